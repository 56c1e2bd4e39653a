"""Where the tensors of a step are cut into buckets: pure decisions, and what they are based on.

A bucket leaves when its last gradient is there and the buckets before it are over. So the last should be small, for the
step waits for it, and the first should be early, for the network waits for that. How much of each depends on when
gradients arrive and how long their exchange takes. One rank measures both in some steps, and all cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: What posting a bucket takes, whatever is in it.
_POST_S = 3e-4


def even(numels: Sequence[int], count: int) -> list[int]:
    """The ends of at most ``count`` runs of about equal numbers of elements: each the number of tensors up to there."""
    total = max(sum(numels), 1)
    groups, done = [], 0
    for numel in numels:
        groups.append(min(done * count // total, count - 1))
        done += numel
    return [k for k in range(1, len(numels) + 1) if k == len(numels) or groups[k] != groups[k - 1]]


def timed(numels: Sequence[int], moments: Sequence[float], cost: float, count: int) -> list[int]:
    """The ends of at most ``count`` runs with which the exchange is over soonest.

    ``moments``: when each tensor's gradient arrives, in seconds, not before those ahead of it; ``cost``: seconds that
    the exchange of an element takes.
    """
    sizes = np.concatenate([[0], np.cumsum(numels)]) * cost
    # over[j]: when the first j tensors are over, in as many runs as there have been rounds.
    over = np.where(np.arange(sizes.size) == 0, 0.0, np.inf)
    best, ends = np.inf, [len(numels)]
    begins: list[NDArray[np.int64]] = []
    for _ in range(count):
        found, begin = np.full(sizes.size, np.inf), np.zeros(sizes.size, np.int64)
        for j in range(1, sizes.size):
            ways = np.maximum(over[:j], moments[j - 1]) + (sizes[j] - sizes[:j]) + _POST_S
            begin[j] = int(np.argmin(ways))
            found[j] = ways[begin[j]]
        begins.append(begin)
        over = found
        if over[-1] < best:
            best, ends = float(over[-1]), [len(numels)]
            for earlier in reversed(begins):
                ends.insert(0, int(earlier[ends[0]]))
            ends.pop(0)
    return ends


class Stopwatch:
    """What one rank sees in some steps: when its gradients arrive, and what the exchange of buckets takes at least."""

    def __init__(self, tensors: int) -> None:
        self._sums = np.zeros(tensors)
        self._counts = np.zeros(tensors, np.int64)
        self.cost = np.inf

    def saw(self, arrivals: Sequence[int], moments: Sequence[float], exchanges: Sequence[tuple[int, float]]) -> None:
        """One step: tensors with the moments at which they came, in seconds of any clock, and the elements of each
        bucket with the seconds that its exchange took."""
        if arrivals:
            self._sums[list(arrivals)] += np.array(moments) - moments[0]
            self._counts[list(arrivals)] += 1
        self.cost = min([self.cost, *(seconds / numel for numel, seconds in exchanges if numel)])

    def moments(self) -> NDArray[np.float64]:
        """When each tensor's gradient arrives, in the mean, after the first; 0 for one that never came."""
        return np.where(self._counts > 0, self._sums / np.maximum(self._counts, 1), 0.0)
