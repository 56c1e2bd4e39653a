"""Makes ``torch.nn.parallel.DistributedDataParallel`` leave gradients to a 1-bit optimizer, by a communication hook."""

# No "from __future__ import annotations" here: DDP compares the annotations of a hook with types, not with strings.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ocomm.errors import InvalidRequestError
from ocomm_torch.optimizers.compressed import CompressedOptimizer


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
