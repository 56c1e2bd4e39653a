"""A process beside Open MPI's launcher, which ends it if it hangs behind its ranks.

Where a rank ends while another one is in MPI_Init, prterun of Open MPI 5.0 kills the other ranks and then may wait for
itself in PMIx, for good; SIGTERM does not end it. ocommrun becomes the launcher of a job on one host, so it cannot look
for that itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from ocomm.launch.processes import children, stat

#: Seconds for which a launcher without ranks may do nothing.
_STILL_S = 10.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a launcher at one time.

    Args:
        now_s: The time.
        children: The processes that it has started and not forgotten, and whether each lives.
        is_asleep: Whether it waits for something; False if it runs, or has been stopped.
        used: The time of processors that it has used.
        is_read: Whether it could print something now: a full pipe may be what it waits for.
    """

    now_s: float
    children: Mapping[int, bool]
    is_asleep: bool
    used: int
    is_read: bool


class Stillness:
    """Decides whether a launcher hangs: all ranks that it has have ended, and for ``still_s`` it does nothing, not even
    take note of their end. One that does waits for something else, such as a process of a rank's that has its output.
    """

    def __init__(self, still_s: float) -> None:
        self._still_s = still_s
        self._used = -1
        self._since_s = 0.0

    def hangs(self, look: Look) -> bool:
        """Takes in a look at the launcher, and returns the decision."""
        has_ended = bool(look.children) and not any(look.children.values())
        if not (has_ended and look.is_asleep and look.is_read and look.used == self._used):
            self._used, self._since_s = look.used, look.now_s
        return look.now_s - self._since_s >= self._still_s


def start(launcher: str, still_s: float = _STILL_S, look_s: float = _LOOK_S) -> None:
    """Starts a process that ends this one if it hangs, once it has become ``launcher``. Does nothing where the system
    has no pidfd_open (Linux before 5.3), or allows no further process.

    The new process ends with this one. It is no child of it, and in a session of its own, where no signal of a terminal
    or of ``kill -- -GROUP`` finds it.
    """
    pid = os.getpid()
    try:
        end = os.pidfd_open(pid)
        child = _fork()
    except (AttributeError, OSError):
        return
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if not _fork():
            _watch(pid, end, launcher, still_s, look_s)
    finally:
        os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():  # of threads that the new process does not have: it needs none
        warnings.simplefilter("ignore")
        return os.fork()


def _watch(pid: int, end: int, launcher: str, still_s: float, look_s: float) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ending, output = select.poll(), select.poll()
    ending.register(end, select.POLLIN)
    for descriptor in (1, 2):
        output.register(descriptor, select.POLLOUT)
    stillness = Stillness(still_s)
    while not ending.poll(look_s * 1e3):
        ranks, fields = children(pid), stat(pid)
        used, is_read = int(fields[11]) + int(fields[12]), len(output.poll(0)) == 2
        if not stillness.hangs(Look(time.monotonic(), ranks, fields[0] == "S", used, is_read)):
            continue
        said = (
            f"ocommrun: all ranks have ended, and {launcher} hangs, as Open MPI's may where a rank ends while others "
            "are in init(). It is killed; look at the ranks' output for what has ended them.\n"
        )
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, said.encode(errors="replace"))
        signal.pidfd_send_signal(end, signal.SIGKILL)
