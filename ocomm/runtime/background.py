"""The background thread: one loop around the engine that serves every process set of this rank.

An uncaught error in it fails every handle here and frees the other ranks: a crash is better than a hang.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable

from ocomm.collectives.engine import Engine, Reason
from ocomm.collectives.waiting import Waits
from ocomm.errors import HorovodInternalError, OcommError, PeerError
from ocomm.runtime.control import MessageType
from ocomm.runtime.deadlock import Deadlock
from ocomm.runtime.process_set import ProcessSet
from ocomm.runtime.supervisor_client import SILENT
from ocomm.types import Settings

_log = logging.getLogger("ocomm")
_HEARTBEAT_S = 2.0  # at most; a third of the timeout if that is less
_FAREWELL_S = 3.0  # how long a failing rank stays to see that the others have heard it
_LAST_PLANS_S = 10.0  # how long plans may still run after every rank has left


class Runtime:
    """Owns the thread and the process sets; ``world`` is the set of all ranks and carries the farewells."""

    def __init__(
        self,
        world: ProcessSet,
        engine: Engine,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        on_start: Callable[[], None] = lambda: None,
        on_loss: Callable[[dict[int, str]], None] = lambda lost: None,
    ) -> None:
        self.world = world
        self.engine = engine
        self.settings = settings
        self.clock = clock
        self.failure: OcommError | None = None
        self._on_start = on_start
        self._on_loss = on_loss
        self._sets = [world]
        self._retiring: list[ProcessSet] = []
        self.waits = Waits()
        self._deadlock = Deadlock(world, lambda: self._sets, self.waits, settings.deadlock_s, clock)
        self._leaving: tuple[bool, str] | None = None  # (failed, why), asked for by the user's thread
        self._left = False
        self._gone: dict[int, tuple[bool, str]] = {}
        self._all_gone_s: float | None = None
        self._failed_s: float | None = None
        self._silent_since: dict[int, float] = {}
        self._heartbeat_s = min(_HEARTBEAT_S, settings.peer_timeout_s / 3 or _HEARTBEAT_S)
        self._silence_s = settings.peer_timeout_s
        if settings.stall_shutdown_s > 0:  # nothing may be waited for longer than that, an answer of rank 0 neither
            self._silence_s = min(self._silence_s, max(settings.stall_shutdown_s, 3 * self._heartbeat_s))
        self._beat_s = self._inspected_s = self._waited_s = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ocomm", daemon=True)
        world.is_served = self.is_serving

    def add(self, process_set: ProcessSet) -> None:
        """Serves another set. From any thread."""
        process_set.is_served = self.is_serving
        self._sets = [*self._sets, process_set]  # a round that has begun keeps its own list

    def retire(self, process_set: ProcessSet) -> None:
        """Serves a set no longer, once nothing of it is under way; then ``process_set.retired`` is set.

        No rank of the set may ask for anything in it any more. From any thread but the background one.
        """
        self._retiring = [*self._retiring, process_set]
        self.engine.wake()

    def start(self) -> None:
        now = self.clock()
        peers = range(1, self.world.size) if self.world.rank == 0 else [0]
        self._silent_since = {rank: now for rank in peers if rank != self.world.rank}
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_serving(self) -> bool:
        """Does the thread run, or is it still to start? From any thread."""
        return self._thread.ident is None or self._thread.is_alive()

    def departed(self) -> dict[int, str]:
        """World ranks which have left the job, and how, as "has shut down". From any thread."""
        return {rank: _how(why) for rank, (_, why) in self._gone.copy().items()}

    def leave(self, failed: bool = False, why: str = "shut down") -> bool:
        """Takes this rank out of the job and ends the thread; True if every rank has left in order.

        A clean departure waits for the others, whose tensors this rank may still own, as long as they show signs of
        life. A failed one tells them and waits three seconds at most. From any thread but the background one.
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
            _log.error("rank %d: the background thread failed:\n%s", self.world.rank, detail)
            failure = error if isinstance(error, OcommError) else HorovodInternalError(
                f"rank {self.world.rank}: the background thread failed: {type(error).__name__}: {error}"
            )  # fmt: skip
            self._fail(failure)
            self._farewell(f"failed: {type(error).__name__}: {error}")
        finally:
            self._end_plans()
            closed = HorovodInternalError("ocomm has been shut down; call init() before the next collective.")
            try:
                for process_set in self._sets:
                    process_set.close(self.failure or closed)
            finally:
                self._over.set()

    def _end_plans(self) -> None:
        """Nobody runs the engine after this: whoever waits for a plan must hear that it will not be done."""
        try:
            self.engine.fail()
            self.engine.run(0.0)
        except Exception as error:
            _log.warning("rank %d: the engine did not stop: %s", self.world.rank, error)

    def cycle(self) -> bool:
        """One round of the loop; True when it is over. An ordinary method, which a test may call by itself."""
        due = min(process_set.cycle() for process_set in self._sets)
        polling = any(process_set.wants_polling for process_set in self._sets)
        longest = min(0.25, self._heartbeat_s / 2)
        reason = self.engine.run(0.0005 if polling else max(min(due, longest), 0.0))
        if reason & Reason.FAILED:
            raise HorovodInternalError(f"rank {self.world.rank}: the network failed; see the errors of the operations")
        for process_set in self._sets:
            while (message := process_set.link.receive()) is not None:
                source, word, payload = message
                if process_set is self.world:
                    self._silent_since[source] = self.clock()
                if word in (MessageType.LEAVE, MessageType.GONE):
                    self._hear_departure(source, word, payload)
                elif word in (MessageType.BLOCKED, MessageType.CONFIRM, MessageType.STUCK):
                    self._deadlock.hear(source, word, payload)
                elif word != MessageType.ALIVE:
                    process_set.handle_message(source, word, payload)
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
                self._retiring = [other for other in self._retiring if other is not process_set]
                self._sets = [other for other in self._sets if other is not process_set]
                self.engine.unwatch(process_set.link.transport)
                process_set.link.transport.close()  # the ranks have closed its channels together
                process_set.retired.set()
        return self._depart()

    def _beat(self, now: float) -> None:
        """Signs of life between rank 0 and the others; silence beyond the timeout is death."""
        missed = now - self._beat_s - self._heartbeat_s
        if missed > self._heartbeat_s:  # this process stood still itself, and says nothing about others' silence
            self._silent_since = {rank: min(now, since + missed) for rank, since in self._silent_since.items()}
        self._beat_s = now
        # A rank that has left sends nothing more, nor rank 0 once all have: a message which nobody receives would stay
        # with MPI, and turn up in the next job on a communicator of the same number.
        if self.world.rank == 0 and len(self._gone) < self.world.size:
            self.world.link.send_all(MessageType.ALIVE)
        elif self.world.rank != 0 and not self._left:
            self.world.link.send(0, MessageType.ALIVE)
        limit = self._silence_s
        for rank, since in list(self._silent_since.items()):
            if rank not in self._gone and 0 < limit < now - since:
                self._announce_departure(rank, True, f"{SILENT} for {now - since:.0f} s")
        if self._left and now - self._waited_s >= self.settings.stall_check_s:
            self._waited_s = now
            missing = [rank for rank in range(self.world.size) if rank not in self._gone]
            _log.warning("rank %d has shut down and waits for ranks %s to do so", self.world.rank, missing)

    def _depart(self) -> bool:
        if self._leaving is not None and not self._left:
            self._left = True
            for process_set in self._sets:
                process_set.is_leaving = True
            self._waited_s = self.clock()
            self._announce_departure(self.world.rank, *self._leaving)
        if not self._left:
            return False
        assert self._leaving is not None
        if self.failure is not None or self._leaving[0]:
            # The launcher ends the others as soon as one rank exits: let them hear, and say, what happened first.
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
        """Lets the last words leave before the thread ends."""
        try:
            if why is not None:
                self._announce_departure(self.world.rank, True, why)
            end = self.clock() + _FAREWELL_S
            while not self.world.link.flush() and self.clock() < end:
                self.engine.run(0.01)
        except Exception as error:  # the network is gone too: nobody is left to tell
            _log.warning("rank %d could not tell the others: %s", self.world.rank, error)

    def _announce_departure(self, rank: int, failed: bool, why: str) -> None:
        payload = json.dumps([rank, failed, why]).encode()
        if self.world.rank == 0:
            self.world.link.send_all(MessageType.GONE, payload)
            self._note_departure(rank, failed, why)
        elif rank == self.world.rank:
            self.world.link.send(0, MessageType.LEAVE, payload)
            if failed:  # rank 0 tells the others; this rank has nothing to wait for
                self._gone[rank] = (failed, why)
        else:
            self._note_departure(rank, failed, why)

    def _hear_departure(self, source: int, word: MessageType, payload: bytes) -> None:
        rank, failed, why = json.loads(payload)
        if word == MessageType.LEAVE:
            self._announce_departure(rank, failed, why)
        else:
            self._note_departure(rank, failed, why)

    def _note_departure(self, rank: int, failed: bool, why: str) -> None:
        self._gone[rank] = (failed, why)
        for process_set in self._sets:
            process_set.rank_left(rank, _how(why))
        if failed and rank != self.world.rank:
            fails_itself = self._leaving is not None and self._leaving[0]
            if self.failure is None and not fails_itself:  # later ones may have failed because of this
                self._on_loss({rank: why})
            self._fail(PeerError(f"rank {rank} {why}."))

    def _fail(self, error: OcommError) -> None:
        """Everything under way and everything to come fails with ``error``."""
        if self.failure is None:
            self.failure = error
        self.engine.fail()
        for process_set in self._sets:
            process_set.close(error)


def _how(why: str) -> str:
    return f"has {why}" if why == "shut down" else why
