"""Plain data-parallel Adam on n ranks in ocomm's arithmetic, in plain NumPy: the law for sharded dense steps.

Written from docs/algorithms.md (Sharded dense steps) and nothing else: no ocomm code, no owners, no blocks. Everything
is float32, one operation at a time, but for factors, which are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

F = np.float32
Array = np.ndarray


class DenseAdam:
    """``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks."""

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        self.ranks = ranks
        self.lr = lr if callable(lr) else lambda t: lr
        self.betas, self.eps, self.limit = betas, eps, max_grad_norm
        self.coupled, self.decoupled = (0.0, weight_decay) if decoupled else (weight_decay, 0.0)
        self.params = [np.array(p, F) for p in params]
        self.momenta = [np.zeros_like(p) for p in self.params]
        self.variances = [np.zeros_like(p) for p in self.params]
        self.steps = [0] * len(self.params)
        self.t = 0

    def step(self, gradients: Sequence[Sequence[Array | None]]) -> None:
        """``gradients[rank][tensor]``; None: no gradient there."""
        self.t += 1
        averages = {}
        for k, p in enumerate(self.params):
            local = [g[k] for g in gradients]
            if any(g is not None for g in local):
                whole = [np.zeros_like(p) if g is None else np.asarray(g, F).reshape(p.shape) for g in local]
                total = whole[0].copy()
                for g in whole[1:]:
                    total += g
                averages[k] = total * F(1 / self.ranks)
        if self.limit is not None:
            norm = math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in averages.values()))
            factor = F(min(1.0, self.limit / (norm + 1e-6)))
            averages = {k: a * factor for k, a in averages.items()}
        for k, average in averages.items():
            self._update(k, average)

    def _update(self, k: int, g: Array) -> None:
        p, m, v = self.params[k], self.momenta[k], self.variances[k]
        self.steps[k] += 1
        t, lr, (beta1, beta2) = self.steps[k], self.lr(self.t), self.betas
        if self.coupled:
            g = g + F(self.coupled) * p
        if self.decoupled:
            p *= F(1 - lr * self.decoupled)
        m += F(1 - beta1) * (g - m)
        v *= F(beta2)
        v += F(1 - beta2) * g * g
        root = np.sqrt(v) / F(math.sqrt(1 - beta2**t)) + F(self.eps)
        p -= F(lr / (1 - beta1**t)) * (m / root)
