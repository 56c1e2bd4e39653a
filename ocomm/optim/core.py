"""What every compressed optimizer is to the stepper: who travels how in the next step, and what is computed on the way.

A core is a state machine over flat float32 buffers; no framework, thread or network. One step of it: the frontend sets
hyperparameters and addresses in ``tensors``; ``exchange`` says which tensors travel compressed and which dense; per
segment ``compress`` and ``average`` describe the work for an engine; when everything has arrived and no rank objects,
``commit`` takes the step and moves the parameters. Until then nothing that is in use is written, so a step that is
not committed has not happened.

Each rank keeps two errors. ``error``, the worker error, is what compressing its own contribution has lost.
``server_error``, the server error, is what compressing the averages of the blocks that it owns has lost. Both are added
to the next step's values (error feedback).

Whatever the plans of a step have built in (addresses, options) must be in ``key``: plans are prepared once per key.
What changes from step to step (learning rates, counters) is read when the plan runs, from ``tensors`` or from
one-element arrays.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.compressed import NodeSum
from ocomm.collectives.plan import Computation, loop
from ocomm.compression.layout import Layout, SegmentLayout
from ocomm.kernels.base import BLOCK, PAGE_NUMEL, TENSOR, Bytes, Floats, Kernels, Memory, Table, sparse_zeros
from ocomm.kernels.device import DeviceArray
from ocomm.optim.options import Options

Flags = NDArray[np.uint32]
Bools = NDArray[np.bool_]


class Exchange(NamedTuple):
    """What the next step sends: one bool per tensor of the layout. A tensor may travel both ways; or not at all, if the
    core ``steps_locally``."""

    compressed: Bools
    dense: Bools


@dataclass(slots=True)
class Segment:
    """One segment's layout, and where its averages are gathered."""

    layout: SegmentLayout
    result: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group as it is now: indices of its tensors, and hyperparameters in float64."""

    tensors: NDArray[np.int64]
    lr: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    #: Added to the gradient (Adam), or taken from the parameter beside the step (AdamW).
    coupled_decay: float = 0.0
    decoupled_decay: float = 0.0


class Core(abc.ABC):
    """The tensors of ``layout`` on rank ``rank`` of ``layout.ranks``, with the ``options`` of its algorithm.

    ``tensors`` is the TENSOR table, one row per tensor of the layout: the frontend writes the addresses ``param``, the
    stepper ``grad``, and the core all else. ``gradients`` is another such table, of which only ``grad`` counts: this
    rank's own (0: none); and, on a device, ``grad_dtype``, which the frontend writes. In the hierarchical form the
    worker's gradients are sums of its node's ranks, and ``tensors`` has their addresses; in the flat form the two
    tables are one.
    """

    #: The optimizer's name, in messages and saved states; frontends have it as ``Distributed`` and this name.
    kind: str
    #: Names what travels compressed, for the signature in every message; with the scale where there is one.
    compressor = "onebit"
    #: Does every block have a float32 scale on the wire? And which: ``"l1"`` or ``"rms"``.
    scales = True
    scale = "l1"
    #: Is what the exchange does not send kept, and added in the next step?
    keeps_errors = True
    #: Are there steps in which a tensor with a gradient does not travel? Then the vote says who has one.
    steps_locally = False
    #: Will there be steps with dense tensors after one without? If not, the buffers for them are given up then.
    dense_again = False
    #: The optimizer whose dense steps the core makes in a warm-up, by name; None: the wrapped one makes them.
    dense_steps_of: str | None = None
    #: Does what is sent depend on the learning rates, those of this step and those before it? Then ``set_hyper`` is
    #: called before every step, and not only when something that gradients are compressed with has changed.
    sends_rates = False

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: Options) -> None:
        self.layout = layout
        self.options = options
        self.rank = rank
        self.kernels = kernels
        #: Of the buffers; those of messages are the host's.
        self.param_memory: Memory = kernels.memory
        count = len(layout.tensors)
        self.tensors: Table = np.zeros(count, TENSOR)
        self.tensors["decay"] = 1.0
        self.tensors["skip"] = 1
        self.gradients = self.tensors if layout.nodes.is_flat else np.zeros(count, TENSOR)
        #: By what the next step multiplies every gradient, for clipping; ``set_hyper`` builds it into the table. It has
        #: the same sign and size on all ranks, so a factor of the local gradient is one of the average, too.
        self.gradient_scale = 1.0
        #: Steps taken by each tensor, as torch's ``state["step"]``.
        self.steps = np.zeros(count, np.int64)
        self.segments: list[Segment] = []
        #: Indices into ``segments`` of each bucket, in the order of ``set_buckets``.
        self.bucket_segments: list[range] = []
        self._buckets: list[tuple[tuple[int, ...], int]] = []
        # Pages of zeros cost nothing until they are written, so tensors which are not compressed yet take no memory.
        self._allocated = False
        none = np.zeros(0, np.float32)
        self.error, self.error_out = none, none
        self.server_error, self.server_error_out = none, none
        self.node_gradient = none
        self._node_addresses = np.zeros(count, np.uint64)

    @abc.abstractmethod
    def set_hyper(self, group: Group) -> None:
        """Sets the next step's hyperparameters of a parameter group, in float64, each rounded to float32 once."""

    # What the stepper asks

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """What the next step sends; the same on all ranks, and the same however often it is asked in one step.

        The very object of the last step only if nothing has changed since.
        """

    @abc.abstractmethod
    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Computation:
        """The worker's half of a segment: ``packed`` (``packed_nbytes`` bytes) is what will be sent."""

    def average(self, segment: int, received: Sequence[Bytes], flags: Flags) -> Computation:
        """The owner's half: all ranks' messages to this one, in rank order, into its place in ``result``."""
        layout = self.segments[segment].layout
        return loop(
            Kernels.average,
            flags,
            blocks=layout.owned_blocks,
            received=received,
            origin=layout.message_start[self.rank],
            error=self.server_error,
            error_out=self.server_error_out,
            mask=self.segment_mask(layout),
            scale=self.scale,
            packed=self.result(segment),
        )

    def result(self, segment: int) -> Bytes:
        """Where the averages of a segment are gathered, ``packed_nbytes`` bytes."""
        this = self.segments[segment]
        if this.result is None:
            this.result = self.param_memory.staging(this.layout.packed_nbytes)
            this.result[:] = 0
        return this.result

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        """What the plan of segments is made for and the next step may change: arrays, and what can be hashed."""
        return (self.error, self.server_error, *[self.result(k) for k in segments])

    def is_finite(self, segment: int) -> bool:
        """Are the gathered averages finite? The same on all ranks, since all hold the same bytes."""
        return self.kernels.finite_scales(self.segments[segment].layout.blocks, self.result(segment))

    def segment_mask(self, layout: SegmentLayout) -> Bytes | None:
        """One bit per flat element, 1 = masked, or None where nothing of the segment is."""
        return None

    def is_dense_finite(self, segment: SegmentLayout, averages: Table) -> bool:
        """Can the averages of a segment be used? The same on all ranks. ``averages`` has their addresses."""
        return self.kernels.finite(segment.blocks, averages)

    def is_local_finite(self, tensors: Sequence[int]) -> bool:
        """Are this rank's gradients of tensors that do not travel in this step finite?"""
        raise NotImplementedError("a core that steps locally looks at its gradients")

    def dense_source(self, segment: SegmentLayout, flags: Flags) -> tuple[list[Computation], Table]:
        """What has to be computed before a dense segment is packed, and the table whose ``grad`` is packed then."""
        return [], self.gradients

    def node_sum(self, layout: SegmentLayout) -> NodeSum | None:
        """The hierarchical form's sum inside the node: of this rank's slice, of all of it where ranks step alone."""
        nodes = layout.nodes
        if nodes.is_flat:
            return None
        return NodeSum(self.gradients, self.tensors, layout.slice_runs, nodes.weight, self.steps_locally)

    def clear_gradients(self) -> None:
        """Before a step: this rank has no gradients yet."""
        self.gradients["grad"] = 0
        if self.gradients is not self.tensors:
            self.tensors["grad"] = self._node_addresses

    def built_in_dense(self) -> tuple[Any, ...]:
        """As ``built_in``, of all dense segments."""
        return ()

    @abc.abstractmethod
    def commit(self, present: Bools, averages: Floats) -> None:
        """Takes the step: swaps the state with what the exchange has written, and moves the parameters in place.

        ``present`` has one bool per tensor of the layout: some rank had a gradient. Where it is False nothing of the
        tensor changes. ``averages`` is flat: what the dense tensors of ``exchange`` brought.
        """

    # After a step: elements that are masked, and have a gradient again on some rank

    @property
    def wake_due(self) -> bool:
        """After a commit: should the ranks exchange ``touched`` now, and ``wake``? The same on all ranks."""
        return False

    def touched(self) -> Bytes:
        """One bit per flat element: masked, and this rank's gradients have left something in its worker error."""
        raise NotImplementedError("a core without masked elements")

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks; returns how many."""
        raise NotImplementedError("a core without masked elements")

    # Buckets

    def set_buckets(self, buckets: Sequence[Sequence[int]], segment_nbytes: int) -> None:
        """Chooses what travels together: each bucket is a list of tensor indices, cut into segments.

        May be called between any two steps, on all ranks alike, and does not change a bit of the result. Raises
        ValueError if a tensor comes twice.
        """
        wanted = [(tuple(bucket), segment_nbytes) for bucket in buckets]
        everything = [tensor for bucket, _ in wanted for tensor in bucket]
        if len(set(everything)) != len(everything):
            raise ValueError("a tensor comes twice in the buckets")
        spans = zip(self._buckets, self.bucket_segments, strict=True)
        kept = {key: [self.segments[k] for k in span] for key, span in spans}
        for key, segments in kept.items():
            if key not in wanted:
                self._drop(key[0], segments)
        self.segments, self.bucket_segments = [], []
        for key in wanted:
            first = len(self.segments)
            self.segments += kept.get(key) or self._cut(*key)
            self.bucket_segments.append(range(first, len(self.segments)))
        self._buckets = wanted

    def _cut(self, tensors: Sequence[int], segment_nbytes: int) -> list[Segment]:
        layouts = self.layout.segments(tensors, self.rank, segment_nbytes, scales=self.scales)
        return [self._segment(layout) for layout in layouts]

    def _segment(self, layout: SegmentLayout) -> Segment:
        return Segment(layout)

    def _drop(self, tensors: Sequence[int], segments: Sequence[Any]) -> None:
        """The segments of these tensors are given up: a core that keeps state in them moves it elsewhere."""
        del tensors, segments

    def segments_of(self, tensor: int) -> list[Any]:
        """The segments in which a tensor travels."""
        return [segment for segment in self.segments if tensor in segment.layout.tensors]

    # Errors: this rank's as a worker and as an owner of blocks, each beside the one being written

    def allocate(self) -> None:
        """Makes the buffers of the compressed stage, once."""
        if self._allocated:
            return
        if self.keeps_errors:
            mine, owned = self.layout.worker_numel(self.rank), self.layout.owned_numel(self.rank)
            self.error, self.error_out = (self.param_memory.zeros(mine) for _ in range(2))
            self.server_error, self.server_error_out = (self.param_memory.zeros(owned) for _ in range(2))
        if not self.layout.nodes.is_flat:
            self._place_node_gradients()
        self._allocated = True

    def _place_node_gradients(self) -> None:
        """Each tensor's whole length, of which only the pages with this rank's slice are ever written.

        On a device the others take memory, too.
        """
        if self.param_memory.is_device:
            self.node_gradient, offsets = self.param_memory.zeros(self.layout.flat_numel), self.layout.offsets
        else:
            lengths = -(-self.layout.numels // PAGE_NUMEL) * PAGE_NUMEL
            self.node_gradient, offsets = sparse_zeros(int(lengths.sum())), np.cumsum(lengths) - lengths
        self._node_addresses = (address(self.node_gradient) + 4 * offsets).astype(np.uint64)
        self.tensors["grad"] = self._node_addresses

    def swap_errors(self) -> None:
        """What the exchange has written is in use from now on."""
        self.error, self.error_out = self.error_out, self.error
        self.server_error, self.server_error_out = self.server_error_out, self.server_error

    def keep_errors(self, tensor: int) -> None:
        """Copies the errors of a tensor that nobody has a gradient for over what the exchange has written."""
        span, owned = self.local_span(tensor), self.owned_span(tensor)
        self.error_out[span] = self.error[span]
        self.server_error_out[owned] = self.server_error[owned]

    def reset_errors(self, tensor: int) -> None:
        """Zeroes all errors of a tensor."""
        for array in (self.error, self.error_out):
            array[self.local_span(tensor)] = 0.0
        for array in (self.server_error, self.server_error_out):
            array[self.owned_span(tensor)] = 0.0

    def flat_span(self, tensor: int) -> slice:
        """Where a tensor lies in the flat buffers."""
        return self.layout.flat_span(tensor)

    def local_span(self, tensor: int) -> slice:
        """Where the part of a tensor that this rank compresses lies in its worker buffers."""
        return self.layout.local_span(tensor, self.rank)

    def owned_span(self, tensor: int) -> slice:
        """This rank's blocks of a tensor lie side by side in its owner error buffer."""
        blocks = self.layout.tensor_blocks(tensor)
        mine = blocks[blocks["owner"] == self.rank]
        if not mine.size:
            return slice(0, 0)
        return slice(int(mine["owned"][0]), int(mine["owned"][-1]) + int(mine["length"][-1]))

    # State

    def report(self) -> dict[str, Any]:
        """What a user is told of the state, in plain values: at least the ``stage``, in a word."""
        return {"stage": "compressed" if self.exchange().compressed.any() else "dense"}

    def state(self) -> dict[str, Any]:
        """What is the same on all ranks, besides parameters and moments: plain values and copies, by string keys."""
        return {"steps": self.steps.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse, for the same tensors. The rank state is reset: load that afterwards."""
        self.steps[:] = state["steps"]
        self.reset_rank_state()

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        """What only this rank knows: the buffers in use by kind and name, without elements before ``allocate``.

        ``worker``: as the worker error, ``Layout.worker_numel``; ``owner``: as the owner error, ``owned_numel``;
        ``flat``: one value per flat element. A core with further local state (local moments, say) adds it here, and it
        is saved, loaded and shared out among another number of ranks with the rest (see ``optim.checkpoint``).
        """
        return {"worker": {"error": self.error}, "owner": {"error": self.server_error}, "flat": {}}

    def rank_state(self) -> dict[str, Any]:
        """What the next steps need and only this rank has: copies of ``rank_buffers``."""
        return {
            kind: {name: self._saved(buffer) for name, buffer in buffers.items()}
            for kind, buffers in self.rank_buffers().items()
        }

    def _saved(self, buffer: Floats) -> Floats:
        """A copy in the host's memory."""
        return self.param_memory.host(buffer) if self.param_memory.is_device else buffer.copy()

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if ``load_rank_state`` could not load it: other buffers, of other sizes, or not finite."""
        numels = {
            "worker": self.layout.worker_numel(self.rank),
            "owner": self.layout.owned_numel(self.rank),
            "flat": self.layout.flat_numel,
        }
        for kind, own in self.rank_buffers().items():
            saved = state.get(kind, {})
            if saved.keys() != own.keys():
                raise ValueError(f"need {kind} buffers {sorted(own)}, got {sorted(saved)}")
            for name, buffer in saved.items():
                if buffer.size:
                    flat_floats(buffer, numels[kind], f"{kind} buffer {name!r}")
                if not np.isfinite(buffer).all():
                    raise ValueError(f"{kind} buffer {name!r} has NaN or Inf")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``rank_state``, for the same layout and rank. Buffers without elements stand for zeros."""
        self.check_rank_state(state)
        self.reset_rank_state()
        for kind, own in self.rank_buffers().items():
            if any(buffer.size > own[name].size for name, buffer in state.get(kind, {}).items()):
                self.allocate()
        for kind, own in self.rank_buffers().items():
            for name, buffer in state.get(kind, {}).items():
                if buffer.size:
                    own[name][:] = buffer

    def reset_rank_state(self) -> None:
        """As after ``allocate``: nothing was left behind by any step."""
        own = [buffer for buffers in self.rank_buffers().values() for buffer in buffers.values()]
        for buffer in (*own, self.error_out, self.server_error_out):
            if self.param_memory.is_device or buffer.any():  # pages that were never written stay without memory
                buffer[:] = 0.0

    @property
    def has_rank_state(self) -> bool:
        """Is there anything that only this rank knows?"""
        return any(buffer.size for buffers in self.rank_buffers().values() for buffer in buffers.values())

    def replica_addresses(self) -> NDArray[np.uint64]:
        """Where that lies which must be equal on all ranks between steps: one per parameter."""
        return self.tensors["param"]

    def replica(self, tensor: int) -> Floats:
        """A copy of what must be equal on all ranks of one parameter: float32, ``numel`` elements."""
        return self._saved(self.param_memory.at(int(self.replica_addresses()[tensor]), int(self.layout.numels[tensor])))

    def replica_digest(self) -> list[int]:
        """Checksums of what must be equal on all ranks between steps: one per parameter."""
        return self.kernels.checksums(self.replica_addresses(), self.layout.numels * 4).tolist()

    def _node_gradient_nbytes(self) -> int:
        whole = self.steps_locally or self.param_memory.is_device
        numel = self.layout.numel if whole else self.layout.worker_numel(self.rank)
        return 4 * numel if self.node_gradient.size else 0

    def memory(self) -> dict[str, int]:
        """Bytes held, by buffer."""
        return {
            "worker_error": self.error.nbytes + self.error_out.nbytes,
            "server_error": self.server_error.nbytes + self.server_error_out.nbytes,
            "node_gradient": self._node_gradient_nbytes(),
        }


def flat_floats(array: Floats, numel: int, what: str) -> Floats:
    """A one-dimensional view. ValueError for another dtype, number of elements, or a view with gaps."""
    has_gaps = isinstance(array, np.ndarray) and not array.flags.c_contiguous
    if array.dtype != np.float32 or array.size != numel or has_gaps:
        raise ValueError(f"{what}: need {numel} contiguous float32, got {array.size} {array.dtype}")
    return array.reshape(-1)


def address(array: np.ndarray | None) -> int:
    """Where an array's elements begin, in the memory in which it is; 0 for None."""
    if array is None:
        return 0
    return array.address if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])


def all_blocks(layout: Layout, rank: int) -> Table:
    """BLOCK table of the whole layout, for loops that do not touch messages."""
    segments = layout.segments(list(range(len(layout.tensors))), rank, sys.maxsize)
    return segments[0].blocks if segments else np.zeros(0, BLOCK)
