"""1-bit Lion for Torch: wraps any optimizer with learning rates, and makes steps in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ocomm.api import Average
from ocomm.optim import lion as optim
from ocomm.optim.lion import LionOptions
from ocomm.training.common import Common
from ocomm_torch.compressed import documented
from ocomm_torch.mesh import chosen_ranks
from ocomm_torch.rates import OPTIMIZER, RateOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@documented(LionOptions, optimizer=OPTIMIZER)
class Lion(RateOptimizer):
    """Data-parallel Lion with a majority vote: exactly 1 bit per parameter and direction from the first step on.

    Each rank sends the sign of its own ``betas[0] * m + (1 - betas[0]) * g``, where m is the moving average of its
    gradient with ``betas[1]``. Then p = p * (1 - lr * wd) - lr * the sign that most ranks sent. Every parameter moves
    by lr in every step: begin with a third to a tenth of Adam's lr, and three to ten times its weight decay. In the
    hierarchical form each slice of a host's sum has as many votes as the host has ranks.

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

    _core_class = optim.Lion

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
        op: int = Average,
        compression: type[Any] | None = None,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
    ) -> None:
        chosen = LionOptions.of(locals()), Common.of(locals())
        super().__init__(optimizer, named_parameters, chosen_ranks(process_set, mesh, data), *chosen)


DistributedLion = Lion
