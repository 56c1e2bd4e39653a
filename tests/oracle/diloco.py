"""DiLoCo on n ranks in plain NumPy: the law for the core, the runtime and the frontend.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners. Everything is float32, one
operation at a time. What a rank does between syncs is not simulated: the caller changes ``thetas``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.dense_codes import DenseCodes
from tests.oracle.ef_sgd import compressed
from tests.oracle.onebit_adam import Array, F


class Signs:
    """1 bit with error feedback: the errors of one tensor, and its averages over ``workers`` workers."""

    def __init__(self, numel: int, workers: int, blocks: Sequence[slice]) -> None:
        self.blocks = blocks
        self.errors = np.zeros((workers, numel), F)
        self.server_error = np.zeros(numel, F)

    def average(self, local: Sequence[Array]) -> Array:
        result = np.zeros(self.server_error.size, F)
        for block in self.blocks:
            total = None
            for error, values in zip(self.errors, local, strict=True):
                c = values[block] + error[block]
                sent = compressed(c)
                error[block] = c - sent
                total = sent if total is None else total + sent
            assert total is not None
            a = total * F(1 / len(local)) + self.server_error[block]
            result[block] = compressed(a)
            self.server_error[block] = a - result[block]
        return result


class DiLoCo:
    """``thetas[rank][tensor]`` are the parameters of each rank, flat, which ``end_step`` syncs.

    Args:
        params: The parameters at the start, the same on all ranks.
        ranks: The number of ranks.
        fragments: The tensors of each fragment.
        sync_every: H.
        lr: Of the outer optimizer.
        momentum: Of the outer optimizer.
        bits: 32, 8, 4 or 1.
        delay: Steps from the beginning of a sync to its end.
        mix: How much of its own parameters a rank keeps.
        block_size: Elements of a block.
        nodes: Ranks per node; a node's changes are added up, weighted by nodes / ranks. None: every rank is a node.
        rounded: Rounds to the parameters' type.
        constrained: Maps an anchor, in a tensor's shape, to the values that the tensor may have.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        fragments: Sequence[Sequence[int]],
        *,
        sync_every: int,
        lr: float = 0.9,
        momentum: float = 0.6,
        bits: int = 32,
        delay: int = 0,
        mix: float = 0.0,
        block_size: int = 4096,
        nodes: Sequence[int] | None = None,
        rounded: Callable[[Array], Array] = lambda x: x,
        constrained: Callable[[Array], Array] = lambda x: x,
    ) -> None:
        self.ranks, self.fragments = ranks, fragments
        self.period, self.delay = sync_every // len(fragments), delay
        self.lr, self.mu, self.mix, self.bits = F(lr), F(momentum), mix, bits
        self.nodes = [1] * ranks if nodes is None else list(nodes)
        self.rounded, self.constrained = rounded, constrained
        self.shapes = [np.shape(p) for p in params]
        self.taken = 0
        self.anchors = [np.array(p, F).reshape(-1) for p in params]
        self.momenta = [np.zeros(a.size, F) for a in self.anchors]
        self.thetas = [[a.copy() for a in self.anchors] for _ in range(ranks)]
        self.deltas: list[list[Array]] = []
        self.codes: list[DenseCodes | Signs | None] = []
        for anchor in self.anchors:
            starts = range(0, anchor.size, block_size)
            blocks = [slice(start, min(start + block_size, anchor.size)) for start in starts]
            if bits == 32:
                self.codes.append(None)
            elif bits == 1:
                self.codes.append(Signs(anchor.size, len(self.nodes), blocks))
            else:
                self.codes.append(DenseCodes(anchor.size, len(self.nodes), bits, blocks))

    def end_step(self) -> None:
        """After a step of all ranks: begins and ends what is due."""
        self.taken += 1
        if (self.taken + self.delay) % self.period == 0:
            self.deltas = self.measured((self.taken + self.delay) // self.period - 1)
        if self.taken % self.period == 0:
            self.sync(self.taken // self.period - 1)

    def measured(self, number: int) -> list[list[Array]]:
        """What the ranks send of fragment ``number``, by tensor."""
        tensors = self.fragments[number % len(self.fragments)]
        return [[self.anchors[t] - theta[t] for theta in self.thetas] for t in tensors]

    def sync(self, number: int) -> None:
        for tensor, local in zip(self.fragments[number % len(self.fragments)], self.deltas, strict=True):
            mean = self.average(tensor, local)
            self.momenta[tensor] = self.momenta[tensor] * self.mu + mean
            move = (self.mu * self.momenta[tensor] + mean) * self.lr
            anchor = self.constrained((self.anchors[tensor] - move).reshape(self.shapes[tensor])).reshape(-1)
            self.anchors[tensor] = anchor
            for theta in self.thetas:
                kept = F(1 - self.mix) * anchor + F(self.mix) * theta[tensor] if self.mix else anchor.copy()
                theta[tensor] = self.rounded(kept)

    def average(self, tensor: int, local: Sequence[Array]) -> Array:
        workers = self.of_workers(local)
        codes = self.codes[tensor]
        if codes is not None:
            return codes.average(workers)
        total = workers[0]
        for values in workers[1:]:
            total = total + values
        return total * F(1 / len(workers))

    def of_workers(self, local: Sequence[Array]) -> list[Array]:
        """One change per node: the sum over its ranks, in their order, weighted if nodes have several."""
        if len(self.nodes) == self.ranks:
            return list(local)
        result, first = [], 0
        for size in self.nodes:
            total = local[first]
            for values in local[first + 1 : first + size]:
                total = total + values
            result.append(total * F(len(self.nodes) / self.ranks))
            first += size
        return result

    def finish(self, unfinished: Sequence[int]) -> None:
        """Syncs these fragments, in this order; then all parameters are the anchors. Nothing is under way."""
        for number in unfinished:
            self.deltas = self.measured(number)
            self.sync(number)
        for theta in self.thetas:
            theta[:] = [self.rounded(anchor.copy()) for anchor in self.anchors]
