"""One process set at run time: its queue, its negotiation, its channels. Driven by the background thread.

Users' threads and the background thread meet in the queue, under its lock. Nothing is called back while it is held.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ocomm.collectives.bridged import BridgedSums
from ocomm.collectives.engine import Channel, Engine, State, Ticket
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.collectives.outcome import cause, explain
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.tracing import activities
from ocomm.errors import (
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    OcommError,
    PeerError,
    StallError,
)
from ocomm.negotiation.autotune import Tuned
from ocomm.negotiation.cache import RankCache
from ocomm.negotiation.coordinator import JOIN_NAME, Coordinator, Stall
from ocomm.negotiation.request import (
    Fault,
    Kind,
    Request,
    Response,
    read_responses,
    write_responses,
)
from ocomm.negotiation.tree import Aggregator, Ranges, Tree, read_aggregate
from ocomm.runtime.call_sites import user_line
from ocomm.runtime.channels import Channels
from ocomm.runtime.control import Link, MessageType
from ocomm.runtime.handle import Handle, Listener, Submission
from ocomm.runtime.plans import Planner, check_reduction, stand_in
from ocomm.runtime.stalls import StallWatch
from ocomm.runtime.tuner import Tuner
from ocomm.telemetry.timeline import Timeline
from ocomm.transport.base import Transport
from ocomm.types import Bytes, Nodes, Settings

_log = logging.getLogger("ocomm")
_RELEASED = struct.Struct("<qq")  # channel, segments
_FAULTS = {Fault.MISMATCH: MismatchError, Fault.STALL: StallError, Fault.LEFT: PeerError}


@dataclass(slots=True)
class _Running:
    """A submitted plan, and the tensors that it serves."""

    ticket: Ticket
    parts: dict[Handle, list[int]]
    result: object
    scratch: Scratch  # owner of the buffers
    buffers: list[Bytes] = field(default_factory=list)
    submitted_ns: int = 0  # set only if there is a timeline


class MemberSet:
    """A process set as one of its ranks sees it.

    ``ranks`` are the world ranks of the members, ``rank`` is this process's position among them. All other numbers of
    ranks are positions in the set.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        control: Transport,
        data: Transport,
        engine: Engine,
        scratch: Scratch,
        settings: Settings,
        nodes: Nodes,
        number: int = 0,
        tuner: Tuner | None = None,
    ) -> None:
        self.timeline: Timeline | None = None
        self._suffix = f" (process set {number})" if number else ""
        self.ranks = tuple(ranks)
        self.rank = control.rank
        self.size = control.size
        self.settings = settings
        self.engine = engine
        self._channels = Channels(control, data, engine, settings.window)
        #: How dense sums go.
        self.nodes = nodes
        self._planner = Planner(self.rank, self.size, settings.segment_nbytes, scratch, nodes)
        self._cache = RankCache()
        tree = Tree.of(self.rank, self.size, settings.direct_peers)
        self.link = Link(control, self.ranks, tree)
        self._below = {subtree.start: subtree for subtree in tree.children}
        #: Joins the announcements of the ranks below this one, if there are any and this is not the coordinator.
        self._aggregator = Aggregator(self.rank, tree.children) if self.rank and tree.children else None
        self.coordinator = (
            Coordinator(self.ranks, settings.fusion_threshold, settings.cache_capacity, settings.group_fusion)
            if self.rank == 0
            else None
        )
        self._stall_watch = (
            StallWatch(self.coordinator, self.link, self._own_line, settings)
            if self.coordinator is not None and settings.stall_check
            else None
        )
        self._tuner = tuner
        self._cycle_s = settings.cycle_time_ms / 1e3
        self._lock = threading.Lock()
        self._queue: list[Request] = []
        self._entries: dict[str, Handle] = {}  # tensors that have not been answered, by name
        self._closed: OcommError | None = None
        self._hurried = False
        # used by the background thread only
        self._running: list[_Running] = []
        self._announced_s = -1e9
        self.users: set[int] = set()  # threads that have submitted; grows only
        self.waiting: dict[int, Handle] = {}  # thread -> its handle; only single dict operations, which are atomic
        self.progress = 0  # counts announcements and responses; background thread only
        self.joined: list[int] = []  # world ranks without more data; written by the background thread, read by any
        self.retired = threading.Event()
        #: Returns True if there is a thread that calls ``cycle``; set by the owner of that thread.
        self.is_served: Callable[[], bool] = lambda: True
        #: What ``compressed_allreduce`` keeps between calls, a channel and the errors of each name. For users' threads.
        self.compressed_channel: Channel | None = None
        self.compressed: dict[str, OneBitAllreduce] = {}
        #: Sums over the bridge between the ranks' devices. Set once by the thread that opens the bridge, read by any.
        self.bridged: BridgedSums | None = None
        #: Why there is no bridge, once that is known.
        self.unbridged = ""
        #: Opens the bridge, in a thread of its own. Set before the first tensor that could use it is submitted.
        self.open_bridge: Callable[[], None] | None = None
        self.opening_bridge: threading.Thread | None = None

    # Users' side

    def submit(self, submission: Submission, listener: Listener | None = None) -> Handle:
        """Queues all tensors of a submission, or none. May be called from any thread.

        Raises InvalidRequestError if a name is in use, and the error that closed the set if it is closed.
        """
        timeline = self.timeline
        requests = submission.requests
        if not submission.is_checked:
            for request in requests:
                check_reduction(request)
        handle = Handle(submission, self.expect, timeline, listener)
        names = handle.positions.keys()
        self.users.add(threading.get_ident())
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(*self._closed.args)
            if JOIN_NAME in self._entries:
                raise InvalidRequestError(
                    f"tensor '{next(iter(names))}': rank {self.ranks[self.rank]} has joined; it may submit again when "
                    "join() has returned."
                )
            if len(names) < len(requests) or not self._entries.keys().isdisjoint(names):
                said = [request.name for request in requests]
                taken = next(n for n in said if n in self._entries or said.count(n) > 1)
                raise InvalidRequestError(
                    f"tensor '{taken}' is already being processed on rank {self.ranks[self.rank]}. Wait for its handle "
                    "first, or give this operation another name. A call that was interrupted ends once all ranks have "
                    "made it."
                )
            first = not self._queue
            if timeline is not None:
                for request in requests:
                    timeline.begin(request.name + self._suffix, f"NEGOTIATE_{request.kind.name}")
            self._entries.update(dict.fromkeys(names, handle))
            self._queue += requests
        if first:  # else the background thread knows already that something is queued, and when to announce it
            self.engine.wake()
        return handle

    def expect(self, waiters: int, handle: Handle) -> None:
        """Notes that one thread more (or less) waits for ``handle``. With a waiter, queued requests are announced at
        once.

        ``waiters`` 0 means that the thread still waits: raises the error that closed the set if the background thread
        has ended without completing ``handle``.
        """
        if waiters == 0:
            if not self.is_served() and not handle.poll():
                raise self._closed or no_thread(self.ranks[self.rank])
            return
        if waiters > 0:
            self.waiting[threading.get_ident()] = handle
        else:
            self.waiting.pop(threading.get_ident(), None)
        hurried = waiters > 0 and bool(self._queue)
        if hurried:
            self._hurried = True
        self.engine.expect(waiters, hurried)

    def say_end(self) -> None:
        """Says what there is to say of a job that ends well. Called on the background thread, before ``close``."""
        if self._tuner is not None:
            self._tuner.say_end()

    def close(self, error: OcommError) -> None:
        """Fails everything that is under way and everything that is submitted later. Called on the background
        thread.
        """
        with self._lock:
            if self._closed is None:
                self._closed = error
            ended = list(_by_handle(list(self._entries.items())).items())
            self._entries.clear()
            self._queue.clear()
        if self._tuner is not None:
            self._tuner.close()
        if self.bridged is not None and self._running:
            self.bridged.bridge.end(str(error), wait_s=0.0)
        ended += [part for running in self._running for part in running.parts.items()]
        ended += [(handle, [0]) for handle in self._channels.give_up()]
        self._running.clear()  # the engine keeps the memory of plans that are under way
        for handle, positions in ended:
            try:
                handle.complete(positions, error=type(error)(*error.args))
            except Exception:  # raised by a listener; the other handles must be completed all the same
                _log.exception("rank %d: could not report an error", self.ranks[self.rank])

    def release(self, channel: Channel) -> None:
        """Notes that this rank will not use ``channel`` of this set any more. Once no rank does, it is closed. From any
        thread.

        Safe in a finalizer: it takes no lock, because the garbage collector may run while this thread holds one.
        """
        self._channels.release(channel)

    def retire(self) -> bool:
        """Ends a process set that was removed while the job goes on; returns True when that is done.

        Called repeatedly on the background thread, on all ranks of the set, because they close its channels together.
        """
        if not self._channels.is_retiring:
            self.close(InvalidRequestError(f"process set {list(self.ranks)} was removed."))
            self._channels.release_all()
        return not self._channels.numbers and self.is_quiet

    # Background thread's side

    def cycle(self) -> float:
        """Makes one round: announce, decide, execute, complete. Returns the seconds after which the next is due at the
        latest.
        """
        now = time.monotonic()
        due = self._announce(now)
        if self._channels.is_releasing:
            self._close_channels()
        if self.coordinator is not None:
            self._respond(self.coordinator.decide())
            if self._tuner is not None and (tuned := self._tuner.poll()) is not None:
                self._respond([Response(Kind.TUNE, (), sizes=(tuned.pack(),))])
        if self._aggregator is not None:
            self._pass_on(now)
            due = min(due, self._aggregator.due_s(now))
        self._channels.open()
        self.complete()
        return due

    def pass_on_all(self) -> None:
        """Passes on to the parent what ranks below have announced, before news of a departure overtakes it."""
        self._pass_on(math.inf)

    def _pass_on(self, now: float) -> None:
        if self._aggregator is not None and (aggregate := self._aggregator.take(now)):
            self.progress += 1
            self.link.send(self.link.parent, MessageType.AGGREGATE, aggregate)

    def handle_message(self, source: int, word: MessageType, payload: bytes) -> None:
        """Takes in a control message of this set. Raises ValueError if it cannot be read."""
        asks = word in (MessageType.ANNOUNCE, MessageType.AGGREGATE)
        if (asks and source not in self._below) or (word == MessageType.RESPOND and source != self.link.parent):
            raise ValueError("responses come from the parent, and what ranks ask for from children")
        if word == MessageType.ANNOUNCE:
            self._receive((range(source, source + 1),), payload, time.monotonic())
        elif word == MessageType.AGGREGATE:
            sections = list(read_aggregate(payload))
            if not all(_within(each, self._below[source]) for ranges, _ in sections for each in ranges):
                raise ValueError("an aggregate of ranks that are not below its sender")
            for ranges, announcement in sections:
                self._receive(ranges, announcement, time.monotonic())
        elif word == MessageType.RESPOND:
            self._execute_all(payload)
        elif word == MessageType.RELEASED:
            if self.coordinator is not None and not self.link.has_left:
                self.coordinator.release(source, *_RELEASED.unpack(payload))
        elif word == MessageType.WHERE:
            self.link.send_up(MessageType.HERE, self._own_line().encode("utf-8", "surrogatepass"))
        elif word == MessageType.HERE and self._stall_watch is not None:
            self._stall_watch.hear(self.ranks[source], payload.decode("utf-8", "surrogatepass"))

    def _own_line(self) -> str:
        return user_line(list(self.users))

    def rank_left(self, world_rank: int, why: str) -> None:
        """Takes in that a rank has left; if it is a member, whatever needs it fails on all other members."""
        if world_rank in self.ranks and self.coordinator is not None:
            self.coordinator.remove(self.ranks.index(world_rank), why)

    def inspect(self) -> None:
        """Looks for stalls on the coordinator, warns of them, and ends those that have lasted too long."""
        if self._stall_watch is not None:
            self._respond(self._stall_watch.inspect(time.monotonic()))

    def report_stuck(self, where: Mapping[int, str], why: str = "") -> None:
        """Reports that no rank of the job can go on, so that everything that waits here will wait for ever.

        ``where`` has the line of code of every rank. If ``why`` is given, everything fails with that reason instead.
        """
        if self._stall_watch is not None:
            self._respond(self._stall_watch.report_stuck(where, why, time.monotonic()))

    @property
    def stalls(self) -> list[Stall]:
        """What of this set waits for ranks, on its coordinator."""
        return [] if self._stall_watch is None else self._stall_watch.stalls

    @property
    def is_blocked(self) -> bool:
        """True if nothing here moves by itself: everything that waits, waits for other ranks."""
        if self._queue or self._running or self._channels.is_opening:
            return False
        if self._aggregator is not None and self._aggregator.is_holding:
            return False
        # A thread whose handle is over may not have woken up yet.
        return not any(handle.poll() for handle in list(self.waiting.values()))

    @property
    def is_quiet(self) -> bool:
        """True if nothing of this set is under way on the network."""
        return not self._running and not self._channels.is_opening and self.link.flush()

    def _announce(self, now: float) -> float:
        if not self._queue or self.link.has_left:
            return 1.0
        wait = self._announced_s + self._cycle_s - now
        if wait > 0 and not self._hurried:
            return wait
        self.progress += 1
        with self._lock:
            self._hurried = False  # before the queue is taken, so that a later waiter's wish is not lost
            requests, self._queue = self._queue, []
        self._announced_s = now
        message = self._cache.announcement(requests)
        if self.timeline is not None and self.timeline.mark_cycles:
            self.timeline.mark("cycles" + self._suffix, "CYCLE_START")
        if self.coordinator is not None or self._aggregator is not None:
            self._receive((range(self.rank, self.rank + 1),), message, now)
        else:
            self.link.send(self.link.parent, MessageType.ANNOUNCE, message)
        return 1.0

    def _receive(self, ranges: Ranges, message: bytes, now: float) -> None:
        """Takes in an announcement, on the coordinator or on the way to it. Marks in the coordinator's timeline say
        which rank is ready for which tensor.
        """
        if self.coordinator is None:
            assert self._aggregator is not None
            self._aggregator.add(ranges, message, now)
            return
        ranks = ranges[0] if len(ranges) == 1 else [rank for each in ranges for rank in each]
        if self.timeline is not None:
            for rank in ranks:
                for request in self.coordinator.heard(rank, message):
                    self.timeline.mark(request.name + self._suffix, str(self.ranks[rank]))
        self.coordinator.receive(ranks, message, now)

    def _respond(self, responses: Sequence[Response]) -> None:
        if not responses:
            return
        assert self.coordinator is not None
        message = self.coordinator.cache.epoch.to_bytes(4, "little") + write_responses(tuple(responses))
        self.link.send_down(MessageType.RESPOND, message)
        self._execute_all(message)

    def _execute_all(self, message: bytes) -> None:
        self._cache.enter(int.from_bytes(message[:4], "little"))
        for response in read_responses(message[4:]):
            self._execute(response)

    def _execute(self, response: Response) -> None:
        self.progress += 1
        if self._aggregator is not None:
            self._aggregator.forget(response.names)
        match response.kind:
            case Kind.JOIN:
                self._hear_of_join(response)
            case Kind.TUNE:
                self._tune(Tuned.unpack(response.sizes[0]))
            case Kind.CLOSE:
                number, is_empty = response.sizes[0]
                self._channels.forget(number, bool(is_empty))
            case Kind.BRIDGE:
                assert self.open_bridge is not None
                self.opening_bridge = threading.Thread(target=self.open_bridge, name="ocomm-bridge", daemon=True)
                self.opening_bridge.start()
            case _:
                self._begin(response, self._take_entries(response))

    def _take_entries(self, response: Response) -> list[tuple[str, Handle]]:
        """Returns the tensors of a response with their handles, which are no longer among those that wait. Where this
        rank has joined, there are stand-ins.
        """
        with self._lock:
            if self._closed is None and not response.fault:
                for template in response.templates:
                    if template.name not in self._entries:
                        self._entries[template.name] = Handle(stand_in(template), self.expect)
            found = [(name, self._entries[name]) for name in response.names if name in self._entries]
            for name, _ in found:
                del self._entries[name]
        return found

    def _begin(self, response: Response, found: Sequence[tuple[str, Handle]]) -> None:
        """Begins what the ranks have agreed on: submits its plan, opens its channel, or ends it with its fault."""
        parts = _by_handle(found)
        self._note_agreement(parts)
        if response.fault:
            for handle, positions in parts.items():
                handle.complete(positions, error=_FAULTS[response.fault](response.error))
            return
        if self._closed is not None:
            return
        tensors = [(handle.submission, handle.positions[name]) for name, handle in found]
        with self._failing_together(found):
            _check_asked(response, tensors)
        self._learn(response, tensors)
        with self._failing_together(found):
            if response.kind in (Kind.CHANNEL, Kind.DUPLICATE):
                self._channels.begin(found[0][1])
            else:
                self._start(response, tensors, parts)

    def _note_agreement(self, parts: Mapping[Handle, list[int]]) -> None:
        """Ends the negotiation of these tensors in timelines."""
        for handle, positions in parts.items():
            if handle.timeline is not None:
                for position in positions:
                    handle.timeline.end(handle.submission.requests[position].name + self._suffix)

    def _learn(self, response: Response, tensors: Sequence[tuple[Submission, int]]) -> None:
        """Notes the numbers that stand for requests from now on, and what the tuner goes by."""
        if response.cache_ids:
            for name, (submission, position), number in zip(response.names, tensors, response.cache_ids, strict=True):
                if number >= 0:
                    self._cache.learn(name, number, submission.requests[position])
        if self._tuner is not None and response.kind == Kind.ALLREDUCE:
            nbytes = sum(submission.requests[position].nbytes for submission, position in tensors)
            self._tuner.note(response.names, nbytes, time.monotonic())

    def _start(
        self, response: Response, tensors: Sequence[tuple[Submission, int]], parts: dict[Handle, list[int]]
    ) -> None:
        """Submits the plan of what the ranks have agreed on."""
        plan, result, scratch = self._planner.plan(response, tensors, self.bridged)
        channel = self._channels.negotiated
        ticket = channel.submit(channel.prepare(plan), self.settings.stall_shutdown_s, True)
        running = _Running(ticket, parts, result, scratch, plan.keepalive)
        if self.timeline is not None:
            running.submitted_ns = time.monotonic_ns()
        self._running.append(running)

    @contextmanager
    def _failing_together(self, found: Sequence[tuple[str, Handle]]) -> Iterator[None]:
        """Returns what was taken from the entries if there is no memory, or no communicator, for it.

        Then threads that wait for it are told when the set is closed.
        """
        try:
            yield
        except BaseException:
            with self._lock:
                self._entries.update(found)
            raise

    def _tune(self, tuned: Tuned) -> None:
        """Uses other settings from the next response on; so do all ranks."""
        self._cycle_s = tuned.cycle_time_ms / 1e3
        self._planner.use_segments(tuned.segment_nbytes)
        if self.coordinator is not None:
            self.coordinator.fusion_threshold = tuned.fusion_threshold

    def _hear_of_join(self, response: Response) -> None:
        if not response.names:
            self.joined.append(self.ranks[response.sizes[0][0]])
            return
        self.joined = []
        with self._lock:
            handle = self._entries.pop(JOIN_NAME, None)
        if handle is None:
            return
        if handle.timeline is not None:
            handle.timeline.end(JOIN_NAME + self._suffix)
        if response.fault:
            handle.complete([0], error=_FAULTS[response.fault](response.error))
        else:
            handle.complete([0], self.ranks[response.sizes[0][0]])

    def _close_channels(self) -> None:
        """Tells the coordinator which channels this rank has closed."""
        for number, segments in self._channels.close():
            if self.link.has_left:
                continue  # the job ends, and a message might come too late
            self.progress += 1
            if self.coordinator is not None:
                self.coordinator.release(self.rank, number, segments)
            else:
                self.link.send_up(MessageType.RELEASED, _RELEASED.pack(number, segments))

    def close_transports(self) -> None:
        """Frees all communicators except those on which messages may be under way. Called when the job is over."""
        self._channels.end()

    @property
    def wants_polling(self) -> bool:
        """True if the engine does not see what the set waits for."""
        return self._channels.wants_polling

    def complete(self) -> None:
        """Completes the handles of plans that are over. Called on the background thread. Raises if a plan failed by
        itself, because other ranks wait for it.
        """
        still: list[_Running] = []
        over: list[_Running] = []
        for running in self._running:
            (still if running.ticket.state < State.DONE else over).append(running)
        self._running = still
        culprit = cause([running.ticket for running in over])
        failure = None
        if culprit is not None:
            what = f"{culprit.plan.name} on rank {self.ranks[self.rank]}"
            failure = explain(culprit, self._channels.negotiated, self.ranks, what, self.settings.stall_shutdown_s)
        for running in over:
            is_done = running.ticket.state == State.DONE
            if is_done:
                if running.submitted_ns:
                    self._record(running)
                running.scratch.give(running.buffers)
            for handle, positions in running.parts.items():
                handle.complete(positions, running.result, None if is_done else failure)
        if culprit is not None and failure is not None and culprit.state != State.ABORTED:
            raise failure

    def _record(self, running: _Running) -> None:
        """Writes the timeline rows of the tensors that a plan served, with Horovod's names."""
        ticket = running.ticket
        if ticket.trace is None:
            return
        start, end = int(ticket.trace[:, 0].min()), int(ticket.trace[:, 2].max())
        spent = activities(ticket.plan, ticket.trace)
        for handle, positions in running.parts.items():
            if handle.timeline is None:
                continue
            for request in [handle.submission.requests[position] for position in positions]:
                kind, track = request.kind.name, request.name + self._suffix
                described = {"dtype": request.dtype.label, "shape": str(list(request.shape)), "bytes": request.nbytes}
                handle.timeline.span(track, kind, running.submitted_ns, end, described)
                handle.timeline.span(track, "QUEUE", running.submitted_ns, start)
                for name, since, until in spent:
                    handle.timeline.span(track, name or f"MPI_{kind}", since, until)


def _within(part: range, whole: range) -> bool:
    return whole.start <= part.start < part.stop <= whole.stop


def no_thread(rank: int) -> HorovodInternalError:
    """Returns the error of a wait whose background thread has ended."""
    return HorovodInternalError(
        f"rank {rank}: ocomm's background thread has ended, so this will never be over. Its error is in this rank's "
        "output; a process that was forked from a rank has none."
    )


def _check_asked(response: Response, tensors: Sequence[tuple[Submission, int]]) -> None:
    """Raises ValueError if this rank has not asked for what a response names."""
    asked = [submission.requests[position].kind.name for submission, position in tensors[:1]]
    if len(tensors) != len(response.names) or asked != [response.kind.name]:
        raise ValueError(
            f"{response.kind.name} of {len(response.names)} tensors, {response.names[0]!r} first; this rank "
            f"has asked for {asked} of {len(tensors)} of them"
        )


def _by_handle(entries: Sequence[tuple[str, Handle]]) -> dict[Handle, list[int]]:
    """Returns the positions that names have in their handles, by handle."""
    parts: dict[Handle, list[int]] = {}
    for name, handle in entries:
        parts.setdefault(handle, []).append(handle.positions[name])
    return parts
