"""What a user holds of an operation under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ocomm.errors import OcommError
from ocomm.kernels.base import Bytes
from ocomm.negotiation.request import Request
from ocomm.telemetry.timeline import Timeline

_events = threading.Lock()  # held while a handle gets its event, or its list of listeners


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


class Handle:
    """Completed once, by the background thread. ``result`` is whatever the operation made: sizes, a channel.

    There is one for every tensor of every step, and most are never waited for: an event is made for who waits.
    """

    __slots__ = ("_error", "_event", "_expect", "_listeners", "_over", "name", "result", "submission", "timeline")

    def __init__(
        self,
        submission: Submission,
        expect: Callable[[int, str], None],
        timeline: Timeline | None = None,
        listener: Callable[[], None] | None = None,
    ) -> None:
        self.name = submission.request.name
        #: The runtime's, until it is over.
        self.submission = submission
        #: The one that has its beginning.
        self.timeline = timeline
        self.result: Any = None
        self._expect = expect
        self._error: OcommError | None = None
        self._over = False
        self._event: threading.Event | None = None
        self._listeners: list[Callable[[], None]] | None = None if listener is None else [listener]

    def poll(self) -> bool:
        """True once ``wait`` will not block."""
        return self._over

    def complete(self, result: Any = None, error: OcommError | None = None) -> None:
        self.result = result
        self._error = error
        self._over = True  # before looking who is there: whoever comes later looks at this first
        if self._event is not None:
            self._event.set()
        if self._listeners is not None:
            self._tell()

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once it is over: on the background thread, whose time is everybody's, or here and now."""
        with _events:
            if self._listeners is None:
                self._listeners = []
        self._listeners.append(listener)
        if self._over:
            self._tell()

    def _tell(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()  # a list.pop is atomic: nobody is told twice
            except IndexError:
                return
            listener()

    def _awaited(self) -> threading.Event:
        """The event that is set when it is over."""
        with _events:
            if self._event is None:
                self._event = threading.Event()
        if self._over:
            self._event.set()
        return self._event

    def wait(self, seconds: float | None = None) -> Any:
        """Waits for the end and returns ``result``; raises what went wrong. TimeoutError after ``seconds``.

        The runtime bounds every operation by its own deadlines, so waiting without a limit ends too.
        """
        if not self._over:
            event = self._awaited()
            self._expect(1, self.name)
            try:
                if not event.wait(seconds):
                    raise TimeoutError(f"'{self.name}' is not over after {seconds} s")
            finally:
                self._expect(-1, self.name)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self.result
