"""1-bit optimizers and ``torch.nn.parallel.DistributedDataParallel``: a hook with which DDP averages nothing."""

# Without "from __future__ import annotations": DDP compares those of a hook with its own types.

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ocomm.errors import InvalidRequestError
from ocomm_torch.compressed import CompressedOptimizer
from ocomm_torch.ddp_modules import ddp_modules


def optimizer_hook(optimizer: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Leaves the gradients of a DDP module to a 1-bit optimizer: ``ddp.register_comm_hook(optimizer, optimizer_hook)``.

    The optimizer gets every gradient as it becomes ready, as that of this rank alone, and exchanges it while backward
    goes on; DDP sends nothing. Losses and parameters are those of the optimizer without DDP, bit for bit. What else DDP
    does stays: it broadcasts parameters and buffers, and finds unused parameters.

    Args:
        optimizer: ``DistributedOneBitAdam`` or another of its kind, also as Accelerate's ``prepare`` returns it.
        bucket: Torch's ``GradBucket``.

    Returns:
        A future with the bucket as it is.

    Raises:
        InvalidRequestError: ``optimizer`` is not a 1-bit optimizer, or does not have a parameter of the bucket, whose
            gradient nobody would average.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    if not isinstance(optimizer, CompressedOptimizer):
        raise InvalidRequestError(
            f"optimizer_hook needs the 1-bit optimizer that trains the module, got {type(optimizer).__name__}: call "
            "ddp.register_comm_hook(optimizer, optimizer_hook) with the optimizer that Distributed... returned. A "
            "DistributedOptimizer averages what DDP averages already: use one of them alone."
        )
    optimizer.left_by_ddp(bucket.parameters())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def refuse_averaged(parameters: Iterable[Tensor], optimizer: str) -> None:
    """InvalidRequestError if DDP averages gradients of ``parameters``, which ``optimizer`` is about to average.

    Both would write to them at a time.
    """
    ids = set(map(id, parameters))
    for found in ddp_modules():
        if any(_leaves_gradients(hook) for hook, _ in getattr(found, "_comm_hooks", ())):
            continue
        if not ids.isdisjoint(map(id, found.parameters())):
            raise InvalidRequestError(
                f"{optimizer} averages gradients of a module in DistributedDataParallel, which averages them by "
                "itself. Give DistributedDataParallel a plain optimizer, or leave it out; a 1-bit optimizer goes with "
                "it: ddp.register_comm_hook(optimizer, ocomm_torch.optimizer_hook)."
            )


def _leaves_gradients(hook: Any) -> bool:
    """Returns True for a hook that may leave the gradients as they are: all but those of Torch that average."""
    if hook is optimizer_hook or getattr(hook, "__name__", "") == "noop_hook":
        return True
    return not str(getattr(hook, "__module__", "")).startswith("torch.")
