"""The phases of an exchange with owners: values go to them, are averaged, and go back to all ranks.

In the flat form each rank is a worker:

    workers scatter -> owners average -> owners gather

In the hierarchical form, on nodes of several ranks, the ranks of a node first sum their values. Each node cuts its sum
into slices, one per rank, and the workers of a slice in all nodes go through the three phases:

    ranks of a node collect -> sum -> [share ->] scatter -> average -> gather -> spread

``share`` sends the node's sum to all its ranks, ``spread`` the averages. Every message begins with a header. In
``collect`` it has what a rank says for itself, in ``scatter`` what a worker says for its node, in ``spread`` what a
worker has heard from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from ocomm.collectives.plan import Computation, Loop, Message, Stage, loop
from ocomm.collectives.routes import Route, after
from ocomm.collectives.segment_header import SegmentHeader
from ocomm.compression.layout import MessageLayout
from ocomm.kernels.base import ALIGNMENT, HOST, Bytes, Kernels, Memory
from ocomm.types import DType, Nodes, ReduceOp


class NodeStaging:
    """Messages inside a node: this rank's part of each slice, and all ranks' parts of its own slice.

    ``messages`` go to the workers of the node, one per slice. With a device the messages of the host are headers alone:
    payloads go from device to device, or there are no nodes of several ranks.
    """

    def __init__(self, nodes: Nodes, rank: int, messages: Sequence[Bytes], memory: Memory = HOST) -> None:
        self.ranks = nodes.node_of(rank)
        self.position = self.ranks.index(rank)
        self.messages = list(messages)
        self.memory: Bytes = memory.staging(0)
        #: The message from each rank of the node; none if this rank has no slice.
        self.rows: list[Bytes] = []
        if self.position < len(self.messages):
            own = self.messages[self.position]
            room = -(-own.nbytes // ALIGNMENT) * ALIGNMENT
            self.memory = memory.staging(room * (len(self.ranks) - 1), headers_only=True)
            spare = [self.memory[k * room : k * room + own.nbytes] for k in range(len(self.ranks) - 1)]
            self.rows = [*spare[: self.position], own, *spare[self.position :]]

    @property
    def others(self) -> list[int]:
        """The other ranks of the node."""
        return after(self.ranks, self.position)

    @property
    def workers(self) -> dict[int, Bytes]:
        """The message to each worker of the node, by rank."""
        return dict(zip(self.ranks, self.messages, strict=False))

    def sum(self, first: int, nbytes: int, weight: float, out: Bytes) -> Loop:
        """Returns the float32 sum of all ranks' bytes [first, first + nbytes) of this slice, in rank order, times
        ``weight``.
        """
        parts = [row[first : first + nbytes] for row in self.rows]
        return loop(Kernels.reduce, None, DType.FLOAT32, ReduceOp.SUM, parts, 1.0, weight, out)


class Staging:
    """Memory of the messages of one segment on one rank. All plans of the segment use the same.

    ``send`` has ``packed_nbytes``. ``node`` is set on nodes of several ranks; its messages are the slices of ``send``,
    unless ``node_nbytes`` gives the sizes of separate ones.
    """

    def __init__(self, layout: MessageLayout, memory: Memory = HOST, node_nbytes: Sequence[int] | None = None) -> None:
        self.layout = layout
        self.send = memory.staging(layout.packed_nbytes)
        self.route = Route(layout, self.send, memory)
        self.node: NodeStaging | None = None
        self.node_memory: list[Bytes] = []
        if not layout.nodes.is_flat:
            messages = slices(layout, self.send)
            if node_nbytes is not None:
                messages = [memory.staging(nbytes, headers_only=True) for nbytes in node_nbytes]
                self.node_memory += messages
            self.node = NodeStaging(layout.nodes, layout.rank, messages, memory)
            self.node_memory.append(self.node.memory)

    @property
    def messages(self) -> list[Bytes]:
        """The messages to the workers of this rank's slice, in the order of their nodes."""
        return [self.route.message(node) for node in range(len(self.layout.workers))]

    @property
    def memory(self) -> list[Bytes]:
        """All buffers."""
        return [self.send, *self.route.memory, *self.node_memory]

    def held(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            "send": self.send.nbytes,
            "receive": sum(buffer.nbytes for buffer in self.route.memory),
            "node_staging": sum(buffer.nbytes for buffer in self.node_memory),
        }


def slices(layout: MessageLayout, packed: Bytes) -> list[Bytes]:
    """Returns the messages of each slice in a packed buffer."""
    return [packed[low:high] for low, high in pairwise(layout.slice_bounds)]


def flat_stages(
    staging: Staging,
    segment_header: SegmentHeader,
    result: Bytes,
    work: Sequence[Computation],
    average: Callable[[list[Bytes]], Sequence[Computation]],
) -> list[Stage]:
    """Returns the stages of the flat form.

    ``work`` fills the payload of the messages; ``average`` reads those of all workers and fills this rank's in
    ``result``.
    """
    route = staging.route
    scatter, gather = route.scatter(), route.gather(result)
    segment_header.received = route.rows
    # With two hops a rank must not end at once, because others wait for what it passes on.
    check = segment_header.check if staging.layout.nodes.groups == 1 else segment_header.check_and_pass_on
    scatter[0].compute[:0] = [*work, segment_header.write(staging.messages)]
    gather[0].compute[:0] = [check(route.rows), *average(route.rows)]
    return [*scatter, *gather, Stage()]


def node_stages(
    staging: Staging,
    segment_header: SegmentHeader,
    result: Bytes,
    collected: Sequence[Computation],
    summed: Sequence[Computation],
    work: Sequence[Computation],
    average: Callable[[list[Bytes]], Sequence[Computation]],
    shared: Sequence[Computation] | None = None,
    *,
    is_dense: bool = False,
) -> list[Stage]:
    """Returns the stages of the hierarchical form.

    ``collected`` fills the payload of the node's messages, ``summed`` sums those of this slice. ``work`` and
    ``average`` are those of ``flat_stages``. With ``shared`` all ranks of the node get the sum, in the node's messages,
    and ``shared`` computes from it. Ranks without a slice only run ``collected`` and ``shared``. ``is_dense``: the
    averages are dense, too.
    """
    route, node = staging.route, staging.node
    assert node is not None
    scatter, gather = route.scatter(), route.gather(result)
    stages = [collect(node, segment_header, collected)]
    if node.rows:
        check = segment_header.check_and_pass_on(node.rows, of_node=True)
        summed = [check, *summed]
        if shared is None:
            work = [*summed, *work]
        scatter[0].compute[:0] = [*work, segment_header.write_for_node(staging.messages)]
        gather[0].compute[:0] = [segment_header.check_and_pass_on(route.rows), *average(route.rows)]
    if shared is not None:
        stages.append(share(node, segment_header, summed if node.rows else []))
        scatter[0].compute[:0] = shared
    return [*stages, *scatter, *gather, *spread(staging.layout, node, segment_header, result, is_dense)]


def collect(node: NodeStaging, segment_header: SegmentHeader, collected: Sequence[Computation]) -> Stage:
    """Returns the stage in which every rank sends its part of a slice to the slice's worker in the node."""
    workers = node.workers
    stage = Stage([*collected, segment_header.write(node.messages)], intra_node=True)
    stage.sends = [Message(peer, workers[peer]) for peer in node.others if peer in workers]
    if node.rows:
        rows = dict(zip(node.ranks, node.rows, strict=True))
        stage.receives = [Message(peer, rows[peer]) for peer in node.others]
    return stage


def share(node: NodeStaging, segment_header: SegmentHeader, summed: Sequence[Computation]) -> Stage:
    """Returns the stage in which the worker of each slice sends its sum to all ranks of the node.

    It overwrites this rank's part of the slice, which the worker has received before it sends anything.
    """
    stage = Stage([*summed], intra_node=True)
    if node.rows:
        own = node.messages[node.position]
        stage.compute.append(segment_header.write_for_node([own]))
        stage.sends = [Message(peer, own) for peer in node.others]
    workers = node.workers
    stage.receives = [Message(peer, workers[peer]) for peer in node.others if peer in workers]
    return stage


def spread(
    layout: MessageLayout, node: NodeStaging, segment_header: SegmentHeader, result: Bytes, is_dense: bool
) -> list[Stage]:
    """Returns the stages in which the worker of each slice sends its averages to all ranks of the node."""
    parts = slices(layout, result)
    stage = Stage(intra_node=is_dense)
    if node.rows:
        stage.compute = [segment_header.write_for_all([parts[node.position]])]
        stage.sends = [Message(peer, parts[node.position]) for peer in node.others]
    of = dict(zip(node.ranks, parts, strict=False))
    stage.receives = [Message(peer, of[peer]) for peer in node.others if peer in of]
    return [stage, Stage([segment_header.check_and_pass_on(parts)])]
