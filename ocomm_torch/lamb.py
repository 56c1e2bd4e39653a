"""1-bit LAMB for Torch: it wraps ``torch.optim.Adam`` or ``AdamW`` for their param groups, and steps in their place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Floats
from ocomm.session import Session
from ocomm.training.driver import Common, Group
from ocomm.training.lamb import LambDriver
from ocomm_torch.adam import AdamWrapper


class OneBitLamb(AdamWrapper):
    """Data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per parameter and direction.

    LAMB multiplies the learning rate of each tensor by its trust ratio, |p| / |update|, for large batches: a step is as
    long as lr times the parameter, whatever the gradient. So it wants an lr of its own.

    ``optimizer`` is a ``torch.optim.Adam`` or ``AdamW`` over CPU parameters: float32, or bfloat16 or float16, of which
    float32 masters are trained. lr, betas, eps (up to the freeze) and weight_decay, which is part of the update
    whichever it is, are read from its groups at every step, so LR schedulers on either object work. Its own step is
    never made; if it has a state, the warm-up goes on from that.

    ``min_coeff`` and ``max_coeff`` bound the trust ratio; ``coeff_beta`` is of its moving average, whose value at the
    freeze the 1-bit steps take: the warm-up should have more than 1 / (1 - coeff_beta) steps. They multiply it by a
    factor that follows the variance, between ``factor_min`` and ``factor_max``; from step to step it changes by at most
    ``factor_threshold`` of itself.

    ``named_parameters``, ``freeze_step``, ``warm_start``, ``block_size``, ``scale``, ``variance_floor``, ``overlap``,
    ``mask_refresh``, ``max_grad_norm``, ``clip``, ``verify``, ``backward_passes_per_step`` and ``hierarchical`` are
    those of ``OneBitAdam``. After a warm start there is no average: the trust ratio of a tensor's
    first step is kept.

    ``step`` changes parameters in place, identically on all ranks, or on none: a NaN raises NonFiniteError everywhere.
    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things,
    SettingsError for bounds that cannot be.
    """

    _driver: LambDriver
    trains_on_devices = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        block_size: int | Literal["tensor"] = 4096,
        scale: Literal["l1", "rms"] = "rms",
        variance_floor: float = 0.05,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        process_set: Any = None,
    ) -> None:
        self._common = Common(block_size, overlap, max_grad_norm, clip, verify, backward_passes_per_step, hierarchical)
        self._options: dict[str, Any] = {
            "freeze_step": freeze_step,
            "scale": scale,
            "variance_floor": variance_floor,
            "mask_refresh": mask_refresh,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        super().__init__(optimizer, named_parameters, process_set, backward_passes_per_step, warm_start)

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> LambDriver:
        assert session.kernels is not None
        options = {**self._options, "warm_start": self._read_warm_start(session.kernels)}
        return LambDriver(session, process_set, specs, self, self._common, optimizer="LAMB", **options)

    # The driver's host

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return replace(super()._group(number, group), coupled_decay=0.0, decoupled_decay=float(group["weight_decay"]))

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor; its m, v, which begin as zeros, and the number of that step."""
        momentum, variance, step = self.started(tensor)
        self.state[self._parameters[tensor]]["step"] += 1
        return momentum, variance, step + 1


DistributedOneBitLamb = OneBitLamb
