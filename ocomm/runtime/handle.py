"""What a user holds of an operation under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ocomm.errors import OcommError
from ocomm.kernels.base import Bytes
from ocomm.negotiation.request import Request


class Handle:
    """Completed once, by the background thread. ``result`` is whatever the operation made: sizes, a channel."""

    def __init__(self, name: str, expect: Callable[[int, str], None]) -> None:
        self.name = name
        self.result: Any = None
        self._expect = expect
        self._error: OcommError | None = None
        self._over = threading.Event()
        self._listeners: list[Callable[[], None]] = []

    def poll(self) -> bool:
        """True once ``wait`` will not block."""
        return self._over.is_set()

    def complete(self, result: Any = None, error: OcommError | None = None) -> None:
        self.result = result
        self._error = error
        self._over.set()
        self._tell()

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once it is over: on the background thread, whose time is everybody's, or here and now."""
        self._listeners.append(listener)
        if self._over.is_set():
            self._tell()

    def _tell(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()  # a list.pop is atomic: nobody is told twice
            except IndexError:
                return
            listener()

    def wait(self, seconds: float | None = None) -> Any:
        """Waits for the end and returns ``result``; raises what went wrong. TimeoutError after ``seconds``.

        The runtime bounds every operation by its own deadlines, so waiting without a limit ends too.
        """
        if not self._over.is_set():
            self._expect(1, self.name)
            try:
                if not self._over.wait(seconds):
                    raise TimeoutError(f"'{self.name}' is not over after {seconds} s")
            finally:
                self._expect(-1, self.name)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self.result


@dataclass(slots=True)
class Submission:
    """One tensor of one operation, as a frontend hands it over.

    ``source`` and ``target`` are the tensor's bytes (uint8, contiguous), which belong to the runtime until the handle
    is done; they may be the same. Where the result's size is only known to all ranks together, ``target`` is None and
    ``allocate`` is called with the result's shape, on the background thread; it returns the bytes of the new tensor.
    """

    request: Request
    source: Bytes
    target: Bytes | None = None
    allocate: Callable[[tuple[int, ...]], Bytes] | None = None
