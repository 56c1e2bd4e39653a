"""The fixed-layout exchange: three-phase compressed allreduce, its dense counterpart for warm-up, and the vote.

Every message starts with a header (``compression.wire``) that says what it is; owners compare all of them before they
average, so every rank sees every disagreement, or hears of it. The flags of all ranks are known to all ranks before
anyone commits.

On nodes of several ranks the exchange is hierarchical: it begins with a dense sum inside the node, whose slices the
ranks of the node share out; the three phases run among the ranks of the same slice; at last every rank of a node gets
what the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ocomm.collectives.envelope import Envelope
from ocomm.collectives.plan import Computation, Copy, Message, Pack, Place, Plan, Reduce, Stage, header_nbytes
from ocomm.collectives.routes import Route, after, relay
from ocomm.collectives.scratch import ALIGNMENT, aligned
from ocomm.compression.layout import SegmentLayout
from ocomm.compression.wire import RUN
from ocomm.kernels.base import Bytes, Floats, Table
from ocomm.types import DType, ReduceOp


def peers(rank: int, size: int) -> list[int]:
    """The other ranks, starting after this one."""
    return after(range(size), rank)


class Staging:
    """Memory of one compressed segment on one rank besides its result: what goes out and what comes in.

    All plans of the segment use the same. ``send`` has ``packed_nbytes``.
    """

    def __init__(self, layout: SegmentLayout) -> None:
        self.layout = layout
        self.send = aligned(layout.packed_nbytes)
        self.route = Route(layout, self.send)
        self.node = None if layout.nodes.is_flat else NodeStaging(layout)

    def memory(self) -> dict[str, int]:
        """Bytes held, by buffer."""
        node = 0 if self.node is None else self.node.memory.nbytes
        return {"send": self.send.nbytes, "receive": self.route.nbytes, "node_staging": node}


class NodeStaging:
    """Float32 messages inside a node: this rank's part of each slice, and all ranks' parts of its own slice."""

    def __init__(self, layout: SegmentLayout) -> None:
        self.header_nbytes = layout.header_nbytes
        self.ranks = layout.nodes.node_of(layout.rank)
        self.place = self.ranks.index(layout.rank)
        numels = [int(runs["length"].sum()) for runs in layout.slice_runs]
        nbytes = [layout.header_nbytes + 4 * numel for numel in numels]
        has_slice = self.place < len(nbytes)
        counts = [len(self.ranks) if s == self.place else 1 for s in range(len(nbytes))]
        rooms = [_round_up(n, ALIGNMENT) for n in nbytes]
        starts = [0, *accumulate(room * count for room, count in zip(rooms, counts, strict=True))]
        self.memory = aligned(starts[-1])
        #: To the worker of each slice.
        self.messages = [self.memory[start : start + n] for start, n in zip(starts, nbytes, strict=False)]
        #: From each rank of the node; none if this rank has no slice.
        self.rows: list[Bytes] = []
        if has_slice:
            first, room, n = starts[self.place], rooms[self.place], nbytes[self.place]
            spare = [self.memory[first + k * room : first + k * room + n] for k in range(1, len(self.ranks))]
            self.rows = [*spare[: self.place], self.messages[self.place], *spare[self.place :]]


@dataclass(frozen=True, slots=True)
class NodeSum:
    """The dense sum inside a node: gradients from the addresses in ``gradients``, summed in the order of ranks.

    The sum times ``weight``, of this rank's slice, goes to the addresses in ``targets``, by ``runs``.
    """

    gradients: Table
    targets: Table
    runs: Table
    weight: float


def compressed_segment(
    staging: Staging,
    envelope: Envelope,
    result: Bytes,
    compress: Computation,
    average: Callable[[Sequence[Bytes]], Computation],
    node_sum: NodeSum | None = None,
) -> list[Stage]:
    """The stages of one segment. ``result`` has ``packed_nbytes``.

    ``compress`` writes ``staging.send`` and sets ``envelope.node_flags``; ``average`` makes the owner's computation
    from all workers' messages in the order of their nodes. A rank without a slice does neither. ``node_sum`` is there
    if nodes have several ranks.

    Bytes sent to other nodes: each owner's message (header, scales, signs) to that owner, then our averages (no header)
    to everyone. Inside the node: our gradients of the other ranks' slices, then the averages of our slice to everyone.
    """
    layout = staging.layout
    route = staging.route
    scatter, gather = route.scatter(), route.gather(result)
    messages = [route.message(node) for node in range(len(layout.workers))]
    if node_sum is None:
        # With two hops a rank that ended at once would leave others without what it is to pass on.
        check = envelope.check if layout.nodes.groups == 1 else envelope.check_and_pass_on
        envelope.received = route.rows
        scatter[0].compute[:0] = [compress, envelope.seal(messages)]
        gather[0].compute[:0] = [check(route.rows), average(route.rows)]
        return [*scatter, *gather, Stage()]
    assert staging.node is not None
    node = staging.node
    if layout.workers:
        scatter[0].compute[:0] = [
            *_summed(node, envelope, node_sum),
            compress,
            envelope.seal_for_node(messages),
        ]
        gather[0].compute[:0] = [envelope.check_and_pass_on(route.rows), average(route.rows)]
    return [_collected(layout, node, envelope, node_sum), *scatter, *gather, *_spread(layout, node, envelope, result)]


def _collected(layout: SegmentLayout, node: NodeStaging, envelope: Envelope, node_sum: NodeSum) -> Stage:
    """Everyone's gradients of a slice to its worker in the node."""
    workers = node.ranks[: layout.nodes.slices]
    header = layout.header_nbytes
    stage = Stage()
    for message, runs in zip(node.messages, layout.slice_runs, strict=True):
        stage.compute.append(Pack(node_sum.gradients, runs, message[header:]))
    stage.compute.append(envelope.seal(node.messages))
    to = dict(zip(workers, node.messages, strict=True))
    stage.sends = [Message(peer, to[peer]) for peer in after(node.ranks, node.place) if peer in to]
    if node.rows:
        rows = dict(zip(node.ranks, node.rows, strict=True))
        stage.receives = [Message(peer, rows[peer]) for peer in after(node.ranks, node.place)]
    return stage


def _summed(node: NodeStaging, envelope: Envelope, node_sum: NodeSum) -> list[Computation]:
    """The sum of what the ranks of the node have sent, to where the compressor reads it."""
    computations: list[Computation] = [envelope.check_and_pass_on(node.rows, of_node=True)]
    payload = [row[node.header_nbytes :] for row in node.rows]
    own = payload[node.place]
    if own.nbytes:
        computations.append(Reduce(DType.FLOAT32, ReduceOp.SUM, payload, 1.0, node_sum.weight, own))
        computations.append(Place(node_sum.targets, node_sum.runs, own))
    return computations


def _spread(layout: SegmentLayout, node: NodeStaging, envelope: Envelope, result: Bytes) -> list[Stage]:
    """The averages of each slice from its worker to all ranks of the node, with what it has heard of everyone."""
    slices = [result[low:high] for low, high in pairwise(layout.slice_bounds)]
    stage = Stage()
    others = after(node.ranks, node.place)
    if node.rows:
        stage.compute = [envelope.seal_for_all([slices[node.place]])]
        stage.sends = [Message(peer, slices[node.place]) for peer in others]
    of = dict(zip(node.ranks, slices, strict=False))
    stage.receives = [Message(peer, of[peer]) for peer in others if peer in of]
    return [stage, Stage([envelope.check_and_pass_on(slices)])]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + result.size) of one tensor, and where their average goes."""

    tensor: int
    start: int
    result: Floats


def dense_segment(
    rank: int, ranks: int, envelope: Envelope, tensors: Table, runs: Sequence[Run]
) -> tuple[list[Stage], list[Bytes]]:
    """Order-fixed float32 average of runs of gradients, with headers. Returns its stages and the memory they use.

    Runs are packed from the addresses in ``tensors``, exchanged, and unpacked: the fixed layout's dense stage, whose
    owners are equal slices.
    """
    header = header_nbytes(int(envelope.header["tensors"][0]))
    numel = sum(run.result.size for run in runs)
    slice_numel = _round_up(_round_up(numel, ranks) // ranks, 16)
    bounds = [min(slice_numel * r, numel) for r in range(ranks + 1)]
    nbytes = [4 * (high - low) for low, high in pairwise(bounds)]
    room = [_round_up(header + n, 64) for n in nbytes]
    starts = [0, *accumulate(room)]
    send = aligned(starts[-1])
    messages = [send[starts[r] : starts[r] + header + nbytes[r]] for r in range(ranks)]
    staging = aligned(room[rank] * ranks)
    rows = [staging[r * room[rank] : r * room[rank] + header + nbytes[rank]] for r in range(ranks)]
    rows[rank] = messages[rank]
    envelope.received = rows
    others = peers(rank, ranks)
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in range(ranks)]
    copies: list[Computation] = []
    position = 0
    for run in runs:
        done = 0
        while done < run.result.size:
            owner = position // slice_numel
            count = min(run.result.size - done, bounds[owner + 1] - position)
            first = position - bounds[owner]
            parts[owner].append((run.start + done, first, count, run.tensor))
            packed = messages[owner][header + 4 * first : header + 4 * (first + count)]
            copies.append(Copy(packed, run.result[done : done + count].view(np.uint8)))
            done += count
            position += count
    packs = [Pack(tensors, np.array(parts[r], RUN), messages[r][header:]) for r in range(ranks) if parts[r]]
    payload = [row[header:] for row in rows]
    own = messages[rank][header:]
    average = [Reduce(DType.FLOAT32, ReduceOp.AVERAGE, payload, 1.0, 1.0 / ranks, own)] if own.nbytes else []
    stages = [
        Stage(
            [*packs, envelope.seal(messages)],
            [Message(peer, messages[peer]) for peer in others],
            [Message(peer, rows[peer]) for peer in others],
        ),
        Stage(
            [envelope.check(rows), *average],
            [Message(peer, own) for peer in others] if own.nbytes else [],
            [Message(peer, messages[peer][header:]) for peer in others if nbytes[peer]],
        ),
        Stage(copies),
    ]
    return stages, [send, staging]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def vote(rank: int, groups: Sequence[Sequence[int]], envelope: Envelope) -> Plan:
    """Headers only: everyone tells everyone its flags and presence, before anyone commits.

    ``groups`` share out the ranks. In one group everyone sends to everyone; with more, ranks tell their group, and then
    each passes its group's headers on to some ranks of the other groups.
    """
    nbytes = envelope.nbytes
    order = [member for group in groups for member in group]
    table = aligned(nbytes * len(order))
    at = {member: nbytes * k for k, member in enumerate(order)}
    rows = [table[at[member] : at[member] + nbytes] for member in range(len(order))]
    envelope.received = rows
    mine = next(group for group in groups if rank in group)
    place = mine.index(rank)
    mates = after(mine, place)
    stages = [
        Stage(
            [envelope.seal([rows[rank]])],
            [Message(peer, rows[rank]) for peer in mates],
            [Message(peer, rows[peer]) for peer in mates],
        )
    ]
    across = Stage()
    for group in [group for group in groups if group is not mine]:
        bundles = [table[at[g[0]] : at[g[0]] + nbytes * len(g)] for g in (mine, group)]
        behind = [peer for k, peer in enumerate(group) if relay(mine, k) == rank]
        across.sends += [Message(peer, bundles[0]) for peer in behind]
        across.receives.append(Message(relay(group, place), bundles[1]))
    if across.receives:
        stages.append(across)
    stages.append(Stage([envelope.check(rows)]))
    return Plan("vote", [stages])
