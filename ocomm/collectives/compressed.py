"""The fixed-layout exchange: three-phase compressed allreduce, its dense counterpart for the warm-up, and the vote.

Every message starts with a header (``compression.wire``) that says what it is. Owners compare all headers before they
average, so every rank sees every disagreement or is told of it. All ranks know the flags of all ranks before any of
them commits. ``phases`` says who sends what to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ocomm.collectives.phases import NodeStaging, Staging, collect, flat_stages, node_stages, share
from ocomm.collectives.plan import Computation, Copy, Message, Plan, Stage, loop
from ocomm.collectives.routes import after
from ocomm.collectives.scratch import aligned
from ocomm.collectives.segment_header import SegmentHeader
from ocomm.compression.layout import MessageLayout, SegmentLayout, float_messages
from ocomm.compression.wire import RUN
from ocomm.kernels.base import HOST, Bytes, Kernels, Memory, Table
from ocomm.types import DType, Nodes, ReduceOp


def compressed_staging(layout: SegmentLayout, memory: Memory = HOST) -> Staging:
    """Returns the memory of a segment. Inside a node gradients are sent instead of compressed values."""
    return Staging(layout, memory, None if layout.nodes.is_flat else _slice_nbytes(layout))


def node_staging(layout: SegmentLayout, memory: Memory = HOST) -> NodeStaging:
    """Returns the memory of a ``node_segment``."""
    messages = [memory.staging(nbytes, headers_only=True) for nbytes in _slice_nbytes(layout)]
    return NodeStaging(layout.nodes, layout.rank, messages, memory)


def _slice_nbytes(layout: SegmentLayout) -> list[int]:
    return [layout.header_nbytes + 4 * int(runs["length"].sum()) for runs in layout.slice_runs]


@dataclass(frozen=True, slots=True)
class NodeSum:
    """The dense sum inside a node: gradients from the addresses in ``gradients``, summed in the order of ranks.

    The sum times ``weight`` goes to the addresses in ``targets``, where ``runs`` has a RUN table for each slice. It
    goes there for this rank's own slice only or, if ``shared``, for all slices on all ranks of the node.
    """

    gradients: Table
    targets: Table
    runs: Sequence[Table]
    weight: float
    shared: bool = False


def compressed_segment(
    staging: Staging,
    segment_header: SegmentHeader,
    result: Bytes,
    compress: Computation,
    average: Callable[[Sequence[Bytes]], Computation],
    node_sum: NodeSum | None = None,
) -> list[Stage]:
    """Returns the stages of one segment. ``result`` has ``packed_nbytes``.

    ``compress`` writes ``staging.send`` and sets ``segment_header.node_flags``. ``average`` makes the server's
    computation from the messages of all workers, in the order of their nodes. A rank without a slice does neither.
    ``node_sum`` is given if nodes have several ranks.

    Bytes sent to other nodes: the message (header, scales, signs) for each owner, then this rank's averages (no header)
    to every worker. Inside the node: this rank's gradients of the other ranks' slices, then the averages of its slice
    to every rank.
    """
    if node_sum is None:
        return flat_stages(staging, segment_header, result, [compress], lambda rows: [average(rows)])
    assert isinstance(staging.layout, SegmentLayout) and staging.node is not None
    header, node = staging.layout.header_nbytes, staging.node
    gathers = _gathers(staging.layout, node, node_sum)
    summed = _sums(node, header, node_sum.weight)
    scatters = [
        loop(Kernels.scatter, None, runs, node_sum.targets, message[header:])
        for number, (message, runs) in enumerate(zip(node.messages, node_sum.runs, strict=True))
        if runs.size and (node_sum.shared or number == node.position)
    ]
    shared = scatters if node_sum.shared else None
    work = [compress] if node_sum.shared else [*scatters, compress]
    return node_stages(staging, segment_header, result, gathers, summed, work, lambda rows: [average(rows)], shared)


def node_segment(
    layout: SegmentLayout, node: NodeStaging, segment_header: SegmentHeader, node_sum: NodeSum
) -> list[Stage]:
    """Returns the stages of the sum inside the node alone, for all its ranks.

    A disagreement does not end the plan; it is in ``segment_header.passed_on`` afterwards, and the vote tells all
    ranks.
    """
    header = layout.header_nbytes
    summed: list[Computation] = []
    if node.rows:
        summed = [
            segment_header.check_and_pass_on(node.rows, of_node=True, ends=False),
            *_sums(node, header, node_sum.weight),
        ]
    last: list[Computation] = [segment_header.check_and_pass_on(node.messages, of_node=True, ends=False)]
    last += [
        loop(Kernels.scatter, None, runs, node_sum.targets, message[header:])
        for message, runs in zip(node.messages, node_sum.runs, strict=True)
        if runs.size
    ]
    return [
        collect(node, segment_header, _gathers(layout, node, node_sum)),
        share(node, segment_header, summed),
        Stage(last),
    ]


def _gathers(layout: SegmentLayout, node: NodeStaging, node_sum: NodeSum) -> list[Computation]:
    header = layout.header_nbytes
    pairs = zip(node.messages, layout.slice_runs, strict=True)
    return [
        loop(Kernels.gather, None, runs, node_sum.gradients, message[header:]) for message, runs in pairs if runs.size
    ]


def _sums(node: NodeStaging, header: int, weight: float) -> list[Computation]:
    if not node.rows:
        return []
    own = node.messages[node.position][header:]
    return [node.sum(header, own.nbytes, weight, own)] if own.nbytes else []


def dense_layout(rank: int, nodes: Nodes, segment_header: SegmentHeader, runs: Table) -> MessageLayout:
    """Returns the layout of a dense segment's messages. ``runs`` is a RUN table of its elements."""
    return float_messages(rank, nodes, segment_header.nbytes, int(runs["length"].sum()))[0]


def dense_segment(
    staging: Staging, segment_header: SegmentHeader, gradients: Table, averages: Table, runs: Table
) -> list[Stage]:
    """Returns the stages of a float32 average of runs of gradients, with headers, in a fixed order.

    The layout of ``staging`` is the ``dense_layout`` of ``runs``, a RUN table. Its elements are read from the addresses
    in ``gradients``, and their averages written to those in ``averages``. In the flat form: the sum in the order of
    ranks, times float32(1/n). On nodes of several ranks: the sum of each node in the order of its ranks, times
    float32(nodes/n); then the sum of these in the order of nodes, times float32(1/nodes).
    """
    layout, send = staging.layout, staging.send
    rank, nodes, header = layout.rank, layout.nodes, layout.header_nbytes
    _, parts = float_messages(rank, nodes, header, int(runs["length"].sum()))
    begins = {owner: (layout.message_start[owner] + header) // 4 for owner in parts}
    placed = _cut(runs, [(parts[owner].start, begins[owner]) for owner in nodes.owners])
    gather = loop(Kernels.gather, None, placed, gradients, send)
    scatter = loop(Kernels.scatter, None, placed, averages, send)

    def average(rows: Sequence[Bytes]) -> list[Computation]:
        nbytes = 4 * len(parts[rank])
        payload = [row[header : header + nbytes] for row in rows]
        first = layout.message_start[rank] + header
        own = send[first : first + nbytes]
        if not nbytes:
            return []
        return [loop(Kernels.reduce, None, DType.FLOAT32, ReduceOp.AVERAGE, payload, 1.0, 1.0 / len(rows), own)]

    if nodes.is_flat:
        stages = flat_stages(staging, segment_header, send, [gather], average)
    else:
        assert staging.node is not None
        sums: list[Computation] = []
        for owner in layout.workers:
            first = layout.message_start[owner] + header
            nbytes = 4 * len(parts[owner])
            inside = first - layout.slice_bounds[staging.node.position]
            if nbytes:
                sums.append(staging.node.sum(inside, nbytes, nodes.weight, send[first : first + nbytes]))
        stages = node_stages(staging, segment_header, send, [gather], sums, [], average, is_dense=True)
    stages[-1].compute.append(scatter)
    return stages


def dense_segment_alone(segment_header: SegmentHeader, gradients: Table, averages: Bytes, runs: Table) -> list[Stage]:
    """Returns the stages of ``dense_segment`` on a rank without others: gradients are their own averages.

    They are copied to where the positions of ``runs`` say in ``averages``; nothing is staged or sent.
    """
    segment_header.received = heads = [aligned(segment_header.nbytes)]
    gather = loop(Kernels.gather, None, runs, gradients, averages)
    return [Stage([gather, segment_header.write(heads), segment_header.check(heads)])]


def scatter_segment(
    staging: Staging, segment_header: SegmentHeader, gradients: Table, averages: Callable[[int, int], Bytes]
) -> list[Stage]:
    """Returns the stages in which the owners of a segment's blocks average float32 gradients: the first half of a
    sharded dense step, in the flat form.

    The layout of ``staging`` has blocks of ``FLOAT32``. Gradients are read from the addresses in ``gradients``.
    ``averages(owned, numel)`` returns the memory for that many elements of this rank's blocks, from place ``owned`` on,
    to which their averages go: sums in the order of ranks, times float32(1/n).
    """
    layout, route = staging.layout, staging.route
    assert isinstance(layout, SegmentLayout) and layout.nodes.is_flat
    scatter = route.scatter()
    segment_header.received = route.rows
    check = segment_header.check if layout.nodes.groups == 1 else segment_header.check_and_pass_on
    pack = loop(Kernels.gather, None, _runs_of(layout.blocks), gradients, staging.send)
    scatter[0].compute[:0] = [pack, segment_header.write(staging.messages)]
    sums: list[Computation] = []
    for first, owned, numel in _adjacent(layout.owned_blocks):
        start = first - layout.message_start[layout.rank]
        payload = [row[start : start + 4 * numel] for row in route.rows]
        out = averages(owned, numel)
        sums.append(loop(Kernels.reduce, None, DType.FLOAT32, ReduceOp.AVERAGE, payload, 1.0, 1.0 / len(payload), out))
    return [*scatter, Stage([check(route.rows), *sums])]


def gather_segment(staging: Staging, tensors: Table) -> list[Stage]:
    """Returns the stages in which each rank sends the float32 elements of the blocks that it owns to all others, in the
    flat form. They have no headers.

    Elements are read from the addresses in the column ``grad`` of ``tensors``, and those of others are written there.
    """
    layout, send = staging.layout, staging.send
    assert isinstance(layout, SegmentLayout) and layout.nodes.is_flat
    gather = staging.route.gather(send)
    is_mine = layout.blocks["owned"] >= 0
    gather[0].compute.insert(0, loop(Kernels.gather, None, _runs_of(layout.blocks[is_mine]), tensors, send))
    return [*gather, Stage([loop(Kernels.scatter, None, _runs_of(layout.blocks[~is_mine]), tensors, send)])]


def _runs_of(blocks: Table) -> Table:
    """Returns a RUN table of blocks of ``FLOAT32``, with their positions in the packed buffer."""
    runs = np.zeros(blocks.size, RUN)
    for field in ("tensor", "start", "length"):
        runs[field] = blocks[field]
    runs["position"] = blocks["bits"] // 4
    return runs


def _adjacent(blocks: Table) -> list[tuple[int, int, int]]:
    """Returns runs of owned blocks that are adjacent both in the message and in the owner's buffers: (position in the
    packed buffer in bytes, ``owned``, number of elements).
    """
    found: list[tuple[int, int, int]] = []
    for bits, owned, length in zip(*(blocks[name].tolist() for name in ("bits", "owned", "length")), strict=True):
        if found:
            first, place, numel = found[-1]
            if (bits, owned) == (first + 4 * numel, place + numel):
                found[-1] = first, place, numel + length
                continue
        found.append((bits, owned, length))
    return found


def _cut(runs: Table, parts: Sequence[tuple[int, int]]) -> Table:
    """Returns ``runs``, adjacent in the message, cut where a part begins: (its first element, its position in the
    message).
    """
    lengths = runs["length"]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    firsts = np.array([first for first, _ in parts], np.int64)
    cuts = np.union1d(starts[lengths > 0], firsts[firsts < (ends[-1] if ends.size else 0)])
    found = np.zeros(cuts.size, RUN)
    if cuts.size:
        of = np.searchsorted(starts, cuts, side="right") - 1
        part = np.searchsorted(firsts, cuts, side="right") - 1
        found["tensor"] = runs["tensor"][of]
        found["start"] = runs["start"][of] + cuts - starts[of]
        found["length"] = np.diff(cuts, append=ends[-1])
        found["position"] = np.array([position for _, position in parts])[part] + cuts - firsts[part]
    return found


def vote(
    rank: int, groups: Sequence[Sequence[int]], segment_header: SegmentHeader, payload: Bytes | None = None
) -> Plan:
    """Returns the plan of a vote: every rank learns the flags and presence of all ranks before any of them commits.

    Messages are headers, with ``payload`` after each if there is one. ``groups`` share out the ranks. With one group
    every rank sends to every rank. With more, ranks tell their group, and then each passes its group's messages on to
    some ranks of the other groups: the k-th of them hears it from member k modulo the number of members.
    """
    head = segment_header.nbytes
    nbytes = head + (0 if payload is None else payload.nbytes)
    order = [member for group in groups for member in group]
    table = aligned(nbytes * len(order))
    at = {member: nbytes * k for k, member in enumerate(order)}
    rows = [table[at[member] : at[member] + nbytes] for member in range(len(order))]

    def rows_of(group: Sequence[int]) -> Bytes:
        return table[at[group[0]] : at[group[0]] + nbytes * len(group)]

    segment_header.received = heads = [row[:head] for row in rows]
    segment_header.payloads = [row[head:] for row in rows]
    mine = next(group for group in groups if rank in group)
    position = mine.index(rank)
    mates = after(mine, position)
    stages = [
        Stage(
            [segment_header.write([heads[rank]]), *([] if payload is None else [Copy(payload, rows[rank][head:])])],
            [Message(peer, rows[rank]) for peer in mates],
            [Message(peer, rows[peer]) for peer in mates],
        )
    ]
    across = Stage()
    before = order.index(mine[0])
    others = order[:before] + order[before + len(mine) :]
    across.sends = [Message(peer, rows_of(mine)) for peer in others[position :: len(mine)]]
    for group in [group for group in groups if group is not mine]:
        place = before + position - (len(group) if at[group[0]] < at[rank] else 0)
        across.receives.append(Message(group[place % len(group)], rows_of(group)))
    if across.receives:
        stages.append(across)
    stages.append(Stage([segment_header.check(heads)]))
    return Plan("vote", [stages])
