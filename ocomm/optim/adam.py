"""Adam on flat float32 arrays, with the same bits in every framework.

For the dense steps of frontends whose own Adam is another formula than Torch's, and of all ranks where they are of
several frameworks: Torch's own kernels round differently.

    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Every operation is rounded to float32, in the order of ``torch.optim.Adam``; ``g`` contains a coupled decay already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ocomm.kernels.base import Floats, aligned_zeros


@dataclass(slots=True)
class DenseAdam:
    """m and v of one tensor, which are changed in place, and its step count."""

    momentum: Floats
    variance: Floats
    step: int = 0

    @classmethod
    def fresh(cls, numel: int) -> DenseAdam:
        """Before the first step of a tensor of ``numel`` elements."""
        return cls(aligned_zeros(numel), aligned_zeros(numel))

    def update(
        self, param: Floats, grad: Floats, *, lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        """One step of ``param``, in place; ``decay`` is taken from the parameter. ``grad`` is not changed."""
        self.step += 1
        beta1, beta2 = betas
        if decay:
            param *= np.float32(1 - lr * decay)
        self.momentum += np.float32(1 - beta1) * (grad - self.momentum)
        self.variance *= np.float32(beta2)
        self.variance += np.float32(1 - beta2) * grad * grad
        root = np.sqrt(self.variance)
        root /= np.float32(math.sqrt(1 - beta2**self.step))
        root += np.float32(eps)
        param -= np.float32(lr / (1 - beta1**self.step)) * (self.momentum / root)
