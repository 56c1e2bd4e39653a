"""Birder and SoftSignSGD for Torch. They wrap any optimizer with learning rates, and make steps in its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ocomm.api import Average
from ocomm.optim import birder, soft_sign
from ocomm.optim.birder import BirderOptions
from ocomm.optim.soft_sign import SoftSignSGDOptions
from ocomm.training.common import Common
from ocomm_torch.compressed import documented
from ocomm_torch.mesh import chosen_ranks
from ocomm_torch.rates import OPTIMIZER, RateOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@documented(SoftSignSGDOptions, optimizer=OPTIMIZER)
class SoftSignSGD(RateOptimizer):
    """Data-parallel SoftSignSGD: p = p * (1 - lr * wd) - lr * mean over ranks of m / (b + 1e-12), exchanged densely.

    m and b are moving averages, with ``beta``, of this rank's gradient and of its magnitude.

    ``step`` changes parameters in place, identically on all ranks, or on none. Making the optimizer and its steps are
    collective.

    Args:
        {arguments}

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things.
        NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity.
        SettingsError: An option of the algorithm has an impossible value.
    """

    _core_class = soft_sign.SoftSignSGD

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
        op: int = Average,
        compression: type[Any] | None = None,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
    ) -> None:
        common = replace(Common.of(locals()), hierarchical=False)
        super().__init__(
            optimizer, named_parameters, chosen_ranks(process_set, mesh, data), SoftSignSGDOptions.of(locals()), common
        )


@documented(BirderOptions, optimizer=OPTIMIZER)
class Birder(RateOptimizer):
    """Data-parallel Birder: SoftSignSGD with exactly 1 bit per parameter and direction from the first step on.

    Each rank sends the sign of m / (b + 1e-12) plus its error, and the servers the sign of the average plus theirs;
    with ``stochastic=True`` random signs with that mean. What a sign loses is the error of the next step. Every
    parameter moves by lr in every step, so tune lr and ``beta``: on a small language model Adam's lr and a ``beta`` of
    0.8 were best, and 0.9 ended higher at every lr. The default is the paper's.

    ``step`` changes parameters in place, identically on all ranks, or on none. Making the optimizer and its steps are
    collective.

    Args:
        {arguments}

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things.
        NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity.
        SettingsError: An option of the algorithm has an impossible value.
    """

    _core_class = birder.Birder

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        beta: float = 0.95,
        stochastic: bool = False,
        seed: int = 0,
        amsgrad_after: int | None = None,
        block_size: int | Literal["tensor"] = 4096,
        overlap: bool = True,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        op: int = Average,
        compression: type[Any] | None = None,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
    ) -> None:
        chosen = BirderOptions.of(locals()), Common.of(locals())
        super().__init__(optimizer, named_parameters, chosen_ranks(process_set, mesh, data), *chosen)


DistributedSoftSignSGD = SoftSignSGD
DistributedBirder = Birder
