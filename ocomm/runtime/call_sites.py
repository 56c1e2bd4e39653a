"""Finds the line of the user's code that a thread is in, for messages. Used when a report is made, or for a call
without a name.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ocomm.runtime.frames import current_frames

_PACKAGE = str(Path(__file__).resolve().parents[1])
_OURS = tuple(_PACKAGE + suffix + os.sep for suffix in ("", "_torch", "_tf"))
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_line(threads: Iterable[int]) -> str:
    """Returns the innermost line of the user's own code that one of the threads is in, as ``train.py:12 in step``.

    Looks at the main thread if there are no threads. Returns "" if there is no such line, as in a process that only
    runs libraries.
    """
    frames = current_frames()
    for thread in [*threads, threading.main_thread().ident]:
        frame = frames.get(thread or 0)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith((*_OURS, *_LIBRARIES, "<")):
                return _line(frame)
            frame = frame.f_back
    return ""


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


class Caller(NamedTuple):
    """The line that calls, as ``user_line`` gives it, and a 64-bit hash of the text of that call and of those around
    it.
    """

    line: str
    digest: int


#: Stands for the caller of a call with a name, which is not looked up.
NOBODY = Caller("", 0)


def caller() -> Caller:
    """Returns the line of the user's code that has called ocomm in this thread.

    The hash is made of the calls' text and the names of their files. So it is the same if a package is installed
    elsewhere, and in two branches of an ``if`` that make the same call.
    """
    frame: FrameType | None = sys._getframe(1)
    said, line = [], ""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_OURS, "<frozen")):
            key = code.co_filename, code.co_name, frame.f_lineno, frame.f_lasti
            text = _texts.get(key)
            if text is None:
                text = _texts[key] = f"{os.path.basename(code.co_filename)} {_call_text(frame)}"
            said.append(text)
            if not line and not code.co_filename.startswith((*_LIBRARIES, "<")):
                line = _line(frame)
        frame = frame.f_back
    hashed = hashlib.blake2b("\n".join(said).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return Caller(line, int.from_bytes(hashed, "little") or 1)


#: The text of calls, by file, function, line and instruction.
_texts: dict[tuple[str, str, int, int], str] = {}


def _call_text(frame: FrameType) -> str:
    """Returns the text of the call that a frame is in, without white space; else its source line, else the line's
    number.
    """
    code = frame.f_code
    first, last, start, end = frame.f_lineno, frame.f_lineno, None, None
    if hasattr(code, "co_positions"):  # since Python 3.11
        position = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
        if None not in position:
            first, last, start, end = position
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    if lines and start is not None:  # columns count bytes
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
    return "".join(b"".join(lines).decode(errors="replace").split()) or f"line {frame.f_lineno}"
