"""1-bit Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW``, which makes the steps of the warm-up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ocomm.kernels.base import Floats
from ocomm.optim import onebit_adam as optim
from ocomm.optim.adam import DenseAdam
from ocomm.training.adam import dense_step
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_torch.memory.placement import FilePlacement
from ocomm_torch.optimizers.adam import AdamWrapper
from ocomm_torch.optimizers.checkpoint import step_count
from ocomm_torch.optimizers.compressed import optimizer_face
from ocomm_torch.optimizers.replicas import way_of
from ocomm_torch.optimizers.wrapped import step_without_hooks


@optimizer_face(
    optim.OneBitAdam,
    memory={"offload", "free_gradients"},
    optimizer=(
        "A ``torch.optim.Adam`` or ``AdamW`` over parameters in the host's memory or on one GPU: float32, or "
        "bfloat16 or float16 with float32 masters. Its param groups stay in use (lr, betas, weight_decay, LR "
        "schedulers on either object; eps up to the freeze), and its step makes the warm-up steps. If it has a "
        "state already, the warm-up continues from that."
    ),
)
class OneBitAdam(AdamWrapper):
    """Data-parallel 1-bit Adam (arXiv 2102.02888): Adam at first, then 1 bit per parameter and direction."""

    _core_class = optim.OneBitAdam
    _driver_class = OneBitAdamDriver
    _driver: OneBitAdamDriver

    # For the driver

    def implementation(self) -> str:
        """Returns the wrapped class, how it computes, and with which instructions."""
        with self._masters.standing_in(self._inner):
            return way_of(self._inner, self.param_groups)

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        """Makes the wrapped optimizer's own step on the averaged gradients of tensors in warm-up, clipped to
        ``max_norm``.

        If the ranks' own steps would round differently (several frameworks, flags or kinds of processors), its formula
        is computed in ocomm's arithmetic, which gives the same bits on all of them.
        """
        if self._driver.has_unlike_hosts:
            self._uniform_dense_step(tensors, average, max_norm)
            return
        chosen = set(tensors)
        if isinstance(self._placement, FilePlacement):
            for index in tensors:
                self.started(index)  # else Torch makes m and v in the host's memory
        self._placement.leave()
        stepped = self._masters.stepped
        local = [tensor.grad for tensor in stepped]
        try:
            for index, tensor in enumerate(stepped):
                tensor.grad = None
                if index in chosen:
                    flat = self._placement.tensor(average(index))
                    tensor.grad = self._orders[index].shaped(flat, tensor.shape)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_([stepped[t] for t in tensors], max_norm, foreach=False)
            with self._masters.standing_in(self._inner):
                step_without_hooks(self._inner)
        finally:
            for tensor, grad in zip(stepped, local, strict=True):
                tensor.grad = grad

    def _uniform_dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        """Makes the step in ocomm's arithmetic, in the host's memory, because all ranks have one."""
        host = self.kernels.memory.host
        began = {tensor: self.started(tensor) for tensor in tensors}
        places = {tensor: self.flat(tensor, self._masters.stepped[tensor]) for tensor in tensors}
        parameters = {tensor: host(place) for tensor, place in places.items()}
        adams = {tensor: DenseAdam(host(m), host(v), step) for tensor, (m, v, step) in began.items()}
        averages = {tensor: host(average(tensor)) for tensor in tensors}
        self._driver.clip_averages(list(averages.values()), max_norm)
        dense_step(self._driver.kernels, self._driver.groups(), averages, parameters.__getitem__, adams.__getitem__)
        for tensor, adam in adams.items():
            self.state[self._parameters[tensor]]["step"] = step_count(adam.step)
            if self._placement.is_device:
                places[tensor][:] = parameters[tensor]
                began[tensor][0][:], began[tensor][1][:] = adam.momentum, adam.variance


DistributedOneBitAdam = OneBitAdam
