"""Submissions, and the handles with which a user's thread waits for them."""

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
_LOOK_S = 1.0  # how often a wait checks that the background thread, which would end it, is still there
_events = threading.Lock()  # held while a handle gets its event, or its list of listeners

#: Allocates a result of a shape and returns its bytes; called on the background thread.
Allocate = Callable[[tuple[int, ...]], Bytes]
#: Called on the background thread with the positions of a submission's tensors that are over, and their error.
Listener = Callable[[Sequence[int], OcommError | None], None]


@dataclass(slots=True)
class Submission:
    """Tensors that a frontend submits at once: for each a request, its source, and the target of its result.

    Sources and targets are contiguous bytes, as many as the request says. They belong to the runtime until the tensor
    is over, and may be the same. A target is an ``Allocate`` if the size of the result is known only to all ranks
    together. ``is_checked``: the requests have passed ``plans.check_reduction``.
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
        """Returns a submission of a single tensor."""
        return cls([request], [source], [target])


class Handle:
    """Waits for a submission. The background thread completes its tensors, each once, in any order."""

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
        #: Belongs to the runtime until it is over.
        self.submission = submission
        #: Position of each tensor in the submission, by name.
        self.positions = {request.name: position for position, request in enumerate(submission.requests)}
        #: The timeline in which the submission's spans have begun.
        self.timeline = timeline
        self._expect = expect
        self._listener = listener
        self._left = len(submission.requests)
        self._results: list[Any] = [None] * self._left
        self._errors: dict[int, OcommError] = {}
        self._event: threading.Event | None = None
        self._listeners: list[Callable[[], None]] | None = None

    def poll(self) -> bool:
        """Returns True once ``wait`` will not block."""
        return not self._left

    def complete(self, positions: Sequence[int], result: Any = None, error: OcommError | None = None) -> None:
        """Completes the tensors at these positions, with an error or a result.

        ``result`` is set for a tensor that was not fused: the sizes or the channel that the operation has made.
        """
        if error is not None:
            self._errors.update(dict.fromkeys(positions, error))
        elif result is not None:
            self._results[positions[0]] = result
        if self._listener is not None:
            self._listener(positions, error)
        self._left -= len(positions)  # before looking for waiters: a thread that comes later looks at this first
        if not self._left:
            if self._event is not None:
                self._event.set()
            if self._listeners is not None:
                self._tell()

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once all tensors are over: on the background thread, so it must be quick, or here if that
        is so already.
        """
        with _events:
            if self._listeners is None:
                self._listeners = []
        self._listeners.append(listener)
        if self.poll():
            self._tell()

    def _tell(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()  # list.pop is atomic, so no listener is called twice
            except IndexError:
                return
            listener()

    def wait(self, seconds: float | None = None) -> list[Any]:
        """Waits for the end of all tensors and returns their results, in order.

        Raises the error of the first tensor that failed, and TimeoutError after ``seconds``. Without a limit the wait
        ends, too: every operation has a deadline of the runtime, and the wait checks every second that the runtime is
        still there.
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
