"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
#: None where the system is not Linux.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the program's name, the process's state first; none if there is no
    such process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_of(pid: int) -> str:
    """Returns the time at which the process began, which together with its number identifies it."""
    fields = stat(pid)
    return fields[19] if fields else ""


def offspring(ancestor: int) -> dict[int, str]:
    """Returns the numbers, and start times, of all descendants of a process. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and (fields := stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: dict[int, str] = {}
    left = [ancestor]
    while left:
        for child in children.get(left.pop(), []):
            found[child] = start_of(child)
            left.append(child)
    return found


def children(pid: int) -> dict[int, bool]:
    """Returns the numbers of the children of a process, and whether each lives; else it waits for its parent to take
    note of its end. Empty if the system has no lists of children. Raises OSError if the process itself has ended.
    """
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        # Another thread has the children of one that has ended since.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return {child: fields[0] not in "ZX" for child in found if (fields := stat(child))}


def end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process when the thread that has started it ends.

    Called between fork and exec: it waits for nothing that another thread may have held.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))


def kill_group(pid: int) -> None:
    """Kills the process ``pid``, which began a session of its own, and all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
