"""1-bit Lion for Torch: wraps any optimizer with learning rates, and makes steps in its place."""

from __future__ import annotations

from ocomm.optim import lion as optim
from ocomm_torch.optimizers.compressed import optimizer_face
from ocomm_torch.optimizers.rates import OPTIMIZER, RateOptimizer


@optimizer_face(optim.Lion, optimizer=OPTIMIZER)
class Lion(RateOptimizer):
    """Data-parallel Lion with a majority vote: exactly 1 bit per parameter and direction from the first step on.

    Each rank sends the sign of its own ``betas[0] * m + (1 - betas[0]) * g``, where m is the moving average of its
    gradient with ``betas[1]``. Then p = p * (1 - lr * wd) - lr * the sign that most ranks sent. Every parameter moves
    by lr in every step: begin with a third to a tenth of Adam's lr, and three to ten times its weight decay. In the
    hierarchical form each slice of a host's sum has as many votes as the host has ranks.
    """

    _core_class = optim.Lion


DistributedLion = Lion
