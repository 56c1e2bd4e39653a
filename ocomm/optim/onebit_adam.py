"""1-bit Adam (arXiv 2102.02888) as a state machine over flat float32 buffers; no framework, thread or network.

Steps 1..T_w are the wrapped optimizer's own. ``freeze`` then takes over a tensor's m and v, and from step T_w + 1 on

    g    = local gradient (+ wd * p where the decay is coupled)
    m    = beta1 * mbar_{t-1} + (1 - beta1) * g
    mbar = CompressedAllreduce(m)
    p    = p * (1 - lr * wd) - lr / (1 - beta1^t) * mbar / (max(sqrt(v_hat), f * mean_block sqrt(v_hat)) + eps)

One step: ``set_hyper``; per segment ``compress`` and ``average`` describe the work for an engine; when all segments
have arrived and no rank objects, ``commit``, then ``apply`` per segment; else ``discard``. Errors and momentum are
written beside the old ones and swapped by ``commit``, so nothing is half changed.

Memory per parameter, besides the parameter and its gradient, for n ranks (``memory`` gives the real numbers):

    warm-up      nothing: m and v (8 B) belong to the wrapped optimizer
    compressed   denominator 4 B, worker error 2 * 4 B, owner error 2 * 4/n B, packed momentum 2 * 1/8 B;
                 mask 1/8 B if an element is masked. m and v may be given up by the wrapped optimizer.
    in between   m (4 B), borrowed from the frontend until the first committed compressed step
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.plan import Average, Compress
from ocomm.compression.layout import Layout, SegmentLayout
from ocomm.errors import NonFiniteError, SettingsError
from ocomm.kernels.base import TENSOR, Bytes, Floats, Kernels, Table, aligned_zeros

_HYPER_FIELDS = ["beta1", "one_minus_beta1", "weight_decay", "step_size", "decay"]


class Stage(enum.IntEnum):
    """Of one tensor."""

    WARMUP = 0
    COMPRESSED = 1


@dataclass(slots=True)
class Segment:
    """One segment's layout and its packed momentum: of the last committed step, and of the one under way."""

    layout: SegmentLayout
    previous: Bytes | None = None  # None: every tensor's momentum is dense
    next: Bytes | None = None


class OneBitAdam:
    """The compressed stage of 1-bit Adam for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``.

    ``variance_floor`` is f, in [0, 1]. ``scale`` is ``"l1"`` or ``"rms"``. Every ``mask_refresh`` compressed steps
    ``refresh_due`` asks for masked elements to be woken. Raises SettingsError for other values.

    ``tensors`` is the TENSOR table, one row per tensor of the layout; the frontend writes the addresses ``grad`` (0: no
    gradient on this rank) and ``param``, all else in it is written here.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        kernels: Kernels,
        *,
        variance_floor: float = 0.05,
        scale: str = "l1",
        mask_refresh: int = 100,
    ) -> None:
        if not 0.0 <= variance_floor <= 1.0:
            raise SettingsError(f"variance_floor must be in [0, 1], got {variance_floor}")
        if scale not in ("l1", "rms"):
            raise SettingsError(f"scale must be 'l1' or 'rms', got {scale!r}")
        if mask_refresh < 1:
            raise SettingsError(f"mask_refresh must be a positive number of steps, got {mask_refresh}")
        self.layout = layout
        self.rank = rank
        self.kernels = kernels
        self.variance_floor = variance_floor
        self.scale = scale
        self.mask_refresh = mask_refresh

        count = len(layout.tensors)
        self.tensors: Table = np.zeros(count, TENSOR)
        self.tensors["decay"] = 1.0
        self.tensors["skip"] = 1
        self.stage = np.zeros(count, np.uint8)
        #: Steps taken by each tensor, as torch's ``state["step"]``; known from its freeze on.
        self.steps = np.zeros(count, np.int64)
        self.compressed_steps = 0
        #: Masked elements per tensor, and how many have been woken in all.
        self.masked = np.zeros(count, np.int64)
        self.woken = 0
        self.segments: list[Segment] = []
        #: Indices into ``segments`` of each bucket, in the order of ``set_buckets``.
        self.bucket_segments: list[range] = []
        self._buckets: list[tuple[tuple[int, ...], int]] = []
        self._refreshed_at = 0
        self._eps = np.zeros(count, np.float32)
        self._dense: dict[int, Floats] = {}
        # Pages of zeros cost nothing until they are written, so tensors still in warm-up take no memory here.
        self._allocated = False
        none = np.zeros(0, np.float32)
        self.error, self.error_out = none, none
        self.owner_error, self.owner_error_out = none, none
        self.denominator = none
        #: Per block: mean of sqrt(v_hat) at the freeze, what a woken element gets.
        self.block_root = none
        self.mask = np.zeros(0, np.uint8)

    # Freezing

    def freeze(self, tensor: int, momentum: Floats, variance: Floats, *, step: int, beta2: float, eps: float) -> bool:
        """Ends the warm-up of ``tensor`` after its dense step ``step``, with Adam's m and v: ``numel`` float32.

        ``momentum`` is borrowed, not copied, until the tensor's first committed compressed step. ``variance`` is only
        read. An element with v == 0 is masked. Returns False, and changes nothing, if all are: such a tensor stays in
        warm-up. Otherwise it is in no bucket yet: call ``set_buckets``. Raises ValueError if it is frozen already,
        NonFiniteError (on all ranks alike: v is replicated) if v has NaN or Inf.

        Rounding, each line one float32 operation per element: v_hat = v / float32(1 - beta2^step); root = sqrt(v_hat);
        floor = float32(f) * mean; max(root, floor) + float32(eps). The mean is over a block's unmasked elements, summed
        in float64 by folding halves (``fold``), rounded to float32 after the division.
        """
        spec = self.layout.tensors[tensor]
        if self.stage[tensor] == Stage.COMPRESSED:
            raise ValueError(f"tensor {spec.name!r} is frozen already")
        momentum = _flat(momentum, spec.numel, f"momentum of {spec.name!r}")
        variance = _flat(variance, spec.numel, f"variance of {spec.name!r}")
        masked = variance == 0.0
        if spec.numel and masked.all():
            return False
        if not np.isfinite(variance).all():
            raise NonFiniteError(
                f"tensor {spec.name!r}: Adam's variance is NaN or Inf after step {step}, so it cannot be frozen; "
                "look for a gradient that was not finite during the warm-up"
            )
        self._allocate()
        root = np.sqrt(variance / np.float32(1.0 - beta2**step))
        means = self._block_means(tensor, root, masked)
        lengths = self.layout.tensor_blocks(tensor)["length"]
        floor = np.repeat(np.float32(self.variance_floor) * means, lengths)
        self._begin(tensor, step, eps, np.packbits(masked, bitorder="little"), momentum)
        self.denominator[self._flat_span(tensor)] = np.maximum(root, floor) + np.float32(eps)
        self.block_root[self._block_span(tensor)] = means
        return True

    def _begin(self, tensor: int, step: int, eps: float, mask: Bytes, momentum: Floats) -> None:
        """Common to ``freeze`` and ``load_tensor_state``: the tensor is compressed from now on, with no errors yet."""
        # Only a tensor that is loaded over a compressed one has errors; zeroing others would touch their pages early.
        if self.stage[tensor] == Stage.COMPRESSED:
            for array in (self.error, self.error_out):
                array[self._flat_span(tensor)] = 0.0
            for array in (self.owner_error, self.owner_error_out):
                array[self._owned_span(tensor)] = 0.0
        self.mask[self._mask_span(tensor)] = mask
        self.masked[tensor] = int(np.unpackbits(mask).sum())
        self.stage[tensor] = Stage.COMPRESSED
        self.steps[tensor] = step
        self._eps[tensor] = eps
        self._set_dense(tensor, momentum)

    def _allocate(self) -> None:
        if self._allocated:
            return
        flat, owned = self.layout.flat_numel, self.layout.owned_numel(self.rank)
        self.error, self.error_out, self.denominator = (aligned_zeros(flat) for _ in range(3))
        self.owner_error, self.owner_error_out = (aligned_zeros(owned) for _ in range(2))
        self.block_root = np.zeros(self.layout.blocks.size, np.float32)
        self.mask = np.zeros(flat // 8, np.uint8)
        self._allocated = True

    def _block_means(self, tensor: int, root: Floats, masked: NDArray[np.bool_]) -> Floats:
        """Mean of ``root`` over each block's unmasked elements, over the tensor's where a block has none; float32."""
        blocks = self.layout.tensor_blocks(tensor)
        if not blocks.size:
            return np.zeros(0, np.float32)
        width = int(blocks["length"].max())
        sums = np.zeros(blocks.size)
        # Some blocks at a time: in float64 a whole embedding would be large.
        for first in range(0, blocks.size, 1024):
            part = root[first * width : (first + 1024) * width]
            table = np.zeros((min(1024, blocks.size - first), width))
            # The last block is short: zeros do not change a sum. Masked elements have root 0 already.
            table.reshape(-1)[: part.size] = part
            sums[first : first + 1024] = fold(table)
        counts = np.add.reduceat(~masked, blocks["start"], dtype=np.int64)
        whole = fold(sums[np.newaxis])[0] / counts.sum()
        return np.where(counts > 0, sums / np.maximum(counts, 1), whole).astype(np.float32)

    def _flat_span(self, tensor: int) -> slice:
        start = int(self.layout.offsets[tensor])
        return slice(start, start + int(self.layout.numels[tensor]))

    def _mask_span(self, tensor: int) -> slice:
        start = int(self.layout.offsets[tensor]) // 8
        return slice(start, start + (int(self.layout.numels[tensor]) + 7) // 8)

    def _block_span(self, tensor: int) -> slice:
        return slice(int(self.layout.first_block[tensor]), int(self.layout.first_block[tensor + 1]))

    def _owned_span(self, tensor: int) -> slice:
        """This rank's blocks of a tensor lie side by side in its owner error buffer."""
        blocks = self.layout.tensor_blocks(tensor)
        mine = blocks[blocks["owner"] == self.rank]
        if not mine.size:
            return slice(0, 0)
        return slice(int(mine["owned"][0]), int(mine["owned"][-1]) + int(mine["length"][-1]))

    def _set_dense(self, tensor: int, momentum: Floats) -> None:
        self._dense[tensor] = momentum
        self.tensors["momentum"][tensor] = momentum.ctypes.data if momentum.size else 0

    def _drop_dense(self, tensor: int) -> None:
        if self._dense.pop(tensor, None) is not None:
            self.tensors["momentum"][tensor] = 0

    # Buckets and hyperparameters

    def set_buckets(self, buckets: Sequence[Sequence[int]], segment_nbytes: int) -> None:
        """Chooses what travels together: each bucket is a list of tensor indices, cut into segments.

        May be called between any two steps, on all ranks alike, and does not change a bit of the result: the momentum
        of buckets that change is kept dense until the next committed step. Raises ValueError if a tensor comes twice.
        """
        wanted = [(tuple(bucket), segment_nbytes) for bucket in buckets]
        everything = [tensor for bucket, _ in wanted for tensor in bucket]
        if len(set(everything)) != len(everything):
            raise ValueError("a tensor comes twice in the buckets")
        spans = zip(self._buckets, self.bucket_segments, strict=True)
        kept = {key: [self.segments[k] for k in span] for key, span in spans}
        for key, segments in kept.items():
            if key not in wanted and any(segment.previous is not None for segment in segments):
                for tensor in key[0]:
                    self._set_dense(tensor, self.momentum(tensor))
        self.segments, self.bucket_segments = [], []
        for key in wanted:
            first = len(self.segments)
            self.segments += kept.get(key) or [Segment(s) for s in self.layout.segments(key[0], self.rank, key[1])]
            self.bucket_segments.append(range(first, len(self.segments)))
        self._buckets = wanted

    def set_hyper(
        self,
        tensors: Sequence[int] | NDArray[np.integer],
        *,
        lr: float,
        beta1: float,
        coupled_decay: float = 0.0,
        decoupled_decay: float = 0.0,
    ) -> None:
        """Sets the next step's hyperparameters of a parameter group, in float64, each rounded to float32 once.

        step_size = lr / (1 - beta1^t) with the t that the step will have; decay = 1 - lr * decoupled_decay.
        """
        index = np.asarray(tensors, np.int64)
        rows = self.tensors
        rows["beta1"][index] = beta1
        rows["one_minus_beta1"][index] = 1.0 - beta1
        rows["weight_decay"][index] = coupled_decay
        rows["decay"][index] = 1.0 - lr * decoupled_decay
        steps = self.steps[index] + 1
        for step in np.unique(steps).tolist():
            rows["step_size"][index[steps == step]] = lr / (1.0 - beta1**step)

    def hyper_digest(self) -> int:
        """64-bit hash of the hyperparameters of all compressed tensors, for the exchange header."""
        values = self.tensors[_HYPER_FIELDS][self.stage == Stage.COMPRESSED]
        data = b"".join(np.ascontiguousarray(values[field]).tobytes() for field in _HYPER_FIELDS)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    # One step

    def _segment_mask(self, layout: SegmentLayout) -> Bytes | None:
        return self.mask if self.masked[layout.tensor_indices].any() else None

    def compress(self, segment: int, packed: Bytes, flags: NDArray[np.uint32]) -> Compress:
        """The worker's half of a segment: this step's momentum into ``packed`` (``packed_nbytes`` bytes, to be sent).

        Reads the gradients and, where the decay is coupled, the parameters; writes ``error_out``. The arrays stay valid
        until ``commit``. Raises ValueError if one of the segment's tensors is still in warm-up.
        """
        this = self.segments[segment]
        stage = self.stage[this.layout.tensor_indices]
        if not stage.all():
            early = this.layout.tensors[int(np.argmin(stage))]
            raise ValueError(f"tensor {self.layout.tensors[early].name!r} is still in warm-up; freeze it first")
        return Compress(
            blocks=this.layout.blocks,
            values=None,
            tensors=self.tensors,
            previous=this.previous,
            error=self.error,
            error_out=self.error_out,
            mask=self._segment_mask(this.layout),
            scale=self.scale,
            packed=packed,
            flags=flags,
        )

    def average(self, segment: int, received: Sequence[Bytes], flags: NDArray[np.uint32]) -> Average:
        """The owner's half: all ranks' messages to this one, in rank order, into its place in ``result``."""
        layout = self.segments[segment].layout
        return Average(
            blocks=layout.owned_blocks,
            received=received,
            origin=layout.message_start[self.rank],
            error=self.owner_error,
            error_out=self.owner_error_out,
            mask=self._segment_mask(layout),
            scale=self.scale,
            packed=self.result(segment),
            flags=flags,
        )

    def result(self, segment: int) -> Bytes:
        """Where the averages of a segment are gathered, ``packed_nbytes`` bytes: mbar of the step under way."""
        this = self.segments[segment]
        if this.next is None:
            this.next = np.zeros(this.layout.packed_nbytes, np.uint8)
        return this.next

    def commit(self, present: NDArray[np.bool_]) -> None:
        """Takes the step on all tensors: swaps errors and momentum with those which the exchange has written.

        ``present`` has one bool per tensor of the layout: some rank had a gradient. Where it is False the tensor's
        errors, momentum and step count stay, and ``apply`` leaves its parameter alone. The arrays handed out by
        ``compress``, ``average`` and ``result`` are invalid afterwards.
        """
        if present.shape != self.stage.shape:
            raise ValueError(f"presence of {present.size} tensors, the layout has {self.stage.size}")
        compressed = self.stage == Stage.COMPRESSED
        # All copies go to the buffers that are not yet in use: up to the swap nothing has changed.
        for tensor in np.flatnonzero(compressed & ~present).tolist():
            self._keep(tensor)
        for segment in self.segments:
            segment.previous, segment.next = self._result_of(segment), segment.previous
        self.error, self.error_out = self.error_out, self.error
        self.owner_error, self.owner_error_out = self.owner_error_out, self.owner_error
        moved = compressed & present
        for tensor in [t for t in self._dense if moved[t]]:
            self._drop_dense(tensor)
        self.tensors["skip"] = ~moved
        self.steps += moved
        self.compressed_steps += 1

    @staticmethod
    def _result_of(segment: Segment) -> Bytes:
        assert segment.next is not None, "commit before the exchange of a segment"
        return segment.next

    def _keep(self, tensor: int) -> None:
        """Copies the state of a tensor that nobody has a gradient for over what the exchange has written."""
        span, owned = self._flat_span(tensor), self._owned_span(tensor)
        self.error_out[span] = self.error[span]
        self.owner_error_out[owned] = self.owner_error[owned]
        for segment in self._segments_of(tensor):
            previous, result = segment.previous, self._result_of(segment)
            if previous is None:
                continue  # its momentum is dense, and stays so
            rows = segment.layout.blocks[segment.layout.blocks["tensor"] == tensor]
            starts = np.array([*segment.layout.message_start, segment.layout.packed_nbytes])
            owner = np.searchsorted(starts, rows["scale"], side="right")
            for mine in np.unique(owner):
                # Within a message the tensor's scales are one run of bytes, and so are its signs.
                run = rows[owner == mine]
                scales = slice(int(run["scale"][0]), int(run["scale"][-1]) + 4)
                signs = slice(int(run["bits"][0]), int(run["bits"][-1]) + (int(run["length"][-1]) + 7) // 8)
                result[scales] = previous[scales]
                result[signs] = previous[signs]

    def _segments_of(self, tensor: int) -> list[Segment]:
        return [segment for segment in self.segments if tensor in segment.layout.tensors]

    def discard(self) -> None:
        """Forgets the step under way: some rank objected. Nothing has changed; the step may be done again."""

    def apply(self, segment: int) -> None:
        """After ``commit``: updates the parameters of a segment in place, through their addresses in ``tensors``."""
        this = self.segments[segment]
        assert this.previous is not None, "apply before commit"
        mask = self._segment_mask(this.layout)
        self.kernels.apply(this.layout.blocks, self.tensors, this.previous, self.denominator, mask)

    # Masked elements

    @property
    def refresh_due(self) -> bool:
        """After a commit: should the ranks exchange ``touched`` now, and ``wake``? The same on all ranks."""
        steps = self.compressed_steps
        return steps > self._refreshed_at and steps % self.mask_refresh == 0 and bool(self.masked.any())

    def touched(self) -> Bytes:
        """One bit per flat element: masked, and this rank's gradients have left something in its worker error."""
        bits = np.zeros(self.mask.size, np.uint8)
        for tensor in np.flatnonzero(self.masked).tolist():
            nonzero = np.packbits(self.error[self._flat_span(tensor)] != 0.0, bitorder="little")
            span = self._mask_span(tensor)
            bits[span] = nonzero & self.mask[span]
        return bits

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks; returns how many.

        Their sqrt(v_hat) becomes the mean over their block's elements that had one at the freeze, the tensor's where
        the block had none. Their momentum is 0; what they have gathered in the worker errors goes into the next step.
        """
        self._refreshed_at = self.compressed_steps
        woken = 0
        for tensor in np.flatnonzero(self.masked).tolist():
            span = self._mask_span(tensor)
            bits = touched[span] & self.mask[span]
            if not bits.any():
                continue
            # A packed momentum has no zero: it is kept dense for one step, while the mask still says which are 0.
            self._set_dense(tensor, self.momentum(tensor))
            self.mask[span] &= ~bits
            start = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            block = np.searchsorted(self.layout.tensor_blocks(tensor)["start"], start, side="right") - 1
            root = self.block_root[self._block_span(tensor)][block]
            self.denominator[self._flat_span(tensor)][start] = root + self._eps[tensor]
            self.masked[tensor] -= start.size
            woken += start.size
        self.woken += woken
        return woken

    # State

    def momentum(self, tensor: int) -> Floats:
        """mbar of a compressed tensor as a new float32 array of ``numel`` elements; 0 where masked."""
        dense = self._dense.get(tensor)
        if dense is not None:
            return dense.copy()
        out = np.zeros(int(self.layout.numels[tensor]), np.float32)
        offset = int(self.layout.offsets[tensor])
        mask = self.mask[offset // 8 :] if self.masked[tensor] else None
        for segment in self._segments_of(tensor):
            assert segment.previous is not None, "a tensor without momentum"
            rows = segment.layout.blocks[segment.layout.blocks["tensor"] == tensor]
            rows["offset"] -= offset
            self.kernels.unpack(rows, segment.previous, mask, out)
        return out

    def variance(self, tensor: int, *, beta2: float) -> Floats:
        """Adam's exp_avg_sq for a checkpoint: v_hat * (1 - beta2^t), new float32 array, 0 where masked.

        v_hat is read back from the denominator, so it has the floor in it, and a rounding: good for plain Adam to go on
        from. ``tensor_state`` has what a bit-identical continuation needs.
        """
        root = self.denominator[self._flat_span(tensor)] - self._eps[tensor]
        root[self._masked_elements(tensor)] = 0.0
        return root * root * np.float32(1.0 - beta2 ** int(self.steps[tensor]))

    def _masked_elements(self, tensor: int) -> NDArray[np.bool_]:
        count = int(self.layout.numels[tensor])
        return np.unpackbits(self.mask[self._mask_span(tensor)], count=count, bitorder="little").view(np.bool_)

    def tensor_state(self, tensor: int) -> dict[str, Any]:
        """The replicated state of a compressed tensor, besides its momentum; arrays are copies.

        ``step``, ``eps``, ``denominator`` (float32, numel), ``mask`` (uint8 bits), ``block_root`` (float32, blocks).
        """
        return {
            "step": int(self.steps[tensor]),
            "eps": float(self._eps[tensor]),
            "denominator": self.denominator[self._flat_span(tensor)].copy(),
            "mask": self.mask[self._mask_span(tensor)].copy(),
            "block_root": self.block_root[self._block_span(tensor)].copy(),
        }

    def load_tensor_state(self, tensor: int, state: Mapping[str, Any], momentum: Floats) -> None:
        """The inverse: the tensor is compressed from now on, with ``momentum`` borrowed as by ``freeze``.

        Its errors are reset: load the rank's errors afterwards. A state saved with another block size is taken as it
        is, but for the roots of woken elements, which are then the means of what the denominator says.
        Raises ValueError if the number of elements differs.
        """
        spec = self.layout.tensors[tensor]
        momentum = _flat(momentum, spec.numel, f"momentum of {spec.name!r}")
        denominator = _flat(state["denominator"], spec.numel, f"denominator of {spec.name!r}")
        self._allocate()
        mask = np.asarray(state["mask"], np.uint8)
        self._begin(tensor, int(state["step"]), float(state["eps"]), mask, momentum)
        self.denominator[self._flat_span(tensor)] = denominator
        roots = np.asarray(state["block_root"], np.float32)
        if roots.size != self.layout.tensor_blocks(tensor).size:
            masked = self._masked_elements(tensor)
            roots = self._block_means(tensor, np.where(masked, np.float32(0), denominator - self._eps[tensor]), masked)
        self.block_root[self._block_span(tensor)] = roots

    def progress(self) -> dict[str, int]:
        """Counters that belong into a checkpoint."""
        return {
            "compressed_steps": self.compressed_steps,
            "refreshed_at": self._refreshed_at,
            "woken": self.woken,
        }

    def load_progress(self, progress: Mapping[str, int]) -> None:
        self.compressed_steps = int(progress["compressed_steps"])
        self._refreshed_at = int(progress["refreshed_at"])
        self.woken = int(progress["woken"])

    def rank_state(self) -> dict[str, Any]:
        """This rank's errors: ``error`` (flat) and ``owner_error`` (owned), copies, with ``rank`` and ``digest``."""
        return {
            "rank": self.rank,
            "digest": self.layout.digest,
            "error": self.error.copy(),
            "owner_error": self.owner_error.copy(),
        }

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """The inverse, for the same layout and rank; after ``load_tensor_state``. Raises ValueError if they differ."""
        if (state["digest"], state["rank"]) != (self.layout.digest, self.rank):
            raise ValueError(
                f"errors of rank {state['rank']} of another layout cannot be loaded by rank {self.rank}; "
                "use redistribute_errors"
            )
        self._load_errors(state["error"], state["owner_error"])

    def _load_errors(self, error: Floats, owner_error: Floats) -> None:
        if error.size:
            self._allocate()
            self.error[:] = error
            self.owner_error[:] = owner_error

    def redistribute_errors(self, states: Sequence[Mapping[str, Any]], layout: Layout) -> None:
        """Loads the errors of a run with another number of ranks: the states of all its ranks, and its layout.

        Owner errors move with their blocks. Worker errors are averaged over the old ranks, in rank order, and every new
        rank gets the mean: an average over ranks then holds the same as before. Raises ValueError if a state is missing
        or the tensors differ; the flat buffers of both layouts are alike then, whatever their blocks.
        """
        states = sorted(states, key=lambda state: int(state["rank"]))
        if [state["rank"] for state in states] != list(range(layout.ranks)):
            raise ValueError(f"need the errors of all {layout.ranks} ranks, got {[s['rank'] for s in states]}")
        if layout.tensors != self.layout.tensors or any(state["digest"] != layout.digest for state in states):
            raise ValueError("the errors belong to other tensors or another layout")
        if not all(state["error"].size for state in states):
            return  # saved before the first freeze: no errors yet
        mean = np.zeros(layout.flat_numel)
        owner_error = np.zeros(layout.flat_numel, np.float32)
        for rank, state in enumerate(states):
            mean += state["error"]
            _move_owned(layout, rank, owner_error, state["owner_error"], gather=False)
        mean /= layout.ranks
        mine = np.zeros(self.layout.owned_numel(self.rank), np.float32)
        _move_owned(self.layout, self.rank, owner_error, mine, gather=True)
        self._load_errors(mean.astype(np.float32), mine)

    def memory(self) -> dict[str, int]:
        """Bytes held, by buffer."""
        packed = [buffer for s in self.segments for buffer in (s.previous, s.next) if buffer is not None]
        return {
            "denominator": self.denominator.nbytes,
            "worker_error": self.error.nbytes + self.error_out.nbytes,
            "owner_error": self.owner_error.nbytes + self.owner_error_out.nbytes,
            "packed_momentum": sum(buffer.nbytes for buffer in packed),
            "dense_momentum": sum(momentum.nbytes for momentum in self._dense.values()),
            "mask": self.mask.nbytes,
        }


def _move_owned(layout: Layout, rank: int, flat: Floats, owned: Floats, *, gather: bool) -> None:
    """Copies between a flat buffer and an owner error buffer of ``rank``; the padding of blocks stays."""
    mine = layout.blocks[layout.blocks["owner"] == rank]
    for offset, start, length in mine[["offset", "owned", "length"]].tolist():
        if gather:
            owned[start : start + length] = flat[offset : offset + length]
        else:
            flat[offset : offset + length] = owned[start : start + length]


def _flat(array: Floats, numel: int, what: str) -> Floats:
    """A one-dimensional view. ValueError for another dtype, number of elements, or a view with gaps."""
    if array.dtype != np.float32 or array.size != numel or not array.flags.c_contiguous:
        raise ValueError(f"{what}: need {numel} contiguous float32, got {array.size} {array.dtype}")
    return array.reshape(-1)


def fold(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of each row in float64: its second half is added to its first, and so on until one element is left.

    The order is spelled out, so that ranks with different processors get the same bits.
    """
    while table.shape[1] > 1:
        width = table.shape[1]
        half = (width + 1) // 2
        folded = table[:, :half].copy()
        folded[:, : width - half] += table[:, half:]
        table = folded
    return table[:, 0]
