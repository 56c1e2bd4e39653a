"""How much gradients are shrunk so that their norm has a limit."""

from __future__ import annotations

import math


def clip_factor(norm: float, limit: float) -> float:
    """Returns by what values of a norm are multiplied, as ``torch.nn.utils.clip_grad_norm_`` does."""
    return min(1.0, limit / (norm + 1e-6))


class Clipping:
    """Decides the factor of each step's gradients from N, the norm of their average.

    Args:
        limit: ``max_grad_norm``; None if nothing is clipped.
        by_previous: Whether N of the last step is used, for which no gradient has to wait.
    """

    def __init__(self, limit: float | None, by_previous: bool) -> None:
        self.limit = limit
        self.by_previous = by_previous
        #: N of the last step whose gradients were clipped by it; None before it.
        self.norm: float | None = None
        #: True if the gradients of the step under way are clipped by N, False if nothing or their average is clipped.
        self.is_on = False
        #: True if the ranks must agree on N before anything of the step under way is sent.
        self.needs_round = False

    def begin(self, is_on: bool) -> float:
        """Begins a step whose gradients are clipped by N if ``is_on``. Returns their factor; 1 until N is known."""
        self.is_on = is_on
        self.needs_round = is_on and not (self.by_previous and self.norm is not None)
        return 1.0 if self.needs_round or not is_on else self.factor(self.norm)

    def factor(self, norm: float | None) -> float:
        """Returns the factor for N. It is 1 where N is not finite: the exchange says whose gradient is not."""
        if self.limit is None or norm is None or not math.isfinite(norm):
            return 1.0
        return clip_factor(norm, self.limit)
