"""What the optimizers that wrap ``torch.optim.Adam`` or ``AdamW`` read of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ocomm.errors import InvalidRequestError
from ocomm.training.driver import Group

#: Names of m and v in the state of a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")


def is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Does Adam take the weight decay from the parameter instead of adding it to the gradient?"""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def adam_group(optimizer: torch.optim.Optimizer, tensors: np.ndarray, group: dict[str, Any]) -> Group:
    """A param group of Adam or AdamW."""
    decay, decoupled = float(group["weight_decay"]), is_decoupled(optimizer, group)
    return Group(
        tensors,
        float(group["lr"]),
        (float(group["betas"][0]), float(group["betas"][1])),
        float(group["eps"]),
        coupled_decay=0.0 if decoupled else decay,
        decoupled_decay=decay if decoupled else 0.0,
    )


def wrappable(optimizer: torch.optim.Optimizer, wrapper: str) -> torch.optim.Optimizer:
    """``optimizer``, if it is an Adam whose options ``wrapper`` has; InvalidRequestError that names what it has not."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise InvalidRequestError(
            f"{wrapper} wraps torch.optim.Adam or AdamW, not {type(optimizer).__name__}; use "
            "DistributedOptimizer for other optimizers."
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise InvalidRequestError(f"{wrapper} does not support {option}=True; leave it out.")
    return optimizer
