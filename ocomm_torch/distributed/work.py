"""Calls under way, as torch.distributed waits for them."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work

from ocomm.errors import OcommError, StallError
from ocomm.ordered import Exchange
from ocomm.runtime.handle import Handle
from ocomm_torch.distributed.futures import Completer, Future


def seconds_of(timeout: Any) -> float | None:
    """Returns the seconds of a caller's timeout; None for the value that torch passes if the caller has given none."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else 0.0
    return seconds if seconds > 0 else None


class UnderWay:
    """The collectives of a channel that nobody has waited for yet, in the order in which they were started.

    Whoever has waited for one finds the results of all before it in their tensors, as in a stream of nccl: a script may
    wait for the last of several, or call a barrier.
    """

    def __init__(self) -> None:
        self._works: deque[GroupWork] = deque()
        self._count = 0
        self._lock = threading.Lock()

    def add(self, work: GroupWork) -> None:
        """Adds the next collective, and gives it its number."""
        with self._lock:
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._count += 1
            work.number = self._count
            self._works.append(work)

    def end(self, number: int) -> None:
        """Waits for the collectives up to ``number``, which is over: all ranks have started those before it."""
        with self._lock:
            while self._works and self._works[0].number <= number:
                self._works.popleft().end()


class GroupWork(Work):
    """A collective under way. ``finish`` copies its results to the caller's tensors. A future is made on request.

    Args:
        completer: Completes its future.
        exchange: What is under way.
        result: The tensors that a future gives.
        finish: Called once, when the exchange has succeeded.
        under_way: Where it is in the order of its channel; None if it is in none.
    """

    def __init__(
        self,
        completer: Completer,
        exchange: Exchange | Messages | Together,
        result: list[Any],
        finish: Callable[[], None],
        under_way: UnderWay | None = None,
    ) -> None:
        super().__init__()
        self._completer = completer
        self._exchange = exchange
        self._result = result
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()
        self._future: Future | None = None
        self._under_way = under_way
        #: Seconds for a wait that gives none; None: the group's.
        self.limit_s: float | None = None
        #: The number in ``under_way``, from 1; 0 for none.
        self.number = 0
        if under_way is not None:
            under_way.add(self)

    def wait(self, timeout: Any = None) -> bool:
        self.end(seconds_of(timeout) or self.limit_s)
        if self._under_way is not None:
            self._under_way.end(self.number)
        return True

    def end(self, seconds: float | None = None) -> None:
        """Waits for this call alone."""
        self._exchange.wait(seconds)
        self._store()

    def _store(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._exchange.poll():
            return False
        if self._exchange.error is None:
            self._store()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._exchange.error is None

    def exception(self) -> BaseException | None:
        return self._exchange.error if self.is_completed() else None

    def result(self) -> list[Any]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        return -1

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = Future(self._completer, self.result)
        if self._finish is None:  # somebody has waited, and DistributedDataParallel's join reads the value at once
            future.complete()
        else:
            self._completer.later(future.complete)
        return future

    getFuture = get_future


def within(timeout: Any, work: GroupWork) -> GroupWork:
    """Returns ``work``, for which waits take ``timeout`` unless they give one; anything else stands for the group's."""
    work.limit_s = seconds_of(timeout)
    return work


class Messages:
    """Messages under way between two ranks, with the interface of ``Exchange``.

    ``timeout_s`` returns the group's timeout, 0 for none: a new one also holds for what is under way, as in a channel.
    """

    def __init__(self, handles: Sequence[Handle], what: str, timeout_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._handles = handles
        self._what = what
        self.error: OcommError | None = None

    def poll(self) -> bool:
        if not all(handle.poll() for handle in self._handles):
            return False
        with contextlib.suppress(OcommError):
            self.wait()
        return True

    def wait(self, seconds: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        limit = seconds or self._timeout_s() or None
        try:
            for handle in self._handles:
                handle.wait(limit)
        except TimeoutError:
            self.error = StallError(
                f"{self._what} was not over within the timeout of {limit:g} s; the other rank has not come."
            )
            raise self.error from None
        except OcommError as error:
            self.error = error
            raise


class Together:
    """Several calls under way, with the interface of ``Exchange``."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        self._works = works

    @property
    def error(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, seconds: float | None = None) -> None:
        for work in self._works:
            work.wait(None if seconds is None else datetime.timedelta(seconds=seconds))
