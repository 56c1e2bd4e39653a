"""dist-EF-SGD for Torch: wraps ``torch.optim.SGD``, whose settings it reads at every step, and makes steps in its
place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.optim import ef_sgd as optim
from ocomm.optim.core import Group
from ocomm_torch.mesh import inside
from ocomm_torch.optimizers.compressed import CompressedOptimizer, optimizer_face
from ocomm_torch.optimizers.wrapped import check_plain_optimizer


@optimizer_face(
    optim.EFSGD,
    optimizer=(
        "A ``torch.optim.SGD`` over parameters in the host's memory or on one GPU: float32, or bfloat16 or float16 "
        "with float32 masters. lr, momentum, nesterov and weight_decay (added to the gradient) are read from its "
        "groups at every step, so LR schedulers on either object work. Its own step is never called. If it has a "
        "momentum already, each rank continues from that, as ``load_state_dict`` does with the state of a plain "
        "SGD."
    ),
)
class EFSGD(CompressedOptimizer):
    """Data-parallel SGD with error feedback (dist-EF-blockSGDM, arXiv 1905.10936): 1 bit per parameter and direction.

    Each rank sends the signs of its own momentum times the learning rate, and per block the mean of their magnitudes.
    What that loses is kept and added in the next step; so is what compressing the average loses at its server.
    """

    _core_class = optim.EFSGD
    refused_options = ("dampening", "maximize", "differentiable")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **arguments: Any,
    ) -> None:
        check_plain_optimizer(optimizer, "DistributedEFSGD")
        if not isinstance(optimizer, torch.optim.SGD) or _step_of(type(optimizer)) is not _step_of(torch.optim.SGD):
            raise InvalidRequestError(
                "DistributedEFSGD makes the steps of a plain torch.optim.SGD in its place, and this is a "
                f"{type(optimizer).__name__} with a step() of its own; use DistributedOptimizer, which makes that."
            )
        super().__init__(optimizer, named_parameters, **arguments)
        self._take_over()

    def _take_over(self) -> None:
        """Takes the momentum in the wrapped optimizer's state as this rank's own."""
        core, found = self._driver.core, {}
        assert isinstance(core, optim.EFSGD)
        for tensor, parameter in enumerate(self._parameters):
            buffer = self.state.pop(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                found[tensor] = self._orders[tensor].arranged(inside(buffer).detach().float())
        self._placement.arrive()
        for tensor, buffer in found.items():
            core.adopt(tensor, core.param_memory.host(self.flat(tensor, buffer)))

    def _check_plain(self, plain: Mapping[str, Any]) -> dict[int, Any]:
        states = super()._check_plain(plain)
        for number, group in enumerate(plain["param_groups"]):
            if not {"lr", "momentum", "nesterov", "weight_decay"} <= group.keys():
                raise CheckpointError(
                    f"the state_dict is not of SGD: its group {number} has {sorted(set(group) - {'params'})}."
                )
        for number, entry in states.items():
            buffer, parameter = inside(entry.get("momentum_buffer")), self._tensors[number]
            if buffer is not None and buffer.shape != parameter.shape:
                raise CheckpointError(
                    f"the state_dict is of another model: of tensor '{self._names[number]}' it has a momentum "
                    f"{tuple(buffer.shape)}, the parameter is {tuple(parameter.shape)}."
                )
        return states

    def _load_plain(self, plain: dict[str, Any]) -> None:
        """Continues from the state of a plain SGD, without errors."""
        self._adopt(plain)
        self._driver.forget()
        self._take_over()

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        momentum = float(group["momentum"])
        return Group(
            self._group_tensors[number],
            float(group["lr"]),
            (momentum, momentum if group["nesterov"] else 0.0),
            coupled_decay=float(group["weight_decay"]),
        )


def _step_of(kind: type[torch.optim.Optimizer]) -> Any:
    """Returns the class's step without the hooks that Torch puts around it."""
    return inspect.unwrap(kind.step)


DistributedEFSGD = EFSGD
