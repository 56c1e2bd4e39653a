"""Detects a deadlock of the job: no rank can go on, whatever any of them still does. It needs no deadline for that.

A rank is blocked when every user's thread that ever submitted something waits, and nothing else is under way. Such a
thread waits for a handle that other ranks have not asked for, or it has waited in an optimizer's step for a second. A
blocked rank tells rank 0. When all ranks have, rank 0 asks once more. If nothing has moved anywhere in between, and no
message is on its way (all that was sent has been received), none of these threads will ever go on (Mattern, Algorithms
for distributed termination detection, 1987).

Messages of steps, and of calls in one order (``ocomm.ordered``), are not counted. A thread that waits in one waits for
ever if one of the ranks that it waits for has not begun it. A rank that has may have finished it long ago, while its
messages are still on a slow wire.

A deadlock is reported at once. It becomes an error when it has lasted for ``deadlock_s``: then rank 0 asks again,
provided that no rank has another live thread that could submit for the first time (``bystanders``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ocomm import json_values
from ocomm.collectives.waiting import Wait, Waits
from ocomm.json_values import expect
from ocomm.negotiation.coordinator import LOADED_ALONE
from ocomm.runtime import bystanders
from ocomm.runtime.call_sites import user_line
from ocomm.runtime.control import MessageType
from ocomm.runtime.process_set import MemberSet

_log = logging.getLogger("ocomm")


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself.

    ``progress`` changes whenever anything moves. ``balance`` is the number of control messages sent minus received.
    ``steps`` are the steps and ordered calls in which its threads wait, ``begun`` the number of those of each name that
    it has begun.
    ``others`` are the live threads that have not submitted and still could.
    """

    is_blocked: bool
    progress: int = 0
    balance: int = 0
    where: str = ""
    steps: tuple[Wait, ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()


class Deadlock:
    """One rank's part in the detection. Driven by the background thread; messages travel on the world's link."""

    def __init__(
        self,
        world: MemberSet,
        sets: Callable[[], Sequence[MemberSet]],
        waits: Waits,
        deadlock_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadlock_s = deadlock_s
        self._clock = clock
        self._world = world
        self._sets = sets
        self._waits = waits
        self._seen = -1
        self._told: Report | None = None
        # used on rank 0 only
        self._reports: dict[int, Report] = {}
        self._confirmed: dict[int, Report] | None = None
        self._since: float | None = None  # when the deadlock in ``_reports`` was certain for the first time

    def inspect(self) -> None:
        """Tells rank 0 if this rank has become blocked since the last call, or moves again. Called every half
        second.
        """
        if self._world.size == 1:
            return
        now = self._report()
        is_news = now.is_blocked and now.progress == self._seen
        self._seen = now.progress
        if is_news and now != self._told:
            self._tell(now)
        elif not now.is_blocked and self._told is not None:
            self._tell(None)
        if self._is_due():
            self._confirmed = {}
            self._world.link.send_down(MessageType.CONFIRM)

    def _is_due(self) -> bool:
        """Returns True on rank 0 if it is time to ask whether the deadlock still holds, and to give up."""
        if self._since is None or self._confirmed is not None or self._deadlock_s == 0:
            return False
        could_submit = any(report.others for report in self._reports.values())
        return not could_submit and self._clock() - self._since >= self._deadlock_s

    def hear(self, source: int, word: MessageType, payload: bytes) -> None:
        """Takes in a message about deadlocks. Raises ValueError if it cannot be read."""
        size = self._world.size
        if word == MessageType.CONFIRM:
            self._answer()
        elif word == MessageType.STUCK:
            said, why = json_values.fields(json_values.parse(payload), "reports", "why")
            each = json_values.fields(said, *map(str, range(size)))
            self._report_stuck({rank: _read(report, size) for rank, report in enumerate(each)}, expect(why, str))
        else:
            self._note(source, _read(json_values.parse(payload), size))

    def _report(self) -> Report:
        sets = self._sets()
        alive = bystanders.python_threads()
        waiting = {user for process_set in sets for user in process_set.waiting}
        all_steps = dict(self._waits.waiting)
        served = self._served(alive, waiting | all_steps.keys())
        users = {user for process_set in sets for user in process_set.users} | all_steps.keys()
        users = (users & alive.keys()) - served - bystanders.idle(users)
        inside = {user for user in self._waits.enclosed if user in waiting or user in all_steps} if served else set()
        users |= inside
        steps = {user: step for user, step in all_steps.items() if user in users}
        counters = self._world.engine.counters()
        progress = (
            sum(process_set.progress for process_set in sets) + counters["messages_sent"] + counters["compute_ns"]
        )
        if not users or not users <= waiting | steps.keys() or not all(process_set.is_blocked for process_set in sets):
            return Report(False, progress)
        balance = sum(process_set.link.balance for process_set in sets)
        where = ", in ".join(filter(None, [user_line(list(users)), *(step.what for step in steps.values())]))
        others = tuple(bystanders.bystanders(users | served))
        return Report(True, progress, balance, where, tuple(steps.values()), dict(self._waits.begun), others)

    def _served(self, alive: Mapping[int, threading.Thread], waiting: Collection[int]) -> set[int]:
        """Returns the threads that wait for others and submit nothing before these go on.

        They are the threads in TensorFlow that wait for a thread of its pool, which waits in an enclosed step, and
        ocomm's own thread that submits for TensorFlow.
        """
        inside = [user for user in self._waits.enclosed if user in waiting and bystanders.is_foreign(alive.get(user))]
        outside = [
            ident
            for ident, thread in alive.items()
            if ident not in waiting and not bystanders.is_ours(thread) and bystanders.is_in_tensorflow(ident)
        ]
        if not inside or len(outside) != len(inside):
            return set()
        return {*outside, *(ident for ident, thread in alive.items() if thread.name == bystanders.TENSORFLOW)}

    def _tell(self, report: Report | None) -> None:
        self._told = report
        said = report or Report(False)
        if self._world.rank == 0:
            self._note(0, said)
        else:
            self._world.link.send_up(MessageType.BLOCKED, json.dumps(asdict(said)).encode())

    def _answer(self) -> None:
        self._told = self._report()
        if self._world.rank != 0:
            self._world.link.send_up(MessageType.BLOCKED, json.dumps(asdict(self._told)).encode())

    # Rank 0

    def _note(self, rank: int, report: Report) -> None:
        if not report.is_blocked:
            self._reports.pop(rank, None)
            self._confirmed = self._since = None
            return
        if self._confirmed is None or report != self._reports.get(rank):  # something has moved: begin again
            self._reports[rank] = report
            self._confirmed = self._since = None
            if len(self._reports) == self._world.size and is_certain(self._reports):
                self._confirmed = {}
                self._world.link.send_down(MessageType.CONFIRM)
            return
        self._confirmed[rank] = report
        if len(self._confirmed) == self._world.size - 1:
            mine = self._report()
            self._confirmed = None
            if mine != self._reports.get(0):
                self._reports.pop(0, None)
                self._told = self._since = None
                return
            why = ""
            if self._since is None:
                self._since = self._clock()
            else:
                why = (
                    f" No rank can move, so ocomm gave up after {self._deadlock_s:g} s (OCOMM_DEADLOCK_SECONDS): all "
                    "ranks must make the same calls, and take the same steps, in the same order."
                )
            reports = dict(self._reports)
            said = {"reports": {rank: asdict(report) for rank, report in reports.items()}, "why": why}
            self._world.link.send_down(MessageType.STUCK, json.dumps(said).encode())
            if why:
                self._reports.clear()  # a rank reports again when it has moved
                self._since = None
            self._report_stuck(reports, why)

    def _report_stuck(self, reports: Mapping[int, Report], why: str) -> None:
        where = {rank: report.where for rank, report in reports.items()}
        for thread, step in dict(self._waits.waiting).items():
            text = describe_step(step, reports)
            if why:
                self._waits.hopeless[thread] = text + why
            else:
                _log.warning("%s", text)
        for process_set in self._sets():
            process_set.report_stuck(where, why)


def describe_step(step: Wait, reports: Mapping[int, Report]) -> str:
    """Returns a sentence about a step that will never end: which ranks it waits for, and which lines those are in."""
    absent = [rank for rank in step.late if is_absent(reports[rank], step)] or list(step.late)
    where = "; ".join(f"rank {rank} is at {reports[rank].where}" for rank in absent if reports[rank].where)
    are_in_steps = any(other.is_step for rank in absent for other in reports[rank].steps)
    if not step.is_step:
        remedy = "Give all ranks equally many batches, and make the same calls on all of them"
    elif are_in_steps:
        remedy = "Step the optimizers in one order on all ranks"
    else:
        remedy = f"Give all ranks equally many batches. {LOADED_ALONE}"
    return f"{step.what}: rank(s) {absent} will not come to it{': ' if where else ''}{where}. {remedy}."


def is_absent(report: Report, step: Wait) -> bool:
    """Returns True if the rank of ``report`` has not come to that step."""
    return report.begun.get(step.name, 0) <= step.number


def _read(said: Any, size: int) -> Report:
    """Returns the report of one of ``size`` ranks. Raises ValueError for anything else."""
    names = [each.name for each in dataclasses.fields(Report)]
    is_blocked, progress, balance, where, steps, begun, others = json_values.fields(said, *names)
    return Report(
        expect(is_blocked, bool),
        expect(progress, int),
        expect(balance, int),
        expect(where, str),
        tuple(_read_step(step, size) for step in expect(steps, list)),
        {name: expect(number, int) for name, number in expect(begun, dict).items()},
        tuple(expect(other, str) for other in expect(others, list)),
    )


def _read_step(said: Any, size: int) -> Wait:
    if len(expect(said, list)) != len(Wait._fields):
        raise ValueError(f"a step of {len(said)} fields")
    what, name, number, late, is_step = said
    return Wait(
        expect(what, str), expect(name, str), expect(number, int), json_values.ranks(late, size), expect(is_step, bool)
    )


def is_certain(reports: Mapping[int, Report]) -> bool:
    """Returns True if no message is on its way, and each step that a rank waits in waits for a rank that has not come
    to it.
    """

    steps = [step for report in reports.values() for step in report.steps]
    return sum(report.balance for report in reports.values()) == 0 and all(
        any(is_absent(reports[rank], step) for rank in step.late) for step in steps
    )
