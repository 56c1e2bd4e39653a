"""The engine in plain Python, over any transport. The native engine must equal it; the in-process transport runs on it.

It follows the same rules in the same order: a window of segments per channel, receives posted when a segment starts,
stages in order, plans ended when all their segments are over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives import plan as plans
from ocomm.collectives.engine import Reason, State, require_open
from ocomm.collectives.plan import HEADER, Plan
from ocomm.collectives.tracing import Trace, new_trace, record
from ocomm.compression.wire import COMPARED, DISAGREEMENT
from ocomm.errors import HorovodInternalError
from ocomm.kernels.base import NOTHING, Kernels, Table, view
from ocomm.telemetry.timeline import Timeline
from ocomm.transport.base import Request, Transport

_TAGS, _STAGES_PER_SEGMENT = 2048, 16
_PASSING_ON_S = 5.0  # equals PASSING_ON_NS in engine.c


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The result of ``PythonChannel.inputs``."""

    tensors: Table
    rows: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    sums: NDArray[np.uint64]


class PythonTicket:
    """The ``engine.Ticket`` of the Python engine."""

    def __init__(self, engine: PythonEngine, plan: Plan, timeout_s: float, notify: bool, segments: int | None) -> None:
        timeline = engine.timeline
        self._engine = engine
        self.plan = plan
        self.notify = notify
        self.open_segments = len(plan.segments) if segments is None else segments
        self.timeline = timeline
        self.trace: Trace | None = None if timeline is None else new_trace(plan)
        self.state = State.QUEUED
        self.error = 0
        self.error_segment = 0
        self.culprit: int | None = None  # rank whose header differs, while this rank still tells others about it
        self.disagreed = 0.0
        self.started_segments = 0
        self.done_segments = 0
        self.past_segments = 0
        self.timeout_s = timeout_s
        self.opened = time.monotonic()
        self._over = threading.Event()

    def note(self, segment: Sequence[plans.Stage], stage: int, which: int) -> None:
        """Writes the time into the trace, if there is one."""
        if self.trace is not None:
            before = 0
            for stages in self.plan.segments:
                if stages is segment:
                    break
                before += len(stages)
            self.trace[before + stage, which] = time.monotonic_ns()

    def open(
        self,
        segments: int,
        inputs: _Inputs | None = None,
        addresses: Sequence[int] = (),
        part: int = NOTHING,
    ) -> None:
        if inputs is not None:
            told = np.array(addresses, np.uint64)
            inputs.tensors["grad"][inputs.rows] = told
            if part != NOTHING:
                inputs.sums[:] = self._engine.kernels.checksums(told, inputs.nbytes, part)
        self.opened = time.monotonic()
        self.open_segments = segments
        self._engine.arrival.set()

    @property
    def is_busy(self) -> bool:
        """True if the plan is not over and does not only wait to be opened further."""
        return self.done_segments < self.open_segments

    def is_late(self, now: float) -> bool:
        return self.timeout_s > 0 and self.is_busy and now - self.opened > self.timeout_s

    def finish(self, state: State, error: int = 0) -> None:
        self.error = error
        self.state = state
        self._over.set()

    def wait(self, seconds: float) -> State:
        self._over.wait(seconds)
        return self.state


@dataclass(slots=True, eq=False)
class _Flight:
    request: Request
    peer: int
    receive: bool


@dataclass(slots=True, eq=False)
class _Segment:
    ticket: PythonTicket
    stages: Sequence[plans.Stage]
    sequence: int
    ranks: int
    stage: int = 0
    begun: bool = False
    next: int = 0  # index of the stage's next computation
    offloaded: plans.Task | None = None  # the task that the stage waits for before computation ``next``
    culprit: int | None = None  # rank whose header differs, if this rank tells others about it
    flights: dict[int, list[_Flight]] = field(default_factory=dict)  # by stage


class PythonChannel:
    """The ``engine.Channel`` of the Python engine."""

    def __init__(self, engine: PythonEngine, transport: Transport, window: int) -> None:
        self.engine = engine
        self.transport = transport
        self.window = window
        self.failed = False
        self.abandoned_by_user = False
        self.queue: deque[PythonTicket] = deque()
        self.active: list[_Segment] = []
        self.abandoned: list[_Segment] = []  # kept because the network may still use their requests and buffers
        self.sequence = 0

    def prepare(self, plan: Plan) -> Plan:
        assert all(len(segment) <= _STAGES_PER_SEGMENT for segment in plan.segments)
        return plan

    def inputs(
        self, tensors: Table, rows: NDArray[np.int64], nbytes: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> _Inputs:
        return _Inputs(tensors, rows, nbytes, sums)

    def submit(self, prepared: Plan, timeout_s: float, notify: bool, segments: int | None = None) -> PythonTicket:
        require_open(self.engine.owner, self.engine.is_closed, prepared.name)
        ticket = PythonTicket(self.engine, prepared, timeout_s, notify, segments)
        with self.engine.lock:
            refused = self.failed or self.engine.failing
            if not refused:
                self.queue.append(ticket)
        if refused:
            ticket.finish(State.ABORTED)
        self.engine.arrival.set()
        return ticket

    def abandon(self) -> None:
        self.abandoned_by_user = True
        self.engine.arrival.set()

    def close(self) -> int | None:
        has_failed = self.failed or self.abandoned_by_user
        if not has_failed and (self.active or any(ticket.is_busy for ticket in list(self.queue)[:1])):
            return None
        self.fail(None, State.ABORTED, 0)
        with self.engine.lock:
            self.engine.channels.remove(self)
        return -1 if has_failed else self.sequence

    def waiting_for(self) -> list[int]:
        segments = list(self.abandoned if self.failed else self.active)
        return sorted({f.peer for s in segments for f in s.flights.get(s.stage, []) if f.receive})

    def step(self) -> bool:
        """Moves every segment as far as it goes; returns True if anything moved."""
        moved = False
        if self.abandoned_by_user and not self.failed:
            self.fail(None, State.ABORTED, 0)
        try:
            for segment in list(self.active):
                moved |= self._poll(segment)
                moved |= self._advance(segment)
            self._conclude()
            while len(self.active) < self.window and (ticket := self._next_ticket()):
                self._start(ticket)
                moved = True
        except _Mismatch as mismatch:
            self.fail(mismatch.ticket, State.MISMATCH, mismatch.rank)
            return True
        except _TaskError as error:
            self.fail(error.ticket, State.TASK_ERROR, 0)
            return True
        except HorovodInternalError:
            self.fail(self.queue[0] if self.queue else None, State.MPI_ERROR, 1)
            return True
        now = time.monotonic()
        queue = list(self.queue)  # a copy, because other threads submit meanwhile
        late = next((t for t in queue if t.is_late(now)), None)
        disputed = next((t for t in queue if t.culprit is not None and now > t.disagreed + _PASSING_ON_S), None)
        if disputed is not None and disputed.culprit is not None:
            self.fail(disputed, State.MISMATCH, disputed.culprit)
        elif late:
            self.fail(late, State.TIMED_OUT, 0)
        return moved

    def _conclude(self) -> None:
        """Ends the channel if a segment in which ranks disagree, and all segments before it, are over."""
        first = self.active[0] if self.active else None
        if first is not None and first.culprit is not None and first.stage == len(first.stages):
            first.ticket.error_segment = _number(first)
            raise _Mismatch(first.ticket, first.culprit)

    def _next_ticket(self) -> PythonTicket | None:
        with self.engine.lock:
            ticket = next((t for t in self.queue if t.started_segments < len(t.plan.segments)), None)
        # Later plans wait for one that is not opened yet, because the order is the same on all ranks.
        if ticket is None or ticket.started_segments >= ticket.open_segments or self._is_lane_taken(ticket):
            return None
        return ticket

    def _is_lane_taken(self, ticket: PythonTicket) -> bool:
        """Returns True if a segment that is under way uses the memory of the next one."""
        lanes, following = ticket.plan.lanes, ticket.started_segments
        return lanes > 0 and any(s.ticket is ticket and _number(s) <= following - lanes for s in self.active)

    def _start(self, ticket: PythonTicket) -> None:
        stages = ticket.plan.segments[ticket.started_segments]
        if ticket.started_segments == 0:
            ticket.state = State.ACTIVE
        ticket.started_segments += 1
        segment = _Segment(ticket, stages, self.sequence, self.transport.size)
        self.sequence += 1
        self.active.append(segment)
        for number, stage in enumerate(stages):
            tag = self._tag(segment, number)
            segment.flights[number] = [
                _Flight(self.transport.irecv(m.buffer, m.peer, tag), m.peer, True) for m in stage.receives
            ]
        self._advance(segment)

    def _tag(self, segment: _Segment, stage: int) -> int:
        return segment.sequence % _TAGS * _STAGES_PER_SEGMENT + stage

    def _poll(self, segment: _Segment) -> bool:
        moved = False
        for number, flights in segment.flights.items():
            left = [f for f in flights if not self.transport.test(f.request)]
            moved |= len(left) < len(flights)
            segment.flights[number] = left
        return moved

    def _advance(self, segment: _Segment) -> bool:
        if segment.stage == len(segment.stages):
            return False  # over, with headers that differ
        moved = False
        while segment.stage < len(segment.stages):
            stage = segment.stages[segment.stage]
            if not segment.begun:
                if not self._compute(segment, stage):
                    return moved
                tag = self._tag(segment, segment.stage)
                for message in stage.sends:
                    request = self.transport.isend(message.buffer, message.peer, tag)
                    segment.flights[segment.stage].append(_Flight(request, message.peer, False))
                    self.engine.totals["bytes_sent"] += message.buffer.nbytes
                    self.engine.totals["messages_sent"] += 1
                segment.ticket.note(segment.stages, segment.stage, 1)
                segment.begun = moved = True
                self._poll(segment)
            if segment.flights[segment.stage]:
                return moved
            segment.ticket.note(segment.stages, segment.stage, 2)
            segment.begun = False
            segment.next = 0
            segment.stage += 1
        if segment.culprit is not None:
            return True
        self.active.remove(segment)
        ticket = segment.ticket
        ticket.done_segments += 1
        left = [_number(other) for other in self.active if other.ticket is ticket]
        ticket.past_segments = min(left, default=ticket.started_segments)
        if ticket.done_segments == len(ticket.plan.segments):
            with self.engine.lock:
                self.queue.remove(ticket)
            self.engine.totals["plans"] += 1
            self.engine.totals["bytes_bridged"] += ticket.plan.bytes_bridged
            if ticket.trace is not None and ticket.timeline is not None:
                record(ticket.timeline, ticket.plan, ticket.trace)
            self.engine.finish(ticket, State.DONE)
        return True

    def _compute(self, segment: _Segment, stage: plans.Stage) -> bool:
        """Runs the stage's computations as far as they go; returns False if it waits for an offloaded one."""
        if segment.next == 0:
            segment.ticket.note(segment.stages, segment.stage, 0)
        while True:
            if segment.offloaded is not None:
                if not _run(segment.ticket, segment.offloaded, segment.offloaded.is_over):
                    return False
                segment.offloaded = None
            if segment.next == len(stage.compute):
                return True
            computation = stage.compute[segment.next]
            segment.next += 1
            if isinstance(computation, plans.Offload):
                _run(segment.ticket, computation.task, computation.task.start)
                segment.offloaded = computation.task
            else:
                self.engine.compute(computation, segment)

    def fail(self, culprit: PythonTicket | None, state: State, error: int) -> None:
        """Ends every plan of the channel: ``culprit`` with ``state``, the others as aborted."""
        with self.engine.lock:
            self.failed = True
            tickets = list(self.queue)
            self.queue.clear()
        self.abandoned += self.active
        self.active = []
        for ticket in tickets:
            self.engine.finish(ticket, *((state, error) if ticket is culprit else (State.ABORTED, 0)))


def _run(ticket: PythonTicket, task: plans.Task, part: Callable[[], Any]) -> Any:
    try:
        return part()
    except BaseException as error:
        task.failure = error
        raise _TaskError(ticket) from error


def _number(segment: _Segment) -> int:
    """Returns the index of the segment in its plan."""
    return next(i for i, stages in enumerate(segment.ticket.plan.segments) if stages is segment.stages)


class _Mismatch(Exception):
    def __init__(self, ticket: PythonTicket, rank: int) -> None:
        self.ticket = ticket
        self.rank = rank


class _TaskError(Exception):
    def __init__(self, ticket: PythonTicket) -> None:
        self.ticket = ticket


class PythonEngine:
    """The ``engine.Engine`` in Python. ``arrival`` is the transports' event, shared by all communicators of this
    rank.
    """

    def __init__(self, kernels: Kernels, arrival: threading.Event, idle_ms: float = 5.0) -> None:
        self.kernels = kernels
        self.arrival = arrival
        self.idle_s = idle_ms / 1e3
        self.timeline: Timeline | None = None
        self.owner = os.getpid()
        self.is_closed = False
        self.lock = threading.Lock()
        self.failing = False
        self.channels: list[PythonChannel] = []
        self.watched: list[Transport] = []
        self.totals = dict.fromkeys(
            ("bytes_sent", "bytes_bridged", "messages_sent", "plans", "polls", "sleeps", "compute_ns", "network_ns"), 0
        )
        self._woken = False
        self._completed = False

    def open_channel(self, transport: Transport, window: int) -> PythonChannel:
        channel = PythonChannel(self, transport, window)
        with self.lock:
            self.channels.append(channel)
        return channel

    def watch(self, transport: Transport) -> None:
        self.watched.append(transport)

    def unwatch(self, transport: Transport) -> None:
        self.watched = [other for other in self.watched if other is not transport]

    def wake(self) -> None:
        self._woken = True
        self.arrival.set()

    def expect(self, waiters: int, wake: bool) -> None:
        if wake:
            self.wake()

    def fail(self) -> None:
        self.failing = True
        self.arrival.set()

    @property
    def is_busy(self) -> bool:
        return any(ticket.is_busy for channel in list(self.channels) for ticket in list(channel.queue)[:1])

    def counters(self) -> dict[str, int]:
        return dict(self.totals)

    def close(self) -> None:
        self.is_closed = self.failing = True
        self.channels.clear()
        self.watched.clear()

    def finish(self, ticket: PythonTicket, state: State, error: int = 0) -> None:
        self._completed |= ticket.notify
        ticket.finish(state, error)

    def run(self, seconds: float) -> Reason:
        end = time.monotonic() + seconds
        nap = 50e-6
        while True:
            self.arrival.clear()
            reason = Reason(0)
            if self._woken:
                self._woken = False
                reason |= Reason.WOKEN
            moved = False
            for channel in list(self.channels):
                if self.failing:
                    channel.fail(None, State.ABORTED, 0)
                else:
                    moved |= channel.step()
            if any(transport.probe(0) for transport in self.watched):
                reason |= Reason.CONTROL
            if self._completed:
                self._completed = False
                reason |= Reason.COMPLETED
            self.totals["polls"] += 1
            if reason or time.monotonic() >= end:
                return reason
            if moved:
                nap = 50e-6
                continue
            self.totals["sleeps"] += 1
            self.arrival.wait(min(nap, self.idle_s, max(end - time.monotonic(), 0.0)))
            # An offloaded task does not wake this thread.
            offloaded = any(s.offloaded for channel in self.channels for s in channel.active)
            nap = min(2 * nap, 5e-4) if offloaded else 2 * nap

    def compute(self, c: plans.Computation, segment: _Segment) -> None:
        """Runs one computation. A header that differs ends the ticket's channel."""
        match c:
            case plans.Loop():
                c.run(self.kernels)
            case plans.Copy():
                c.destination[...] = c.source
            case plans.CopyIn():
                at = 0
                for source, nbytes in zip(c.sources, c.nbytes, strict=True):
                    c.destination[at : at + nbytes] = view(source, nbytes)
                    at += nbytes
            case plans.CopyOut():
                at = 0
                for destination, nbytes in zip(c.destinations, c.nbytes, strict=True):
                    view(destination, nbytes)[:] = c.source[at : at + nbytes]
                    at += nbytes
            case plans.WriteHeaders():
                header = c.header.copy()
                header["flags"] |= c.flags[0]
                for message in c.messages:
                    message[: HEADER.itemsize] = header.reshape(1).view(np.uint8)
                    message[HEADER.itemsize : HEADER.itemsize + c.presence.nbytes] = c.presence
            case plans.CheckHeaders():
                self._check(c, segment)

    @staticmethod
    def _check(c: plans.CheckHeaders, segment: _Segment) -> None:
        mine = c.header.reshape(1)[0]
        ticket = segment.ticket
        if not c.messages:
            return
        heads = np.stack([message[: HEADER.itemsize + c.presence.nbytes] for message in c.messages])
        rows = np.ascontiguousarray(heads[:, : HEADER.itemsize]).view(HEADER)[:, 0]
        differs = np.stack([rows[name] != mine[name] for name in COMPARED])
        alike = ~differs.any(0)
        for rank in np.flatnonzero(~alike).tolist():
            if c.passed_on is None:
                ticket.error_segment = _number(segment)
                raise _Mismatch(ticket, rank)
            theirs, said = rows[rank], c.passed_on[0]
            if said["magic"] != DISAGREEMENT and theirs["magic"] == DISAGREEMENT:
                c.passed_on[0] = theirs
            elif said["magic"] != DISAGREEMENT:
                field = int(differs[:, rank].argmax())
                said["magic"], said["gradients"], said["tensors"] = DISAGREEMENT, theirs["rank"], field
                said["signature"], said["hyper"] = mine[COMPARED[field]], theirs[COMPARED[field]]
            if not c.ends:
                continue
            other = int(said["rank"] if said["gradients"] == mine["rank"] else said["gradients"])
            # A header that no rank has written may name any number; then it is this rank, which has seen it.
            segment.culprit = other if other < segment.ranks else int(mine["rank"])
            if ticket.culprit is None:
                ticket.culprit, ticket.disagreed = segment.culprit, time.monotonic()
                ticket.error_segment = _number(segment)
        c.flags[0] |= np.bitwise_or.reduce(rows["flags"][alike])
        c.presence |= np.bitwise_or.reduce(heads[alike, HEADER.itemsize :])
        announced = rows["announcement"][alike & (rows["announcement"] != 0)]
        if announced.size:
            c.announcement[0] = announced[-1]
