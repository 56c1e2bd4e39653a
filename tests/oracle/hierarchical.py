"""The hierarchical 1-bit allreduce of n ranks on nodes, in plain NumPy: no packing, no slices, no owners.

Who compresses a block and who keeps its errors does not change a result, so here a node is one worker. Everything is
float32, one operation at a time. Nodes of one rank each are the flat allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle.onebit_adam import Array, F, _lane_sum


def node_sums(nodes: Sequence[Sequence[int]], values: Sequence[Array]) -> list[Array]:
    """Each node's sum in the order of its ranks, times nodes/ranks: their mean is the mean over all ranks."""
    sums = []
    for node in nodes:
        total = values[node[0]].copy()
        for rank in node[1:]:
            total = total + values[rank]
        sums.append(total * F(len(nodes) / len(values)) if len(nodes) < len(values) else total)
    return sums


class Simulation:
    """``nodes`` are lists of ranks; every block of ``block_size`` elements has one scale."""

    def __init__(self, nodes: Sequence[Sequence[int]], numel: int, block_size: int = 4096) -> None:
        self.nodes = nodes
        self.blocks = [slice(start, min(start + block_size, numel)) for start in range(0, numel, block_size)]
        self.errors = [np.zeros(numel, F) for _ in nodes]
        self.server_error = np.zeros(numel, F)

    def step(self, values: Sequence[Array]) -> Array:
        """``values[rank]`` are flat; returns what every rank gets."""
        result = np.zeros(values[0].size, F)
        compensated = [x + error for x, error in zip(node_sums(self.nodes, values), self.errors, strict=True)]
        for block in self.blocks:
            total = None
            for node, c in enumerate(compensated):
                sent = _sent(c[block])
                self.errors[node][block] = c[block] - sent
                total = sent if total is None else total + sent
            a = total * F(1 / len(self.nodes)) + self.server_error[block]
            result[block] = _sent(a)
            self.server_error[block] = a - result[block]
        return result


def _sent(c: Array) -> Array:
    scale = _lane_sum(np.abs(c)) * F(1 / c.size)
    return np.where(c >= 0, scale, -scale)
