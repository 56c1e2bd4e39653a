"""Threads that may still submit something: while there are any, a rank that waits is not certain to wait for ever.

Whoever decides this must never be wrong in one direction: a thread that is not known to be a servant of others counts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from types import FrameType

from ocomm.runtime.frames import current_frames

#: Threads that only do what another thread asks them to, known by a function on their stack: of libraries that do not
#: call the user's training code there. (end of the file's path, function)
_SERVANTS = tuple(
    (os.path.join(*path.split("/")), function)
    for path, function in (
        ("torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop"),
        ("torch/_inductor/compile_worker/subproc_pool.py", "_read_thread"),
        ("multiprocessing/queues.py", "_feed"),
        ("tqdm/_monitor.py", "run"),
        ("tensorboard/summary/writer/event_file_writer.py", "run"),
        ("tensorboard/summary/writer/event_file_writer.py", "_run"),
    )
)
#: An idle thread of a pool waits for work in this function itself.
_IDLE = os.path.join("concurrent", "futures", "thread.py"), "_worker"
_TENSORFLOW = os.sep + os.path.join("tensorflow", "python") + os.sep


#: Submits what graphs of TensorFlow hand it.
TENSORFLOW = "ocomm-tensorflow"


def is_ours(thread: threading.Thread) -> bool:
    """Is it one of ocomm's own, which submit nothing for the user?"""
    return thread.name == "ocomm" or (thread.name.startswith("ocomm-") and thread.name != TENSORFLOW)


def bystanders(waiting: Collection[int]) -> list[str]:
    """The names of live Python threads that may still submit: those which neither are in ``waiting`` nor only serve
    others.

    Threads that Python does not know of, a framework's in C++, say, are left out: they work for those it knows.
    """
    frames = current_frames()
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in waiting and not is_ours(thread) and not _serves(frames.get(thread.ident or 0))
    )


def is_in_tensorflow(thread: int) -> bool:
    """Is the thread's innermost Python code TensorFlow's: does it wait for a graph, say?"""
    frame = current_frames().get(thread)
    return frame is not None and _TENSORFLOW in frame.f_code.co_filename


def _serves(frame: FrameType | None) -> bool:
    if frame is not None and _is(frame, *_IDLE):
        return True
    while frame is not None:
        if any(_is(frame, *servant) for servant in _SERVANTS):
            return True
        frame = frame.f_back
    return False


def _is(frame: FrameType, path: str, function: str) -> bool:
    return frame.f_code.co_name == function and frame.f_code.co_filename.endswith(os.sep + path)
