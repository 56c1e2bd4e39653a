"""Adam on flat float32 arrays: the dense steps of frontends whose own Adam is another formula than Torch's.

    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Every operation is rounded to float32, in the order of ``torch.optim.Adam``; ``g`` contains a coupled decay already.
"""

from __future__ import annotations

import math

import numpy as np

from ocomm.kernels.base import Floats, aligned_zeros


class DenseAdam:
    """m, v and the step count of one tensor of ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        self.momentum = aligned_zeros(numel)
        self.variance = aligned_zeros(numel)
        self.step = 0

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
