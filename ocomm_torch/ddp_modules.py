"""Finds modules in DistributedDataParallel: it does not say which there are, so this looks through all objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ocomm.errors import InvalidRequestError


def ddp_modules() -> Iterator[Any]:
    """Yields the modules in DistributedDataParallel of this process. It takes a tenth of a second: call it once."""
    if not dist.is_available() or not dist.is_initialized():
        return
    for found in gc.get_objects():
        # Not isinstance, which asks an object for its class: some import something then.
        if issubclass(type(found), DistributedDataParallel):
            yield found


def averages(module: Any, parameters: Iterable[Tensor]) -> bool:
    """Returns True if a module in DistributedDataParallel averages gradients of some of ``parameters``."""
    if any(_leaves_gradients(hook) for hook, _ in getattr(module, "_comm_hooks", ())):
        return False
    return not set(map(id, parameters)).isdisjoint(map(id, module.parameters()))


def refuse_averaged(parameters: Iterable[Tensor], optimizer: str) -> None:
    """Raises InvalidRequestError if DDP averages gradients of ``parameters``, which an optimizer averages, too.

    Both would write to the gradients at the same time.

    Args:
        parameters: The parameters whose gradients the optimizer averages.
        optimizer: The name of the optimizer, for the message.
    """
    mine = list(parameters)
    if any(averages(module, mine) for module in ddp_modules()):
        raise InvalidRequestError(
            f"{optimizer} averages gradients of a module in DistributedDataParallel, which averages them by itself. "
            "Give DistributedDataParallel a plain optimizer, or leave it out; a 1-bit optimizer goes with it: "
            "ddp.register_comm_hook(optimizer, ocomm_torch.optimizer_hook)."
        )


def _leaves_gradients(hook: Any) -> bool:
    """Returns True for a hook that may leave the gradients as they are: all but those of Torch that average."""
    return getattr(hook, "__name__", "") == "noop_hook" or not str(getattr(hook, "__module__", "")).startswith("torch.")
