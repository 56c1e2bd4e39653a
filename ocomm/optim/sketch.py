"""Sketches of gradients in messages: what ranks send so that all know the norm of their average."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ocomm.kernels.base import SKETCH, Bytes

#: One standard deviation of the norm, relative to it: half of that of its square, which is sqrt(2 / SKETCH).
DEVIATION = math.sqrt(1 / (2 * SKETCH))
#: A scale in float64, and a code of 8 bits for each bucket.
SKETCH_NBYTES = 8 + SKETCH


def write_sketch(sums: NDArray[np.float64], message: Bytes) -> None:
    """Writes the sums of a sketch's buckets as whole numbers up to 127, times a scale. Rounding changes the square of a
    norm by 1e-4 where gradients are spread over buckets, by 0.5 % where one element outweighs all others, and by 5 %
    where all sums but one are half a unit.
    """
    scale = np.abs(sums).max() / 127
    message[:8].view(np.float64)[0] = scale
    codes = message[8:].view(np.int8)
    codes[:] = np.rint(sums / scale) if 0 < scale < math.inf else 0


def square_of_mean(messages: Sequence[Bytes]) -> float:
    """Returns the squared norm of the mean of the ranks' sketches, the same on all ranks: every sum is in rank order or
    rounded once. It is NaN or infinite if a sketch is.
    """
    total = np.zeros(SKETCH)
    for message in messages:
        scale = float(np.frombuffer(message[:8], np.float64)[0])
        if not math.isfinite(scale):
            return scale
        total += scale * message[8:].view(np.int8)
    return math.fsum(np.square(total / len(messages)).tolist())
