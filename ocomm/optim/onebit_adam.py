"""1-bit Adam (arXiv 2102.02888) as a state machine over flat float32 buffers, without framework, thread or network.

Steps 1..T_w are the wrapped optimizer's own. ``freeze`` then takes over a tensor's m and v, and from step T_w + 1 on

    g    = local gradient (+ wd * p if the decay is coupled)
    m    = beta1 * mbar_{t-1} + (1 - beta1) * g
    mbar = CompressedAllreduce(m)
    p    = p * (1 - lr * wd) - lr / (1 - beta1^t) * mbar / (max(sqrt(v_hat), f * mean_block sqrt(v_hat)) + eps)

Errors and momentum are written to second buffers, which ``commit`` swaps with the current ones, so nothing is ever half
changed.

Memory per parameter, besides the parameter and its gradient, for n ranks (``memory`` gives the real numbers):

    warm-up      nothing: m and v (8 B) belong to the wrapped optimizer; with shards 8/n B of them, and averages 4/n B
    compressed   denominator 4 B, worker's error 2 * 4 B, server's error 2 * 4/n B, packed momentum 2 * 1/8 B;
                 mask 1/8 B if an element is masked. m and v may be freed by the wrapped optimizer.
    in between   m (4 B), borrowed from the frontend until the first committed compressed step
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ocomm.collectives.plan import Loop, loop
from ocomm.compression.layout import Layout, SegmentLayout
from ocomm.errors import SettingsError
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.optim.core import Bools, Core, Exchange, Flags, Group, Segment, address, flat_floats
from ocomm.optim.freeze import require_total_steps, whole_freeze_step
from ocomm.optim.options import option
from ocomm.optim.preconditioner import Preconditioner, PreconditionerOptions


class Stage(enum.IntEnum):
    """The stage of one tensor."""

    WARMUP = 0
    COMPRESSED = 1


@dataclass(slots=True)
class MomentumSegment(Segment):
    """A segment with its packed momentum: ``result`` that of the current step, ``previous`` that of the last committed
    one.
    """

    previous: Bytes | None = None  # None: every tensor's momentum is dense


@dataclass(frozen=True, kw_only=True)
class OneBitAdamOptions(PreconditionerOptions):
    """The options of 1-bit Adam. Raises SettingsError for impossible values."""

    freeze_step: int | Literal["auto"] = option(
        "auto",
        """The number of dense steps T_w before the first compressed one. ``"auto"``: until the variance is stable,
        which takes at least 2 / (1 - beta2) steps, and with ``total_steps`` a fifth of these at most.""",
    )
    total_steps: int | None = option(
        None,
        """The number of the optimizer's steps in the whole run, such as ``epochs * len(loader)``, of which the warm-up
        takes a fifth at most. None: it is not known.""",
    )
    shard_state: bool | Literal["auto"] = option(
        False,
        """True: in the warm-up each of n ranks has m and v of 1/n of all elements, makes their steps, and sends the new
        parameters in the place of averages (docs/parallel.md). Steps are computed in ocomm's arithmetic, and until the
        warm-up is over m and v are in the ranks' own states. ``"auto"``: the same where it is possible and there are
        several ranks. False: all ranks make the steps of all elements.""",
        agree=False,  # the ranks compare what comes of it
    )

    def __post_init__(self) -> None:
        if self.shard_state not in (True, False, "auto"):
            raise SettingsError(f"shard_state must be True, False or 'auto', got {self.shard_state!r}")
        object.__setattr__(self, "freeze_step", whole_freeze_step(self.freeze_step))
        object.__setattr__(self, "total_steps", require_total_steps(self.total_steps))
        super().__post_init__()


class OneBitAdam(Core):
    """The compressed stage of 1-bit Adam for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "OneBitAdam"
    options_class = OneBitAdamOptions
    options: OneBitAdamOptions

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: OneBitAdamOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.scale = options.scale
        self.mask_refresh = options.mask_refresh
        self.preconditioner = Preconditioner(layout, options.variance_floor, self.param_memory)
        self.stage = np.zeros(len(layout.tensors), np.uint8)
        self._exchange: Exchange | None = None  # what these stages send
        self.compressed_steps = 0
        self._refreshed_at = 0
        self._dense: dict[int, Floats] = {}

    # The warm-up

    def dense_step(self, tensor: int, gradient: Floats, momentum: Floats, variance: Floats, step: int) -> None:
        """Makes a dense step, numbered from 1, of a tensor in warm-up, on its averaged gradient, if the core makes such
        steps.
        """
        raise NotImplementedError("the wrapped optimizer makes the dense steps")

    # Freezing

    def freeze(self, tensor: int, momentum: Floats, variance: Floats, *, step: int, beta2: float, eps: float) -> bool:
        """Ends the warm-up of ``tensor`` after its dense step ``step``, with Adam's m and v: ``numel`` float32.

        ``momentum`` is borrowed, not copied, until the tensor's first committed compressed step. ``variance`` is only
        read. An element with v == 0 is masked. If all elements are, returns False and changes nothing: the tensor stays
        in warm-up. Otherwise the tensor is in no bucket yet: call ``set_buckets``. Raises ValueError if it is frozen
        already, NonFiniteError (on all ranks, because v is replicated) if v has NaN or Inf.
        """
        spec = self.layout.tensors[tensor]
        if self.stage[tensor] == Stage.COMPRESSED:
            raise ValueError(f"tensor {spec.name!r} is frozen already")
        momentum = flat_floats(momentum, spec.numel, f"momentum of {spec.name!r}")
        if not self.preconditioner.set_variance(tensor, variance, 1.0 - beta2**step, eps, when=f"step {step}"):
            return False
        self._begin(tensor, step, momentum)
        return True

    def _begin(self, tensor: int, step: int, momentum: Floats) -> None:
        """Begins the compressed stage of a tensor, without errors, for ``freeze`` and ``load_state``."""
        self.allocate()
        self.stage[tensor] = Stage.COMPRESSED
        self._exchange = None
        if self.dense_codes is not None:
            self.dense_codes.drop(self.stage == Stage.COMPRESSED)
        self.steps[tensor] = step
        self._set_dense(tensor, momentum)

    def _set_dense(self, tensor: int, momentum: Floats) -> None:
        self._dense[tensor] = momentum
        self.tensors["momentum"][tensor] = address(momentum) if momentum.size else 0

    def _drop_dense(self, tensor: int) -> None:
        if self._dense.pop(tensor, None) is not None:
            self.tensors["momentum"][tensor] = 0

    def _segment(self, layout: SegmentLayout) -> MomentumSegment:
        return MomentumSegment(layout)

    def _drop(self, tensors: Sequence[int], segments: Sequence[MomentumSegment]) -> None:
        """Keeps the momentum of buckets that change dense until the next committed step."""
        if any(segment.previous is not None for segment in segments):
            for tensor in tensors:
                self._set_dense(tensor, self.momentum(tensor))

    # Hyperparameters

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters; reads all but beta2 and ``eps``, which are those of the freeze.

        step_size = lr / (1 - beta1^t) with the t that the step will have; decay = 1 - lr * decoupled_decay. With a
        ``gradient_scale`` f, (1 - beta1) * f * (g + (wd / f) * p) is what (1 - beta1) * (f * g + wd * p) would be.
        """
        tensors, lr, beta1 = group.tensors, group.lr, group.betas[0]
        # Most users have one group of all tensors, for which a slice is a faster index.
        index: Any = slice(None) if len(tensors) == self.steps.size else tensors
        rows = self.tensors
        rows["beta1"][index] = beta1
        rows["one_minus_beta1"][index] = (1.0 - beta1) * self.gradient_scale
        rows["weight_decay"][index] = group.coupled_decay / self.gradient_scale
        rows["decay"][index] = 1.0 - lr * group.decoupled_decay
        steps = (self.steps[index] + 1).tolist()
        sizes = {step: lr / (1.0 - beta1**step) for step in set(steps)}
        rows["step_size"][index] = sizes[steps[0]] if len(sizes) == 1 else [sizes[step] for step in steps]

    # One step

    def exchange(self) -> Exchange:
        """Returns what the next step sends. Tensors in warm-up travel dense: their averages are for the wrapped
        optimizer.
        """
        if self._exchange is None:
            compressed = self.stage == Stage.COMPRESSED
            self._exchange = Exchange(compressed, ~compressed)
        return self._exchange

    def segment_mask(self, layout: SegmentLayout) -> Bytes | None:
        return self.preconditioner.mask_of(layout.tensors)

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop that writes this step's momentum into ``packed``. It reads gradients and, if the decay is
        coupled, parameters.

        Raises ValueError if one of the segment's tensors is still in warm-up.
        """
        this = self.segments[segment]
        assert isinstance(this, MomentumSegment)
        stage = self.stage[this.layout.tensor_indices]
        if not stage.all():
            early = this.layout.tensors[int(np.argmin(stage))]
            raise ValueError(f"tensor {self.layout.tensors[early].name!r} is still in warm-up; freeze it first")
        return loop(
            Kernels.compress_momentum,
            flags,
            blocks=this.layout.worker_blocks,
            tensors=self.tensors,
            previous=this.previous,
            error=self.error,
            error_out=self.error_out,
            mask=self.segment_mask(this.layout),
            scale=self.scale,
            packed=packed,
        )

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        previous = [self.segments[k].previous for k in segments]  # type: ignore[attr-defined]
        masks = self.preconditioner.masked.tobytes(), self.preconditioner.mask
        return (*super().built_in(segments), *masks, *previous)

    def commit(self, present: Bools, averages: Floats) -> None:
        """Swaps errors and momentum of the compressed tensors with what the exchange has written, and moves these
        tensors.

        The arrays returned by ``compress``, ``average`` and ``result`` are invalid afterwards.
        """
        compressed = self.exchange().compressed
        if not compressed.any():
            return
        moved = compressed & present
        if moved.tobytes() != compressed.tobytes():
            # Copies only go to the buffers that are not in use yet, so nothing changes before the swap.
            for tensor in np.flatnonzero(compressed & ~present).tolist():
                self.errors.keep(tensor)
                self._keep_momentum(tensor)
        for segment in self.segments:
            assert isinstance(segment, MomentumSegment)
            segment.previous, segment.result = _result_of(segment), segment.previous
        self.errors.swap()
        self.tensors["skip"] = ~moved
        self.steps += moved
        self.compressed_steps += 1
        self._move(moved)
        for tensor in [t for t in self._dense if moved[t]]:
            self._drop_dense(tensor)

    def _move(self, moved: Bools) -> None:
        """Moves the parameters of ``moved``, one bool per tensor, which are those without ``skip``.

        A segment's ``previous`` is what has just been committed, ``result`` what was there before, None at first. If
        the momentum was dense before, it still is.
        """
        calls = []
        for segment in self.segments:
            assert isinstance(segment, MomentumSegment) and segment.previous is not None
            mask = self.segment_mask(segment.layout)
            calls.append((segment.layout.blocks, self.tensors, segment.previous, self.preconditioner.denominator, mask))
        self.for_each("apply", calls)

    def _keep_momentum(self, tensor: int) -> None:
        """Copies the momentum of a tensor that has no gradient on any rank over what the exchange has gathered."""
        for segment in self.segments_of(tensor):
            previous, result = segment.previous, _result_of(segment)
            if previous is None:
                continue  # its momentum is dense, and stays so
            rows = segment.layout.blocks[segment.layout.blocks["tensor"] == tensor]
            starts = np.sort(segment.layout.message_start)
            owner = np.searchsorted(starts, rows["scale"], side="right")
            for mine in np.unique(owner):
                # Within a message the tensor's scales are one run of bytes, and so are its signs.
                run = rows[owner == mine]
                scales = slice(int(run["scale"][0]), int(run["scale"][-1]) + 4)
                signs = slice(int(run["bits"][0]), int(run["bits"][-1]) + (int(run["length"][-1]) + 7) // 8)
                result[scales] = previous[scales]
                result[signs] = previous[signs]
            self.param_memory.changed(result)

    # Masked elements

    @property
    def wake_due(self) -> bool:
        """True every ``mask_refresh`` compressed steps, while an element is masked."""
        steps = self.compressed_steps
        due = steps > self._refreshed_at and steps % self.mask_refresh == 0
        return due and bool(self.preconditioner.masked.any())

    def touched(self) -> Bytes:
        """Returns one bit per flat element: it is masked, and this rank's gradients have left something in its worker
        error.
        """
        return self.preconditioner.touched(self.error, self.rank)

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks. Returns their number.

        Their momentum is 0. What they have accumulated in the worker errors goes into the next step.
        """
        self._refreshed_at = self.compressed_steps
        for tensor in self.preconditioner.touched_tensors(touched):
            # A packed momentum has no zero, so it is kept dense for one step, while the mask still says which are 0.
            self._set_dense(tensor, self.momentum(tensor))
        return self.preconditioner.wake(touched)

    # State

    def report(self) -> dict[str, Any]:
        """Also returns ``dense_bits``, and the numbers of elements that are masked and that were woken."""
        stages = {int(stage) for stage in self.stage[self.layout.numels > 0]}
        return {
            "stage": "warm-up" if stages == {0} else "compressed" if stages == {1} else "mixed",
            "dense_bits": self.dense_bits,
            "masked_elements": int(self.preconditioner.masked.sum()),
            "woken_elements": self.preconditioner.woken,
        }

    def momentum(self, tensor: int) -> Floats:
        """Returns mbar of a compressed tensor as a new float32 array of ``numel`` elements; 0 for masked ones."""
        dense = self._dense.get(tensor)
        if dense is not None:
            return dense.copy()
        out = self.param_memory.zeros(int(self.layout.numels[tensor]))
        for segment in self.segments_of(tensor):
            assert segment.previous is not None, "a tensor without momentum"
            self.unpack(tensor, segment.layout, segment.previous, out)
        return out

    def unpack(self, tensor: int, layout: SegmentLayout, packed: Bytes, out: Floats) -> None:
        """Writes the part of a tensor that is in ``packed``, the buffer of a segment, into ``out``: ``numel``
        float32.
        """
        offset = int(self.layout.offsets[tensor])
        mask = self.preconditioner.mask[offset // 8 :] if self.preconditioner.masked[tensor] else None
        rows = layout.blocks[layout.blocks["tensor"] == tensor]
        rows["offset"] -= offset
        self.kernels.unpack(rows, packed, mask, out)

    def variance(self, tensor: int, *, beta2: float) -> Floats:
        """Returns Adam's exp_avg_sq for a checkpoint: v_hat * (1 - beta2^t), a new float32 array, 0 for masked
        elements.
        """
        return self.preconditioner.variance(tensor, 1.0 - beta2 ** int(self.steps[tensor]))

    def state(self) -> dict[str, Any]:
        """Returns counters, and all but the momentum of each compressed tensor: ``denominator`` (float32, numel),
        ``mask`` (uint8 bits), ``block_root`` (float32, blocks), ``eps``. With shards also the step counts of tensors in
        warm-up, ``sharded``.
        """
        names = [spec.name for spec in self.layout.tensors]
        compressed = np.flatnonzero(self.stage == Stage.COMPRESSED).tolist()
        sharded = {} if self.sharded is None else {"sharded": self.sharded.state()}
        return {
            **super().state(),
            **sharded,
            "compressed_steps": self.compressed_steps,
            "refreshed_at": self._refreshed_at,
            "woken": self.preconditioner.woken,
            "tensors": {names[tensor]: self.preconditioner.tensor_state(tensor) for tensor in compressed},
        }

    def load_state(self, state: Mapping[str, Any], momentum: Callable[[int], Floats] | None = None) -> None:
        """Loads the result of ``state``: a tensor in ``state["tensors"]`` is compressed from now on, any other is in
        warm-up.

        ``momentum(tensor)``, float32, is borrowed as by ``freeze``. Raises ValueError, before anything is changed, if a
        number of elements differs.
        """
        numbers = {spec.name: number for number, spec in enumerate(self.layout.tensors)}
        tensors = {numbers[name]: tensor_state for name, tensor_state in state.get("tensors", {}).items()}
        borrowed = {}
        for tensor, tensor_state in tensors.items():
            assert momentum is not None
            spec = self.layout.tensors[tensor]
            flat_floats(tensor_state["denominator"], spec.numel, f"denominator of {spec.name!r}")
            borrowed[tensor] = flat_floats(momentum(tensor), spec.numel, f"momentum of {spec.name!r}")
        for tensor in range(self.stage.size):
            self._drop_dense(tensor)
        for segment in self.segments:
            assert isinstance(segment, MomentumSegment)
            segment.previous = None
        self.stage[:] = Stage.WARMUP
        self._exchange = None
        self.preconditioner.unmask()
        super().load_state(state)
        if self.sharded is not None:
            self.sharded.load_state(state.get("sharded", {}))
        for tensor, tensor_state in tensors.items():
            self.preconditioner.load_tensor_state(tensor, tensor_state)
            self._begin(tensor, int(self.steps[tensor]), borrowed[tensor])
        self.compressed_steps = int(state["compressed_steps"])
        self._refreshed_at = int(state["refreshed_at"])
        self.preconditioner.woken = int(state["woken"])

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        packed = [getattr(s, name) for s in self.segments for name in ("previous", "result")]
        return {
            **self.preconditioner.memory(),
            **super().memory(),
            "packed_momentum": sum(buffer.nbytes for buffer in packed if buffer is not None),
            "dense_momentum": sum(momentum.nbytes for momentum in self._dense.values()),
        }


def _result_of(segment: Segment) -> Bytes:
    assert segment.result is not None, "commit before the exchange of a segment"
    return segment.result
