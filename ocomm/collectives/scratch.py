"""Reused memory for fusion and staging buffers: fresh pages cost more than the copies into them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ocomm.kernels.base import ALIGNMENT as ALIGNMENT
from ocomm.kernels.base import Bytes
from ocomm.kernels.base import aligned as aligned


class Scratch:
    """Owns idle buffers of at most ``limit_nbytes`` in all. ``new`` allocates a buffer of a number of bytes.
    Thread-safe.
    """

    def __init__(self, limit_nbytes: int, new: Callable[[int], Bytes] = aligned) -> None:
        self.limit_nbytes = limit_nbytes
        self._new = new
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []
        self._idle_nbytes = 0

    def take(self, nbytes: int) -> Bytes:
        """Returns a buffer of ``nbytes``: the smallest idle one that fits and wastes less than half, else a new one."""
        with self._lock:
            fits = [b for b in self._idle if nbytes <= b.nbytes <= 2 * nbytes + 4096]
            if fits:
                best = min(fits, key=lambda b: b.nbytes)
                self._idle = [b for b in self._idle if b is not best]
                self._idle_nbytes -= best.nbytes
                return best
        return self._new(max(nbytes, 1))

    def give(self, buffers: list[Bytes]) -> None:
        """Takes buffers back; drops the oldest idle ones over the limit."""
        with self._lock:
            self._idle += buffers
            self._idle_nbytes += sum(b.nbytes for b in buffers)
            while self._idle and self._idle_nbytes > self.limit_nbytes:
                self._idle_nbytes -= self._idle.pop(0).nbytes
