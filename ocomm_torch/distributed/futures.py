"""Futures of calls, and the thread of a group that completes them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ocomm.runtime.bystanders import FUTURES

_log = logging.getLogger("ocomm")
#: In a thread that completes futures, ``of`` is its ``Completer``.
_current = threading.local()


class Completer:
    """Completes the futures of a process group in a thread of its own, in the order in which it was asked to.

    The order is the same on all ranks, if that of the group's calls is.

    Args:
        name: The group's, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._is_closed = False

    def is_current(self) -> bool:
        """True in the thread that completes the futures."""
        return getattr(_current, "of", None) is self

    def later(self, complete: Callable[[], None]) -> None:
        """Makes the thread call ``complete``, after everything that it was asked to call before.

        In the thread itself, and once this is closed, ``complete`` is called at once, because the caller may wait for
        its result.
        """
        with self._lock:
            is_now = self._is_closed or self.is_current()
            if not is_now:
                if self._asked is None:
                    self._asked = queue.SimpleQueue()
                    threading.Thread(target=self._run, args=[self._asked], name=FUTURES, daemon=True).start()
                self._asked.put(complete)
        if is_now:
            complete()

    def close(self) -> None:
        """Ends the thread after what it was asked to call. Waits for nothing."""
        with self._lock:
            if not self._is_closed and self._asked is not None:
                self._asked.put(None)
            self._is_closed = True

    def _run(self, asked: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        _current.of = self
        while (complete := asked.get()) is not None:
            try:
                complete()
            except Exception:
                _log.exception("a callback of a future of process group %r failed", self._name)
            del complete


class _Failure:
    """The value of a future that has failed: its error is raised for everyone who looks for tensors in it.

    DistributedDataParallel's C++ does so, by pickling the value, and would read past the end of a list without any. The
    value that a communication hook returns it casts to a tensor instead, and asks for the text of what is none.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def tell(self) -> NoReturn:
        raise self._error

    def __reduce__(self) -> NoReturn:
        raise self._error

    def __str__(self) -> NoReturn:
        raise self._error


class Future(torch.futures.Future):
    """A future whose callbacks run in the thread of a completer, in the order in which they were added.

    A future of Torch's runs a callback in the thread that adds it if the future is complete by then, else in the thread
    that completes the future. Which of the two it is differs between ranks, and so does the order of the collectives
    that callbacks start.

    Args:
        completer: That of the group.
        result: Waits for what the future is of, and returns its result, or raises its error.
    """

    def __init__(self, completer: Completer, result: Callable[[], Any]) -> None:
        super().__init__()
        self._completer = completer
        self._result: Callable[[], Any] | None = result

    def complete(self) -> None:
        """Gives the future its result or error. A second call does nothing."""
        result, self._result = self._result, None
        if result is None:
            return
        try:
            found = result()
        except BaseException as error:
            # As Torch's set_exception does it, whose value is the error itself.
            self._set_unwrap_func(_Failure.tell)
            self.set_result(_Failure(error))
        else:
            self.set_result(found)

    def wait(self) -> Any:
        # A callback that waits for a future whose turn comes after its own would wait for itself.
        if self._completer.is_current():
            self.complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        def result() -> Any:
            self.complete()
            return callback(self)

        following = Future(self._completer, result)
        self._completer.later(following.complete)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._completer.later(lambda: callback(self))
