"""Clipping by the agreed norm N = sqrt(mean over ranks of |g|^2), in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Clipping:
    """``factor`` is by what the gradients of a step count. ``previous``: N is that of the last step, once there is one.

    A factor f goes into the update rule as (1 - beta1) * f, rounded to float32 once, and into a coupled weight decay as
    wd / f; an average that is used by itself is multiplied by float32(f).
    """

    def __init__(self, max_grad_norm: float, *, previous: bool) -> None:
        self.max_grad_norm = max_grad_norm
        self.previous = previous
        self.norm: float | None = None
        #: All factors so far.
        self.factors: list[float] = []

    def factor(self, gradients: Sequence[Sequence[np.ndarray | None]]) -> float:
        """``gradients[rank][tensor]``."""
        squares = [sum(float((g.astype(np.float64) ** 2).sum()) for g in own if g is not None) for own in gradients]
        now = math.sqrt(sum(squares) / len(squares))
        used = self.norm if self.previous and self.norm is not None else now
        self.norm = now
        self.factors.append(min(1.0, self.max_grad_norm / (used + 1e-6)))
        return self.factors[-1]
