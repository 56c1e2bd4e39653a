"""Decides what an elastic job does next: the hosts of its next generation, or what it waits for, or why it ends.

A generation is one MPI job. Decisions only: hosts, failures and times come in as arguments, the next action goes out.

A host on which a rank failed is kept out of the next generations: for good or, with a cooldown, for a time that doubles
with each failure. If the other hosts have too few slots it is used all the same, unless it cannot be reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ocomm.launch.failures import Failure
from ocomm.launch.hosts import Host, place, total_slots

#: Number of generations in a row that fail without a new commit, after which the job ends, because the next would fail,
#: too.
LIMIT = 3


@dataclass(frozen=True)
class Limits:
    """The limits that the user has set. ``cooldown_s`` is (first, longest), None for ever."""

    wanted_ranks: int
    min_ranks: int
    max_ranks: int | None = None
    resets: int | None = None
    patience_s: float = 600.0
    cooldown_s: tuple[float, float] | None = None
    #: Whether hosts may come that are not there yet.
    discovers: bool = False


@dataclass(frozen=True)
class Start:
    """Start generation ``number`` on these hosts, with all their slots."""

    number: int
    hosts: tuple[Host, ...]


@dataclass(frozen=True)
class Wait:
    """Look again until ``until_s``; ``why`` for the user."""

    until_s: float
    why: str


@dataclass(frozen=True)
class End:
    """Nothing more can be done, for the reason ``why``."""

    why: str


@dataclass
class _Out:
    """A host that is kept out."""

    failure: Failure
    times: int
    until_s: float


class Generations:
    """The state of one elastic job."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.limits = limits
        self.running: tuple[Host, ...] = ()
        self.started = 0
        self.commit = 0
        self._found: tuple[Host, ...] = ()
        self._order: list[str] = []  # hosts in the order of their first use, so that old ones keep their ranks
        self._out: dict[str, _Out] = {}
        self._fruitless = 0  # number of generations in a row without a new commit
        self._has_committed = False
        self._commit_before = 0  # ``commit`` when the running generation began
        self._resets = 0
        self._last = ""
        self._waiting_since_s = now_s

    # What happens

    def found(self, hosts: Sequence[Host]) -> None:
        """Takes in the hosts that discovery has found. A host that had gone and is back starts without failures."""
        names = {host.name for host in hosts}
        self._out = {name: out for name, out in self._out.items() if name in names}
        self._found = tuple(hosts)

    def committed(self, number: int) -> None:
        """Notes that the running generation has kept commit ``number``; 0 for none yet. It may be smaller than that
        of a generation before: another state counts its own, and a generation may have gone back further.

        The same number is no progress: that commit was not whole, and the generation has gone back from it.
        """
        if number:
            self.commit, self._has_committed = number, number != self._commit_before

    def ended(self, now_s: float, failures: Sequence[Failure], why: str = "") -> None:
        """Notes that the running generation has failed, because of ``failures`` or, if there are none, of ``why``."""
        self._close(now_s)
        self._fruitless = 0 if self._has_committed else self._fruitless + 1
        self._last = "; ".join(map(str, failures)) or why
        for failure in failures:
            self._keep_out(now_s, failure)

    def left(self, now_s: float) -> None:
        """Notes that the running generation has ended in order, to make way for one on other hosts."""
        self._close(now_s)

    def unreachable(self, now_s: float, failures: Sequence[Failure]) -> None:
        """Notes that hosts on which the next generation was to start cannot be reached."""
        for failure in failures:
            self._keep_out(now_s, failure)

    def _close(self, now_s: float) -> None:
        self.running = ()
        self._resets += 1
        self._waiting_since_s = now_s

    def _keep_out(self, now_s: float, failure: Failure) -> None:
        before = self._out.get(failure.host)
        times = before.times + 1 if before else 1
        until_s = math.inf
        if self.limits.cooldown_s is not None:
            first, longest = self.limits.cooldown_s
            until_s = now_s + min(longest, first * 2.0 ** (times - 1))
        self._out[failure.host] = _Out(failure, times, until_s)

    @property
    def lost(self) -> set[str]:
        """The hosts that could not be reached when they were last needed."""
        return {name for name, out in self._out.items() if out.failure.is_lost}

    # What to do

    def next(self, now_s: float) -> Start | Wait | End:
        """Returns what to do when no generation runs."""
        limits = self.limits
        if self._fruitless >= LIMIT:
            return End(f"{LIMIT} generations in a row failed without a new commit; the last: {self._last}")
        if limits.resets is not None and self._resets > limits.resets:
            return End(f"the reset limit of {limits.resets} is used up; the last generation: {self._last}")
        hosts = self.outlook(now_s)
        slots = total_slots(hosts)
        end_s = self._waiting_since_s + limits.patience_s
        # The first generation waits for all ranks that were asked for.
        enough = limits.wanted_ranks if not self.started and now_s < end_s else limits.min_ranks
        if slots >= enough or (slots >= limits.min_ranks and not self._hopes(now_s, end_s)):
            self.started += 1
            self.running, self._has_committed, self._commit_before = hosts, False, self.commit
            for host in hosts:
                if host.name not in self._order:
                    self._order.append(host.name)
            return Start(self.started, hosts)
        why = f"{slots} slots are left, and at least {enough} are needed{self._reasons(now_s)}"
        if now_s >= end_s or not self._hopes(now_s, end_s):
            return End(why)
        return Wait(end_s, why)

    def outlook(self, now_s: float) -> tuple[Host, ...]:
        """Returns the hosts, and their ranks, of a generation that would begin now."""
        usable = self._usable(now_s)
        return place(usable, min(total_slots(usable), self.limits.max_ranks or total_slots(usable)))

    def _usable(self, now_s: float) -> list[Host]:
        """Returns the hosts of which a generation would be made, with all their slots, in the order of their use."""
        known = {name: position for position, name in enumerate(self._order)}
        hosts = sorted(self._found, key=lambda host: known.get(host.name, len(known)))
        chosen = [host for host in hosts if not self._is_out(host, now_s)]
        if total_slots(chosen) < self.limits.min_ranks:
            chosen = [host for host in hosts if not self._is_out(host, now_s) or host.name not in self.lost]
        return chosen

    def wants_others(self, now_s: float) -> bool:
        """Returns True if a next generation would have enough ranks, and more than the one that runs, or if some of
        the slots where that runs are to be used no more.
        """
        ranks = total_slots(self.outlook(now_s))
        slots = {host.name: host.slots for host in self._usable(now_s)}
        may_stay = all(host.slots <= slots.get(host.name, 0) for host in self.running)
        return ranks >= self.limits.min_ranks and (not may_stay or ranks > total_slots(self.running))

    def _is_out(self, host: Host, now_s: float) -> bool:
        return host.name in self._out and now_s < self._out[host.name].until_s

    def _hopes(self, now_s: float, end_s: float) -> bool:
        """Returns True if there may be more slots before ``end_s``."""
        return self.limits.discovers or any(now_s < out.until_s < end_s for out in self._out.values())

    def _reasons(self, now_s: float) -> str:
        out = [out for name, out in self._out.items() if now_s < out.until_s]
        return "".join(f"; {entry.failure}" for entry in out)
