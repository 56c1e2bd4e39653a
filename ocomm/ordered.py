"""Collectives that all ranks of a process set call in one order, as those of torch.distributed.

Their order says which calls belong together, so nothing is negotiated: a call is a plan on a channel of its own. Every
plan begins with headers in which the ranks compare what they call; where they differ nothing is returned.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ocomm.collectives.dense import Context
from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.collectives.outcome import explain
from ocomm.collectives.plan import HEADER, MAGIC, CheckHeaders, Message, Plan, Stage
from ocomm.collectives.scratch import aligned
from ocomm.collectives.waiting import Waits, wait
from ocomm.errors import InvalidRequestError, MismatchError, OcommError, PeerError, StallError
from ocomm.kernels.base import Bytes
from ocomm.session import Session

#: Calls up to this many bytes are copied through buffers of plans that are kept: to make a plan takes longer.
KEPT_NBYTES = 32 * 1024
#: How many idle plans a channel keeps.
_KEPT_PLANS = 256

#: Makes a call's plan: of the context, the buffers that it reads, and those that it writes.
Build = Callable[[Context, Sequence[Bytes], Sequence[Bytes]], Plan]
#: Tells the other ranks, by means other than the channel, what this one was doing when it failed; returns what others
#: have said, by rank of the set.
Tell = Callable[[str], Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Call:
    """What all ranks must say alike of a collective.

    Args:
        operation: Its name.
        dtype: Of the elements.
        counts: Elements of each tensor, as far as they are the same on all ranks.
        op: The reduction; "" if it has none.
        root: The root's rank in the set; -1 if it has none.
    """

    operation: str
    dtype: str = ""
    counts: tuple[int, ...] = ()
    op: str = ""
    root: int = -1

    def __str__(self) -> str:
        words = [self.operation]
        if self.dtype:
            words.append(f"of {' + '.join(map(str, self.counts)) or '0'} elements of {self.dtype}")
        if self.op:
            words.append(f"by {self.op}")
        if self.root >= 0:
            words.append(f"with root {self.root}")
        return " ".join(words)


@lru_cache(maxsize=4096)
def _signature(call: Call) -> int:
    return int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), "little")


class _Prepared:
    """A plan that was made ready, and the buffers that it reads and writes."""

    __slots__ = ("keepalive", "key", "prepared", "sources", "targets")

    def __init__(
        self, prepared: Any, keepalive: list[Bytes], sources: Sequence[Bytes], targets: Sequence[Bytes]
    ) -> None:
        #: Says which calls can use it again; None of one that has the caller's buffers.
        self.key: Hashable = None
        self.prepared = prepared
        self.keepalive = keepalive
        self.sources = sources
        self.targets = targets


class Exchange:
    """One collective under way. The caller's buffers belong to it until it is over."""

    __slots__ = ("_call", "_channel", "_is_over", "_kept", "_lock", "_plan", "_ticket", "error")

    def __init__(
        self, channel: OrderedChannel, call: Call, plan: _Prepared, kept: Sequence[Bytes] | None, ticket: Ticket
    ) -> None:
        self._channel = channel
        self._call = call
        self._plan: _Prepared | None = plan
        self._kept = kept  # the caller's targets, where the plan has buffers of its own
        self._ticket = ticket
        self._lock = threading.Lock()
        self._is_over = False
        #: What went wrong, once it is known.
        self.error: OcommError | None = None

    def poll(self) -> bool:
        """True once it is over, one way or another; results are in their places then."""
        if self._is_over:
            return True
        if self._ticket.state < State.DONE:
            return False
        self._end(None)
        return True

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the results are in their places. Raises what went wrong.

        Args:
            seconds: Within which it must be over, if that is sooner than the deadline it was started with.

        Raises:
            MismatchError: The ranks called different things.
            StallError: It was not over in time; the message names the ranks that have not come.
            PeerError: A rank has failed or left.
        """
        if not self._is_over:
            self._end(seconds)
        if self.error is not None:
            raise self.error

    def _end(self, seconds: float | None) -> None:
        error = self._channel.finish(self._ticket, self._call, seconds)
        with self._lock:  # of several threads that wait, the first puts the results in their places
            if self._is_over:
                return
            plan, self._plan = self._plan, None
            assert plan is not None
            self.error = error
            if error is None and self._kept is not None:
                for target, result in zip(self._kept, plan.targets, strict=True):
                    np.copyto(target, result)
            self._is_over = True
        if error is None:  # else the network may still write there: the engine keeps what it needs
            self._channel.reuse(plan)


class OrderedChannel:
    """An order of collectives among the ranks of a process set. Opening it is collective."""

    def __init__(self, session: Session, number: int, name: str, timeout_s: float, tell: Tell | None = None) -> None:
        """
        Args:
            session: The job.
            number: Of the process set, of which this rank is a member.
            name: The same on all ranks, for messages to people.
            timeout_s: Deadline of each collective in seconds, 0 for none.
            tell: See ``Tell``.
        """
        member = session.member_set(number)
        self.name = name
        self.rank = member.rank
        self.size = member.size
        #: World ranks.
        self.ranks = member.ranks
        self.timeout_s = timeout_s
        self.scratch = session.scratch
        self._tell = tell
        self._session, self._number = session, number
        self._channel: Channel = session.open_channel(number, name, 0, "collectives in one order")
        self._context = Context(self.rank, self.size, session.settings.segment_nbytes, self.scratch.take, member.nodes)
        # With ``Waits`` of its own: which of several exchanges under way a thread waits for does not say which of them
        # it has come to, so that no rank may conclude from it that another waits for ever.
        self._watch = replace(session.watch(number, name), waits=Waits())
        self._idle: dict[Hashable, list[_Prepared]] = {}
        self._idle_count = 0
        self._lock = threading.Lock()  # of what is idle
        self._failure: OcommError | None = None

    def start(
        self,
        call: Call,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
        build: Build,
        own: tuple[int, ...] = (),
    ) -> Exchange:
        """Sends a collective on its way.

        Args:
            call: The same on all ranks, or the exchange ends as MismatchError.
            sources: What the plan reads: contiguous bytes, which must not change before the exchange is over.
            targets: What it writes; may be the sources.
            build: Makes the plan. The same shape of plan on all ranks that make the same call.
            own: What else the plan depends on, which the ranks need not say alike.
        """
        if self._failure is not None:
            raise type(self._failure)(f"{call} cannot be done: before, {self._failure}")
        nbytes = sum(source.nbytes for source in sources) + sum(target.nbytes for target in targets)
        if nbytes > KEPT_NBYTES:
            plan = self._prepare(call, sources, targets, build)
            return Exchange(self, call, plan, None, self._channel.submit(plan.prepared, self.timeout_s, False))
        key = call, own, tuple([b.nbytes for b in sources]), tuple([b.nbytes for b in targets])
        found = self._take(key)
        if found is None:
            copies = [aligned(source.nbytes) for source in sources]
            results = [aligned(target.nbytes) for target in targets]
            found = self._prepare(call, copies, results, build)
            found.key = key
        for copy, source in zip(found.sources, sources, strict=True):
            np.copyto(copy, source)
        return Exchange(self, call, found, targets, self._channel.submit(found.prepared, self.timeout_s, False))

    def _prepare(self, call: Call, sources: Sequence[Bytes], targets: Sequence[Bytes], build: Build) -> _Prepared:
        plan = build(self._context, sources, targets)
        plan.name = f"{self.name}: {call}"
        if self.size > 1:
            plan.segments.insert(0, self._comparison(call))
        try:
            prepared = self._channel.prepare(plan)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{call}: {error}") from None
        return _Prepared(prepared, plan.keepalive, sources, targets)

    def _comparison(self, call: Call) -> list[Stage]:
        """The segment in which every rank hears what each of the others calls."""
        headers = np.zeros(self.size, HEADER)
        headers["magic"], headers["rank"], headers["signature"] = MAGIC, self.rank, _signature(call)
        rows = [headers[rank : rank + 1].view(np.uint8) for rank in range(self.size)]
        check = CheckHeaders(
            headers[self.rank : self.rank + 1],
            rows,
            np.zeros(1, np.uint32),
            np.zeros(0, np.uint8),
            np.zeros(1, np.int64),
        )
        peers = self._context.peers
        exchange = Stage([], [Message(p, rows[self.rank]) for p in peers], [Message(p, rows[p]) for p in peers])
        return [exchange, Stage([check])]

    def _take(self, key: Hashable) -> _Prepared | None:
        with self._lock:
            idle = self._idle.get(key)
            if not idle:
                return None
            self._idle_count -= 1
            return idle.pop()

    def reuse(self, plan: _Prepared) -> None:
        """What nobody uses now: the plan, or its staging memory."""
        if plan.key is None:
            self.scratch.give(plan.keepalive)
            return
        with self._lock:
            if self._idle_count >= _KEPT_PLANS:
                self._idle.clear()
                self._idle_count = 0
            self._idle.setdefault(plan.key, []).append(plan)
            self._idle_count += 1

    def finish(self, ticket: Ticket, call: Call, seconds: float | None) -> OcommError | None:
        """Waits for an exchange. Returns its error, with what the other ranks say that they were doing."""
        # The usual case first, without looking around.
        state = ticket.wait(1.0 if seconds is None else min(1.0, seconds))
        if state == State.DONE:
            return None
        what = f"{self.name}: {call}"
        try:
            if state < State.DONE and seconds is not None:
                self._wait_until(ticket, what, seconds)
            if wait(ticket, self._channel, self.ranks, self._watch, what) == State.DONE:
                return None
            raise explain(
                ticket, self._channel, self.ranks, what, self.timeout_s, mismatch=lambda: self._differ(ticket, call)
            )
        except OcommError as error:
            if self._failure is None:
                self._failure = self._with_words(error, call)
                return self._failure
            return error

    def _wait_until(self, ticket: Ticket, what: str, seconds: float) -> None:
        end = time.monotonic() + max(seconds - 1.0, 0.0)
        while (left := end - time.monotonic()) > 0 and ticket.wait(min(1.0, left)) < State.DONE:
            if (failure := self._watch.failure()) is not None:
                raise type(failure)(*failure.args)
        if ticket.state < State.DONE:
            late = [self.ranks[rank] for rank in self._channel.waiting_for()]
            self._channel.abandon()
            raise StallError(f"{what} was not over after {seconds:g} s; rank(s) {late} have not sent their part.")

    def _differ(self, ticket: Ticket, call: Call) -> OcommError:
        return MismatchError(
            f"{self.name}: rank {self.ranks[self.rank]} called {call}, and rank {self.ranks[ticket.error]} something "
            "else. All ranks must make the same calls in the same order."
        )

    def _with_words(self, error: OcommError, call: Call) -> OcommError:
        """The error with what the others say, if anybody does; a MismatchError where that is something else."""
        if self._tell is None or isinstance(error, PeerError):
            return error
        said = {rank: words for rank, words in self._tell(str(call)).items() if words != str(call)}
        if not said:
            return error
        others = ", ".join(f"rank {self.ranks[rank]} called {words}" for rank, words in sorted(said.items()))
        return MismatchError(
            f"{self.name}: rank {self.ranks[self.rank]} called {call}, {others}. All ranks must make the same calls in "
            "the same order."
        )

    def close(self) -> None:
        """This rank uses it no longer; not collective."""
        self._session.release_channel(self._number, self._channel)
