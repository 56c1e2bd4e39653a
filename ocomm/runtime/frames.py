"""The frames of all threads, without a deadlock of CPython up to 3.11.8."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """Returns ``sys._current_frames()``: the innermost frame of each thread, by the thread's ident.

    The garbage collector is off meanwhile. CPython holds a lock on the list of threads while it makes the dictionary.
    If that starts a collection, and a finalizer releases the GIL, every thread then waits for the lock or the GIL
    (https://github.com/python/cpython/issues/106883, fixed in 3.11.9 and 3.12).
    """
    with _lock:  # else one caller could enable the collector during another's call
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
