"""Birder and SoftSignSGD for Torch: they wrap any optimizer that has learning rates, and step in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.session import Session
from ocomm.training.birder import BirderDriver
from ocomm.training.driver import Common
from ocomm_torch.rates import RateOptimizer


class SoftSignSGD(RateOptimizer):
    """Data-parallel SoftSignSGD: p = p * (1 - lr * wd) - lr * mean over ranks of m / (b + 1e-12), exchanged densely.

    m and b are moving averages, with ``beta``, of this rank's gradient and of its magnitude.

    ``optimizer`` is any Torch optimizer over parameters in the host's memory or on one GPU,
    ``torch.optim.SGD(parameters, lr=...)`` for instance: ``lr`` and ``weight_decay`` (taken from the parameter, as
    in AdamW) are read from its groups at every step, so LR schedulers on either object work; its own step is never
    made. Parameters are float32, or bfloat16 or float16, of which float32 masters are trained.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``amsgrad_after``: the number
    of steps after which b never falls; None: it may always. ``block_size``: elements per block, or ``"tensor"``.
    ``overlap``: exchange during backward. ``max_grad_norm``: clips gradients by one norm for all ranks,
    N = sqrt(mean over ranks of |g|^2). ``clip``: ``"exact"`` takes this step's N, without overlap; ``"previous"`` the
    last step's, with it. ``verify``: how much of each gradient is read again to notice a change that Torch does not
    show (docs/checks.md): another 64th in each step (``"sampled"``), all of it (``"full"``), nothing (``"version"``).
    ``backward_passes_per_step``: gradients are summed over that many backward passes.

    ``step`` changes parameters in place, identically on all ranks, or on none: a NaN raises NonFiniteError everywhere.
    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things.
    """

    _driver: BirderDriver
    _kind = "SoftSignSGD"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        beta: float = 0.95,
        amsgrad_after: int | None = None,
        block_size: int | Literal["tensor"] = 4096,
        overlap: bool = True,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        process_set: Any = None,
    ) -> None:
        common = Common(block_size, overlap, max_grad_norm, clip, verify, backward_passes_per_step, False)
        self._wrap(optimizer, named_parameters, process_set, common, beta=beta, amsgrad_after=amsgrad_after)

    def _wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        process_set: Any,
        common: Common,
        **options: Any,
    ) -> None:
        self._common, self._options = common, options
        RateOptimizer.__init__(self, optimizer, named_parameters, process_set, common.backward_passes_per_step)

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> BirderDriver:
        return BirderDriver(session, process_set, self._kind, specs, self, self._common, self._options)


class Birder(SoftSignSGD):
    """Data-parallel Birder: SoftSignSGD with exactly 1 bit per parameter and direction from the first step on.

    The ratio m / (b + 1e-12) of each rank, and the average at its owner, are replaced by random signs of the same mean;
    what that leaves is kept and added in the next step. Every parameter moves by lr in every step, so it wants another
    lr (and beta) than Adam: about two thirds of Adam's, with a ``beta`` of 0.8, was best on a small language model.

    ``stochastic``: the paper's random signs. False takes the sign itself, which is right on average over steps, not in
    each: what is kept stays in [-1, 1], and losses end nearer to Adam's (docs/decisions/0008). ``seed``: of the random
    signs, the same on all ranks. ``hierarchical``: the ranks of a host add up their gradients,
    and each compresses a slice of the sum; ``"auto"``: if there are several hosts, all with several ranks. The other
    arguments and errors are those of ``SoftSignSGD``.
    """

    _kind = "Birder"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        beta: float = 0.95,
        stochastic: bool = True,
        seed: int = 0,
        amsgrad_after: int | None = None,
        block_size: int | Literal["tensor"] = 4096,
        overlap: bool = True,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        process_set: Any = None,
    ) -> None:
        common = Common(block_size, overlap, max_grad_norm, clip, verify, backward_passes_per_step, hierarchical)
        options = {"beta": beta, "stochastic": stochastic, "seed": seed, "amsgrad_after": amsgrad_after}
        self._wrap(optimizer, named_parameters, process_set, common, **options)


DistributedSoftSignSGD = SoftSignSGD
DistributedBirder = Birder
