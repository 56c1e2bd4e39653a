"""Naive 1-bit Adam: what 1-bit Adam is not, for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ocomm


class NaiveOneBitAdam(torch.optim.Optimizer):
    """Adam on gradients that went through the compressed allreduce, with error feedback, from the first step on.

    Adam's variance lives on the result. Each tensor is exchanged under a name of its own, in blocks of 4096.
    """

    instances = 0

    def __init__(self, adam: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(adam.param_groups, adam.defaults)
        self.param_groups = adam.param_groups
        self._adam = adam
        # Errors are kept by name: every run needs names of its own, the same on all ranks.
        self._names = {f"naive.{self.instances}.{name}": p for name, p in model.named_parameters()}
        NaiveOneBitAdam.instances += 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self._names.items():
            parameter.grad.copy_(torch.from_numpy(ocomm.compressed_allreduce(parameter.grad.numpy(), name)))
        self._adam.step()
