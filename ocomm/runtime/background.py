"""The background thread: one loop around the engine that serves every process set of this rank.

An uncaught error in it fails every handle here and frees the other ranks: a crash is better than a hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ocomm import json_values
from ocomm.collectives.engine import Engine, Reason
from ocomm.collectives.waiting import Waits
from ocomm.errors import HorovodInternalError, OcommError, PeerError, in_words
from ocomm.json_values import expect
from ocomm.negotiation.coordinator import SHUT_DOWN
from ocomm.negotiation.tree import Tree
from ocomm.runtime.channels import free
from ocomm.runtime.control import MessageType
from ocomm.runtime.deadlock import Deadlock
from ocomm.runtime.exporter import Exporter
from ocomm.runtime.process_set import MemberSet
from ocomm.runtime.supervisor_client import SILENT
from ocomm.types import Settings

_log = logging.getLogger("ocomm")
#: How a rank leaves whose background thread has failed, as it does with the network.
FAILED = "failed"
_HEARTBEAT_S = 2.0  # longest time between signs of life; a third of the timeout if that is less
_FAREWELL_S = 3.0  # how long a failing rank waits until its last messages have been delivered
_LAST_PLANS_S = 10.0  # how long plans may still run after every rank has left
_LAST_PASSES = 100  # of the engine before plans are ended; one takes every segment on as far as messages have arrived


class Runtime:
    """Owns the background thread and the process sets. ``world`` is the set of all ranks; its link carries the news of
    ranks that leave.
    """

    def __init__(
        self,
        world: MemberSet,
        engine: Engine,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[], None] = lambda: None,
        on_loss: Callable[[dict[int, str]], None] = lambda lost: None,
    ) -> None:
        self.world = world
        #: Sends this rank's counters with its signs of life, if somebody wants them; set before ``start``.
        self.exporter: Exporter | None = None
        self.engine = engine
        self.settings = settings
        self.clock = clock
        self.failure: OcommError | None = None
        self._has_mpi_failed = False
        self._on_start = on_start
        self._on_loss = on_loss
        self._sets = [world]
        self._retiring: list[MemberSet] = []
        self._sets_lock = threading.Lock()  # for whoever replaces one of these two lists
        self.waits = Waits()
        world.link.before_departure = self._pass_on_all
        self._deadlock = Deadlock(world, lambda: self._sets, self.waits, settings.deadlock_s, clock)
        self._interrupted: deque[tuple[str, str]] = deque()  # (name, why); any thread appends
        self._leaving: tuple[bool, str] | None = None  # (failed, why), set by the user's thread
        self._left = False
        self._gone: dict[int, tuple[bool, str]] = {}
        self._departures: list[tuple[int, bool, str]] = []  # on rank 0, those that it has not told the others
        self._all_gone_s: float | None = None
        self._failed_s: float | None = None
        self._silent_since: dict[int, float] = {}
        self._heartbeat_s = min(_HEARTBEAT_S, settings.peer_timeout_s / 3 or _HEARTBEAT_S)
        self._silence_s = settings.peer_timeout_s
        if settings.stall_shutdown_s > 0:  # no wait may be longer than that, nor one for an answer of rank 0
            self._silence_s = min(self._silence_s, max(settings.stall_shutdown_s, 3 * self._heartbeat_s))
        self._beat_s = self._inspected_s = self._waited_s = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ocomm", daemon=True)
        world.is_served = self.is_serving

    def add(self, process_set: MemberSet) -> None:
        """Serves another process set. May be called from any thread."""
        process_set.is_served = self.is_serving
        with self._sets_lock:
            self._sets = [*self._sets, process_set]  # a new list, because a cycle under way iterates over the old one

    def retire(self, process_set: MemberSet) -> None:
        """Stops to serve a process set once nothing of it is under way, and then sets ``process_set.retired``.

        No rank may submit anything to the set any more. May be called from any thread but the background one.
        """
        with self._sets_lock:
            self._retiring = [*self._retiring, process_set]
        self.engine.wake()

    def start(self) -> None:
        now = self.clock()
        link = self.world.link
        self._silent_since = dict.fromkeys([*link.children, *([link.parent] if self.world.rank else [])], now)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_serving(self) -> bool:
        """Returns True if the background thread runs or is still to start. May be called from any thread."""
        return self._thread.ident is None or self._thread.is_alive()

    def departed(self) -> dict[int, str]:
        """Returns the world ranks that have left the job, and how, as "has shut down". May be called from any
        thread.
        """
        return {rank: _how(why) for rank, (_, why) in self._gone.copy().items()}

    def interrupt(self, name: str, why: str) -> None:
        """Tells all ranks that this one takes no part any more in exchanges of ``name``, so that none waits for it.
        Does not wait. May be called from any thread.
        """
        self._interrupted.append((name, why))
        self.engine.wake()

    def leave(self, failed: bool = False, why: str = "shut down") -> bool:
        """Takes this rank out of the job and ends the thread. Returns True if every rank has left in order.

        A clean departure waits for the other ranks, whose tensors this rank may still own, as long as they show signs
        of life. A failed one tells them and waits three seconds at most. May be called from any thread but the
        background one.
        """
        if self._leaving is None:
            self._leaving = (failed, why)
        self.engine.wake()
        if failed:
            self._over.wait(_FAREWELL_S + 1.0)
        while not failed and self.is_alive and not self._over.wait(1.0):
            pass
        self._thread.join(5.0)
        return not failed and self.failure is None and not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        try:
            self._on_start()
            while not self.cycle():
                pass
        except BaseException as error:
            detail = traceback.format_exc()
            if self._has_mpi_failed:  # no fault of this thread
                _log.error("%s", error)
            else:
                _log.error("rank %d: the background thread failed:\n%s", self.world.rank, detail)
            failure = error if isinstance(error, OcommError) else HorovodInternalError(
                f"rank {self.world.rank}: the background thread failed: {in_words(error)}."
            )  # fmt: skip
            self._fail(failure)
            self._farewell(f"{FAILED}: {in_words(error)}")
        finally:
            self._end_plans()
            closed = HorovodInternalError("ocomm has been shut down; call init() before the next collective.")
            try:
                for process_set in self._sets:
                    if self.failure is None:
                        process_set.say_end()
                    process_set.close(self.failure or closed)
            finally:
                self._over.set()

    def _end_plans(self) -> None:
        """Ends all plans of the engine, which nobody runs any more: threads that wait for a plan hear that it will not
        be done.
        """
        try:
            self.engine.fail()
            self.engine.run(0.0)
        except Exception as error:
            _log.warning("rank %d: the engine did not stop: %s", self.world.rank, error)

    def cycle(self) -> bool:
        """Makes one round of the loop; returns True when the loop is over. A test may call it as an ordinary method."""
        due = min(process_set.cycle() for process_set in self._sets)
        # The end of a set takes a few rounds, which nothing else wakes.
        polling = bool(self._retiring) or any(process_set.wants_polling for process_set in self._sets)
        longest = min(0.25, self._heartbeat_s / 2)
        reason = self.engine.run(0.0005 if polling else max(min(due, longest), 0.0))
        if reason & Reason.FAILED:
            self._has_mpi_failed = True
            raise HorovodInternalError(
                f"rank {self.world.rank}: MPI failed, which ends all exchanges of this rank. The errors of the "
                "operations say why: after a MismatchError it is the calls, whose messages did not fit, and not the "
                "network."
            )
        for process_set in self._sets:
            while (message := process_set.link.receive()) is not None:
                self._hear(process_set, *message)
        self._tell_interrupted()
        now = self.clock()
        if now - self._beat_s >= self._heartbeat_s:
            self._beat(now)
        if now - self._inspected_s >= 0.5:
            self._inspected_s = now
            for process_set in self._sets:
                process_set.inspect()
            if self.settings.stall_check and not self._left and self.failure is None:
                self._deadlock.inspect()
        for process_set in self._retiring:
            if process_set.is_quiet and process_set.retire():
                with self._sets_lock:
                    self._retiring = [other for other in self._retiring if other is not process_set]
                    self._sets = [other for other in self._sets if other is not process_set]
                self.engine.unwatch(process_set.link.transport)
                free(process_set.link.transport)  # the ranks have closed its channels together
                process_set.retired.set()
        return self._depart()

    def _hear(self, process_set: MemberSet, source: int, word: MessageType, payload: bytes) -> None:
        """Takes in a message. An error that is not ocomm's own becomes one that names message and sender."""
        try:
            if process_set is self.world and source in self._silent_since:
                self._silent_since[source] = self.clock()
            if word in (MessageType.LEAVE, MessageType.GONE):
                self._hear_departure(source, word, payload)
            elif word in (MessageType.BLOCKED, MessageType.CONFIRM, MessageType.STUCK):
                self._deadlock.hear(source, word, payload)
            elif word in (MessageType.INTERRUPTED, MessageType.ENDED):
                self._hear_interrupted(source, word, payload)
            elif word == MessageType.COUNTERS:
                if self.exporter is not None:
                    self.exporter.hear(source, payload)
            elif word != MessageType.ALIVE:
                process_set.handle_message(source, word, payload)
        except OcommError:
            raise
        except Exception as error:
            raise HorovodInternalError(
                f"rank {self.world.rank}: the background thread failed at the message {word.name} of {len(payload)} "
                f"bytes from rank {process_set.ranks[source]}: {in_words(error)}"
            ) from error

    def _tell_interrupted(self) -> None:
        while self._interrupted:
            said = self.world.rank, *self._interrupted.popleft()
            if self.world.rank == 0:
                self._note_interrupted(*said)
            else:
                self.world.link.send_up(MessageType.INTERRUPTED, json.dumps(said).encode())

    def _hear_interrupted(self, source: int, word: MessageType, payload: bytes) -> None:
        said = expect(json_values.parse(payload), list)
        if len(said) != 3 or (word == MessageType.INTERRUPTED and said[0] != source):
            raise ValueError("no news of exchanges that a rank has ended")
        self._note_interrupted(json_values.rank(said[0], self.world.size), expect(said[1], str), expect(said[2], str))

    def _note_interrupted(self, rank: int, name: str, why: str) -> None:
        """Notes that a rank takes no part any more in exchanges of ``name``; rank 0 tells the others."""
        self.waits.interrupted[name] = {**self.waits.interrupted.get(name, {}), rank: why}
        if self.world.rank == 0:
            self.world.link.send_down(MessageType.ENDED, json.dumps([rank, name, why]).encode())

    def _beat(self, now: float) -> None:
        """Sends signs of life to the neighbours in the tree, and checks theirs. A rank that is silent longer than the
        timeout counts as dead.
        """
        missed = now - self._beat_s - self._heartbeat_s
        if missed > self._heartbeat_s:  # this process itself stood still, so it cannot judge the others' silence
            self._silent_since = {rank: min(now, since + missed) for rank, since in self._silent_since.items()}
        self._beat_s = now
        self._send_signs_of_life()
        limit = self._silence_s
        for rank, since in list(self._silent_since.items()):
            is_needed = rank not in self._gone or (rank == self.world.link.parent and len(self._gone) < self.world.size)
            if is_needed and 0 < limit < now - since:
                self._announce_departure(rank, True, f"{SILENT} for {now - since:.0f} s")
        if self._left and self.settings.stall_check and now - self._waited_s >= self.settings.stall_check_s:
            self._waited_s = now
            missing = [rank for rank in range(self.world.size) if rank not in self._gone]
            _log.warning("rank %d has shut down and waits for ranks %s to do so", self.world.rank, missing)

    def _send_signs_of_life(self) -> None:
        """Sends them to those who wait for them, and this rank's counters to rank 0 if somebody wants them."""
        link = self.world.link
        link.send_down(MessageType.ALIVE)
        counters = b"" if self.exporter is None else self.exporter.sample()
        if self.world.rank:
            link.send(link.parent, MessageType.ALIVE)
            if counters:
                link.send_up(MessageType.COUNTERS, counters)

    def _depart(self) -> bool:
        if self._leaving is not None and not self._left:
            if self.exporter is not None:  # the last counters
                self._send_signs_of_life()
            self._left = True
            self._waited_s = self.clock()
            self._announce_departure(self.world.rank, *self._leaving)
            for process_set in self._sets:
                process_set.link.has_left = True
        self._tell_departures()
        if not self._left:
            return False
        assert self._leaving is not None
        if self.failure is not None or self._leaving[0]:
            # The launcher ends the others as soon as one rank exits, so they get the time to report what happened.
            now = self.clock()
            self._failed_s = now if self._failed_s is None else self._failed_s
            if len(self._gone) < self.world.size and now - self._failed_s < _FAREWELL_S:
                return False
            self._farewell(None)
            return True
        if len(self._gone) < self.world.size:
            return False
        if not self.engine.is_busy:
            return all(process_set.is_quiet for process_set in self._sets)
        if self._all_gone_s is None:
            self._all_gone_s = self.clock()
        if self.clock() - self._all_gone_s > _LAST_PLANS_S:
            raise HorovodInternalError(
                f"rank {self.world.rank} has shut down with an exchange under way which other ranks never took part in."
            )
        return False

    def _farewell(self, why: str | None) -> None:
        """Sends the last messages before the thread ends."""
        try:
            if why is not None:
                self._announce_departure(self.world.rank, True, why)
            self._tell_departures()
            end = self.clock() + _FAREWELL_S
            while not self.world.link.flush() and self.clock() < end:
                self.engine.run(0.01)
        except Exception as error:  # the network has failed, too, so nobody can be told
            _log.warning("rank %d could not tell the others: %s", self.world.rank, error)

    def _announce_departure(self, rank: int, failed: bool, why: str) -> None:
        """Tells the other ranks that this rank or a neighbour has left."""
        self._pass_on_all()
        link, departure = self.world.link, (rank, failed, why)
        if self.world.rank == 0:
            self._departures.append(departure)
        if self.world.rank and rank != link.parent:
            link.send_up(MessageType.LEAVE, json.dumps(departure).encode())
        if self.world.rank and (rank == link.parent or (failed and rank == self.world.rank)):
            # The failed rank may pass nothing on any more, neither what rank 0 says to those below it.
            link.send_down(MessageType.GONE, json.dumps([departure]).encode())
        if self.world.rank == 0 or rank != self.world.rank:
            self._note_departure(*departure)
        elif failed:  # rank 0 tells the others; this rank does not wait
            self._gone[rank] = (failed, why)

    def _tell_departures(self) -> None:
        """Sends what rank 0 has heard of departures since the last call, in one message, because each goes to all."""
        departures, self._departures = self._departures, []
        if departures:
            self.world.link.send_down(MessageType.GONE, json.dumps(departures).encode())
        if len(self._gone) == self.world.size:
            for process_set in self._sets:
                process_set.link.have_all_left = True

    def _pass_on_all(self) -> None:
        for process_set in self._sets:
            process_set.pass_on_all()

    def _hear_departure(self, source: int, word: MessageType, payload: bytes) -> None:
        said = expect(json_values.parse(payload), list)
        if word == MessageType.GONE:
            if source != self.world.link.parent:
                raise ValueError("no news of ranks that leave, which the parent passes on")
            for departure in [self._read_departure(each) for each in said]:
                self._note_departure(*departure)
            return
        rank, failed, why = self._read_departure(said)
        below = Tree.of(source, self.world.size, self.settings.direct_peers).children
        if rank != source and rank not in [subtree.start for subtree in below]:
            raise ValueError(f"rank {rank} leaves")
        self._announce_departure(rank, failed, why)

    def _read_departure(self, said: Any) -> tuple[int, bool, str]:
        if len(expect(said, list)) != 3:
            raise ValueError("no news of a rank that leaves")
        return json_values.rank(said[0], self.world.size), expect(said[1], bool), expect(said[2], str)

    def _note_departure(self, rank: int, failed: bool, why: str) -> None:
        self._gone[rank] = (failed, why)
        for process_set in self._sets:
            process_set.rank_left(rank, _how(why))
        if failed and rank != self.world.rank:
            fails_itself = self._leaving is not None and self._leaving[0]
            if self.failure is None and not fails_itself:  # a later failure may be a consequence of the first
                self._on_loss({rank: why})
            self._finish_what_has_arrived()
            self._fail(PeerError(f"rank {rank} {why}."))

    def _finish_what_has_arrived(self) -> None:
        """Completes the collectives of which this rank has all messages.

        A rank that fails right after a collective must not take its result from the others. The news of its failure is
        another message, which this rank may hear before it has looked at those of the collective.
        """
        for _ in range(_LAST_PASSES):
            if not self.engine.is_busy:
                break
            self.engine.run(0.0)
        for process_set in self._sets:
            with contextlib.suppress(OcommError):  # of a plan that failed by itself: its handles have the error
                process_set.complete()

    def _fail(self, error: OcommError) -> None:
        """Fails everything that is under way, and everything that is submitted from now on, with ``error``."""
        if self.failure is None:
            self.failure = error
        self.engine.fail()
        for process_set in self._sets:
            process_set.close(error)


def _how(why: str) -> str:
    return SHUT_DOWN if why == "shut down" else why
