"""What a step exchanges: one flow per kind of exchange, with its segments, its memory and its prepared plans."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.compressed import (
    compressed_segment,
    compressed_staging,
    dense_layout,
    dense_segment,
    dense_segment_alone,
    gather_segment,
    node_segment,
    node_staging,
    scatter_segment,
)
from ocomm.collectives.engine import Ticket
from ocomm.collectives.phases import Staging
from ocomm.collectives.pipeline import Cut
from ocomm.collectives.plan import Computation, Plan, Stage, in_pieces
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.collectives.staged import staged
from ocomm.compression.codecs import FLOAT32, SCALED_SIGNS, Codec
from ocomm.compression.layout import MessageLayout, SegmentLayout
from ocomm.kernels.base import ALIGNMENT, HOST, TENSOR, Bytes, Floats, HostMemory, Memory, Table, sparse_bytes
from ocomm.kernels.device import DeviceArray
from ocomm.optim.core import Core, Exchange, address
from ocomm.optim.step_channel import Sent, StepChannel

#: Limit for the number of buckets, and the least number of elements of a bucket. At 1 Gbit/s so many elements take as
#: long as posting a bucket takes.
BUCKETS, BUCKET_NUMEL = 8, 1 << 17
#: Number of segments of a sharded exchange, or of a dense one of devices, that have memory, which later ones use again:
#: no more are in flight. A device's are more if they are small, as many as have so many bytes.
LANES, LANES_NBYTES = 4, 32 << 20
#: Number of prepared plans that a flow keeps. Buffers alternate, so two are used in turn.
_KEPT_PLANS = 4


class Flow(abc.ABC):
    """The exchange of all tensors of one kind: one plan, whose segments may start when their buckets are posted.

    ``groups`` are the tensors of its buckets, ``parts`` the segments of each. ``built_in()`` returns the buffers and
    options for which the plan of the current step is made.
    """

    #: Names what the segments hold, for their signatures.
    compressor: str
    #: True if the headers of a rank's messages say whether its gradients were finite, after the exchange, too. False
    #: where the rank only adds to a sum.
    says_whose = False
    #: Bytes of the pieces in which messages travel; 0: they travel whole.
    message_nbytes = 0

    def __init__(
        self,
        core: Core,
        wire: StepChannel,
        groups: Sequence[list[int]],
        parts: Sequence[Sequence[SegmentLayout]],
        built_in: Callable[[], tuple[Any, ...]],
    ) -> None:
        ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        #: The tensors of each bucket, and the numbers of their segments.
        self.buckets = [(group, range(*span)) for group, span in zip(groups, pairwise(ends), strict=True)]
        self.segments = [segment for part in parts for segment in part]
        contents = [(segment.signature(self.compressor), len(segment.tensors)) for segment in self.segments]
        self.segment_headers: SegmentHeaders = wire.segment_headers(contents, for_node=not core.layout.nodes.is_flat)
        self.core = core
        self.wire = wire
        #: The prepared plan if it begins before ``step()``, and what the plan of the current step sends.
        self.prepared: Any = None
        self.sent = Sent(0, 0)
        self.ticket: Ticket | None = None
        self._built_in = built_in
        #: What has the memory that plans find through addresses in tables. A plan may outlive its optimizer.
        self.keeps: list[Any] = [core]
        #: Prepared plans, by the identity of what is built into them, which they keep alive.
        self._plans: dict[tuple[Hashable, ...], tuple[Any, Sent, tuple[Any, ...]]] = {}
        #: The flags that checks of averages set, the same on all ranks.
        self._result_flags = np.zeros(1, np.uint32)
        #: The presence bits heard last, and the tensors that some rank has according to them.
        self._heard: bytes = b""
        self._anywhere: NDArray[np.int64] = np.zeros(0, np.int64)

    @abc.abstractmethod
    def _plan(self) -> Plan:
        """Returns the plan for the buffers that this step reads and writes."""

    def _results(self) -> list[Bytes]:
        """Returns what each segment gathers, if a device needs it after the step."""
        return []

    def is_finite(self) -> bool:
        """Returns True if the averages are finite. The same on all ranks, since all have the same bytes."""
        return not self._result_flags[0]

    def prepare(self) -> Any:
        """Returns the prepared plan for the buffers that this step reads and writes."""
        self._result_flags[0] = 0
        built_in = self._built_in()
        key = tuple([id(part) if isinstance(part, (np.ndarray, DeviceArray)) else part for part in built_in])
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _KEPT_PLANS:
                self._forget_plans()
            wire = self.wire
            plan = staged(self._plan(), self.core.param_memory, self._results(), wire.direct, wire.intra_node)
            plan.keepalive += self.keeps
            for stage in (stage for stages in plan.segments for stage in stages if self.message_nbytes):
                stage.sends[:] = in_pieces(stage.sends, self.message_nbytes)
                stage.receives[:] = in_pieces(stage.receives, self.message_nbytes)
            found = self._plans[key] = *wire.prepare(plan), built_in
        self.prepared, self.sent, _ = found
        return self.prepared

    def _forget_plans(self) -> None:
        self._plans.clear()

    def say_presence(self, segments: range, present: NDArray[np.bool_]) -> None:
        """Writes into the headers of ``segments`` which tensors have a gradient on this rank."""
        for k in segments:
            self.segment_headers[k].presence[:] = self.segments[k].presence_bits(present)

    def present_anywhere(self) -> NDArray[np.int64]:
        """Returns the tensors that have a gradient on some rank, as was heard."""
        heard = self.segment_headers.heard.tobytes()
        if heard != self._heard:
            present = np.zeros(len(self.core.layout.tensors), np.bool_)
            for segment, segment_header in zip(self.segments, self.segment_headers, strict=True):
                segment.read_presence(segment_header.heard, present)
            self._heard, self._anywhere = heard, np.flatnonzero(present)
        return self._anywhere

    def tensors_of(self, segment: int) -> tuple[int, ...]:
        """Returns the tensors of a segment."""
        return self.segments[segment].tensors

    @abc.abstractmethod
    def memory(self) -> dict[str, int]:
        """Returns the bytes of messages held, by buffer."""


class CompressedFlow(Flow):
    """Compressed averages with error feedback, in the core's own segments."""

    says_whose = True

    def __init__(self, core: Core, wire: StepChannel, groups: Sequence[list[int]]) -> None:
        self.compressor = f"{core.compressor}-{core.scale}" if core.codec.group else core.compressor
        parts = [[core.segments[k].layout for k in span] for span in core.bucket_segments]
        super().__init__(core, wire, groups, parts, partial(core.built_in, range(sum(map(len, parts)))))
        self.staging = [compressed_staging(segment, core.param_memory) for segment in self.segments]
        #: The flags that ``average`` sets, which are not sent: all ranks see an average that overflows in the result,
        #: and headers say which rank had a bad gradient. A rank without others does not look at the result again.
        self._average_flags = np.zeros(1, np.uint32)
        if core.layout.ranks == 1 and core.codec.group is not None:
            self._average_flags = self._result_flags

    def _results(self) -> list[Bytes]:
        return [self.core.result(k) for k in range(len(self.segments))]

    def _plan(self) -> Plan:
        core = self.core
        stages = []
        for k, (segment, staging, segment_header) in enumerate(
            zip(self.segments, self.staging, self.segment_headers, strict=True)
        ):

            def average(rows: Sequence[Bytes], k: int = k) -> Computation:
                return core.average(k, rows, self._average_flags)

            compress = core.compress(k, staging.send, segment_header.node_flags)
            node_sum = core.node_sum(segment)
            cut = compressed_segment(staging, segment_header, core.result(k), compress, average, node_sum)
            cut[-1].compute += core.check_averages(k, self._result_flags)
            stages.append(cut)
        return Plan(f"{self.wire.name}: compressed", stages)

    def memory(self) -> dict[str, int]:
        held = dict.fromkeys(("send", "receive", "node_staging"), 0)
        for staging in self.staging:
            for name, nbytes in staging.held().items():
                held[name] += nbytes
        return held


class DenseFlow(Flow):
    """Averages in float32, at the ``addresses``, which are in the flat ``averages`` of the layout.

    In the host's memory each plan has messages of its own. On a device all plans share lanes, because page-locked
    memory is scarce, and so is the device's. A rank without others has none.
    """

    compressor = "dense"

    def __init__(
        self,
        core: Core,
        wire: StepChannel,
        groups: Sequence[list[int]],
        parts: Sequence[Sequence[SegmentLayout]],
        addresses: Table,
        averages: Floats,
    ) -> None:
        super().__init__(core, wire, groups, parts, core.built_in_dense)
        self._averages = addresses
        self._flat = averages
        #: The memory of the messages of all plans on a device, and of each plan in the host's memory.
        self._lanes: Lanes | None = None
        self._plan_memory: list[Bytes] = []
        #: The blocks of all segments.
        self._blocks = np.concatenate([segment.blocks for segment in self.segments]) if self.segments else None

    def _plan(self) -> Plan:
        core = self.core
        name = f"{self.wire.name}: dense"
        if core.layout.ranks == 1:
            return Plan(name, [self._stages(k, None) for k in range(len(self.segments))])
        memory = core.param_memory
        if not memory.is_device:
            staging = [Staging(layout) for layout in self._layouts()]
            used = [part for each in staging for part in each.memory]
            self._plan_memory += used
            return Plan(name, [self._stages(k, each) for k, each in enumerate(staging)], used)
        if self._lanes is None:
            layouts = self._layouts()
            largest = max(layout.packed_nbytes for layout in layouts)
            self._lanes = Lanes(layouts, memory, max(LANES, LANES_NBYTES // largest))
        stages = [self._stages(k, each) for k, each in enumerate(self._lanes.staging)]
        return Plan(name, stages, [*self._lanes.memory], self._lanes.count)

    def _layouts(self) -> list[MessageLayout]:
        pairs = zip(self.segments, self.segment_headers, strict=True)
        return [dense_layout(self.wire.rank, self.core.layout.nodes, header, s.runs()) for s, header in pairs]

    def _stages(self, number: int, staging: Staging | None) -> list[Stage]:
        """Returns the stages of a segment; ``staging`` is None on a rank without others."""
        segment, segment_header, runs = (
            self.segments[number],
            self.segment_headers[number],
            self.segments[number].runs(),
        )
        before, source = self.core.dense_source(segment, segment_header.flags)
        if staging is None:
            runs["position"] = self.core.layout.offsets[runs["tensor"]] + runs["start"]
            stages = dense_segment_alone(segment_header, source, self._flat.view(np.uint8), runs)
        else:
            stages = dense_segment(staging, segment_header, source, self._averages, runs)
        stages[0].compute[:0] = before
        stages[-1].compute += self.core.check_dense_averages(segment, self._averages, self._result_flags)
        return stages

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._plan_memory.clear()

    def is_finite(self) -> bool:
        return super().is_finite() and (self._blocks is None or self.core.can_use(self._blocks, self._averages))

    def memory(self) -> dict[str, int]:
        lanes = [] if self._lanes is None else self._lanes.memory
        return {"dense_staging": sum(memory.nbytes for memory in (*self._plan_memory, *lanes))}


class LowBitFlow(DenseFlow):
    """Averages in fewer than 32 bits, with the errors of ``core.dense_codes``, to the flat ``averages``."""

    says_whose = True

    def __init__(
        self,
        core: Core,
        wire: StepChannel,
        groups: Sequence[list[int]],
        parts: Sequence[Sequence[SegmentLayout]],
        addresses: Table,
        averages: Floats,
    ) -> None:
        assert core.dense_codes is not None
        self._codes = core.dense_codes
        self.compressor = f"dense {self._codes.codec.label}"
        super().__init__(core, wire, groups, parts, addresses, averages)
        memory = core.param_memory
        self._staging = [compressed_staging(segment, memory) for segment in self.segments]
        self._gathered = [memory.staging(segment.packed_nbytes) for segment in self.segments]
        #: The flags that the server sets, which are not sent: all ranks see an average that overflows in the result.
        self._average_flags = np.zeros(1, np.uint32)

    def _plan(self) -> Plan:
        core, codes = self.core, self._codes
        plan = []
        for segment, segment_header, staging, gathered in zip(
            self.segments, self.segment_headers, self._staging, self._gathered, strict=True
        ):

            def average(
                rows: Sequence[Bytes], segment: SegmentLayout = segment, gathered: Bytes = gathered
            ) -> Computation:
                return codes.average(segment, rows, gathered, self._average_flags)

            compress = codes.compress(segment, core.tensors, staging.send, segment_header.node_flags)
            stages = compressed_segment(staging, segment_header, gathered, compress, average, core.node_sum(segment))
            stages[-1].compute.append(codes.unpack(segment, gathered, self._flat))
            stages[-1].compute += core.check_dense_averages(segment, self._averages, self._result_flags)
            plan.append(stages)
        return Plan(f"{self.wire.name}: dense", plan)

    def memory(self) -> dict[str, int]:
        held = sum(gathered.nbytes for gathered in self._gathered)
        return {"dense_staging": held + sum(sum(staging.held().values()) for staging in self._staging)}


class _Lane(HostMemory):
    """Memory for the messages of one segment at a time: for whole messages, and for ones whose headers alone the host
    uses. Without memory it finds out how much of both a segment needs.
    """

    def __init__(self, memory: Sequence[Bytes] = ()) -> None:
        self.memory = memory
        self.used = [0, 0]

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        start = self.used[headers_only]
        self.used[headers_only] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not self.memory:
            return sparse_bytes(nbytes)  # which is never written
        return self.memory[headers_only][start : start + nbytes]


class Lanes:
    """The ``memory`` of the messages of segments: segment k has that of segment k - ``count`` (``Plan.lanes``)."""

    def __init__(self, segments: Sequence[MessageLayout], memory: Memory = HOST, count: int = LANES) -> None:
        self.count = count
        needed = [[0, 0] for _ in range(min(count, len(segments)))]
        for k, segment in enumerate(segments):
            room = _Lane()
            Staging(segment, room)
            lane_of = needed[k % count]
            lane_of[:] = map(max, lane_of, room.used)
        lanes = [
            _Lane([memory.staging(whole), memory.staging(headed, headers_only=True) if headed else sparse_bytes(0)])
            for whole, headed in needed
        ]
        #: The memory of each segment.
        self.staging: list[Staging] = []
        for k, segment in enumerate(segments):
            lane = lanes[k % count]
            lane.used = [0, 0]
            self.staging.append(Staging(segment, lane))
        self.memory = [part for lane in lanes for part in lane.memory]


class Gathering:
    """Sends what each rank owns of some tensors to all ranks: float32 elements, of the blocks of ``segments``."""

    def __init__(self, core: Core, wire: StepChannel, lanes: Lanes) -> None:
        self._wire = wire
        self._places = np.zeros(len(core.layout.tensors), TENSOR)
        stages = [gather_segment(staging, self._places) for staging in lanes.staging]
        keeps = [core, *lanes.memory]
        self._prepared, self.sent = wire.prepare(Plan(f"{wire.name}: shards", stages, keeps, lanes.count))

    def run(self, addresses: NDArray[np.uint64], what: str) -> None:
        """Fills in, at the ``addresses`` of all tensors, what other ranks own. Collective; raises the error with which
        it fails.

        Args:
            addresses: One address per tensor of the layout, of float32 elements with this rank's part.
            what: Names it in messages.
        """
        self._places["grad"] = addresses
        self._wire.run(self._prepared, what)


class ShardedFlow(DenseFlow):
    """Averages in float32 for the owners of blocks alone, in ``core.sharded``, and later what they send back. Each rank
    says in the vote whether its averages are finite.
    """

    compressor = "sharded"

    def __init__(
        self, core: Core, wire: StepChannel, groups: Sequence[list[int]], parts: Sequence[Sequence[SegmentLayout]]
    ) -> None:
        assert core.sharded is not None
        super().__init__(core, wire, groups, parts, np.zeros(0, TENSOR), np.zeros(0, np.float32))
        self._sharded = core.sharded
        self._sharded.begin()
        self._lanes = Lanes(self.segments)
        #: What follows the vote: the owners send parameters.
        self.gathering = Gathering(core, wire, self._lanes)

    def _plan(self) -> Plan:
        assert self._lanes is not None
        gradients, averages = self.core.gradients, self._sharded.averages
        stages = [
            scatter_segment(staging, segment_header, gradients, averages)
            for staging, segment_header in zip(self._lanes.staging, self.segment_headers, strict=True)
        ]
        return Plan(f"{self.wire.name}: dense", stages, [*self._lanes.memory, self._sharded.average], self._lanes.count)


class NodeFlow(Flow):
    """Sums inside nodes, in steps that the ranks of a node take by themselves."""

    compressor = "node"

    def __init__(
        self, core: Core, wire: StepChannel, groups: Sequence[list[int]], parts: Sequence[Sequence[SegmentLayout]]
    ) -> None:
        super().__init__(core, wire, groups, parts, tuple)
        self.staging = [node_staging(segment, core.param_memory) for segment in self.segments]

    def _plan(self) -> Plan:
        stages = []
        for segment, segment_header, staging in zip(self.segments, self.segment_headers, self.staging, strict=True):
            node_sum = self.core.node_sum(segment)
            assert node_sum is not None
            stages.append(node_segment(segment, staging, segment_header, node_sum))
        return Plan(f"{self.wire.name}: node", stages)

    def memory(self) -> dict[str, int]:
        messages = sum(message.nbytes for node in self.staging for message in node.messages)
        return {"node_staging": messages + sum(node.memory.nbytes for node in self.staging)}


class Flows:
    """The flows of the current step, as the core wants them, and the addresses of dense averages. ``cut`` says how they
    are cut.
    """

    def __init__(self, core: Core, wire: StepChannel, cut: Cut) -> None:
        self.core = core
        self.layout = core.layout
        self.cut = cut
        count = len(self.layout.tensors)
        #: The order of gradients in which buckets are cut, the same on all ranks.
        self.order = list(range(count - 1, -1, -1))
        #: The flows of the step: compressed, dense, inside nodes.
        self.flows: list[Flow] = []
        #: Tensors that do not travel in the step, and the flow that sums them, and others that step locally, inside
        #: nodes.
        self.local: list[int] = []
        self.node: NodeFlow | None = None
        #: The flow of the step's sharded averages; None without any.
        self.sharded: ShardedFlow | None = None
        #: The dense averages, flat float32, and the addresses of each tensor's part.
        self.averages: Floats = np.zeros(0, np.float32)
        self._addresses: Table = np.zeros(count, TENSOR)
        self._wire = wire
        #: The flows of the last step that had any of their kind.
        self.compressed: CompressedFlow | None = None
        self.dense: DenseFlow | None = None
        self._exchange: Exchange | None = None
        self._wanted: tuple[bytes, bytes, bytes] | None = None
        self._cut_for: dict[str, bytes] = {}

    def adopt_order(self, order: Sequence[int]) -> None:
        """Cuts all later buckets by ``order``."""
        assert sorted(order) == sorted(self.order)
        self.order = list(order)
        self._exchange = self._wanted = None
        self._cut_for.clear()

    def arrange(self) -> bool:
        """Makes the flows that the core wants for the step that begins. Returns True if they have changed."""
        exchange = self.core.exchange()
        if exchange is self._exchange:
            return False
        compressed, dense = (wanted & (self.layout.numels > 0) for wanted in (exchange.compressed, exchange.dense))
        local = ~(compressed | dense)
        summed = local
        if exchange.local is not None and self.core.dense_codes is None:
            # An average in float32 leaves no sum of the node behind, as those in codes do.
            summed = local | exchange.local
        wanted = compressed.tobytes(), dense.tobytes(), summed.tobytes()
        if wanted == self._wanted:
            self._exchange = exchange
            return False
        # Some steps lack a kind of exchange; its buckets are kept until they have other tensors.
        if compressed.any() and self._cut_for.get("compressed") != wanted[0]:
            groups = self._cut(compressed)
            self.core.set_buckets(groups, self.cut.segment_nbytes)
            self.compressed = CompressedFlow(self.core, self._wire, groups)
            self._cut_for["compressed"] = wanted[0]
        if self._cut_for.get("dense") != wanted[1] and (dense.any() or not self.core.dense_again):
            self._arrange_dense(dense)
            self._cut_for["dense"] = wanted[1]
        self.local = np.flatnonzero(local).tolist()
        alone = summed & (self.layout.numels > 0)
        self.node = None
        # In local steps the ranks of a node step together, on the sum of their gradients.
        if self.core.steps_locally and not self.layout.nodes.is_flat and alone.any():
            groups = self._cut(alone)
            self.node = NodeFlow(self.core, self._wire, groups, self._segments(groups, self.cut.segment_nbytes))
        chosen = (compressed.any(), self.compressed), (dense.any(), self.dense), (True, self.node)
        self.flows = [flow for travels, flow in chosen if travels and flow is not None]
        self.sharded = next((flow for flow in self.flows if isinstance(flow, ShardedFlow)), None)
        self._exchange, self._wanted = exchange, wanted
        return True

    def _arrange_dense(self, dense: NDArray[np.bool_]) -> None:
        sharded = self.core.sharded
        if sharded is not None:
            self.dense = None
            if dense.any():
                groups = self._cut(dense)
                self.dense = ShardedFlow(
                    self.core, self._wire, groups, self._segments(groups, self.cut.segment_nbytes, FLOAT32)
                )
            else:
                sharded.end()
            return
        self.averages = self.core.param_memory.zeros(self.layout.flat_numel if dense.any() else 0)
        self._addresses["grad"] = address(self.averages) + 4 * self.layout.offsets.astype(np.uint64)
        self.dense = None
        if dense.any():
            groups = self._cut(dense)
            codes = self.core.dense_codes
            if codes is None:
                parts = self._segments(groups, max(self.cut.dense_nbytes // 32, 1))
                self.dense = DenseFlow(self.core, self._wire, groups, parts, self._addresses, self.averages)
                self.dense.message_nbytes = self.cut.message_nbytes
            else:
                parts = self._segments(groups, self.cut.segment_nbytes, codes.codec)
                self.dense = LowBitFlow(self.core, self._wire, groups, parts, self._addresses, self.averages)
            self.dense.keeps.append(self.averages)

    def gathering_of(self, tensor: int) -> Gathering:
        """Returns what sends a tensor's parts to all ranks, once."""
        segments = self.layout.segments([tensor], self.core.rank, self.cut.segment_nbytes, FLOAT32)
        return Gathering(self.core, self._wire, Lanes(segments))

    def _cut(self, wanted: NDArray[np.bool_]) -> list[list[int]]:
        """Returns at most ``BUCKETS`` runs of the wanted tensors; a small model is one run."""
        tensors = [tensor for tensor in self.order if wanted[tensor]]
        numel = int(self.layout.numels[tensors].sum())
        return self.layout.buckets(tensors, max(1, min(BUCKETS, numel // BUCKET_NUMEL)))

    def _segments(
        self, groups: Sequence[list[int]], nbytes: int, codec: Codec = SCALED_SIGNS
    ) -> list[list[SegmentLayout]]:
        return [self.layout.segments(group, self.core.rank, nbytes, codec) for group in groups]

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer; for messages, those of the last step that had any of the kind."""
        held = {
            "averages": self.averages.nbytes,
            **dict.fromkeys(("dense_staging", "send", "receive", "node_staging"), 0),
        }
        for flow in (self.dense, self.compressed, self.node):
            for name, nbytes in (flow.memory() if flow is not None else {}).items():
                held[name] += nbytes
        return held
