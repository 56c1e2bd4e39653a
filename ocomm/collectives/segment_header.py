"""The headers of a segment's messages: what this rank says in them, and what it has heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ocomm.collectives.plan import HEADER, MAGIC, CheckHeaders, WriteHeaders, header_nbytes, read_header
from ocomm.compression.wire import COMPARED, DISAGREEMENT
from ocomm.errors import MismatchError
from ocomm.kernels.base import Bytes
from ocomm.types import Flag


@dataclass(slots=True)
class SegmentHeader:
    """What one rank says in the headers of one segment's messages, and what it has heard.

    ``header`` is one HEADER row; ``presence`` says which tensors this rank has; ``heard`` is the OR of that over ranks.
    ``flags``, ``heard_flags`` and ``announcement`` are single-element arrays, shared by all segments of a step.

    If ranks learn about each other through other ranks, ``passed_on`` is the header that they pass on: their own, or a
    disagreement that they have found or heard of. ``node_flags`` are the flags of this rank's node, or ``flags`` if it
    speaks for itself alone; the compressor sets them.
    """

    header: np.ndarray
    presence: Bytes
    heard: Bytes
    flags: np.ndarray
    heard_flags: np.ndarray
    announcement: np.ndarray
    passed_on: np.ndarray
    node_flags: np.ndarray
    received: list[Bytes] = field(default_factory=list)
    #: What ranks have sent after their headers in a vote, in rank order.
    payloads: list[Bytes] = field(default_factory=list)

    def write(self, messages: Sequence[Bytes]) -> WriteHeaders:
        """Returns the computation that writes what this rank says for itself."""
        return WriteHeaders(self.header, self.flags, self.presence, messages)

    def write_for_node(self, messages: Sequence[Bytes]) -> WriteHeaders:
        """Returns the computation that writes what this rank says for its node."""
        return WriteHeaders(self.passed_on, self.node_flags, self.heard, messages)

    def write_for_all(self, messages: Sequence[Bytes]) -> WriteHeaders:
        """Returns the computation that writes what this rank has heard from all ranks."""
        return WriteHeaders(self.passed_on, self.heard_flags, self.heard, messages)

    def check(self, messages: Sequence[Bytes]) -> CheckHeaders:
        """Returns the computation that compares messages which all ranks get, so that each rank sees every difference
        itself.
        """
        return CheckHeaders(self.header, messages, self.heard_flags, self.heard, self.announcement)

    def check_and_pass_on(self, messages: Sequence[Bytes], *, of_node: bool = False, ends: bool = True) -> CheckHeaders:
        """Returns the computation that compares messages which others learn about through this rank.

        ``ends``: a difference ends the plan, once it has been passed on.
        """
        flags = self.node_flags if of_node else self.heard_flags
        return CheckHeaders(self.header, messages, flags, self.heard, self.announcement, self.passed_on, ends)

    @property
    def has_disagreement(self) -> bool:
        """True if this rank has found, or heard, that ranks disagree."""
        return bool(self.passed_on["magic"][0] == DISAGREEMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of a message without payload."""
        return HEADER.itemsize + self.presence.nbytes

    def ranks_with(self, flag: Flag) -> list[int]:
        """Returns the ranks that set ``flag`` in the messages received."""
        return [rank for rank, message in enumerate(self.received) if int(read_header(message)["flags"]) & flag]

    def learning_rates(self) -> dict[int, float]:
        """Returns the learning rates that ranks have written, as far as they are known: a rank that reports a
        difference may have copied the header of another.
        """
        rows = [read_header(message) for message in self.received]
        return {rank: float(row["lr"]) for rank, row in enumerate(rows) if row["magic"] == MAGIC}

    def squares(self) -> list[float]:
        """Returns the sum of squares that each rank wrote into its vote, in rank order. Raises MismatchError if one is
        negative.
        """
        found = [float(read_header(message)["squares"]) for message in self.received]
        for rank, squares in enumerate(found):
            if squares < 0:
                raise MismatchError(f"rank {rank} of this exchange sent {squares} as its sum of squares.")
        return found

    def gradients(self) -> list[int]:
        """The checksums of gradients that the ranks wrote into their headers of the vote, in rank order."""
        return [int(read_header(message)["gradients"]) for message in self.received]

    def differences(self) -> list[tuple[str, dict[int, int]]]:
        """Returns, after a mismatch, (field, value by rank) for every field that is not equal on all ranks.

        If this rank does not have the headers of all ranks, that is one field and two ranks. Empty if a header is none
        that a rank writes.
        """
        rows = [read_header(message) for message in self.received]
        for said in rows or [self.passed_on[0]]:
            if said["magic"] == DISAGREEMENT:
                if said["tensors"] >= len(COMPARED):
                    return []
                values = {int(said["rank"]): int(said["signature"]), int(said["gradients"]): int(said["hyper"])}
                return [(COMPARED[int(said["tensors"])], values)]
        found = []
        for name in COMPARED:
            values = {rank: int(row[name]) for rank, row in enumerate(rows)}
            if len(set(values.values())) > 1:
                found.append((name, values))
        return found


class SegmentHeaders(list[SegmentHeader]):
    """The headers of segments that travel together, adjacent in memory, so that they begin a step at once.

    ``contents`` are signature and number of tensors of each. ``for_node``: this rank speaks for its node, not only for
    itself.
    """

    def __init__(
        self,
        rank: int,
        contents: Sequence[tuple[int, int]],
        flags: np.ndarray,
        heard_flags: np.ndarray,
        announcement: np.ndarray,
        *,
        for_node: bool = False,
    ) -> None:
        count = len(contents)
        headers = np.zeros(count, HEADER)
        headers["magic"], headers["rank"] = MAGIC, rank
        headers["signature"] = np.array([signature for signature, _ in contents], np.uint64)
        headers["tensors"] = [tensors for _, tensors in contents]
        passed_on = headers.copy()
        ends = np.cumsum([0, *(header_nbytes(tensors) - HEADER.itemsize for _, tensors in contents)]).tolist()
        presence, heard = np.zeros(ends[-1], np.uint8), np.zeros(ends[-1], np.uint8)
        node_flags = np.zeros(count, np.uint32)
        super().__init__(
            SegmentHeader(
                headers[k : k + 1],
                presence[ends[k] : ends[k + 1]],
                heard[ends[k] : ends[k + 1]],
                flags,
                heard_flags,
                announcement,
                passed_on[k : k + 1],
                node_flags[k : k + 1] if for_node else flags,
            )
            for k in range(count)
        )
        #: The presence bits that were heard in all of them.
        self.heard: Bytes = heard
        self._node_flags = node_flags
        self._columns = [headers[name] for name in ("step", "attempt", "hyper", "announcement")]
        self._rates, self._lr = headers["lr"], 0.0
        self._headers, self._passed_on = headers.view(np.uint8), passed_on.view(np.uint8)

    def begin(self, step: int, attempt: int, hyper: int = 0, announcement: int = 0, lr: float = 0.0) -> None:
        """Writes what changes from step to step, and forgets what was heard."""
        for column, value in zip(self._columns, (step, attempt, hyper, announcement), strict=True):
            column.fill(value)
        if lr != self._lr:
            self._lr = lr
            self._rates.fill(lr)
        self._passed_on[:] = self._headers
        self.heard.fill(0)
        self._node_flags.fill(0)
