"""Plans of the uncompressed collectives: who sends which bytes, and what is summed where.

Sums are made by one owner per element, in rank order, so their bits depend neither on fusion nor on timing nor on the
segment size (docs/algorithms.md, Dense average). Every builder is a pure function: arrays in, a ``Plan`` out, with the
same shape on all ranks.

Sends, and results received over the same bytes, may overlap in place: the result of a slice cannot arrive before its
owner has received this rank's part of it.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress

import numpy as np

from ocomm.collectives.pipeline import SMALLEST_NBYTES, message_nbytes, segment_nbytes, share_nbytes
from ocomm.collectives.plan import Copy, CopyIn, CopyOut, Loop, Message, Plan, Stage, loop
from ocomm.collectives.routes import after
from ocomm.kernels.base import Bytes, Kernels, view
from ocomm.types import DType, Location, Nodes, ReduceOp

ALIGNMENT = 64
#: Below this many bytes every rank sends everything to every rank and sums alone: one message time instead of two.
SMALL_NBYTES = 8192
#: The largest message of an alltoall in one segment: MPI counts bytes in an int.
WHOLE_NBYTES = 1 << 30


@dataclass(frozen=True)
class Context:
    """What a plan is built for: this rank of ``size``, the largest segment in bytes, and a source of staging memory.

    ``nodes`` says whether an allreduce is flat, or sums inside each node first.
    """

    rank: int
    size: int
    segment_nbytes: int
    scratch: Callable[[int], Bytes]
    nodes: Nodes

    @property
    def message_nbytes(self) -> int:
        """The largest message, in bytes, of a collective whose segments are not shared out among owners."""
        return message_nbytes(self.segment_nbytes)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks, starting after this one, so that not all ranks send to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.nodes.node_of(self.rank)

    @cached_property
    def mates(self) -> list[int]:
        """The other ranks of this rank's node."""
        return after(self.members, self.members.index(self.rank))

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that reduce this rank's slice with it, one per node; none if it has no slice."""
        return self.nodes.workers(self.rank)


def _pieces(nbytes: int, largest_nbytes: int) -> list[tuple[int, int]]:
    """Cuts [0, nbytes) into equal pieces for the pipeline; a size that can be sent at once is one piece."""
    count = 1 if nbytes <= SMALL_NBYTES else -(-nbytes // largest_nbytes)
    step = max(-(-nbytes // (count * ALIGNMENT)), 1) * ALIGNMENT
    return [(low, min(low + step, nbytes)) for low in range(0, nbytes, step)]


def _slices(low: int, high: int, size: int) -> list[slice]:
    """Cuts [low, high) into ``size`` nearly equal aligned slices; the last ones may be empty."""
    share = -(-(high - low) // size)
    piece = -(-share // ALIGNMENT) * ALIGNMENT
    return [slice(min(low + piece * r, high), min(low + piece * (r + 1), high)) for r in range(size)]


def average_factor(dtype: DType, op: ReduceOp, postscale: float, size: int) -> float:
    """Returns the factor that multiplies the sum. An integer average is divided by the reduction itself."""
    return postscale / size if op == ReduceOp.AVERAGE and dtype.is_floating else postscale


def allreduce(
    context: Context,
    sources: Sequence[Location],
    results: Sequence[Location],
    nbytes: Sequence[int],
    dtype: DType,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    copied: bool = False,
) -> Plan:
    """Returns the plan that reduces each of ``sources`` into its result, both of ``nbytes``. They may be the same
    memory.

    Small tensors are fused: they travel side by side in a buffer. A large tensor is sent from its own memory and
    received there, because copies take as much memory bandwidth as the rest of a sum. With ``copied`` it is copied in
    and out, too, with the same messages: then other computations only see memory from ``scratch``.

    Bytes sent per rank: 2 (n-1)/n of the total; (n-1) times what is fused if that is below ``SMALL_NBYTES``. On N nodes
    of M ranks 2 (N-1)/(N M) of the total to other nodes, and twice (M-1)/M inside the node. Averages of integers are
    always flat, because their one division must be that of the whole sum.
    """
    staging: list[Bytes] = []

    def stage_memory(nbytes: int) -> Bytes:
        buffer = context.scratch(nbytes)
        staging.append(buffer)
        return buffer[:nbytes]

    reduction = _Reduction(context, stage_memory, dtype, op, prescale, postscale)
    # Messages are as large as they may be: each costs as much processor time as some ten thousand bytes on the wire,
    # and nothing is computed before a sum that smaller ones would hide.
    piece = min(reduction.shares * share_nbytes(reduction.shares), context.segment_nbytes)
    alone_nbytes = max(piece // 4, SMALLEST_NBYTES)  # a segment is worth its messages
    is_fused = [n < alone_nbytes for n in nbytes]
    count = sum(is_fused)
    if count == len(nbytes) > 1:  # the usual case
        return Plan("allreduce", _fused(reduction, sources, results, nbytes, piece), staging)
    segments: list[list[Stage]] = []
    if count > 1:
        fused = list(compress(sources, is_fused)), list(compress(results, is_fused)), list(compress(nbytes, is_fused))
        segments += _fused(reduction, *fused, piece)
    for source, result, n, one in zip(sources, results, nbytes, is_fused, strict=True):
        if count < 2 or not one:
            if copied:
                segments += _fused(reduction, [source], [result], [n], piece)
            else:
                segments += reduction.segments(view(source, n), view(result, n), piece)
    return Plan("allreduce", segments, staging)


def _fused(
    reduction: _Reduction, sources: Sequence[Location], results: Sequence[Location], nbytes: Sequence[int], piece: int
) -> list[list[Stage]]:
    """Returns the segments of tensors that travel in one buffer: they are copied in, reduced, and copied out."""
    ends = list(accumulate(nbytes))
    buffer = reduction.memory(ends[-1])
    segments = reduction.segments(buffer, buffer, piece)
    in_place = all(map(operator.is_, sources, results))
    for stages, (low, high) in zip(segments, _pieces(ends[-1], piece) or [(0, 0)], strict=True):
        cut = _cut(sources, nbytes, ends, low, high)
        written = cut if in_place else _cut(results, nbytes, ends, low, high)
        stages[0].compute.insert(0, CopyIn(*cut, buffer[low:high]))
        if stages[-1].sends or stages[-1].receives:
            stages.append(Stage())
        stages[-1].compute.append(CopyOut(buffer[low:high], *written))
    return segments


def _cut(
    places: Sequence[Location], nbytes: Sequence[int], ends: list[int], low: int, high: int
) -> tuple[list[Location], list[int]]:
    """Returns the parts, as places and sizes, of adjacent tensors (each up to its end in ``ends``) that lie in [low,
    high).
    """
    first, last = bisect.bisect_right(ends, low), bisect.bisect_left(ends, high) + 1
    found, lengths = list(places[first:last]), list(nbytes[first:last])
    if found:
        lengths[-1] -= ends[last - 1] - high
        skipped = max(low - (ends[first] - nbytes[first]), 0)
        lengths[0] -= skipped
        for k, start in {len(found) - 1: 0, 0: skipped}.items():
            whole = found[k]
            found[k] = whole + start if isinstance(whole, int) else whole[start : start + lengths[k]]
    return found, lengths


@dataclass(frozen=True, slots=True)
class _Reduction:
    """How tensors are reduced. ``memory`` returns memory that lasts as long as the plan."""

    context: Context
    memory: Callable[[int], Bytes]
    dtype: DType
    op: ReduceOp
    prescale: float
    postscale: float

    @property
    def in_nodes(self) -> bool:
        """True if nodes reduce first. That is so for every number of bytes or for none, so that fusion changes no
        bit.
        """
        return not self.context.nodes.is_flat and (self.dtype.is_floating or self.op != ReduceOp.AVERAGE)

    @property
    def shares(self) -> int:
        """The number of parts of a segment, each of which is reduced by another rank."""
        return len(self.context.nodes.owners) if self.in_nodes else self.context.size

    def segments(self, source: Bytes, result: Bytes, largest_nbytes: int) -> list[list[Stage]]:
        """Returns the stages of an allreduce of ``source`` into ``result``, which may be the same memory, piece by
        piece.
        """
        if source.nbytes <= SMALL_NBYTES:
            return [self._at_once(source, result)]
        way = self._through_nodes if self.in_nodes else self._flat
        return [way(source, result, low, high) for low, high in _pieces(source.nbytes, largest_nbytes)]

    def _at_once(self, source: Bytes, result: Bytes) -> list[Stage]:
        """Returns the stages in which every rank sends everything to every rank and reduces alone."""
        context = self.context
        rows = self._rows(range(context.size), source)
        received = dict(rows) | {context.rank: source}
        send = Stage(
            [],
            [Message(peer, source) for peer in context.peers],
            [Message(peer, received[peer]) for peer in context.peers],
        )
        if not self.in_nodes:
            # The sends are over when the stage is over, so a sum in place may overwrite what was sent.
            return [send, Stage([self._reduce(list(received.values()), result, context.size, self.prescale)])]
        inner = [self._inner([received[r] for r in node], rows[node[0]]) for node in context.nodes.members]
        outer = self._reduce([rows[node[0]] for node in context.nodes.members], result, len(inner))
        return [send, Stage([*inner, outer])]

    def _flat(self, source: Bytes, result: Bytes, low: int, high: int) -> list[Stage]:
        """Returns the stages for the bytes [low, high): each rank sums its slice in the order of ranks, and sends it to
        all.
        """
        ranks = range(self.context.size)
        return self._between(_shares(low, high, ranks), ranks, source, result, self.prescale)

    def _through_nodes(self, source: Bytes, result: Bytes, low: int, high: int) -> list[Stage]:
        """Returns the stages for the bytes [low, high), cut into slices.

        Each node reduces the slices in the order of its ranks. The ranks that have a slice reduce it in the order of
        nodes, and send it to the ranks of their node.
        """
        context = self.context
        slices = _shares(low, high, context.members[: context.nodes.slices])
        collect = Stage([], [Message(peer, source[slices[peer]]) for peer in context.mates if peer in slices])
        spread = Stage([], [], [Message(peer, result[slices[peer]]) for peer in context.mates if peer in slices])
        if context.rank not in slices:
            return [collect, Stage(), Stage(), spread]
        mine = slices[context.rank]
        rows = self._rows(context.members, source[mine]) | {context.rank: source[mine]}
        collect.receives = [Message(peer, rows[peer]) for peer in context.mates]
        across = self._between(_shares(mine.start, mine.stop, context.workers), context.workers, result, result)
        across[0].compute.append(self._inner(list(rows.values()), result[mine]))
        spread.sends = [Message(peer, result[mine]) for peer in context.mates]
        return [collect, *across, spread]

    def _between(
        self, owners: dict[int, slice], ranks: Sequence[int], source: Bytes, result: Bytes, prescale: float = 1.0
    ) -> list[Stage]:
        """Returns the stages in which each of ``ranks`` sends its ``source`` to the owners, which reduce it into
        ``result`` and send that back.
        """
        rank = self.context.rank
        others = after(ranks, ranks.index(rank))
        scatter = Stage([], [Message(peer, source[owners[peer]]) for peer in others if peer in owners])
        gather = Stage([], [], [Message(peer, result[owners[peer]]) for peer in others if peer in owners])
        if rank in owners:
            mine = owners[rank]
            rows = self._rows(ranks, source[mine]) | {rank: source[mine]}
            scatter.receives = [Message(peer, rows[peer]) for peer in others]
            gather.compute = [self._reduce(list(rows.values()), result[mine], len(ranks), prescale)]
            gather.sends = [Message(peer, result[mine]) for peer in others]
        return [scatter, gather]

    def _reduce(self, sources: list[Bytes], out: Bytes, size: int, prescale: float = 1.0) -> Loop:
        """Returns the last reduction of ``sources``, with what remains to be done: the average over ``size`` and the
        factors.
        """
        factor = average_factor(self.dtype, self.op, self.postscale, size)
        return loop(Kernels.reduce, None, self.dtype, self.op, sources, prescale, factor, out)

    def _inner(self, sources: list[Bytes], out: Bytes) -> Loop:
        """Returns the reduction of the ranks of a node. For an average the sum is multiplied by nodes/n, so that it
        overflows no sooner than the values do.
        """
        weight = self.context.nodes.weight if self.op == ReduceOp.AVERAGE else 1.0
        return loop(Kernels.reduce, None, self.dtype, self.op, sources, self.prescale, weight, out)

    def _rows(self, ranks: Sequence[int], like: Bytes) -> dict[int, Bytes]:
        """Returns memory for as many bytes as ``like`` has from each of ``ranks``, in their order."""
        nbytes = like.nbytes
        memory = self.memory(nbytes * len(ranks))
        return {peer: memory[k * nbytes : (k + 1) * nbytes] for k, peer in enumerate(ranks)}


def _shares(low: int, high: int, ranks: Sequence[int]) -> dict[int, slice]:
    """Cuts [low, high) among ``ranks``; a rank for which nothing is left is not in the result."""
    cut = zip(ranks, _slices(low, high, len(ranks)), strict=True)
    return {rank: part for rank, part in cut if part.stop > part.start}


def allgather(context: Context, tensors: Sequence[tuple[Bytes, Bytes, Sequence[int]]]) -> Plan:
    """Returns the plan of an allgather. For each (input, output, bytes of every rank), ``output`` gets the inputs of
    all ranks side by side.
    """
    segments = []
    for source, result, nbytes in tensors:
        starts = np.concatenate([[0], np.cumsum(nbytes)]).tolist()
        pieces = max(-(-max(nbytes, default=0) // context.message_nbytes), 1)
        for piece in range(pieces):
            spans = [_piece(start, n, piece, context.message_nbytes) for start, n in zip(starts, nbytes, strict=False)]
            own = spans[context.rank]
            mine = source[own.start - starts[context.rank] : own.stop - starts[context.rank]]
            segments.append(
                [
                    Stage(
                        [Copy(mine, result[own])] if mine.nbytes else [],
                        [Message(peer, mine) for peer in context.peers] if mine.nbytes else [],
                        [Message(p, result[spans[p]]) for p in context.peers if spans[p].stop > spans[p].start],
                    )
                ]
            )
    return Plan("allgather", segments)


def _piece(start: int, nbytes: int, piece: int, piece_nbytes: int) -> slice:
    low = min(piece * piece_nbytes, nbytes)
    return slice(start + low, start + min(low + piece_nbytes, nbytes))


def broadcast(context: Context, source: Bytes, result: Bytes, root: int) -> Plan:
    """Returns the plan that copies the root's ``source`` to ``result`` on every rank.

    If it is large, the root sends a slice to each owner, and owners pass their slices on.
    """
    copy = [Copy(source, result)] if context.rank == root and source is not result and source.nbytes else []
    is_root = context.rank == root
    segments: list[list[Stage]] = [[Stage(list(copy))]] if copy else [[Stage()]]
    is_dealt = result.nbytes > SMALL_NBYTES and context.size > 2
    piece = segment_nbytes(result.nbytes, context.size if is_dealt else 1, context.segment_nbytes)
    for low, high in _pieces(result.nbytes, piece):
        if not is_dealt:
            part = slice(low, high)
            sends = [Message(peer, source[part]) for peer in context.peers] if is_root else []
            segments.append([Stage([], sends, [] if is_root else [Message(root, result[part])])])
            continue
        slices = _slices(low, high, context.size)
        mine = slices[context.rank]
        filled = [peer for peer in context.peers if slices[peer].stop > slices[peer].start]
        has_mine = mine.stop > mine.start
        leaves = [peer for peer in context.peers if peer != root]
        if is_root:
            deal = Stage([], [Message(peer, source[slices[peer]]) for peer in filled])
            share = Stage([], [Message(peer, source[mine]) for peer in context.peers] if has_mine else [])
        else:
            deal = Stage([], [], [Message(root, result[mine])] if has_mine else [])
            share = Stage(
                [],
                [Message(peer, result[mine]) for peer in leaves] if has_mine else [],
                [Message(peer, result[slices[peer]]) for peer in filled],
            )
        segments.append([deal, share])
    return Plan("broadcast", segments)


def message(context: Context, buffer: Bytes | None, nbytes: int, source: int, destination: int) -> Plan:
    """Returns the plan of a message: ``nbytes`` bytes of ``buffer`` go from rank ``source`` to rank ``destination``.

    The other ranks have no buffer, and a plan of as many segments.
    """
    segments = []
    for low, high in _pieces(nbytes, context.message_nbytes):
        stage = Stage()
        if buffer is not None and context.rank == source:
            stage.sends.append(Message(destination, buffer[low:high]))
        elif buffer is not None:
            stage.receives.append(Message(source, buffer[low:high]))
        segments.append([stage])
    return Plan("message", segments)


def alltoall(
    context: Context, source: Bytes, result: Bytes, nbytes: Sequence[Sequence[int]], whole: bool = False
) -> Plan:
    """Returns the plan of an alltoall. Row r of ``nbytes`` says how many bytes rank r sends to each rank; parts are in
    rank order.

    With ``whole`` the plan has one segment, whose messages have at most ``WHOLE_NBYTES``. A rank then needs to know
    only its own row and column. Each pair exchanges at least one message, also of 0 bytes, so that ranks that disagree
    on a size get an error.
    """
    sent = nbytes[context.rank]
    got = [row[context.rank] for row in nbytes]
    send_starts = np.concatenate([[0], np.cumsum(sent)]).tolist()
    receive_starts = np.concatenate([[0], np.cumsum(got)]).tolist()
    largest = max((n for row in nbytes for n in row), default=0)
    piece_nbytes = WHOLE_NBYTES if whole else context.message_nbytes
    pieces = max(-(-largest // piece_nbytes), 1)
    stages = []
    for piece in range(pieces):
        out = [_piece(send_starts[p], sent[p], piece, piece_nbytes) for p in range(context.size)]
        into = [_piece(receive_starts[p], got[p], piece, piece_nbytes) for p in range(context.size)]
        own = Copy(source[out[context.rank]], result[into[context.rank]])
        is_first = whole and piece == 0
        stages.append(
            Stage(
                [own] if own.source.nbytes else [],
                [Message(p, source[out[p]]) for p in context.peers if is_first or out[p].stop > out[p].start],
                [Message(p, result[into[p]]) for p in context.peers if is_first or into[p].stop > into[p].start],
            )
        )
    if not whole:
        return Plan("alltoall", [[stage] for stage in stages])
    # Messages of one stage between two ranks arrive in the order in which they were sent.
    compute = [one for stage in stages for one in stage.compute]
    sends = [one for stage in stages for one in stage.sends]
    receives = [one for stage in stages for one in stage.receives]
    return Plan("alltoall", [[Stage(compute, sends, receives)]])


def reducescatter(
    context: Context,
    source: Bytes,
    result: Bytes,
    nbytes: Sequence[int],
    dtype: DType,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Plan:
    """Returns the plan after which rank r has the reduced r-th part of the inputs, of ``nbytes[r]`` bytes."""
    factor = average_factor(dtype, op, postscale, context.size)
    starts = np.concatenate([[0], np.cumsum(nbytes)]).tolist()
    staging: list[Bytes] = []
    segments = []
    piece_nbytes = -(-context.message_nbytes // ALIGNMENT) * ALIGNMENT  # no element is cut
    for piece in range(max(-(-max(nbytes, default=0) // piece_nbytes), 1)):
        spans = [_piece(starts[r], nbytes[r], piece, piece_nbytes) for r in range(context.size)]
        mine = spans[context.rank]
        length = mine.stop - mine.start
        rows = [source[mine]] * context.size
        if length:
            received = context.scratch(length * context.size)
            staging.append(received)
            rows = [received[r * length : (r + 1) * length] for r in range(context.size)]
            rows[context.rank] = source[mine]
        out = result[mine.start - starts[context.rank] : mine.stop - starts[context.rank]]
        exchange = Stage(
            [],
            [Message(p, source[spans[p]]) for p in context.peers if spans[p].stop > spans[p].start],
            [Message(p, rows[p]) for p in context.peers] if length else [],
        )
        reduce = loop(Kernels.reduce, None, dtype, op, rows, prescale, factor, out)
        segments.append([exchange, Stage([reduce] if length else [])])
    return Plan("reducescatter", segments, staging)
