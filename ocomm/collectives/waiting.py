"""Waiting for a plan from the user's thread: bounded, and never in silence about whom it waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.errors import OcommError, PeerError, StallError

_log = logging.getLogger("ocomm")
#: A rank that left in order has sent all it had; what is not here after this long was never sent.
_GRACE_S = 5.0


class Wait(NamedTuple):
    """What a thread waits for: the exchange ``what``, which is number ``number``, from 0 on, of those of ``name``, and
    in it the messages of the world ranks ``late``."""

    what: str
    name: str
    number: int
    late: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """Of this rank's threads in exchanges that all ranks make in one order. Single dict operations, from any thread.

    ``waiting``: those that have waited for a second. ``ended``: how many exchanges of each name have ended.
    ``hopeless``: those of ``waiting`` that will wait for ever, and why.
    ``enclosed``: threads of a framework's pool that make a step for a thread of the user's, which waits for them;
    nothing else in the framework can submit before they are done.
    """

    waiting: dict[int, Wait] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    hopeless: dict[int, str] = field(default_factory=dict)
    enclosed: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Watch:
    """What a waiting thread looks at: whether the runtime has failed and why, which world ranks have left and how.

    ``name`` is that of what makes the exchanges, an optimizer, say: the same on all ranks.
    """

    failure: Callable[[], OcommError | None]
    departed: Callable[[], Mapping[int, str]]
    stall_check_s: float
    name: str = ""
    waits: Waits = field(default_factory=Waits)
    #: Is there a thread that runs the engine?
    is_served: Callable[[], bool] = lambda: True


def wait(ticket: Ticket, channel: Channel, ranks: Sequence[int], watch: Watch, what: str) -> State:
    """Until the plan is over, one way or another; its own deadline bounds the wait.

    ``ranks`` are the channel's world ranks, ``what`` names the exchange. Warns every ``stall_check_s``. Raises the
    runtime's failure, PeerError if a rank that has left in order owes a message, and StallError if no rank can move.
    """
    me, waits = threading.get_ident(), watch.waits
    begun = warned = time.monotonic()
    owing_since: float | None = None
    try:
        while (state := ticket.wait(min(1.0, watch.stall_check_s))) < State.DONE:
            if not watch.is_served() and (failure := watch.failure()) is not None:
                raise type(failure)(*failure.args)
            now = time.monotonic()
            late = [ranks[rank] for rank in channel.waiting_for()]
            waits.waiting[me] = Wait(what, watch.name, waits.ended.get(watch.name, 0), tuple(late))
            if (why := waits.hopeless.get(me)) is not None:
                channel.abandon()
                raise StallError(why)
            departed = {rank: how for rank, how in watch.departed().items() if rank in late}
            if not departed:
                owing_since = None
            elif owing_since is None:
                owing_since = now
            elif now - owing_since > _GRACE_S:
                channel.abandon()
                reasons = "; ".join(f"rank {rank} {how}" for rank, how in departed.items())
                raise PeerError(f"{what} cannot end: {reasons}. All ranks must take equally many steps.")
            if now - warned >= watch.stall_check_s:
                warned = now
                _log.warning("%s: waited %.0f s so far for rank(s) %s", what, now - begun, late)
    finally:
        waits.waiting.pop(me, None)
        waits.hopeless.pop(me, None)
        waits.ended[watch.name] = waits.ended.get(watch.name, 0) + 1
    if state != State.DONE and (failure := watch.failure()) is not None:
        raise type(failure)(*failure.args)
    return state
