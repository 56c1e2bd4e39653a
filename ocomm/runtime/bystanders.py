"""Finds the threads that could still submit something. While there is one, a waiting rank may yet go on.

A thread that is wrongly left out would turn a wait into an error, so every thread counts that is not known to serve
others only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from types import FrameType

from ocomm.runtime.frames import current_frames

#: Threads of libraries that only do what another thread asks for, and never call the user's training code. They are
#: recognised by a function on their stack: (end of the file's path, function).
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
#: The innermost functions of threads that have nothing to do: of a pool, of that which submits for graphs, and of those
#: that complete futures. A graph runs for some thread of Python, which waits for it and is looked at itself.
_IDLE = (
    (os.path.join("concurrent", "futures", "thread.py"), "_worker"),
    (os.path.join("ocomm_tf", "engine.py"), "run"),
    (os.path.join("ocomm_torch", "distributed", "futures.py"), "_run"),
)
_TENSORFLOW = os.sep + os.path.join("tensorflow", "python") + os.sep


#: Name of the thread that submits the collectives of TensorFlow's graphs.
TENSORFLOW = "ocomm-tensorflow"
#: Name of the threads that complete Torch's futures, and call the user's callbacks.
FUTURES = "ocomm-futures"


def is_ours(thread: threading.Thread) -> bool:
    """Returns True for a thread of ocomm that submits nothing for the user."""
    return thread.name == "ocomm" or (thread.name.startswith("ocomm-") and thread.name not in (TENSORFLOW, FUTURES))


def python_threads() -> dict[int, threading.Thread]:
    """Returns the live threads of Python, by ident.

    Python also lists a thread of C++ that has once called it, for example one of a framework's pool whose function has
    logged something. Such a thread counts only while it runs Python.
    """
    frames = current_frames()
    return {
        thread.ident: thread
        for thread in threading.enumerate()
        if thread.ident is not None and not (is_foreign(thread) and thread.ident not in frames)
    }


def idle(threads: Collection[int]) -> set[int]:
    """Returns those of ``threads`` that have nothing to do until another thread asks them."""
    frames = current_frames()
    return {thread for thread in threads if _is_idle(frames.get(thread))}


def is_foreign(thread: threading.Thread | None) -> bool:
    """Returns True for a thread that Python has not started. ``thread`` is its entry in ``python_threads``, if any."""
    return thread is None or isinstance(thread, threading._DummyThread)


def bystanders(waiting: Collection[int]) -> list[str]:
    """Returns the names of live Python threads that may still submit: those that are not in ``waiting`` and do not only
    serve others.

    Threads that Python does not know, such as those of a framework in C++, are left out: they work for threads it
    knows.
    """
    frames = current_frames()
    return sorted(
        thread.name
        for ident, thread in python_threads().items()
        if ident not in waiting and not is_ours(thread) and not _serves(frames.get(ident))
    )


def is_in_tensorflow(thread: int) -> bool:
    """Returns True if the innermost Python code of the thread is TensorFlow's, as while it waits for a graph."""
    frame = current_frames().get(thread)
    return frame is not None and _TENSORFLOW in frame.f_code.co_filename


def _serves(frame: FrameType | None) -> bool:
    if _is_idle(frame):
        return True
    while frame is not None:
        if any(_is(frame, *servant) for servant in _SERVANTS):
            return True
        frame = frame.f_back
    return False


def _is_idle(frame: FrameType | None) -> bool:
    return frame is not None and any(_is(frame, *innermost) for innermost in _IDLE)


def _is(frame: FrameType, path: str, function: str) -> bool:
    return frame.f_code.co_name == function and frame.f_code.co_filename.endswith(os.sep + path)
