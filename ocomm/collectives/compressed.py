"""The fixed-layout exchange: three-phase compressed allreduce, its dense counterpart for warm-up, and the vote.

Every message starts with a header (``compression.wire``) that says what it is; owners compare all of them before they
average, so every rank sees every disagreement. The flags of all ranks are known to all ranks before anyone commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from ocomm.collectives.plan import (
    HEADER,
    MAGIC,
    Check,
    Computation,
    Copy,
    Message,
    Pack,
    Plan,
    Reduce,
    Seal,
    Stage,
    header_nbytes,
    read_header,
)
from ocomm.collectives.scratch import aligned
from ocomm.compression.layout import SegmentLayout
from ocomm.kernels.base import Bytes, Floats, Table
from ocomm.types import DType, Flag, ReduceOp


def peers(rank: int, size: int) -> list[int]:
    """The other ranks, starting after this one."""
    return [(rank + k) % size for k in range(1, size)]


@dataclass(slots=True)
class Envelope:
    """What one rank says in the headers of one segment's messages, and what it has heard.

    ``header`` is one HEADER row; ``presence`` what this rank has; ``heard`` the OR over ranks; ``flags`` and
    ``announcement`` are single-element arrays shared by all segments of a step.
    """

    header: np.ndarray
    presence: Bytes
    heard: Bytes
    flags: np.ndarray
    heard_flags: np.ndarray
    announcement: np.ndarray
    received: list[Bytes] = field(default_factory=list)

    @classmethod
    def new(
        cls,
        rank: int,
        signature: int,
        tensors: int,
        flags: np.ndarray,
        heard_flags: np.ndarray,
        announcement: np.ndarray,
    ) -> Envelope:
        header = np.zeros(1, HEADER)
        header["magic"], header["rank"], header["signature"], header["tensors"] = MAGIC, rank, signature, tensors
        nbytes = header_nbytes(tensors) - HEADER.itemsize
        presence, heard = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return cls(header, presence, heard, flags, heard_flags, announcement)

    def begin(self, step: int, attempt: int, hyper: int, announcement: int) -> None:
        """Fills in what changes from step to step, and forgets what was heard."""
        row = self.header[0]
        row["step"], row["attempt"], row["hyper"], row["announcement"] = step, attempt, hyper, announcement
        self.heard[:] = 0

    def seal(self, messages: Sequence[Bytes]) -> Seal:
        return Seal(self.header, self.flags, self.presence, messages)

    def check(self) -> Check:
        return Check(self.header, self.received, self.heard_flags, self.heard, self.announcement)

    @property
    def nbytes(self) -> int:
        """Of a message without payload."""
        return HEADER.itemsize + self.presence.nbytes

    def ranks_with(self, flag: Flag) -> list[int]:
        """Ranks that set ``flag`` in the messages received."""
        return [rank for rank, message in enumerate(self.received) if int(read_header(message)["flags"]) & flag]

    def learning_rates(self) -> list[float]:
        """The lr that each rank wrote into its vote."""
        return [float(read_header(message)["lr"]) for message in self.received]

    def differences(self) -> list[tuple[str, dict[int, int]]]:
        """After a mismatch: (field, value by rank) for every field that is not the same everywhere."""
        rows = [read_header(message) for message in self.received]
        found = []
        for name in ("magic", "step", "signature", "hyper", "attempt", "tensors"):
            values = {rank: int(row[name]) for rank, row in enumerate(rows)}
            if len(set(values.values())) > 1:
                found.append((name, values))
        return found


def compressed_segment(
    rank: int,
    layout: SegmentLayout,
    envelope: Envelope,
    send: Bytes,
    receive: Sequence[Bytes],
    result: Bytes,
    compress: Computation,
    average: Callable[[Sequence[Bytes]], Computation],
) -> list[Stage]:
    """The three phases of one segment. ``send`` and ``result`` have ``packed_nbytes``; ``receive[r]`` one message.

    ``average`` makes the owner's computation from all ranks' messages in rank order. Bytes sent: each owner's message
    (header, scales, signs) to that owner, then our averages (no header) to everyone.
    """
    start, nbytes = layout.message_start, layout.message_nbytes
    others = peers(rank, layout.ranks)
    messages = [send[start[r] : start[r] + nbytes[r]] for r in range(layout.ranks)]
    rows = list(receive)
    rows[rank] = messages[rank]
    envelope.received = rows
    gathered = [result[start[r] + layout.header_nbytes : start[r] + nbytes[r]] for r in range(layout.ranks)]
    phase_one = Stage(
        [compress, envelope.seal(messages)],
        [Message(peer, messages[peer]) for peer in others],
        [Message(peer, rows[peer]) for peer in others],
    )
    phase_two = Stage(
        [envelope.check(), average(rows)],
        [Message(peer, gathered[rank]) for peer in others] if gathered[rank].nbytes else [],
        [Message(peer, gathered[peer]) for peer in others if gathered[peer].nbytes],
    )
    return [phase_one, phase_two, Stage()]


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
    packs: list[Computation] = []
    copies: list[Computation] = []
    position = 0
    for run in runs:
        done = 0
        while done < run.result.size:
            owner = position // slice_numel
            count = min(run.result.size - done, bounds[owner + 1] - position)
            at = header + 4 * (position - bounds[owner])
            packed = messages[owner][at : at + 4 * count]
            packs.append(Pack(tensors, run.tensor, run.start + done, packed))
            copies.append(Copy(packed, run.result[done : done + count].view(np.uint8)))
            done += count
            position += count
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
            [envelope.check(), *average],
            [Message(peer, own) for peer in others] if own.nbytes else [],
            [Message(peer, messages[peer][header:]) for peer in others if nbytes[peer]],
        ),
        Stage(copies),
    ]
    return stages, [send, staging]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def vote(rank: int, ranks: int, envelope: Envelope) -> Plan:
    """Headers only: everyone tells everyone its flags and presence, before anyone commits."""
    nbytes = header_nbytes(int(envelope.header["tensors"][0]))
    message = aligned(nbytes)
    rows = [aligned(nbytes) for _ in range(ranks)]
    rows[rank] = message
    envelope.received = rows
    others = peers(rank, ranks)
    stages = [
        Stage(
            [envelope.seal([message])],
            [Message(peer, message) for peer in others],
            [Message(peer, rows[peer]) for peer in others],
        ),
        Stage([envelope.check()]),
    ]
    return Plan("vote", [stages])
