"""The interface of an optimizer's core to the stepper: which tensors travel in the next step, and what is computed.

A core is a state machine over flat float32 buffers, without framework, thread or network. In one step, the frontend
sets hyperparameters and addresses in ``tensors``; ``exchange`` says which tensors travel compressed and which dense;
per segment ``compress`` and ``average`` describe the work for an engine. When everything has arrived and no rank
objects, ``commit`` takes the step and moves the parameters. Until then nothing that is in use is written, so a step
that is not committed has no effect.

Each rank keeps two errors. ``error``, the worker error, is what compressing its own contribution has lost.
``server_error``, the server error, is what compressing the averages of the blocks that it owns has lost. Both are added
to the values of the next step (error feedback).

Plans are prepared once per key, so everything that is built into the plans of a step (addresses, options) must be in
``key``. What changes from step to step (learning rates, counters) is read when the plan runs, from ``tensors`` or from
one-element arrays.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.compressed import NodeSum
from ocomm.collectives.plan import Computation, loop
from ocomm.compression.codecs import SCALED_SIGNS
from ocomm.compression.layout import Layout, SegmentLayout
from ocomm.kernels.base import PAGE_NUMEL, TENSOR, Bytes, Floats, Kernels, Memory, Table, sparse_zeros
from ocomm.kernels.device import DeviceArray, DeviceKernels
from ocomm.optim.dense_codes import DenseCodes, DenseOptions
from ocomm.optim.feedback import Errors
from ocomm.optim.options import Options
from ocomm.optim.sharded import MOMENTS, ShardedAdam

Flags = NDArray[np.uint32]
Bools = NDArray[np.bool_]
#: Number of sets of arguments that are kept for ``for_each``. Buffers alternate, so two are used in turn.
_KEPT_BATCHES = 4
#: The name of the errors of dense exchanges in a rank state.
DENSE_ERROR = "dense_error"


class Exchange(NamedTuple):
    """What the next step sends: one bool per tensor of the layout, for each of two ways.

    A tensor may travel both ways, or not at all if the core ``steps_locally``. ``local`` are the tensors that take a
    local step, also if they travel; None: only those that do not travel do.
    """

    compressed: Bools
    dense: Bools
    local: Bools | None = None


@dataclass(slots=True)
class Segment:
    """One segment's layout, and the buffer in which its averages are gathered."""

    layout: SegmentLayout
    result: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The current hyperparameters of a parameter group, in float64, and the indices of its tensors."""

    tensors: NDArray[np.int64]
    lr: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    #: Weight decay that is added to the gradient (Adam), or subtracted from the parameter (AdamW).
    coupled_decay: float = 0.0
    decoupled_decay: float = 0.0


class Core(abc.ABC):
    """The state of an optimizer for the tensors of ``layout`` on rank ``rank`` of ``layout.ranks``.

    ``tensors`` is the TENSOR table, one row per tensor of the layout. The frontend writes the addresses ``param``, the
    stepper ``grad``, and the core all else. ``gradients`` is another such table, of which only ``grad`` is used, this
    rank's own gradients (0: none), and on a device ``grad_dtype``, which the frontend writes. In the hierarchical form
    the worker's gradients are sums over the ranks of its node, and ``tensors`` has their addresses. In the flat form
    the two tables are the same object.
    """

    #: The optimizer's name, in messages and saved states; frontends have it as ``Distributed`` and this name.
    kind: str
    #: Its options.
    options_class: type[Options]
    #: Options that have the same value in all its runs, by name.
    fixed_options: ClassVar[Mapping[str, Any]] = {}
    #: Names what travels compressed, for the signature in every message; with the scale if there is one.
    compressor = "onebit"
    #: The wire format of what travels compressed; and the scale that a block has, if any: ``"l1"`` or ``"rms"``.
    codec = SCALED_SIGNS
    scale = "l1"
    #: Whether what compression loses is kept and added in the next step.
    keeps_errors = True
    #: Whether there are steps in which a tensor with a gradient does not travel. Then the vote says which ranks have
    #: one.
    steps_locally = False
    #: What is said if something is not finite in a step, with the step and world ranks.
    non_finite_text = (
        "a gradient is NaN or Inf in step {step}, on rank(s) {ranks}; the step was discarded on all ranks. Use a "
        "GradScaler, clip, or lower the learning rate. A finite gradient counts if a square or sum of it overflows "
        "float32, or if the learning rate is NaN or Inf."
    )
    #: What is said if no rank has such a gradient, with the step.
    overflow_text = (
        "in step {step} the gradients of all ranks are finite, but their average or its square overflows float32; the "
        "step was discarded on all ranks. Clip, or lower the learning rate."
    )
    #: What is said if the ranks' settings differ.
    hyper_text = "lr, betas, eps or weight decay differ between ranks"
    #: What is said besides if learning rates differ.
    rate_advice = ""
    #: Number of the frontend's steps from one exchange to the next.
    steps_per_exchange = 1
    #: Whether all ranks have the same parameters now.
    is_synced = True
    #: Whether steps with dense tensors may follow one without. If not, the buffers for them are freed then.
    dense_again = False
    #: The optimizer whose dense steps the core makes in a warm-up, by name; None: the wrapped one makes them.
    dense_steps_of: str | None = None
    #: Whether what is sent depends on the learning rates of this step and of earlier ones. Then ``set_hyper`` is called
    #: before every step, and not only when something that gradients are compressed with has changed.
    sends_rates = False

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: Options) -> None:
        self.layout = layout
        self.options = options
        self.rank = rank
        self.kernels = kernels
        #: The memory of the buffers. Messages are in the host's memory.
        self.param_memory: Memory = kernels.memory
        count = len(layout.tensors)
        self.tensors: Table = np.zeros(count, TENSOR)
        self.tensors["decay"] = 1.0
        self.tensors["skip"] = 1
        self.gradients = self.tensors if layout.nodes.is_flat else np.zeros(count, TENSOR)
        #: The factor, for clipping, by which the next step multiplies every gradient; ``set_hyper`` builds it into the
        #: table. It is the same on all ranks, so a factor of the local gradient is one of the average, too.
        self.gradient_scale = 1.0
        #: What the hashes of the next sketch of gradients are made with, the same on all ranks.
        self.sketch_seed = 0
        #: Number of steps taken by each tensor, like Torch's ``state["step"]``.
        self.steps = np.zeros(count, np.int64)
        self.segments: list[Segment] = []
        #: Indices into ``segments`` of each bucket, in the order of ``set_buckets``.
        self.bucket_segments: list[range] = []
        self._buckets: list[tuple[tuple[int, ...], int]] = []
        # Pages of zeros take no memory until they are written, so tensors that are not compressed yet take none.
        self._allocated = False
        self.errors = Errors(layout, rank, self.param_memory)
        #: What a device is given at once, by the identity of the arguments, which it keeps alive.
        self._batches: dict[tuple[Hashable, ...], Callable[[], None]] = {}
        #: How gradients travel in dense exchanges of fewer than 32 bits; None: in float32.
        self.dense_codes: DenseCodes | None = None
        if isinstance(options, DenseOptions) and options.dense_bits < 32:
            self.dense_codes = DenseCodes(layout, rank, options.dense_bits, self.param_memory)
        #: m and v of this rank's blocks, if owners make the dense steps; None: all ranks make all of them.
        self.sharded: ShardedAdam | None = None
        #: Holds the frontend's tensors whose addresses are in ``tensors``. Plans keep the core, because a plan may
        #: outlive its optimizer.
        self.borrowed: list[Any] = []
        self.node_gradient = np.zeros(0, np.float32)
        self._node_addresses = np.zeros(count, np.uint64)

    @property
    def error(self) -> Floats:
        """The worker error."""
        return self.errors.worker

    @property
    def error_out(self) -> Floats:
        """The worker error after the step under way."""
        return self.errors.worker_out

    @property
    def server_error(self) -> Floats:
        """The server error."""
        return self.errors.server

    @property
    def server_error_out(self) -> Floats:
        """The server error after the step under way."""
        return self.errors.server_out

    @abc.abstractmethod
    def set_hyper(self, group: Group) -> None:
        """Sets a parameter group's hyperparameters for the next step; each is rounded from float64 to float32 once."""

    # What the stepper calls

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """Returns what the next step sends. The same on all ranks, and the same for each call within one step.

        It is the same object as in the last step only if nothing has changed since.
        """

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Computation:
        """Returns the worker's computation for a segment, which writes what is sent into ``packed`` (``packed_nbytes``
        bytes). A core of which nothing ever travels compressed has none.
        """
        raise AssertionError("nothing travels compressed")

    def average(self, segment: int, received: Sequence[Bytes], flags: Flags) -> Computation:
        """Returns the server's computation for a segment: the average of the workers' messages, into its part of
        ``result``.

        ``received`` has one message per worker: in the flat form that of every rank, in rank order; in the hierarchical
        form that of one worker per node, in the order of nodes.
        """
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
        """Returns the buffer in which the averages of a segment are gathered, ``packed_nbytes`` bytes."""
        this = self.segments[segment]
        if this.result is None:
            this.result = self.param_memory.staging(this.layout.packed_nbytes)
            this.result[:] = 0
        return this.result

    def results_nbytes(self) -> int:
        """Returns the bytes of all ``result`` buffers."""
        return sum(segment.result.nbytes for segment in self.segments if segment.result is not None)

    def param(self, tensor: int) -> Floats:
        """Returns the parameter at its address in ``tensors``: a flat view."""
        return self.param_memory.at(int(self.tensors["param"][tensor]), int(self.layout.numels[tensor]))

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        """Returns what the plan of these segments has built in and the next step may change: arrays, and values that
        can be hashed.
        """
        return (self.errors.worker, self.errors.server, *[self.result(k) for k in segments])

    def check_averages(self, segment: int, flags: Flags) -> list[Computation]:
        """Returns what a segment's exchange ends with: a check of what was gathered, which sets ``flags`` if something
        is not finite. The same on all ranks, since all have the same bytes.

        Without scales there is none, because signs are finite; what a worker cannot compute is in the flags of its
        messages. A rank without others needs none, because it has made all averages.
        """
        if self.codec.group is None or self.layout.ranks == 1:
            return []
        return [loop(Kernels.finite_scales, flags, self.segments[segment].layout.blocks, self.result(segment))]

    def segment_mask(self, layout: SegmentLayout) -> Bytes | None:
        """Returns one bit per flat element, 1 = masked, or None if nothing of the segment is masked."""
        return None

    def check_dense_averages(self, segment: SegmentLayout, averages: Table, flags: Flags) -> list[Computation]:
        """Returns what a dense segment's exchange ends with, as ``check_averages`` does. ``averages`` has addresses."""
        return [loop(Kernels.finite, flags, segment.blocks, averages)]

    def can_use(self, blocks: Table, averages: Table) -> bool:
        """Returns True if the dense averages of ``blocks``, which are finite, can be used. The same on all ranks.
        ``averages`` has their addresses.
        """
        return True

    def is_local_finite(self, tensors: Sequence[int]) -> bool:
        """Returns True if this rank's gradients of tensors that do not travel in this step are finite."""
        raise NotImplementedError("a core that steps locally looks at its gradients")

    def waiting(self) -> Bools:
        """Returns the tensors of which this rank has had a gradient in a step without a vote, and other ranks do not
        know.
        """
        raise NotImplementedError("a core that steps locally knows which gradients wait")

    def dense_source(self, segment: SegmentLayout, flags: Flags) -> tuple[list[Computation], Table]:
        """Returns what must be computed before a dense segment is copied into messages, and the table whose ``grad`` is
        copied.
        """
        return [], self.gradients

    def node_sum(self, layout: SegmentLayout) -> NodeSum | None:
        """Returns the sum inside the node in the hierarchical form: of this rank's slice, or of all slices if ranks
        step alone.
        """
        nodes = layout.nodes
        if nodes.is_flat:
            return None
        return NodeSum(self.gradients, self.tensors, layout.slice_runs, nodes.weight, self.steps_locally)

    def clear_gradients(self) -> None:
        """Notes that this rank has no gradients yet. Called before a step."""
        self.gradients["grad"] = 0
        if self.gradients is not self.tensors:
            self.tensors["grad"] = self._node_addresses

    def built_in_dense(self) -> tuple[Any, ...]:
        """Returns what the plans of dense segments have built in and the next step may change."""
        if self.dense_codes is None:
            return ()
        self._place_node_gradients()
        return self.dense_codes.built_in()

    @property
    def dense_bits(self) -> int:
        """Bits per element of dense exchanges."""
        return 32 if self.dense_codes is None else self.dense_codes.codec.bits

    def commit_dense(self, present: Bools) -> None:
        """Takes over the errors that a dense exchange in codes has written. Called before ``commit``, with the same
        ``present``.
        """
        assert self.dense_codes is not None
        self.dense_codes.commit(self.exchange().dense & present)

    @abc.abstractmethod
    def commit(self, present: Bools, averages: Floats) -> None:
        """Takes the step: swaps the state with what the exchange has written, and moves the parameters in place.

        ``present`` has one bool per tensor of the layout: whether some rank had a gradient. If not, nothing of the
        tensor changes. ``averages`` is flat: the averages of the tensors that traveled dense.
        """

    # After a step: masked elements that have a gradient again on some rank

    @property
    def wake_due(self) -> bool:
        """True after a commit if the ranks should exchange ``touched`` now and ``wake``. The same on all ranks."""
        return False

    def touched(self) -> Bytes:
        """Returns one bit per flat element: it is masked, and this rank's gradients have left something in its worker
        error.
        """
        raise NotImplementedError("a core without masked elements")

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks. Returns their number."""
        raise NotImplementedError("a core without masked elements")

    # Buckets

    def set_buckets(self, buckets: Sequence[Sequence[int]], segment_nbytes: int) -> None:
        """Chooses which tensors travel together: each bucket is a list of tensor indices, and is cut into segments.

        May be called between any two steps, with the same arguments on all ranks, and changes no bit of the result.
        Raises ValueError if a tensor comes twice.
        """
        self._batches.clear()
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
        layouts = self.layout.segments(tensors, self.rank, segment_nbytes, self.codec)
        return [self._segment(layout) for layout in layouts]

    def _segment(self, layout: SegmentLayout) -> Segment:
        return Segment(layout)

    def _drop(self, tensors: Sequence[int], segments: Sequence[Any]) -> None:
        """Gives up the segments of these tensors. A core that keeps state in segments moves it elsewhere."""
        del tensors, segments

    def segments_of(self, tensor: int) -> list[Any]:
        """Returns the segments in which a tensor travels."""
        return [segment for segment in self.segments if tensor in segment.layout.tensors]

    # What the compressed stage needs

    def allocate(self) -> None:
        """Allocates the buffers of the compressed stage, once."""
        if self._allocated:
            return
        if self.keeps_errors:
            self.errors.allocate()
        self._place_node_gradients()
        self._allocated = True

    def _place_node_gradients(self) -> None:
        """Allocates the node's gradients in the hierarchical form, once: each tensor's whole length, of which only the
        pages of this rank's slice are written.

        On a device the other pages take memory, too.
        """
        if self.layout.nodes.is_flat or self.node_gradient.size:
            return
        if self.param_memory.is_device:
            self.node_gradient, offsets = self.param_memory.zeros(self.layout.flat_numel), self.layout.offsets
        else:
            lengths = -(-self.layout.numels // PAGE_NUMEL) * PAGE_NUMEL
            self.node_gradient, offsets = sparse_zeros(int(lengths.sum())), np.cumsum(lengths) - lengths
        self._node_addresses = (address(self.node_gradient) + 4 * offsets).astype(np.uint64)
        self.tensors["grad"] = self._node_addresses

    def flat_span(self, tensor: int) -> slice:
        """Returns where a tensor lies in the flat buffers."""
        return self.layout.flat_span(tensor)

    def local_span(self, tensor: int) -> slice:
        """Returns where the part of a tensor that this rank compresses lies in its worker buffers."""
        return self.layout.local_span(tensor, self.rank)

    def owned_span(self, tensor: int) -> slice:
        """Returns where this rank's blocks of a tensor lie in ``server_error``, where they are adjacent."""
        return self.layout.owned_span(tensor, self.rank)

    def for_each(self, loop: str, calls: Sequence[tuple[Any, ...]]) -> None:
        """Calls a loop, which has no result, with each of these arguments. A device is given all of them at once, which
        is prepared when the arguments are new to it.
        """
        if not isinstance(self.kernels, DeviceKernels):
            for arguments in calls:
                getattr(self.kernels, loop)(*arguments)
            return
        key = (loop, *[id(argument) for arguments in calls for argument in arguments])
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _KEPT_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self.kernels.batch(loop, calls)
        batch()

    # State

    def report(self) -> dict[str, Any]:
        """Returns the state for users, in plain values: at least the ``stage``, in a word."""
        return {"stage": "compressed" if self.exchange().compressed.any() else "dense"}

    def state(self) -> dict[str, Any]:
        """Returns the state that is the same on all ranks, without parameters and moments: plain values and copies, by
        string keys.
        """
        return {"steps": self.steps.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the result of ``state``, for the same tensors. Resets the rank state, which must be loaded
        afterwards.
        """
        self.steps[:] = state["steps"]
        self.reset_rank_state()

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        """Returns the state that only this rank has: the buffers in use by kind and name, without elements before
        ``allocate``.

        ``worker``: like the worker error, of ``Layout.worker_numel``; ``owner``: like the error as a server, of
        ``owned_numel``; ``flat``: one value per flat element. A core with further local state, such as local moments,
        adds it here. Then it is saved, loaded and redistributed to another number of ranks with the rest
        (``optim.checkpoint``).
        """
        worker, owner = {"error": self.error}, {"error": self.server_error}
        if self.dense_codes is not None and self.dense_codes.codec.keeps_errors:
            worker[DENSE_ERROR], owner[DENSE_ERROR] = self.dense_codes.buffers()
        return {"worker": worker, "owner": owner, "flat": {}}

    def rank_state(self) -> dict[str, Any]:
        """Returns what the next steps need and only this rank has: copies of ``rank_buffers``."""
        state = {
            kind: {name: self._saved(buffer) for name, buffer in buffers.items()}
            for kind, buffers in self.rank_buffers().items()
        }
        if self.sharded is not None and self.sharded.steps.any():
            state["owner"].update({name: buffer.copy() for name, buffer in self.sharded.buffers().items()})
        return state

    @property
    def needs_rank_state(self) -> bool:
        """True if a state was loaded of which rank states have more than errors, so that they cannot begin at zero."""
        return self.sharded is not None and self.sharded.is_due

    def _saved(self, buffer: Floats) -> Floats:
        """Returns a copy in the host's memory."""
        return self.param_memory.host(buffer) if self.param_memory.is_device else buffer.copy()

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if ``load_rank_state`` could not load the state: other buffers, other sizes, or values that
        are not finite.
        """
        numels = {
            "worker": self.layout.worker_numel(self.rank),
            "owner": self.layout.owned_numel(self.rank),
            "flat": self.layout.flat_numel,
        }
        for kind, own in self.rank_buffers().items():
            saved = state.get(kind, {})
            # dense_bits may be changed, and shards are gathered or made where that is
            others = {DENSE_ERROR, *MOMENTS}
            if kind == "owner" and self.needs_rank_state and not {*MOMENTS} <= saved.keys():
                raise ValueError("the run was sharded, and this has no m and v of the blocks that this rank owns")
            if saved.keys() - others != own.keys() - others:
                raise ValueError(f"need {kind} buffers {sorted(own)}, got {sorted(saved)}")
            for name, buffer in saved.items():
                if buffer.size or name in MOMENTS:
                    flat_floats(buffer, numels[kind], f"{kind} buffer {name!r}")
                if not np.isfinite(buffer).all():
                    raise ValueError(f"{kind} buffer {name!r} has NaN or Inf")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Loads the result of ``rank_state``, for the same layout and rank. A buffer without elements stands for
        zeros.
        """
        self.check_rank_state(state)
        self.reset_rank_state()
        saved = {kind: dict(state.get(kind, {})) for kind in self.rank_buffers()}
        none = np.zeros(0, np.float32)
        dense = [saved[kind].pop(DENSE_ERROR, none) for kind in ("worker", "owner")]
        if self.dense_codes is not None:
            self.dense_codes.load(*dense)
        moments = [saved["owner"].pop(name, none) for name in MOMENTS]
        if self.sharded is not None:
            self.sharded.load(*moments)
        for kind, own in self.rank_buffers().items():
            if any(buffer.size > own[name].size for name, buffer in saved[kind].items()):
                self.allocate()
        for kind, own in self.rank_buffers().items():
            for name, buffer in saved[kind].items():
                if buffer.size:
                    own[name][:] = buffer

    def reset_rank_state(self) -> None:
        """Resets the rank state to that after ``allocate``: no step has left an error."""
        for buffers in self.rank_buffers().values():
            for buffer in buffers.values():
                if self.param_memory.is_device or buffer.any():  # pages that were never written take no memory
                    buffer[:] = 0.0
        self.errors.reset_all()
        if self.dense_codes is not None:
            self.dense_codes.reset()

    @property
    def has_rank_state(self) -> bool:
        """True if there is state that only this rank has, or would be after a step."""
        if self.dense_codes is not None and self.dense_codes.codec.keeps_errors and self.exchange().dense.any():
            return True
        if self.sharded is not None and self.sharded.steps.any():
            return True
        return any(buffer.size for buffers in self.rank_buffers().values() for buffer in buffers.values())

    def replica_addresses(self) -> NDArray[np.uint64]:
        """Returns the addresses, one per parameter, of what must be equal on all ranks between steps."""
        return self.tensors["param"]

    def replica_nbytes(self) -> NDArray[np.int64]:
        """Returns the bytes at each of ``replica_addresses``."""
        return 4 * self.layout.numels

    def replica(self, tensor: int) -> Floats:
        """Returns a copy of what must be equal on all ranks of one parameter: float32, ``numel`` elements."""
        return self._saved(self.param_memory.at(int(self.replica_addresses()[tensor]), int(self.layout.numels[tensor])))

    def replica_digest(self) -> list[int]:
        """Returns checksums, one per parameter, of what must be equal on all ranks between steps."""
        return self.kernels.checksums(self.replica_addresses(), self.replica_nbytes()).tolist()

    def _node_gradient_nbytes(self) -> int:
        whole = self.steps_locally or self.param_memory.is_device
        numel = self.layout.numel if whole else self.layout.worker_numel(self.rank)
        return 4 * numel if self.node_gradient.size else 0

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            "worker_error": self.errors.worker_nbytes,
            "server_error": self.errors.server_nbytes,
            "node_gradient": self._node_gradient_nbytes(),
            "dense_error": 0 if self.dense_codes is None else self.dense_codes.errors.nbytes,
            "sharded_moments": 0 if self.sharded is None else self.sharded.nbytes,
            "sharded_average": 0 if self.sharded is None else self.sharded.average.nbytes,
        }


class OneStageCore(Core):
    """A core all of whose tensors travel in the same way in every step.

    A subclass says which: compressed, unless ``travels_dense``.
    """

    travels_dense = False

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: Options) -> None:
        super().__init__(layout, rank, kernels, options)
        dense = np.full(len(layout.tensors), self.travels_dense, np.bool_)
        self._exchange = Exchange(~dense, dense)

    def exchange(self) -> Exchange:
        return self._exchange


def flat_floats(array: Floats, numel: int, what: str) -> Floats:
    """Returns a one-dimensional view. Raises ValueError for another dtype or number of elements, or if the array is not
    contiguous.
    """
    has_gaps = isinstance(array, np.ndarray) and not array.flags.c_contiguous
    if array.dtype != np.float32 or array.size != numel or has_gaps:
        raise ValueError(f"{what}: need {numel} contiguous float32, got {array.size} {array.dtype}")
    return array.reshape(-1)


def address(array: np.ndarray | None) -> int:
    """Returns the address of an array's first element, in the memory in which it is; 0 for None."""
    if array is None:
        return 0
    return array.address if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])
