"""1-bit LAMB for Torch: wraps ``torch.optim.Adam`` or ``AdamW`` for its param groups, and makes steps in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ocomm.kernels.base import Floats
from ocomm.optim import lamb as optim
from ocomm.optim.core import Group
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_torch.optimizers.adam import AdamWrapper
from ocomm_torch.optimizers.compressed import optimizer_face


@optimizer_face(
    optim.Lamb,
    memory={"offload"},
    optimizer=(
        "A ``torch.optim.Adam`` or ``AdamW`` over CPU parameters, or with ``offload`` on one GPU: float32, or "
        "bfloat16 or float16 with float32 masters. lr, betas, eps (up to the freeze) and weight_decay, which is "
        "part of the update for both classes, are read from its groups at every step, so LR schedulers on either "
        "object work. Its own step is never called. If it has a state, the warm-up continues from that."
    ),
)
class OneBitLamb(AdamWrapper):
    """Data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per parameter and direction.

    For large batches LAMB multiplies the learning rate of each tensor by its trust ratio, |p| / |update|: a step is as
    long as lr times the parameter, whatever the gradient. So it needs another lr than Adam. After a warm start there is
    no average of the trust ratio; that of a tensor's first step is kept.
    """

    _core_class = optim.Lamb
    _driver_class = OneBitAdamDriver
    trains_on_devices = False
    needs_whole_tensors = True
    most_state_nbytes = 44

    # For the driver

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return replace(super()._group(number, group), coupled_decay=0.0, decoupled_decay=float(group["weight_decay"]))

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor. Returns its m and v, which begin as zeros, and the number of that step."""
        momentum, variance, step = self.started(tensor)
        self.state[self._parameters[tensor]]["step"] += 1
        return momentum, variance, step + 1


DistributedOneBitLamb = OneBitLamb
