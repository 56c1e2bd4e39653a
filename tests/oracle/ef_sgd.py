"""dist-EF-SGD on n ranks in plain NumPy: the law for the core, the runtime and the frontends.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners (who keeps a block's server error
does not change it). Everything is float32, one operation at a time. ``Paper`` is the algorithm as published, in
float64, with its ratio of step sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.birder import inside_nodes
from tests.oracle.clipping import Clipping
from tests.oracle.onebit_adam import Array, F, Gradients, _lane_sum


@dataclass
class Tensor:
    """One parameter, flat, with every worker's momentum and error, and the errors of its owners."""

    param: Array
    momenta: list[Array]
    errors: list[Array]
    server_error: Array


class EFSGD:
    """``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks.

    ``nodes``: ranks per node. A node's gradients are added up before anything else, and weighted by nodes / ranks; it
    is then one worker. If it is None, every rank is a node.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        lr: float | Callable[[int], float] = 1e-2,
        momentum: float = 0.0,
        nesterov: bool = False,
        coupled: float = 0.0,
        decoupled: float = 0.0,
        block_size: int = 4096,
        nodes: Sequence[int] | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        self.clipping = clipping
        self.nodes = [1] * ranks if nodes is None else list(nodes)
        assert sum(self.nodes) == ranks
        self.ranks = ranks
        self.lr = lr if callable(lr) else lambda t: lr
        self.momentum, self.nesterov = momentum, nesterov
        self.coupled, self.decoupled = coupled, decoupled
        self.block_size = block_size
        self.taken = 0
        self.shapes = [np.shape(p) for p in params]
        self.tensors: list[Tensor] = []
        for p in params:
            flat = np.array(p, F).reshape(-1)
            momenta, errors = ([np.zeros(flat.size, F) for _ in self.nodes] for _ in range(2))
            self.tensors.append(Tensor(flat, momenta, errors, np.zeros(flat.size, F)))

    @property
    def params(self) -> list[Array]:
        """Copies, in their shapes."""
        return [x.param.reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def step(self, gradients: Gradients) -> None:
        self.taken += 1
        lr, mu = self.lr(self.taken), self.momentum
        factor = self.clipping.factor(gradients, self.taken) if self.clipping else 1.0
        of_m, of_g = (mu * mu, 1 + mu) if self.nesterov else (mu, 1.0)
        for number, x in enumerate(self.tensors):
            local = [None if g[number] is None else np.asarray(g[number], F).reshape(-1) for g in gradients]
            if all(g is None for g in local):
                continue  # nobody touches its state
            c = []
            workers = inside_nodes([np.zeros(x.param.size, F) if g is None else g for g in local], self.nodes)
            for m, error, g in zip(x.momenta, x.errors, workers, strict=True):
                decayed = g + F(self.coupled / factor) * x.param if self.coupled else g
                c.append(F(lr) * (F(of_m) * m + F(of_g * factor) * decayed) + error)
                m[:] = F(mu) * m + F(factor) * decayed
            update = self._exchange(x, c)
            x.param = x.param * F(1 - lr * self.decoupled)
            x.param = x.param - update

    def _exchange(self, x: Tensor, c: list[Array]) -> Array:
        update = np.zeros(x.param.size, F)
        for start in range(0, x.param.size, self.block_size):
            block = slice(start, min(start + self.block_size, x.param.size))
            total = None
            for values, error in zip(c, x.errors, strict=True):
                sent = compressed(values[block])
                error[block] = values[block] - sent
                total = sent if total is None else total + sent
            assert total is not None
            a = total * F(1 / len(c)) + x.server_error[block]
            update[block] = compressed(a)
            x.server_error[block] = a - update[block]
        return update


def compressed(values: Array) -> Array:
    """The mean of the sizes times the signs; the sign of 0 is +1."""
    scale = _lane_sum(np.abs(values)) * F(1 / values.size)
    return np.where(values >= 0, scale, -scale).astype(F)


class Paper:
    """Algorithm 4 of arXiv 1905.10936 on one tensor of one block, in float64: dist-EF-blockSGDM."""

    def __init__(self, param: Array, ranks: int, momentum: float, nesterov: bool = True) -> None:
        self.param = param.astype(np.float64)
        self.mu, self.nesterov = momentum, nesterov
        self.m, self.e = np.zeros((2, ranks, param.size))
        self.server_e = np.zeros(param.size)
        self.last_lr: float | None = None

    def step(self, gradients: Sequence[Array], lr: float) -> None:
        ratio = 1.0 if self.last_lr is None else self.last_lr / lr
        sent = []
        for i, g in enumerate(gradients):
            self.m[i] = self.mu * self.m[i] + g
            p = (self.mu * self.m[i] + g if self.nesterov else self.m[i]) + ratio * self.e[i]
            sent.append(self._c(p))
            self.e[i] = p - sent[-1]
        p = np.mean(sent, axis=0) + ratio * self.server_e
        update = self._c(p)
        self.server_e = p - update
        self.param -= lr * update
        self.last_lr = lr

    @staticmethod
    def _c(p: Array) -> Array:
        return np.abs(p).mean() * np.where(p >= 0, 1.0, -1.0)
