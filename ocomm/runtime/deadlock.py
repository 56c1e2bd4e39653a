"""Finds out that no rank of the job can move, when it is certain, instead of waiting for a minute to pass.

A rank is blocked when every thread of the user's that ever submitted something waits for a handle which other ranks
have not asked for, or for a second has waited in an optimizer's step, and nothing else is under way. It tells rank 0.
When all ranks have, rank 0 asks once more: if nothing has moved anywhere in between and no message is on its way (what
all have sent is what all have received), then nothing ever will (Mattern, Algorithms for distributed termination
detection, 1987). Messages of steps are not counted: who waits in a step waits for ever if one of the ranks that it
waits for has not come to that step. One that has may be long done with it, while its messages are still on a slow wire.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ocomm.collectives.waiting import Wait, Waits
from ocomm.runtime.control import Word
from ocomm.runtime.process_set import ProcessSet
from ocomm.runtime.whereabouts import whereabouts


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself. ``progress`` changes whenever anything moves; ``balance`` is sent less received.

    ``steps`` are its threads that wait in some, ``ended`` is how many it has ended of each name.
    """

    is_blocked: bool
    progress: int = 0
    balance: int = 0
    where: str = ""
    steps: tuple[Wait, ...] = ()
    ended: Mapping[str, int] = field(default_factory=dict)


class Deadlock:
    """One rank's part in it. Driven by the background thread; messages travel on the world's link."""

    def __init__(
        self,
        world: ProcessSet,
        sets: Callable[[], Sequence[ProcessSet]],
        waits: Waits,
    ) -> None:
        self._world = world
        self._sets = sets
        self._waits = waits
        self._seen = -1
        self._told: Report | None = None
        # rank 0
        self._reports: dict[int, Report] = {}
        self._confirmed: dict[int, Report] | None = None

    def inspect(self) -> None:
        """Every half second: tells rank 0 if this rank has come to a halt since the last time, or moves again."""
        if self._world.size == 1:
            return
        now = self._report()
        is_news = now.is_blocked and now.progress == self._seen
        self._seen = now.progress
        if is_news and now != self._told:
            self._tell(now)
        elif not now.is_blocked and self._told is not None:
            self._tell(None)

    def hear(self, source: int, word: Word, payload: bytes) -> None:
        """Takes in a message."""
        if word == Word.CONFIRM:
            self._answer()
        elif word == Word.STUCK:
            self._report_stuck({int(rank): where for rank, where in json.loads(payload).items()})
        else:
            said = json.loads(payload)
            steps = tuple(Wait(what, name, number, tuple(late)) for what, name, number, late in said["steps"])
            self._note(source, Report(**{**said, "steps": steps}))

    def _report(self) -> Report:
        sets = self._sets()
        alive = {thread.ident for thread in threading.enumerate()}
        users = {user for process_set in sets for user in process_set.users if user in alive}
        waiting = {user for process_set in sets for user in process_set.waiting}
        steps = {user: step for user, step in dict(self._waits.waiting).items() if user in users}
        counters = self._world.engine.counters()
        progress = (
            sum(process_set.progress for process_set in sets) + counters["messages_sent"] + counters["compute_ns"]
        )
        if not users or not users <= waiting | steps.keys() or not all(process_set.is_blocked for process_set in sets):
            return Report(False, progress)
        balance = sum(process_set.link.balance for process_set in sets)
        where = ", in ".join([whereabouts(list(users)), *(step.what for step in steps.values())])
        return Report(True, progress, balance, where, tuple(steps.values()), dict(self._waits.ended))

    def _tell(self, report: Report | None) -> None:
        self._told = report
        said = report or Report(False)
        if self._world.rank == 0:
            self._note(0, said)
        else:
            self._world.link.send(0, Word.BLOCKED, json.dumps(asdict(said)).encode())

    def _answer(self) -> None:
        self._told = self._report()
        if self._world.rank != 0:
            self._world.link.send(0, Word.BLOCKED, json.dumps(asdict(self._told)).encode())

    # Rank 0

    def _note(self, rank: int, report: Report) -> None:
        if not report.is_blocked:
            self._reports.pop(rank, None)
            self._confirmed = None
            return
        if self._confirmed is None or report != self._reports.get(rank):  # something has moved: begin again
            self._reports[rank] = report
            self._confirmed = None
            if len(self._reports) == self._world.size and is_certain(self._reports):
                self._confirmed = {}
                self._world.link.send_all(Word.CONFIRM)
            return
        self._confirmed[rank] = report
        if len(self._confirmed) == self._world.size - 1:
            mine = self._report()
            confirmed, self._confirmed = self._confirmed, None
            if mine != self._reports.get(0):
                self._reports.pop(0, None)
                self._told = None
                return
            self._reports.clear()  # a rank speaks again when it has moved
            where = {rank: report.where for rank, report in {0: mine, **confirmed}.items()}
            self._world.link.send_all(Word.STUCK, json.dumps(where).encode())
            self._report_stuck(where)

    def _report_stuck(self, where: dict[int, str]) -> None:
        for process_set in self._sets():
            process_set.report_stuck(where)


def is_certain(reports: Mapping[int, Report]) -> bool:
    """No message is on its way, and each step that some rank waits in waits for one that has not come to it."""

    def is_absent(rank: int, step: Wait) -> bool:
        report = reports[rank]
        is_in_it = any((other.name, other.number) == (step.name, step.number) for other in report.steps)
        return not is_in_it and report.ended.get(step.name, 0) <= step.number

    steps = [step for report in reports.values() for step in report.steps]
    return sum(report.balance for report in reports.values()) == 0 and all(
        any(is_absent(rank, step) for rank in step.late) for step in steps
    )
