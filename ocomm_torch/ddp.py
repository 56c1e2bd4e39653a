"""Makes ``torch.nn.parallel.DistributedDataParallel`` leave gradients to a 1-bit optimizer, by a communication hook."""

# No "from __future__ import annotations" here: DDP compares the annotations of a hook with types, not with strings.

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

    DDP averages nothing. The optimizer gets the gradients of this rank as they become ready, and exchanges them while
    backward goes on. Losses and parameters are equal, bit for bit, to those of the optimizer without DDP. DDP still
    broadcasts parameters and buffers, and finds unused parameters. It calls the hook in backward, once for each bucket.

    Args:
        optimizer: The 1-bit optimizer that trains the module, such as a ``DistributedOneBitAdam``, also as Accelerate's
            ``prepare`` returns it.
        bucket: Torch's ``GradBucket``. It is not changed.

    Returns:
        A completed future with the buffer of the bucket.

    Raises:
        InvalidRequestError: ``optimizer`` is not a 1-bit optimizer, or it lacks a parameter of the bucket, whose
            gradient would then not be averaged.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    if not isinstance(optimizer, CompressedOptimizer) or optimizer.has_averages:
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
    """Raises InvalidRequestError if DDP averages gradients of ``parameters``, which an optimizer averages, too.

    Both would write to the gradients at the same time.

    Args:
        parameters: The parameters whose gradients the optimizer averages.
        optimizer: The name of the optimizer, for the message.
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
