"""1-bit Lion for Torch: it wraps any optimizer that has learning rates, and steps in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.session import Session
from ocomm.training.driver import Common
from ocomm.training.lion import LionDriver
from ocomm_torch.rates import RateOptimizer


class Lion(RateOptimizer):
    """Data-parallel Lion with a majority vote: exactly 1 bit per parameter and direction from the first step on.

    Each rank sends the sign of its own ``betas[0] * m + (1 - betas[0]) * g``, m being the moving average of its
    gradient with ``betas[1]``; p = p * (1 - lr * wd) - lr * the sign that most ranks sent. Every parameter moves by lr
    in every step: a third to a tenth of Adam's lr, with three to ten times its weight decay, is where to begin.

    ``optimizer`` is any Torch optimizer over parameters in the host's memory or on one GPU,
    ``torch.optim.SGD(parameters, lr=...)`` for instance: ``lr`` and ``weight_decay`` (taken from the parameter, as
    in AdamW) are read from its groups at every step, so LR schedulers on either object work; its own step is never
    made. Parameters are float32, or bfloat16 or float16, of which float32 masters are trained.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``seed``: of the coin that
    decides where half of the ranks voted either way, the same on all ranks. ``block_size``: elements per block, or
    ``"tensor"``. ``overlap``: exchange during backward. ``max_grad_norm``: clips gradients by one norm for all ranks,
    N = sqrt(mean over ranks of |g|^2). ``clip``: ``"exact"`` takes this step's N, without overlap; ``"previous"`` the
    last step's, with it. ``verify``: how much of each gradient is read again to notice a change that Torch does not
    show (docs/checks.md): another 64th in each step (``"sampled"``), all of it (``"full"``), nothing (``"version"``).
    ``backward_passes_per_step``: gradients are summed over that many backward passes. ``hierarchical``: the ranks of a
    host add up their gradients, and each votes for a slice of them, with as many votes as the host has ranks;
    ``"auto"``: if there are several hosts, all with several ranks.

    ``step`` changes parameters in place, identically on all ranks, or on none: a NaN raises NonFiniteError everywhere.
    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things,
    SettingsError for betas or a seed that cannot be.
    """

    _driver: LionDriver

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        seed: int = 0,
        block_size: int | Literal["tensor"] = 4096,
        overlap: bool = True,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        process_set: Any = None,
    ) -> None:
        self._common = Common(block_size, overlap, max_grad_norm, clip, verify, backward_passes_per_step, hierarchical)
        self._options = {"betas": [float(beta) for beta in betas], "seed": seed}
        super().__init__(optimizer, named_parameters, process_set, backward_passes_per_step)

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> LionDriver:
        return LionDriver(session, process_set, specs, self, self._common, self._options)


DistributedLion = Lion
