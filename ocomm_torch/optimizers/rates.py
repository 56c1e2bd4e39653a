"""What Birder, SoftSignSGD and Lion share: they read learning rates of any Torch optimizer, and make steps in its
place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ocomm.errors import InvalidRequestError
from ocomm.optim.core import Group
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.wrapped import check_plain_optimizer

#: The documentation of the argument ``optimizer``.
OPTIMIZER = (
    "Any Torch optimizer over parameters in the host's memory or on one GPU, ``torch.optim.SGD(parameters, lr=...)`` "
    "for instance. ``lr`` and ``weight_decay`` (subtracted from the parameter, as in AdamW) are read from its groups "
    "at every step, so LR schedulers on either object work; its own step is never called. Parameters are float32, or "
    "bfloat16 or float16 with float32 masters."
)

_log = logging.getLogger("ocomm")


class RateOptimizer(CompressedOptimizer):
    """Base class of optimizers that only read lr and weight decay from the wrapped optimizer's groups, at every
    step.
    """

    refused_options = ("dampening", "nesterov", "maximize", "amsgrad", "centered", "capturable", "differentiable")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        **arguments: Any,
    ) -> None:
        check_plain_optimizer(optimizer, f"Distributed{type(self).__name__}")
        _check_groups(type(self).__name__, optimizer)
        #: Other hyperparameters that schedulers change, as they were when wrapped; None once a warning was given.
        self._unread: list[Any] | None = [_moments(group) for group in optimizer.param_groups]
        super().__init__(optimizer, named_parameters, **arguments)

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        if self._unread is not None and (moved := _moments(group)) != self._unread[number]:
            self._unread = None
            name = "momentum" if moved[0] else "betas"
            _log.warning(
                "%s: %s=%r of the param groups is ignored, and so is every later value: lr and weight_decay are what "
                "is read. A scheduler that cycles it (OneCycleLR, CyclicLR) takes cycle_momentum=False.",
                self._driver.name,
                name,
                group.get(name),
            )
        return Group(
            self._group_tensors[number],
            float(group["lr"]),
            decoupled_decay=float(group.get("weight_decay", 0.0)),
        )


def _moments(group: dict[str, Any]) -> tuple[Any, Any]:
    return group.get("momentum") or 0.0, group.get("betas")


def _check_groups(wrapper: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises InvalidRequestError if a group has no lr, or has a momentum, which this step would ignore."""
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InvalidRequestError(
                f"Distributed{wrapper} takes its lr from the wrapped optimizer's groups, and those of "
                f"{type(optimizer).__name__} have none; wrap torch.optim.SGD."
            )
        if group.get("momentum"):  # a scheduler may set it later, which causes one warning
            raise InvalidRequestError(
                f"Distributed{wrapper} does not support momentum={group['momentum']!r}; leave it out."
            )
