"""DeepSpeed's 1-bit Adam on processors and gloo, as ``step`` measures it. 0.19.6 is its last release with one.

``pip install deepspeed==0.19.6 --no-build-isolation``. Optimizer and exchange are DeepSpeed's own, tensor by tensor.
Three things stand in for what it has on other devices only: NumPy packs the bits, gathered scales are given the shape
that gloo asks for, and instead of its engine, whose communication layer compiles an extension, a few lines average
gradients in the warm-up.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.comm import compressed
from deepspeed.runtime.fp16.onebit import adam


class _Packer:
    """One bit per element, 1 for what is not negative."""

    def load(self) -> _Packer:
        return self

    def packbits(self, values: torch.Tensor, numel: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def unpackbits(self, packed: torch.Tensor, numel: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.unpackbits(packed.numpy()).astype(np.float32)).mul_(2).sub_(1)


class _Gloo:
    """torch.distributed, whose gather takes a scalar beside tensors of one element, as NCCL's does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> Any:
        return dist.all_gather([each.view(-1) for each in gathered], tensor.reshape(-1), group=group)


class OnebitAdam(adam.OnebitAdam):
    """Averages gradients in the first ``freeze_step`` steps, then compresses momentum."""

    def __init__(self, model: torch.nn.Module, lr: float, freeze_step: int, **options: Any) -> None:
        compressed.PackbitsBuilder, compressed.dist, adam.dist = _Packer, _Gloo(), _Gloo()
        self._engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        options |= {"deepspeed": self._engine, "lr": lr, "freeze_step": freeze_step}
        super().__init__(model.parameters(), comm_backend_name="compressed", **options)

    def step(self, closure: Any = None, grads: Any = None) -> Any:
        if self._engine.enable_backward_allreduce:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        return super().step(closure, grads)
