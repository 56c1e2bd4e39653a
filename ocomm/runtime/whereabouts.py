"""Where a thread of the user's is, for messages to people. Looked up when somebody asks, never before."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])
_OURS = tuple(_PACKAGE + suffix + os.sep for suffix in ("", "_torch", "_tf"))
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def whereabouts(threads: Iterable[int]) -> str:
    """``train.py:12 in step``: the innermost line of the user's own code that one of the threads is in.

    The main thread's where there are none; "" if there is none, as in a process that only runs libraries.
    """
    frames = sys._current_frames()
    for thread in [*threads, threading.main_thread().ident]:
        frame = frames.get(thread or 0)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith((*_OURS, *_LIBRARIES, "<")):
                return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
            frame = frame.f_back
    return ""
