"""Clipping by the norm N of the averaged gradient, which ranks know from sketches, in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Gradients = Sequence[Sequence[np.ndarray | None]]
BUCKETS, CHUNK, ROW = 1024, 1 << 17, 32


def mixed(word: int, position: int) -> int:
    x = (word + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    return (x ^ x >> 32) * 0xD6E8FEB86659FD93 % 2**64


def sketch(gradients: Sequence[np.ndarray | None], step: int) -> np.ndarray:
    """Returns what a rank sends of ``gradients`` in ``step``: sums of buckets as whole numbers times a scale."""
    sums = np.zeros(BUCKETS)
    for index, grad in enumerate(gradients):
        flat = np.zeros(0, np.float32) if grad is None else np.asarray(grad, np.float32).reshape(-1)
        for chunk in range(-(-flat.size // CHUNK)):
            part, key = np.zeros(BUCKETS + ROW, np.float32), mixed(mixed(step, index), chunk)
            values = flat[chunk * CHUNK : (chunk + 1) * CHUNK]
            for k in range(-(-values.size // ROW)):
                row, bits = values[k * ROW : (k + 1) * ROW], mixed(mixed(key, k), k)
                signs = 1 - 2 * ((bits >> ROW) >> np.arange(row.size) & 1)
                first = bits % BUCKETS
                part[first : first + row.size] += row * signs.astype(np.float32)
            part[:ROW] += part[BUCKETS:]
            sums += part[:BUCKETS]
    scale = np.abs(sums).max() / 127
    return scale * np.rint(sums / scale) if scale else sums


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

    def factor(self, gradients: Gradients, step: int) -> float:
        """``gradients[rank][tensor]`` of ``step``, counted from 1."""
        ranks = len(gradients)
        by_tensor = zip(*gradients, strict=True)
        average = [sum(np.asarray(g, np.float64) for g in given if g is not None) / ranks for given in by_tensor]
        now = math.sqrt(sum(float(np.square(g).sum()) for g in average))
        if ranks > 1:
            total = np.zeros(BUCKETS)
            for own in gradients:
                total += sketch(own, step)
            now = math.sqrt(math.fsum((total / ranks) ** 2))
        used = self.norm if self.previous and self.norm is not None else now
        self.norm = now
        self.factors.append(min(1.0, self.max_grad_norm / (used + 1e-6)))
        return self.factors[-1]
