"""Counts the calls of each site, and says which of them is to fail."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(f"{ROOT / name}/" for name in ("ocomm", "ocomm_torch"))
_TESTS = f"{ROOT / 'tests'}/"


@dataclass(frozen=True)
class Fault:
    """Call ``number``, from 1, of ``site`` fails; with ``lasting`` all later ones, too."""

    site: str
    number: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.site}, call {self.number}{' and all later ones' if self.lasting else ''}"


class Calls:
    """The calls of one rank, or of a process. From any thread."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.counts: Counter[str] = Counter()
        #: True once the fault has happened.
        self.has_failed = False
        self._lock = threading.Lock()

    def fails(self, site: str) -> bool:
        """Counts a call, and returns True if it is to fail."""
        with self._lock:
            self.counts[site] += 1
            number, fault = self.counts[site], self.fault
            now = fault is not None and site == fault.site and (
                number == fault.number or (fault.lasting and number > fault.number)
            )  # fmt: skip
            self.has_failed |= now
        return now


def faults(counts: Mapping[str, int], lasting: bool = False) -> list[Fault]:
    """Returns the faults at the first, second and last call of each site; with ``lasting`` also, for each, one that
    lasts from the second call on.
    """
    found = []
    for site, count in sorted(counts.items()):
        found += [Fault(site, number) for number in sorted({1, min(2, count), count})]
        if lasting:
            found.append(Fault(site, min(2, count), True))
    return found


def place(frame: FrameType | None) -> str | None:
    """Returns the nearest line of ocomm, from ``frame`` outwards, as "folder:_beside:178". Returns None if a test
    comes before it, or if there is none.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGES):
            return f"{Path(code.co_filename).stem}:{code.co_name}:{frame.f_lineno}"
        if code.co_filename.startswith(_TESTS):
            return None
        frame = frame.f_back
    return None


def caller(depth: int = 2) -> str:
    """Returns the line of ocomm that has called the caller of this function."""
    return place(sys._getframe(depth)) or "test"
