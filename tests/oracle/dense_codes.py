"""Dense averages in 16, 8 or 4 bits in plain NumPy: the law for the codes of the kernels and for the optimizers.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners. Everything is float32, one
operation at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

F = np.float32
Array = np.ndarray
GROUP = 128
LEAST = F(2.0**-100)


def bfloat16(c: Array) -> Array:
    """The nearest bfloat16 of finite values, of two the even one."""
    words = c.astype(F).view(np.uint32).astype(np.uint64)
    rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(F)


def sent(c: Array, bits: int, blocks: Sequence[slice]) -> Array:
    """What the codes of c stand for; scales are those of groups, counted from the start of each block."""
    if bits == 16:
        return bfloat16(c)
    levels = F(127 if bits == 8 else 7)
    meant = np.zeros(c.size, F)
    for block in blocks:
        for start in range(block.start, block.stop, GROUP):
            group = slice(start, min(start + GROUP, block.stop))
            largest = np.abs(c[group]).max()
            if largest >= LEAST:
                q = np.rint(c[group] * (levels / largest))
                # q is a whole number, which has no negative zero.
                meant[group] = (q + F(0)) * (largest / levels)
    return meant


class DenseCodes:
    """The dense errors of one tensor of ``numel`` elements, and its averages over ``workers`` workers.

    With a ``beta`` errors are moving averages, which are zeroed after every ``reset``-th average.
    """

    def __init__(self, numel: int, workers: int, bits: int, blocks: Sequence[slice], beta: float = 0.0) -> None:
        self.bits, self.blocks = bits, blocks
        self.beta, self.reset = beta, 1024
        self.averages = 0
        self.errors = [np.zeros(numel, F) for _ in range(workers)]
        self.server_error = np.zeros(numel, F)

    def average(self, local: Sequence[Array]) -> Array:
        """The average of what the workers' gradients are sent as."""
        keeps = self.bits != 16
        self.averages += 1
        total = None
        for worker, g in enumerate(local):
            c = g + self.errors[worker] if keeps else g
            message = sent(c, self.bits, self.blocks)
            if keeps:
                self.errors[worker] = self.kept(self.errors[worker], c - message)
            total = message if total is None else total + message
        assert total is not None
        a = total * F(1 / len(local))
        if keeps:
            a = a + self.server_error
        result = sent(a, self.bits, self.blocks)
        if keeps:
            self.server_error = self.kept(self.server_error, a - result)
        return result

    def kept(self, error: Array, lost: Array) -> Array:
        """The error after an average that has lost ``lost``."""
        if not self.beta:
            return lost
        if self.averages % self.reset == 0:
            return np.zeros_like(lost)
        return F(self.beta) * error + F(1 - self.beta) * lost
