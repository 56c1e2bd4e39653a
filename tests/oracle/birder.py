"""Birder and SoftSignSGD on n ranks in plain NumPy: the law for the cores, the kernels, the runtime and the frontends.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners (who keeps a block's server error
does not change it), no blocks. Everything is float32, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.clipping import Clipping

F = np.float32
Array = np.ndarray
#: gradients[rank][tensor]; None: no gradient there.
Gradients = Sequence[Sequence[Array | None]]

OWNERS = 0xFFFFFFFF


def uniform(seed: int, index: Array, step: int, stream: int) -> Array:
    """U of the elements with these indices: 24 bits of Philox-4x32-7."""
    quad = index.astype(np.uint64) // np.uint64(4)
    full = np.uint64(0xFFFFFFFF)
    x = [quad & full, quad >> np.uint64(32), np.full_like(quad, step), np.full_like(quad, stream)]
    key = [seed % 2**32, seed // 2**32]
    for _ in range(7):
        left, right = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (right // np.uint64(2**32)) ^ x[1] ^ np.uint64(key[0]),
            right & full,
            (left // np.uint64(2**32)) ^ x[3] ^ np.uint64(key[1]),
            left & full,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    word = np.choose(index % 4, x)
    return (word // np.uint64(256)).astype(F) * F(2.0**-24)


def inside_nodes(local: list[Array], nodes: Sequence[int]) -> list[Array]:
    """One gradient per worker: the weighted sum over its ranks, in their order."""
    result, first = [], 0
    for size in nodes:
        total = local[first]
        for g in local[first + 1 : first + size]:
            total = total + g
        result.append(total * F(len(nodes) / len(local)))
        first += size
    return result


@dataclass
class Tensor:
    """One parameter, flat, with what every worker (a rank, or a node) keeps of it."""

    param: Array
    index: Array
    momenta: list[Array]
    magnitudes: list[Array]
    errors: list[Array]
    server_error: Array


class SoftSign:
    """SoftSignSGD. ``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks.

    ``nodes``, for Birder: ranks per node. A node's gradients are added up before anything else, and weighted by
    nodes / ranks; it is then one worker. If it is None, every rank is.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        lr: float | Callable[[int], float] = 1e-3,
        beta: float = 0.95,
        weight_decay: float = 0.0,
        eps: float = 1e-12,
        amsgrad_after: int | None = None,
        nodes: Sequence[int] | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        self.clipping = clipping
        self.nodes = [1] * ranks if nodes is None else list(nodes)
        assert sum(self.nodes) == ranks
        self.ranks = ranks
        self.lr = lr if callable(lr) else lambda t: lr
        self.beta = beta
        self.weight_decay = weight_decay
        self.eps = eps
        self.amsgrad_after = amsgrad_after
        self.committed = 0
        self.shapes = [np.shape(p) for p in params]
        self.tensors: list[Tensor] = []
        first = 0
        for p in params:
            flat = np.array(p, F).reshape(-1)
            index = np.arange(first, first + flat.size)
            first += flat.size
            zeros = [[np.zeros(flat.size, F) for _ in self.nodes] for _ in range(3)]
            self.tensors.append(Tensor(flat, index, *zeros, np.zeros(flat.size, F)))

    @property
    def params(self) -> list[Array]:
        """Copies, in their shapes."""
        return [x.param.reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def step(self, gradients: Gradients) -> None:
        t = self.committed + 1
        lr = self.lr(t)
        over = F((1 - self.beta) * (self.clipping.factor(gradients, t) if self.clipping else 1.0))
        for number, x in enumerate(self.tensors):
            local = [None if g[number] is None else np.asarray(g[number], F).reshape(-1) for g in gradients]
            if all(g is None for g in local):
                continue  # nobody touches its state
            given = [np.zeros(x.param.size, F) if g is None else g for g in local]
            ratios = []
            for worker, g in enumerate(inside_nodes(given, self.nodes)):
                m = F(self.beta) * x.momenta[worker] + over * g
                b = F(self.beta) * x.magnitudes[worker] + over * np.abs(g)
                if self.amsgrad_after is not None and t > self.amsgrad_after:
                    b = np.maximum(x.magnitudes[worker], b)
                x.momenta[worker], x.magnitudes[worker] = m, b
                ratios.append(m / (b + F(self.eps)))
            update = self._average(x, ratios)
            x.param = x.param * F(1 - lr * self.weight_decay)
            x.param = x.param - F(lr) * update
        self.committed += 1

    def _average(self, x: Tensor, ratios: list[Array]) -> Array:
        assert len(self.nodes) == self.ranks, "nodes are for Birder"
        total = ratios[0]
        for ratio in ratios[1:]:
            total = total + ratio
        return total * F(1 / self.ranks)


class Birder(SoftSign):
    """As ``SoftSign``, with every ratio and every average replaced by signs, random ones if it is ``stochastic``."""

    def __init__(
        self, params: Sequence[Array], ranks: int, *, seed: int = 0, stochastic: bool = False, **settings: object
    ) -> None:
        super().__init__(params, ranks, **settings)  # type: ignore[arg-type]
        self.seed = seed
        self.stochastic = stochastic

    def _average(self, x: Tensor, ratios: list[Array]) -> Array:
        total = np.zeros(0, F)
        for worker, ratio in enumerate(ratios):
            u, x.errors[worker] = self._quantize(ratio + x.errors[worker], x.index, worker)
            part = F(self.nodes[worker] / self.ranks) * u
            total = part if worker == 0 else total + part
        update, x.server_error = self._quantize(total + x.server_error, x.index, OWNERS)
        return update

    def _quantize(self, y: Array, index: Array, stream: int) -> tuple[Array, Array]:
        """Signs of y, and what they leave of it."""
        drawn = uniform(self.seed, index, self.committed, stream) if self.stochastic else F(0.5)
        positive = drawn < (y + F(1)) * F(0.5)
        u = np.where(positive, F(1), F(-1))
        return u, y - u
