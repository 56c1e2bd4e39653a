"""Birder and SoftSignSGD for Torch. They wrap any optimizer with learning rates, and make steps in its place."""

from __future__ import annotations

from ocomm.optim import birder, soft_sign
from ocomm_torch.optimizers.compressed import optimizer_face
from ocomm_torch.optimizers.rates import OPTIMIZER, RateOptimizer


@optimizer_face(soft_sign.SoftSignSGD, optimizer=OPTIMIZER)
class SoftSignSGD(RateOptimizer):
    """Data-parallel SoftSignSGD: p = p * (1 - lr * wd) - lr * mean over ranks of m / (b + 1e-12), exchanged densely.

    m and b are moving averages, with ``beta``, of this rank's gradient and of its magnitude.
    """

    _core_class = soft_sign.SoftSignSGD


@optimizer_face(birder.Birder, optimizer=OPTIMIZER)
class Birder(RateOptimizer):
    """Data-parallel Birder: SoftSignSGD with exactly 1 bit per parameter and direction from the first step on.

    Each rank sends the sign of m / (b + 1e-12) plus its error, and the servers the sign of the average plus theirs;
    with ``stochastic=True`` random signs with that mean. What a sign loses is the error of the next step. Every
    parameter moves by lr in every step, so tune lr and ``beta``: on a small language model Adam's lr and a ``beta`` of
    0.8 were best, and 0.9 ended higher at every lr. The default is the paper's.
    """

    _core_class = birder.Birder


DistributedSoftSignSGD = SoftSignSGD
DistributedBirder = Birder
