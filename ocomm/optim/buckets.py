"""Where the tensors of a step are cut into buckets: a pure decision.

A bucket leaves when its last gradient is there and those before it have left. So what comes last should be small, for
the step waits for it, and what comes first should be early, for the network waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence


def even(numels: Sequence[int], count: int) -> list[int]:
    """The ends of at most ``count`` runs of about equal numbers of elements: each the number of tensors up to there."""
    total = max(sum(numels), 1)
    groups, done = [], 0
    for numel in numels:
        groups.append(min(done * count // total, count - 1))
        done += numel
    return [k for k in range(1, len(numels) + 1) if k == len(numels) or groups[k] != groups[k - 1]]
