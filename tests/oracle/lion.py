"""1-bit Lion on n ranks in plain NumPy: the law for the core, the kernels, the runtime and the frontends.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners, no blocks. Everything is
float32, one operation at a time; votes are counted in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.birder import OWNERS, Array, F, Gradients, inside_nodes, uniform
from tests.oracle.clipping import Clipping


@dataclass
class Tensor:
    """One parameter, flat, with every worker's momentum."""

    param: Array
    index: Array
    momenta: list[Array]


class Lion:
    """``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks.

    ``nodes``: ranks per node. A node's gradients are added up before anything else, and weighted by nodes / ranks; it
    is then one worker, with a vote for each of its ranks. If it is None, every rank is a node.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        lr: float | Callable[[int], float] = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        seed: int = 0,
        nodes: Sequence[int] | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        self.clipping = clipping
        self.nodes = [1] * ranks if nodes is None else list(nodes)
        assert sum(self.nodes) == ranks
        self.ranks = ranks
        self.lr = lr if callable(lr) else lambda t: lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.seed = seed
        self.committed = 0
        #: Elements that were equally often up and down, so far.
        self.ties = 0
        self.shapes = [np.shape(p) for p in params]
        self.tensors: list[Tensor] = []
        first = 0
        for p in params:
            flat = np.array(p, F).reshape(-1)
            index = np.arange(first, first + flat.size)
            first += flat.size
            self.tensors.append(Tensor(flat, index, [np.zeros(flat.size, F) for _ in self.nodes]))

    @property
    def params(self) -> list[Array]:
        """Copies, in their shapes."""
        return [x.param.reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def step(self, gradients: Gradients) -> None:
        lr = self.lr(self.committed + 1)
        factor = self.clipping.factor(gradients, self.committed + 1) if self.clipping else 1.0
        for number, x in enumerate(self.tensors):
            local = [None if g[number] is None else np.asarray(g[number], F).reshape(-1) for g in gradients]
            if all(g is None for g in local):
                continue  # nobody touches its state
            votes = np.zeros(x.param.size, np.int64)
            workers = inside_nodes([np.zeros(x.param.size, F) if g is None else g for g in local], self.nodes)
            for worker, g in enumerate(workers):
                m = x.momenta[worker]
                c = F(self.betas[0]) * m + F((1 - self.betas[0]) * factor) * g
                of_zero = 1 if (self.committed + worker) % 2 == 0 else -1
                votes += self.nodes[worker] * np.where(c == 0, of_zero, np.sign(c)).astype(np.int64)
                x.momenta[worker] = F(self.betas[1]) * m + F((1 - self.betas[1]) * factor) * g
            self.ties += int(np.count_nonzero(votes == 0))
            coin = np.where(uniform(self.seed, x.index, self.committed, OWNERS) < F(0.5), 1, -1)
            update = np.where(votes == 0, coin, np.sign(votes)).astype(F)
            x.param = x.param * F(1 - lr * self.weight_decay)
            x.param = x.param - F(lr) * update
        self.committed += 1


def plain(params: Sequence[Array], gradients: Sequence[Sequence[Array]], lr: float, wd: float) -> list[Array]:
    """Lion as published (Chen et al., algorithm 2), on one worker, where no element is ever 0; betas 0.9 and 0.99."""
    result = [np.array(p, F) for p in params]
    momenta = [np.zeros_like(p) for p in result]
    for grads in gradients:
        for i, g in enumerate(grads):
            update = np.sign(F(0.9) * momenta[i] + F(1 - 0.9) * g)
            result[i] = result[i] * F(1 - lr * wd) - F(lr) * update
            momenta[i] = F(0.99) * momenta[i] + F(1 - 0.99) * g
    return result
