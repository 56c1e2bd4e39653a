"""What the ranks of a generation have reported, and what follows: whom to blame, and when the launcher must end.

Decisions only: messages and times come in as arguments, what is to be done goes out as values.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ocomm import json_values
from ocomm.errors import LaunchError
from ocomm.json_values import expect
from ocomm.launch.failures import Failure, blame, failed_ranks, lost_daemons
from ocomm.launch.generations import Start
from ocomm.launch.hosts import total_slots
from ocomm.runtime.supervisor_client import SILENT
from ocomm.telemetry.counters import JobCounters, read_job

#: Seconds from the first report of a failure until the launcher is told to end, if it has not ended by itself.
END_S = 12.0


class Heard(NamedTuple):
    """What follows from a message: the rank that has failed if the connection ends next, -1 for none; what to tell the
    user; and counters, for whoever watches the job.
    """

    rank: int
    notice: str = ""
    counters: JobCounters | None = None


@dataclass(frozen=True)
class Deadline:
    """The time by which the launcher must have ended, and the signal that asks it to. ``why`` is for the user."""

    at_s: float = math.inf
    signal_number: int = signal.SIGTERM
    why: str = ""


class Reports:
    """The messages of the ranks of generation ``step``, which come to ``init()`` until ``come_by_s``.

    ``kept`` has the states of the script, and the last commit of each; it changes with every commit.
    """

    def __init__(self, step: Start, kept: dict[str, int], come_by_s: float) -> None:
        self.step = step
        self.ranks = total_slots(step.hosts)
        self.commit = 0
        self.has_left = False
        self.failed: dict[int, str] = {}  # ranks, and how each has failed
        self._kept = kept
        self._come_by_s = come_by_s
        self._hosts: dict[int, str] = {}  # ranks that have come, and how each calls its host

    def hear(self, rank: int, message: Any) -> Heard:
        """Takes in a message of ``rank``, which is -1 before it has said who it is.

        Raises ValueError if no rank sends such a message, EOFError if it is of a generation that is over.
        """
        (word,) = json_values.fields(message, "word")
        if word == "here":
            return Heard(self._come(message))
        if word == "anew":
            return Heard(rank, notice=self._begin_anew(message))
        if word == "counters":
            return Heard(rank, counters=read_job(message.get("job")))
        if word == "commit":
            number, state = expect(message.get("number"), int), expect(message.get("state"), str)
            self.commit = max(self.commit, number)
            self._kept[state] = number
        elif word == "lost":
            for other, why in expect(message.get("ranks"), dict).items():
                self.failed.setdefault(json_values.rank(int(other), self.ranks), expect(why, str))
        elif word == "late":
            self.failed = {**self._never_came(), **self.failed}
        elif word in ("leave", "bye"):
            self.has_left = self.has_left or word == "leave"
            return Heard(-1)
        return Heard(rank)

    def _come(self, message: Any) -> int:
        rank, host, generation = json_values.fields(message, "rank", "host", "generation")
        if generation != self.step.number:
            raise EOFError
        self._hosts[json_values.rank(rank, self.ranks)] = expect(host, str)
        return int(rank)

    def _begin_anew(self, message: Any) -> str:
        state, folder = (expect(message.get(name), str) for name in ("state", "folder"))
        if not (number := self._kept.pop(state, 0)):
            return ""
        hosts = ", ".join(host.name for host in self.step.hosts)
        return (
            f"commit {number} is gone: generation {self.step.number} has found none in {folder} on {hosts}, and begins "
            "anew"
        )

    def _never_came(self) -> dict[int, str]:
        """Returns the ranks that have not come to ``init()``, and says so of each."""
        return {rank: f"{SILENT}: it never came to init()" for rank in range(self.ranks) if rank not in self._hosts}

    def deadline(self, before: Deadline, now_s: float, asked_to_end: int, has_died: bool) -> Deadline:
        """Returns by when the launcher must have ended, which may change what was decided ``before``. ``has_died``: the
        connection of a rank has ended that had not said so. ``asked_to_end``: by this signal; 0 for none.
        """
        if asked_to_end:
            # Hydra passes an interrupt on, and so the ranks raise KeyboardInterrupt.
            asks = signal.SIGINT if asked_to_end == signal.SIGINT else signal.SIGTERM
            return Deadline(min(before.at_s, now_s), asks)
        if before.at_s < math.inf:
            return before
        if self.failed or has_died:
            return Deadline(now_s + END_S)
        if len(self._hosts) < self.ranks and now_s > self._come_by_s:
            return Deadline(now_s, why=f"ranks {list(self._never_came())} have not come to init() in time")
        return before

    def failures(
        self, printed: str, died: Sequence[int], now_s: float, lost: Callable[[Sequence[str]], dict[str, bool]]
    ) -> list[Failure]:
        """Returns the failures that have ended the generation, of which the launcher has ``printed`` something.

        The connections of the ranks ``died`` have ended in this order, though these ranks had not said so. ``lost``
        finds out which of some hosts cannot be reached.
        """
        signalled, exited = failed_ranks(printed)
        names = {rank: self._host_of(rank) for rank in range(self.ranks)}
        absent = self._never_came()
        reported = self.failed or (absent if now_s > self._come_by_s else {})
        silent = sorted({names[rank] for rank, why in reported.items() if why.startswith(SILENT)})
        daemons = lost_daemons(printed)
        if daemons:
            died = ()  # the launcher has ended the ranks of the other hosts
        failures = blame(signalled, reported, exited, died, list(absent), names, lost(silent) if silent else {})
        named = list(filter(None, daemons))
        if not named or any(failure.host in named for failure in failures):
            return failures
        is_lost = lost(named)
        return [Failure(host, None, "has lost the launcher's daemon", is_lost[host]) for host in named]

    def _host_of(self, rank: int) -> str:
        """Returns the name by which the supervisor knows a rank's host. If the rank's own name for it is another, ranks
        fill the hosts in order.
        """
        own = self._hosts.get(rank, "")
        for host in self.step.hosts:
            if own and host.name.partition(".")[0] == own.partition(".")[0]:
                return host.name
        for host in self.step.hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        raise LaunchError(f"there is a rank too many: {rank}")
