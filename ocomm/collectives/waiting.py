"""Waits for a plan on the user's thread: with a deadline, and with warnings that say which ranks are late."""

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
#: A rank that left in order has sent everything before; what has not arrived after this long was never sent.
_GRACE_S = 5.0
_EQUALLY_MANY = (
    "All ranks must take equally many steps; join() does not step a 1-bit optimizer for a rank that has no more "
    "batches. "
)
#: What to do where a rank has taken fewer steps than others, or has called join(), by framework.
EQUALLY_MANY = {
    "torch": _EQUALLY_MANY + "Stop all ranks after the smallest number, int(allreduce(torch.tensor(len(loader)), "
    "op=Min)), or use DistributedSampler, which gives all ranks equally many samples.",
    "keras": _EQUALLY_MANY + "Fit a dataset that repeats, with equal steps_per_epoch on all ranks: "
    "fit(dataset.repeat(), steps_per_epoch=...). Put MetricAverageCallback before EarlyStopping, so that all ranks "
    "stop together.",
}
#: What to do after a step that was interrupted on one rank.
INTERRUPTED = "Wrap the optimizer anew, and load a state, on all ranks."
#: The reason that a rank of an elastic job gives if it leaves to join again, and what the others are to do.
REJOINS = "has left to join again"
REJOIN = "Go back to the last commit and join again, too, as hvd.elastic.run does."


class Wait(NamedTuple):
    """What a thread waits for: the exchange ``what``, number ``number`` (from 0) of the exchanges of ``name``, and in
    it the messages of the world ranks ``late``. ``is_step`` is False for a call, which no optimizer makes.
    """

    what: str
    name: str
    number: int
    late: tuple[int, ...]
    is_step: bool = True


@dataclass(frozen=True, slots=True)
class Waits:
    """This rank's threads in exchanges that all ranks make in one order. Only single dict operations, from any thread.

    - ``waiting``: the threads that have waited for a second.
    - ``begun``: how many exchanges of each name have begun.
    - ``hopeless``: those of ``waiting`` that will wait for ever, and why.
    - ``interrupted``: by name, the ranks that take no part any more in exchanges of it, and why.
    - ``enclosed``: threads of a framework's pool that make a step for a user's thread, which waits for them. Nothing
      else in the framework can submit before they are done.
    """

    waiting: dict[int, Wait] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    hopeless: dict[int, str] = field(default_factory=dict)
    interrupted: dict[str, dict[int, str]] = field(default_factory=dict)
    enclosed: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Watch:
    """What a waiting thread looks at: whether and why the runtime has failed, and which world ranks have left and how.

    ``name`` is the name of what makes the exchanges, such as an optimizer: the same on all ranks. With
    a ``stall_check_s`` of 0 there are no warnings. ``framework`` is a key of ``EQUALLY_MANY``.
    """

    failure: Callable[[], OcommError | None]
    departed: Callable[[], Mapping[int, str]]
    stall_check_s: float
    name: str = ""
    waits: Waits = field(default_factory=Waits)
    #: Returns True if there is a thread that runs the engine.
    is_served: Callable[[], bool] = lambda: True
    framework: str = "torch"
    #: ``interrupt(name, why)`` tells all ranks that this one takes no part any more in exchanges of ``name``.
    interrupt: Callable[[str, str], None] = lambda name, why: None


def wait(
    ticket: Ticket, channel: Channel, ranks: Sequence[int], watch: Watch, what: str, number: int | None = None
) -> State:
    """Waits until the plan is over, at most until its own deadline, and returns its state.

    ``ranks`` are the channel's world ranks; ``what`` names the exchange. ``number`` is its place in ``Waits.begun`` if
    it is a call, which has been counted when it began; None for a step, which begins here. Warns every
    ``stall_check_s``. Raises the runtime's failure, PeerError if a rank that has left in order owes a message, and
    StallError if no rank can go on.
    """
    me, waits = threading.get_ident(), watch.waits
    is_step = number is None
    if number is None:
        number = waits.begun.get(watch.name, 0)
        waits.begun[watch.name] = number + 1
    begun = warned = time.monotonic()
    owing_since: float | None = None
    try:
        while (state := ticket.wait(min(1.0, watch.stall_check_s or 1.0))) < State.DONE:
            if not watch.is_served() and (failure := watch.failure()) is not None:
                raise type(failure)(*failure.args)
            now = time.monotonic()
            late = [ranks[rank] for rank in channel.waiting_for()]
            waits.waiting[me] = Wait(what, watch.name, number, tuple(late), is_step)
            if (why := waits.hopeless.get(me)) is not None:
                channel.abandon()
                raise StallError(why)
            interrupted = dict(watch.waits.interrupted.get(watch.name, {}))
            departed = {rank: how for rank, how in {**interrupted, **watch.departed()}.items() if rank in late}
            rejoins = REJOINS in departed.values()  # and goes back to a commit, so that this exchange does not count
            if not departed:
                owing_since = None
            elif owing_since is None:
                owing_since = now
            elif rejoins or now - owing_since > _GRACE_S:
                channel.abandon()
                reasons = "; ".join(f"rank {rank} {how}" for rank, how in departed.items())
                advice = EQUALLY_MANY[watch.framework] if is_step else "All ranks must make the same calls."
                if rejoins:
                    advice = REJOIN
                elif interrupted.keys() >= departed.keys():
                    advice = INTERRUPTED if is_step else "Make a new group on all ranks."
                raise PeerError(f"{what} cannot end: {reasons}. {advice}")
            if watch.stall_check_s and now - warned >= watch.stall_check_s:
                warned = now
                _log.warning("%s: waited %.0f s so far for rank(s) %s", what, now - begun, late)
    finally:
        waits.waiting.pop(me, None)
        waits.hopeless.pop(me, None)
    if state != State.DONE and (failure := watch.failure()) is not None:
        raise type(failure)(*failure.args)
    return state
