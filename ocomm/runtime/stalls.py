"""Which tensors of a process set wait for which ranks, and where in their scripts those are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ocomm.negotiation.coordinator import Coordinator, Stall, describe_stalls
from ocomm.negotiation.request import Response
from ocomm.runtime.control import Link, MessageType
from ocomm.types import Settings

_log = logging.getLogger("ocomm")
_ANSWER_S = 2.0  # how long a rank that is late may take to say where it is
_SHOWN_S = 2.0  # how long a tensor must have been stalled to be shown to whoever watches the job


class StallWatch:
    """Warns of stalls on the coordinator of a process set, and ends those that have lasted too long.

    Args:
        coordinator: Knows what waits.
        link: Asks ranks for their lines of code.
        own_line: Returns the line of code that this rank's users are in.
        settings: When to warn and to give up.
    """

    def __init__(self, coordinator: Coordinator, link: Link, own_line: Callable[[], str], settings: Settings) -> None:
        self._coordinator = coordinator
        self._link = link
        self._own_line = own_line
        self._settings = settings
        #: What waits by now, for whoever watches the job.
        self.stalls: list[Stall] = []
        self._warned_s: dict[str, float] = {}  # tensor -> when the last warning was
        self._asked_s: dict[int, float] = {}  # world rank -> when it was asked for its line of code
        self._where: dict[int, str] = {}  # world rank -> its line of code

    def hear(self, world_rank: int, where: str) -> None:
        """Takes in the line of code of a rank that was asked for it."""
        self._where[world_rank] = where

    def inspect(self, now: float) -> list[Response]:
        """Looks for stalls; asks the missing ranks for their lines of code, then warns. Returns the ends of those that
        are given up.
        """
        limit_s, shutdown_s = self._settings.stall_check_s, self._settings.stall_shutdown_s
        self.stalls = self._coordinator.stalled(now, min(limit_s, _SHOWN_S))
        stalls = [stall for stall in self.stalls if stall.waited_s >= limit_s]
        if not stalls:
            self._warned_s.clear()
            self._asked_s.clear()
            self._where.clear()
            return []
        ended = []
        if self._knows_where({rank for stall in stalls for rank in stall.missing}, now):
            ended = self._report(stalls, now)
        self._warned_s = {s.name: self._warned_s[s.name] for s in stalls if s.name in self._warned_s}
        hopeless = [s for s in stalls if 0 < shutdown_s <= s.waited_s]
        return ended + self._coordinator.fail_stalled(hopeless, self._where) if hopeless else ended

    def report_stuck(self, where: Mapping[int, str], why: str, now: float) -> list[Response]:
        """Reports that everything that waits will wait for ever, because no rank of the job can go on.

        Args:
            where: The line of code of every world rank.
            why: The reason with which all of it fails; empty if a warning will do.
            now: The time.
        """
        self._where.update(where)
        stalls = self._coordinator.stalled(now, 0.0)
        return self._coordinator.fail_stalled(stalls, self._where, why) if why else self._report(stalls, now)

    def _knows_where(self, missing: set[int], now: float) -> bool:
        """Returns True if all missing ranks have said which line they are in, or have had the time to."""
        ranks = self._link.ranks
        for rank in missing - self._asked_s.keys():
            self._asked_s[rank] = now
            if rank == ranks[0]:
                self._where[rank] = self._own_line()
            else:
                self._link.send(ranks.index(rank), MessageType.WHERE)
        return all(rank in self._where or now - self._asked_s[rank] >= _ANSWER_S for rank in missing)

    def _report(self, stalls: Sequence[Stall], now: float) -> list[Response]:
        if self._settings.stall_raise:
            return self._coordinator.fail_stalled(stalls, self._where)
        due: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Stall]] = {}  # by the ranks, ready and missing
        for stall in stalls:
            if now - self._warned_s.get(stall.name, -1e9) >= self._settings.stall_check_s:
                self._warned_s[stall.name] = now
                due.setdefault((stall.ready, stall.missing), []).append(stall)
        for alike in due.values():
            _log.warning("%s", describe_stalls(alike, self._coordinator, self._where))
        return []
