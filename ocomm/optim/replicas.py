"""Which bytes of the parameters a step compares between the ranks, to detect replicas that drift apart.

A step computes the checksum of one window of the parameters, laid end to end, and every rank writes it into its vote.
The windows follow each other, so all parameters are compared within ``steps`` steps, and a step reads ``1 / steps`` of
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ocomm.errors import MismatchError
from ocomm.kernels.base import Kernels

Addresses = Callable[[NDArray[np.int64]], NDArray[np.uint64]]


class ReplicasDifferError(MismatchError):
    """The ranks' parameters are not equal. All ranks raise it at the same step."""


class ReplicaWindows:
    """The windows of the parameters. A window depends on the step alone, so it is the same on all ranks.

    Args:
        nbytes: The size of each parameter in bytes.
        steps: The number of steps within which the windows cover all parameters; 0 for no windows.
        kernels: Compute the checksums.
        on_devices: True if some rank's parameters are on a device, where the host would wait for a checksum. Then one
            step in ``steps`` compares all parameters, and the others compare nothing.
    """

    def __init__(self, nbytes: NDArray[np.int64], steps: int, kernels: Kernels, *, on_devices: bool = False) -> None:
        self._kernels = kernels
        self._stride = steps if on_devices else 1
        self._ends = np.cumsum(nbytes, dtype=np.int64)
        self._count = -(-steps // self._stride) if self._stride and self._ends.size and self._ends[-1] else 0
        self._cut: dict[int, tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]] = {}

    def checksum(self, addresses: Addresses, steps: range) -> int:
        """Returns the checksum of the windows of ``steps``, those since the last comparison; 0 if they compare nothing.
        ``addresses(rows)`` returns those of parameters.
        """
        if not self._count:
            return 0
        found = 0
        for step in steps[-self._count * self._stride :]:
            if (step + 1) % self._stride == 0:
                rows, starts, nbytes = self._window(step // self._stride % self._count)
                found += self._sum(addresses(rows) + starts, nbytes)
        return found % (1 << 64)

    def whole(self, addresses: Addresses) -> int:
        """Returns the checksum of all parameters."""
        return self._sum(addresses(np.arange(self._ends.size)), np.diff(self._ends, prepend=0))

    def _sum(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64]) -> int:
        sums = self._kernels.checksums(addresses, nbytes)
        return int.from_bytes(hashlib.blake2b(sums.tobytes(), digest_size=8).digest(), "little")

    def _window(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
        """Returns the rows of the parameters that the window touches, and the first byte and number of bytes of
        each.
        """
        if number not in self._cut:
            total = int(self._ends[-1])
            low, high = (total * k // self._count // 4 * 4 for k in (number, number + 1))
            high = total if number + 1 == self._count else high
            rows = np.arange(np.searchsorted(self._ends, low, "right"), np.searchsorted(self._ends, high, "left") + 1)[
                : self._ends.size
            ]
            before = np.concatenate([np.zeros(1, np.int64), self._ends])[rows]
            first = np.maximum(low - before, 0)
            last = np.minimum(high, self._ends[rows]) - before
            some = last > first
            self._cut[number] = rows[some], first[some].astype(np.uint64), (last - first)[some]
        return self._cut[number]
