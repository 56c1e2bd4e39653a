"""What a user holds of an operation under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm.errors import OcommError
from ocomm.kernels.base import Bytes
from ocomm.negotiation.request import Request
from ocomm.telemetry.timeline import Timeline
from ocomm.types import Location

NOTHING: Bytes = np.zeros(0, np.uint8)
_LOOK_S = 1.0  # how often a wait looks whether there is still somebody to end it
_events = threading.Lock()  # held while a handle gets its event, or its list of listeners

#: Makes room for a result of this shape; called on the background thread, returns the bytes of the new tensor.
Allocate = Callable[[tuple[int, ...]], Bytes]
#: Hears, on the background thread, of tensors of a submission that are over, by position, and what went wrong.
Listener = Callable[[Sequence[int], OcommError | None], None]


@dataclass(slots=True)
class Submission:
    """Tensors that a frontend hands over at once: of each a request, where it is, and where its result goes.

    Contiguous bytes, as many as the request says, which belong to the runtime until the tensor is over; source and
    target may be the same. An ``Allocate`` where the result's size is only known to all ranks together. ``is_checked``:
    the requests have passed ``process_set.check_reduction``.
    """

    requests: list[Request]
    sources: list[Location]
    targets: list[Location | Allocate]
    is_checked: bool = False

    def add(self, request: Request, source: Location, target: Location | Allocate) -> None:
        self.requests.append(request)
        self.sources.append(source)
        self.targets.append(target)

    @classmethod
    def of(cls, request: Request, source: Location = NOTHING, target: Location | Allocate = NOTHING) -> Submission:
        """A single tensor."""
        return cls([request], [source], [target])


class Handle:
    """Of a submission. Its tensors are completed by the background thread, each once, in any order."""

    __slots__ = (
        "_errors", "_event", "_expect", "_left", "_listener", "_listeners", "_results", "positions", "submission",
        "timeline",
    )  # fmt: skip

    def __init__(
        self,
        submission: Submission,
        expect: Callable[[int, Handle], None],
        timeline: Timeline | None = None,
        listener: Listener | None = None,
    ) -> None:
        #: The runtime's, until it is over.
        self.submission = submission
        #: By name.
        self.positions = {request.name: position for position, request in enumerate(submission.requests)}
        #: The one that has its beginning.
        self.timeline = timeline
        self._expect = expect
        self._listener = listener
        self._left = len(submission.requests)
        self._results: list[Any] = [None] * self._left
        self._errors: dict[int, OcommError] = {}
        self._event: threading.Event | None = None
        self._listeners: list[Callable[[], None]] | None = None

    def poll(self) -> bool:
        """True once ``wait`` will not block."""
        return not self._left

    def complete(self, positions: Sequence[int], result: Any = None, error: OcommError | None = None) -> None:
        """``result``, of a tensor that was not fused, is whatever the operation made: sizes, a channel."""
        if error is not None:
            self._errors.update(dict.fromkeys(positions, error))
        elif result is not None:
            self._results[positions[0]] = result
        if self._listener is not None:
            self._listener(positions, error)
        self._left -= len(positions)  # before looking who is there: whoever comes later looks at this first
        if not self._left:
            if self._event is not None:
                self._event.set()
            if self._listeners is not None:
                self._tell()

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once all is over: on the background thread, whose time is everybody's, or here and now."""
        with _events:
            if self._listeners is None:
                self._listeners = []
        self._listeners.append(listener)
        if self.poll():
            self._tell()

    def _tell(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()  # a list.pop is atomic: nobody is told twice
            except IndexError:
                return
            listener()

    def wait(self, seconds: float | None = None) -> list[Any]:
        """Waits for the end of all tensors and returns their results, in order; raises what went wrong with the first
        that failed. TimeoutError after ``seconds``.

        The runtime bounds every operation by its own deadlines, and a wait looks every second whether the runtime is
        still there: so waiting without a limit ends too.
        """
        if self._left:
            with _events:
                if self._event is None:
                    self._event = threading.Event()
            event = self._event
            if not self._left:
                event.set()
            self._expect(1, self)
            try:
                end = None if seconds is None else time.monotonic() + seconds
                while not event.wait(_LOOK_S if end is None else min(_LOOK_S, max(end - time.monotonic(), 0.0))):
                    if end is not None and time.monotonic() >= end:
                        raise TimeoutError(f"'{next(iter(self.positions))}' is not over after {seconds} s")
                    self._expect(0, self)
            finally:
                self._expect(-1, self)
        if self._errors:
            raise self._errors[min(self._errors)].with_traceback(None)
        return self._results
