"""The frames of all threads, without the deadlock of CPython up to 3.11.8."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """``sys._current_frames()``: by a thread's ident, its innermost frame.

    The garbage collector is off meanwhile. CPython holds a lock on the list of threads while it makes the dictionary;
    if that sets off a collection, and a finalizer in it lets go of the GIL, every thread then waits for one of the two
    (https://github.com/python/cpython/issues/106883, mended in 3.11.9 and 3.12).
    """
    with _lock:  # one caller's `enable` would come into another's call
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
