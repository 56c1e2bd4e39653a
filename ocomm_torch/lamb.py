"""1-bit LAMB for Torch: wraps ``torch.optim.Adam`` or ``AdamW`` for its param groups, and makes steps in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ocomm.api import Average
from ocomm.kernels.base import Floats
from ocomm.optim import lamb as optim
from ocomm.optim.core import Group
from ocomm.optim.lamb import LambOptions
from ocomm.training.common import Common
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_torch.adam import AdamWrapper
from ocomm_torch.compressed import documented
from ocomm_torch.memory_options import MemoryOptions
from ocomm_torch.mesh import chosen_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@documented(LambOptions)
class OneBitLamb(AdamWrapper):
    """Data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per parameter and direction.

    For large batches LAMB multiplies the learning rate of each tensor by its trust ratio, |p| / |update|: a step is as
    long as lr times the parameter, whatever the gradient. So it needs another lr than Adam. After a warm start there is
    no average of the trust ratio; that of a tensor's first step is kept.

    ``step`` changes parameters in place, identically on all ranks, or on none. Making the optimizer and its steps are
    collective.

    Args:
        optimizer: A ``torch.optim.Adam`` or ``AdamW`` over CPU parameters, or with ``offload`` on one GPU: float32, or
            bfloat16 or float16 with float32 masters. lr, betas, eps (up to the freeze) and weight_decay, which is part
            of the update for both classes, are read from its groups at every step, so LR schedulers on either object
            work. Its own step is never called. If it has a state, the warm-up continues from that.
        {arguments}

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things.
        NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity.
        SettingsError: An option of the algorithm has an impossible value.
    """

    _core_class = optim.Lamb
    _driver_class = OneBitAdamDriver
    trains_on_devices = False
    needs_whole_tensors = True
    most_state_nbytes = 44

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        total_steps: int | None = None,
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
        dense_bits: Literal[32, 16, 8, 4] = 32,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        op: int = Average,
        compression: type[Any] | None = None,
        gradient_predivide_factor: float = 1.0,
        offload: bool | str | os.PathLike[str] = False,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
    ) -> None:
        chosen = LambOptions.of(locals()), Common.of(locals())
        memory = MemoryOptions.of(locals())
        super().__init__(
            optimizer, named_parameters, chosen_ranks(process_set, mesh, data), *chosen, warm_start, memory
        )

    # For the driver

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return replace(super()._group(number, group), coupled_decay=0.0, decoupled_decay=float(group["weight_decay"]))

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor. Returns its m and v, which begin as zeros, and the number of that step."""
        momentum, variance, step = self.started(tensor)
        self.state[self._parameters[tensor]]["step"] += 1
        return momentum, variance, step + 1


DistributedOneBitLamb = OneBitLamb
