"""What a process uses, and whether that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import psutil

#: The steps that growth is stated for.
PER = 100_000
#: Bytes of resident memory, and numbers of descriptors, threads and files, by which ``PER`` steps may grow. The first
#: is 42 bytes a step.
LIMITS = {"rss": 4 << 20, "descriptors": 1.0, "threads": 1.0, "files": 1.0}
#: What the fit may rise in what was seen, whatever that would be in ``PER`` steps, because the allocator takes memory
#: in pieces. For the others it is less than one.
NOISE = {"rss": 512 << 10, "descriptors": 0.9, "threads": 0.9, "files": 0.9}


class Usage(NamedTuple):
    """What a process uses after ``step`` steps; ``files`` are those in a folder of commits."""

    step: int
    rss: int
    descriptors: int
    threads: int
    files: int = 0

    @classmethod
    def now(cls, step: int, pid: int | None = None, files: int = 0) -> Usage:
        process = psutil.Process(pid)
        return cls(step, process.memory_info().rss, process.num_fds(), process.num_threads(), files)

    def text(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def of(cls, text: str) -> Usage:
        return cls(*map(int, text.split()))


class Growth(NamedTuple):
    """How a usage has grown in the second half of what was seen: from the fit of a straight line, per ``PER`` steps."""

    what: str
    last: int
    per: float
    is_too_much: bool


def growth(seen: Sequence[Usage]) -> list[Growth]:
    """Returns the growth of everything in the second half of ``seen``, which has at least four entries."""
    later = seen[len(seen) // 2 :]
    steps = np.array([usage.step for usage in later], float)
    found = []
    for what, limit in LIMITS.items():
        values = [getattr(usage, what) for usage in later]
        slope = float(np.polyfit(steps, values, 1)[0])
        risen = slope * (steps[-1] - steps[0])
        found.append(Growth(what, values[-1], slope * PER, slope * PER > limit and risen > NOISE[what]))
    return found
