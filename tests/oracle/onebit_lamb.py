"""1-bit LAMB on n ranks in plain NumPy: the law for the core, the runtime and the frontends.

Written from docs/algorithms.md and nothing else. Layout, mask, floor, freeze and exchange are those of 1-bit Adam. What
belongs to an element is float32, one operation at a time; norms and ratios of whole tensors are float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle import onebit_adam
from tests.oracle.birder import inside_nodes
from tests.oracle.onebit_adam import Array, F, Gradients, Tensor


@dataclass
class Trust:
    """What LAMB keeps of a tensor besides Adam's."""

    average: float = 0.0
    count: int = 0
    coefficient: float | None = None
    factor: float = 1.0
    #: All factors so far.
    factors: list[float] = field(default_factory=list)
    fresh: Array = field(default_factory=lambda: np.zeros(0, F))


class Simulation(onebit_adam.Simulation):
    """``weight_decay`` is part of the update, as LAMB has it; other settings are those of 1-bit Adam."""

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        weight_decay: float = 0.0,
        coefficients: tuple[float, float] = (0.01, 10.0),
        coeff_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        **settings: Any,
    ) -> None:
        super().__init__(params, ranks, **settings)
        self.decay = weight_decay
        self.coefficients = coefficients
        self.coeff_beta = coeff_beta
        self.factors = factors
        self.factor_threshold = factor_threshold
        self.trust = {id(x): Trust() for x in self.tensors}

    def step(self, gradients: Gradients) -> None:
        self.shrink = self._clip_average(gradients)
        super().step(gradients)

    def _clip_average(self, gradients: Gradients) -> F:
        """While all tensors are in the warm-up their average is clipped by its own norm."""
        if self.clipping is None or any(x.compressed for x in self.tensors):
            return F(1)
        self.factor, squares = 1.0, 0.0
        for index, x in enumerate(self.tensors):
            local = [g[index] for g in gradients]
            if any(g is not None for g in local):
                zero = np.zeros(x.param.size, F)
                given = [zero if g is None else np.asarray(g, F).reshape(-1) for g in local]
                of_workers = inside_nodes(given, self.nodes)
                codes = copy.deepcopy(x.codes)
                squares += _squares(self._dense_average(x, of_workers))
                x.codes = codes
        return F(min(1.0, self.clipping.max_grad_norm / (math.sqrt(squares) + 1e-6)))

    def _dense_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        grad = self._dense_average(x, local) * self.shrink
        x.momentum = F(self.beta1) * x.momentum + F(1 - self.beta1) * grad
        x.variance = F(self.beta2) * x.variance + F(1 - self.beta2) * (grad * grad)
        root = np.sqrt(x.variance * F(1 / (1 - self.beta2**x.step)))
        update = (x.momentum * F(1 / (1 - self.beta1**x.step))) / (root + F(self.eps))
        if self.decay:
            update = update + F(self.decay) * x.param
        ratio = self._trust_ratio(x, update)
        if ratio is not None:
            trust = self.trust[id(x)]
            trust.average = self.coeff_beta * trust.average + (1 - self.coeff_beta) * ratio
            trust.count += 1
        x.param = x.param - F(lr * (1.0 if ratio is None else ratio)) * update

    def _trust_ratio(self, x: Tensor, update: Array) -> float | None:
        """|p| / |update|, within bounds; None where one of them is 0."""
        of_param, of_update = math.sqrt(_squares(x.param)), math.sqrt(_squares(update))
        if not of_param or not of_update:
            return None
        return min(max(of_param / of_update, self.coefficients[0]), self.coefficients[1])

    def _freeze_tensor(self, x: Tensor) -> None:
        super()._freeze_tensor(x)
        trust = self.trust[id(x)]
        trust.fresh = x.variance.copy()
        if trust.count:
            trust.coefficient = trust.average / (1 - self.coeff_beta**trust.count)

    def _compressed_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        trust = self.trust[id(x)]
        mbar = self._exchange(x, local)
        rebuilt = (mbar - F(self.beta1) * x.momentum) * F(1 / (1 - self.beta1))
        trust.fresh = F(self.beta2) * trust.fresh + F(1 - self.beta2) * (rebuilt * rebuilt)
        x.momentum = mbar
        adam = (mbar * F(1 / (1 - self.beta1**x.step))) / x.denominator
        update = adam + F(self.decay) * x.param if self.decay else adam
        factor = self._factor(x, trust, adam, update)
        if trust.coefficient is None:
            ratio = self._trust_ratio(x, update)
            trust.coefficient = 1.0 if ratio is None else ratio
        trust.factor = factor
        trust.factors.append(factor)
        x.param = x.param - F(lr * (trust.coefficient * factor)) * update

    def _factor(self, x: Tensor, trust: Trust, adam: Array, update: Array) -> float:
        """How much larger steps would be with the variance as it is now."""
        root = np.sqrt(trust.fresh * F(1 / (1 - self.beta2**x.step)))
        now = np.maximum(root, F(self.variance_floor) * x.root_mean) + F(self.eps)
        factor = float((x.denominator / now)[~x.mask].max())
        if self.decay:
            whole = math.sqrt(_squares(update))
            share = min(1.0, math.sqrt(_squares(adam)) / whole) if whole else 1.0
            factor = factor * share + (1.0 - share)
        factor = min(max(factor, self.factors[0]), self.factors[1])
        low, high = (trust.factor * (1 + sign * self.factor_threshold) for sign in (-1, 1))
        return min(max(factor, low), high)

    def _wake(self) -> None:
        masks = [x.mask for x in self.tensors]
        super()._wake()
        for x, before in zip(self.tensors, masks, strict=True):
            if x.compressed:
                woken = before & ~x.mask
                root = x.root_mean[woken]
                self.trust[id(x)].fresh[woken] = root * root * F(1 - self.beta2**x.step)


def _squares(values: Array) -> float:
    """Sum of squares in float64: lane k of 32 sums elements k, k + 32, ...; lanes fold by halves."""
    table = np.zeros((-(-values.size // 32), 32))
    table.reshape(-1)[: values.size] = values.reshape(-1)
    lanes = np.zeros(32)
    for row in table * table:
        lanes = lanes + row
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return float(lanes[0])
