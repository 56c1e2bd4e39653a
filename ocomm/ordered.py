"""Makes collectives that all ranks of a process set call in one order, such as those of torch.distributed.

The order says which calls belong together, so nothing is negotiated: a call is a plan on an ordered channel. Every plan
begins with headers in which the ranks compare what they call. A rank that sees a difference raises MismatchError.
"""

from __future__ import annotations

import hashlib
import itertools
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
from ocomm.collectives.waiting import wait
from ocomm.errors import InvalidRequestError, MismatchError, OcommError, PeerError, StallError
from ocomm.kernels.base import Bytes
from ocomm.runtime.background import FAILED
from ocomm.session import Session

#: Largest number of bytes of a call that uses a kept plan and copies into its buffers, because making a plan takes
#: longer than the copies.
KEPT_NBYTES = 32 * 1024
#: Number of idle plans that a channel keeps.
_KEPT_PLANS = 256

#: Makes the plan of a call. The arguments are the context, the buffers that the plan reads, and those that it writes.
Build = Callable[[Context, Sequence[Bytes], Sequence[Bytes]], Plan]
#: Tells the other ranks, by other means than the channel, what this rank called when it failed. Returns what others
#: have called, by rank of the set.
Tell = Callable[[str], Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Call:
    """The description of a collective, which must be equal on all ranks.

    Args:
        operation: The name of the collective.
        dtype: The type of the elements; "" if there are none.
        counts: The number of elements of each tensor; empty if ranks may have different numbers.
        op: The reduction; "" if there is none.
        root: The root's rank in the set; -1 if there is none.
        sent: The bytes that this rank sends to each rank of the set, if they may differ between pairs of ranks; not
            compared as they are, but pair by pair.
        received: The bytes that it receives from each.
    """

    operation: str
    dtype: str = ""
    counts: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [self.operation]
        if self.counts:
            words.append(f"of {' + '.join(map(str, self.counts))} elements")
        if self.dtype:
            words.append(f"of {self.dtype}")
        if self.op:
            words.append(f"by {self.op}")
        if self.root >= 0:
            words.append(f"with root {self.root}")
        return " ".join(words)


@lru_cache(maxsize=4096)
def _signature(call: Call, low_to_high: int = 0, high_to_low: int = 0) -> int:
    """Returns a number for what two ranks compare: the call, and the bytes that they send each other."""
    said = call.operation, call.dtype, call.counts, call.op, call.root, low_to_high, high_to_low
    return int.from_bytes(hashlib.blake2b(repr(said).encode(), digest_size=8).digest(), "little")


class _Prepared:
    """A prepared plan, and the buffers that it reads and writes."""

    __slots__ = ("keepalive", "key", "prepared", "sources", "targets")

    def __init__(
        self, prepared: Any, keepalive: list[Bytes], sources: Sequence[Bytes], targets: Sequence[Bytes]
    ) -> None:
        #: Says which calls can use the plan again; None if its buffers are the caller's.
        self.key: Hashable = None
        self.prepared = prepared
        self.keepalive = keepalive
        self.sources = sources
        self.targets = targets


class Exchange:
    """One collective under way. It owns the caller's buffers until it is over."""

    __slots__ = ("_call", "_channel", "_is_over", "_kept", "_lock", "_number", "_plan", "_ticket", "error")

    def __init__(
        self,
        channel: OrderedChannel,
        call: Call,
        number: int,
        plan: _Prepared,
        kept: Sequence[Bytes] | None,
        ticket: Ticket,
    ) -> None:
        self._channel = channel
        self._call = call
        self._number = number  # of the channel's exchanges, from 0
        self._plan: _Prepared | None = plan
        self._kept = kept  # the caller's targets, if the plan has buffers of its own
        self._ticket = ticket
        self._lock = threading.Lock()
        self._is_over = False
        #: The error, once the exchange has failed.
        self.error: OcommError | None = None

    def poll(self) -> bool:
        """Returns True once the exchange is over. If ``error`` is None then, the targets have the results."""
        if self._is_over:
            return True
        if self._ticket.state < State.DONE:
            return False
        self._end(None)
        return True

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the targets have the results.

        Args:
            seconds: Deadline in seconds from now, None for none. The deadline of the channel holds as well.

        Raises:
            MismatchError: The ranks called different things.
            StallError: The exchange was not over in time. The message names the ranks that have not come.
            PeerError: A rank has failed or left.
        """
        if not self._is_over:
            self._end(seconds)
        if self.error is not None:
            raise self.error

    def _end(self, seconds: float | None) -> None:
        error = self._channel.finish(self._ticket, self._call, self._number, seconds)
        with self._lock:  # several threads may wait; the first one copies the results
            if self._is_over:
                return
            plan, self._plan = self._plan, None
            assert plan is not None
            self.error = error
            if error is None and self._kept is not None:
                for target, result in zip(self._kept, plan.targets, strict=True):
                    np.copyto(target, result)
            self._is_over = True
        if error is None:  # after an error the network may still write to the buffers, which the engine keeps
            self._channel.reuse(plan)


def _check(header: np.ndarray, messages: Sequence[Bytes]) -> CheckHeaders:
    return CheckHeaders(header, messages, np.zeros(1, np.uint32), np.zeros(0, np.uint8), np.zeros(1, np.int64))


def _new_name(name: str, begun: Mapping[str, int]) -> str:
    """Returns a name that no earlier channel of this run has, the same on all ranks, because opening is collective."""
    return next(new for k in itertools.count() if (new := f"{name}#{k}") not in begun)


class OrderedChannel:
    """A channel for collectives that all ranks of a process set call in one order. Opening it is collective."""

    def __init__(self, session: Session, number: int, name: str, timeout_s: float, tell: Tell | None = None) -> None:
        """Opens the channel. Collective over the process set.

        Args:
            session: The session of this rank.
            number: The number of the process set, of which this rank is a member.
            name: The name of the channel in messages to users; the same on all ranks.
            timeout_s: Deadline of each collective in seconds, 0 for none.
            tell: Tells the other ranks what this rank called when it failed, by other means than the channel. Returns
                what others have called, by rank of the set. None if there are no such means.
        """
        member = session.member_set(number)
        self.name = name
        self.rank = member.rank
        self.size = member.size
        #: World ranks of the members, by rank of the set.
        self.ranks = member.ranks
        self.timeout_s = timeout_s
        self.scratch = session.scratch
        self._tell = tell
        self._session, self._number = session, number
        self._channel: Channel = session.open_channel(number, name, 0, "collectives in one order")
        watch = session.watch(number, name)
        self._begun = watch.waits.begun
        self._watch = replace(watch, name=_new_name(name, self._begun))
        self._begun[self._watch.name] = 0
        self._context = Context(self.rank, self.size, session.settings.segment_nbytes, self.scratch.take, member.nodes)
        self._idle: dict[Hashable, list[_Prepared]] = {}
        self._idle_count = 0
        self._lock = threading.Lock()  # guards the idle plans, and the number of exchanges that have begun
        self._failure: OcommError | None = None

    def start(
        self,
        call: Call,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
        build: Build,
    ) -> Exchange:
        """Starts a collective, and returns it. Collective, in one order on all ranks; does not wait for them.

        Args:
            call: The description of the collective. The exchange fails with MismatchError if ranks have different ones.
            sources: The buffers that the plan reads: contiguous bytes, which must not change before the exchange is
                over.
            targets: The buffers that the plan writes; they may be the sources.
            build: Makes the plan, which depends on ``call`` and the sizes of buffers alone, and has the same shape on
                all ranks that make the same call.

        Raises:
            OcommError: An earlier collective of this channel has failed; the error is of the same class.
            InvalidRequestError: The plan cannot be made.
        """
        if self._failure is not None:
            raise type(self._failure)(f"{call} cannot be done: before, {self._failure}")
        nbytes = sum(source.nbytes for source in sources) + sum(target.nbytes for target in targets)
        if nbytes > KEPT_NBYTES:
            plan = self._prepare(call, sources, targets, build)
            return self._begin(call, plan, None)
        key = call, tuple([b.nbytes for b in sources]), tuple([b.nbytes for b in targets])
        found = self._take(key)
        if found is None:
            copies = [aligned(source.nbytes) for source in sources]
            results = [aligned(target.nbytes) for target in targets]
            found = self._prepare(call, copies, results, build)
            found.key = key
        for copy, source in zip(found.sources, sources, strict=True):
            np.copyto(copy, source)
        return self._begin(call, found, targets)

    def _begin(self, call: Call, plan: _Prepared, kept: Sequence[Bytes] | None) -> Exchange:
        with self._lock:
            number = self._begun[self._watch.name]
            self._begun[self._watch.name] = number + 1
        ticket = self._channel.submit(plan.prepared, self.timeout_s, False)
        return Exchange(self, call, number, plan, kept, ticket)

    def _prepare(self, call: Call, sources: Sequence[Bytes], targets: Sequence[Bytes], build: Build) -> _Prepared:
        plan = build(self._context, sources, targets)
        plan.name = f"{self.name}: {call}"
        if self.size > 1 and call.sent:
            # Before any data: MPI cannot go on after a message that is longer than its receiver expects.
            plan.segments[0][:0] = self._comparison_of_pairs(call)
        elif self.size > 1:
            plan.segments.insert(0, self._comparison(call))
        try:
            prepared = self._channel.prepare(plan)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{call}: {error}") from None
        return _Prepared(prepared, plan.keepalive, sources, targets)

    def _comparison(self, call: Call) -> list[Stage]:
        """Returns the segment in which every rank receives the signatures of the calls of all others."""
        headers, rows = self._headers()
        headers["signature"] = _signature(call)
        peers = self._context.peers
        exchange = Stage([], [Message(p, rows[self.rank]) for p in peers], [Message(p, rows[p]) for p in peers])
        return [exchange, Stage([_check(headers[self.rank : self.rank + 1], rows)])]

    def _comparison_of_pairs(self, call: Call) -> list[Stage]:
        """Returns the stages in which every two ranks compare the call and what they send each other."""
        mine, out = self._headers()
        _, rows = self._headers()
        exchange, checks = Stage(), Stage()
        for peer in self._context.peers:
            both = call.sent[peer], call.received[peer]
            mine["signature"][peer] = _signature(call, *(both if self.rank < peer else reversed(both)))
            exchange.sends.append(Message(peer, out[peer]))
            exchange.receives.append(Message(peer, rows[peer]))
            others = [out[peer]] * self.size  # equal to what they are compared with
            others[peer] = rows[peer]
            checks.compute.append(_check(mine[peer : peer + 1], others))
        return [exchange, checks]

    def _headers(self) -> tuple[np.ndarray, list[Bytes]]:
        """Returns a header of this rank for each rank, and the bytes of each."""
        headers = np.zeros(self.size, HEADER)
        headers["magic"], headers["rank"] = MAGIC, self.rank
        return headers, [headers[rank : rank + 1].view(np.uint8) for rank in range(self.size)]

    def _take(self, key: Hashable) -> _Prepared | None:
        with self._lock:
            idle = self._idle.get(key)
            if not idle:
                return None
            self._idle_count -= 1
            return idle.pop()

    def reuse(self, plan: _Prepared) -> None:
        """Takes back a plan whose exchange has succeeded: keeps it for later calls, or gives up its staging memory."""
        if plan.key is None:
            self.scratch.give(plan.keepalive)
            return
        with self._lock:
            if self._idle_count >= _KEPT_PLANS:
                self._idle.clear()
                self._idle_count = 0
            self._idle.setdefault(plan.key, []).append(plan)
            self._idle_count += 1

    def finish(self, ticket: Ticket, call: Call, number: int, seconds: float | None) -> OcommError | None:
        """Waits for exchange ``number`` of the channel, and returns its error; None if it has succeeded.

        After the first error of the channel no further collective can be started. That error says what the other ranks
        have called, if they tell.
        """
        # The usual case comes first, without a look at the other ranks.
        state = ticket.wait(1.0 if seconds is None else min(1.0, seconds))
        if state == State.DONE:
            return None
        what = f"{self.name}: {call}"
        try:
            if state < State.DONE and seconds is not None:
                self._wait_until(ticket, what, seconds)
            if wait(ticket, self._channel, self.ranks, self._watch, what, number) == State.DONE:
                return None
            raise explain(
                ticket, self._channel, self.ranks, what, self.timeout_s, mismatch=lambda: self._differ(ticket, call)
            )
        except OcommError as error:
            if self._failure is None:
                self._failure = self._with_words(error, call, number)
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
            self._watch.interrupt(self._watch.name, f"has waited no longer than {seconds:g} s for {what}")
            raise StallError(
                f"{what} was not over within the timeout of {seconds:g} s; rank(s) {late} have not sent their part."
            )

    def _differ(self, ticket: Ticket, call: Call) -> OcommError:
        other = ticket.error
        if call.sent:
            return MismatchError(
                f"{self.name}: {call}: rank {self.ranks[self.rank]} sends {call.sent[other]} bytes to rank "
                f"{self.ranks[other]} and expects {call.received[other]} from it; rank {self.ranks[other]} has other "
                "sizes, or called something else. The splits of the two must fit."
            )
        return MismatchError(
            f"{self.name}: rank {self.ranks[self.rank]} called {call}, and rank {self.ranks[other]} something "
            "else. All ranks must make the same calls in the same order."
        )

    def _with_words(self, error: OcommError, call: Call, number: int) -> OcommError:
        """Returns a MismatchError with the calls of other ranks if some called something else as exchange ``number`` of
        the channel, else ``error``.
        """
        if self._tell is None or (isinstance(error, PeerError) and not self._has_heard_of_a_failure()):
            return error
        place = f"{number} "
        heard = {
            rank: words.removeprefix(place)
            for rank, words in self._tell(f"{place}{call}").items()
            if words.startswith(place)
        }
        said = {rank: words for rank, words in heard.items() if words != str(call)}
        if not said:
            return error
        others = ", ".join(f"rank {self.ranks[rank]} called {words}" for rank, words in sorted(said.items()))
        return MismatchError(
            f"{self.name}: rank {self.ranks[self.rank]} called {call}, {others}. All ranks must make the same calls in "
            "the same order."
        )

    def _has_heard_of_a_failure(self) -> bool:
        """Returns True if the network of another rank has failed, as it does where a message is too long for a call.
        That rank tells what it has called; one that has died does not.
        """
        return any(how.startswith(FAILED) for how in self._watch.departed().values())

    def close(self) -> None:
        """Gives up the channel on this rank. Not collective."""
        self._session.release_channel(self._number, self._channel)
