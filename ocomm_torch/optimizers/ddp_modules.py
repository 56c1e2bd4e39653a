"""Finds modules in DistributedDataParallel, which does not say which there are, so this looks through all objects; and
takes over the gradients that one leaves to an optimizer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ocomm.collectives.waiting import EQUALLY_MANY
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


class DDPModule:
    """The module in DistributedDataParallel that leaves the gradients of an optimizer's parameters to it, if any.

    Args:
        parameters: The optimizer's.
        optimizer: Its name, for messages.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: str) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        #: Whether ``find`` was called.
        self.is_known = False
        #: The module; None if there is none.
        self.reference: weakref.ref[Any] | None = None
        self._members: set[int] = set()  # ids of the parameters, once they are needed
        #: Whether backward will call ``follow`` at its end.
        self._is_queued = False

    def find(self, optimizer: Any) -> None:
        """Looks for a module with a hook whose state is ``optimizer``.

        Raises InvalidRequestError for one that averages gradients of the parameters among several ranks.
        """
        self.is_known = True
        for module in ddp_modules():
            hooks = getattr(module, "_comm_hooks", ())
            if any(_is_state(state, optimizer) for _, state in hooks):
                self.reference = weakref.ref(module)
            elif (
                module.require_backward_grad_sync
                and module.process_group.size() > 1
                and averages(module, self._parameters)
            ):
                by, instead = "", "Add"
                if hooks:  # Torch has no call that takes a hook out
                    by = f", by its hook {hooks[0][0].__name__}"
                    instead = (
                        "It takes one hook only: take out register_comm_hook of that one (with Accelerate, comm_hook= "
                        "of DistributedDataParallelKwargs), and add"
                    )
                raise InvalidRequestError(
                    f"DistributedDataParallel averages the gradients that {self._optimizer} averages{by}. {instead} "
                    "ddp.register_comm_hook(optimizer, ocomm_torch.optimizer_hook), or leave DistributedDataParallel "
                    "out."
                )

    def take(self, bucket: Sequence[Tensor], follow: Callable[[], None]) -> None:
        """Takes the gradients of a bucket's parameters. Called in backward, which calls ``follow`` at its end, once
        DDP has written its buckets to the gradients.

        Raises InvalidRequestError if the optimizer does not have one of the parameters.
        """
        if not self._members:
            self._members = set(map(id, self._parameters))
        for parameter in bucket:
            if id(parameter) not in self._members:
                everything = (pair for module in ddp_modules() for pair in module.module.named_parameters())
                name = next((f"'{name}'" for name, other in everything if other is parameter), "a parameter")
                raise InvalidRequestError(
                    f"DDP leaves the gradient of {name}, of shape {tuple(parameter.shape)}, to {self._optimizer}, "
                    "which does not have that parameter: nobody would average it. Give the optimizer all trained "
                    "parameters of the module; where several optimizers share them, leave DistributedDataParallel out, "
                    "which these do not need."
                )
        if self._is_queued:
            return

        def end() -> None:
            self._is_queued = False
            follow()

        queue = torch.autograd.Variable._execution_engine.queue_callback
        try:
            # When this runs DDP's own callback is there, too, and the one that is added then runs after it.
            queue(lambda: queue(end))
        except RuntimeError:  # outside a backward pass
            raise InvalidRequestError(
                f"DDP's join() calls the hook of {self._optimizer} for a rank without batches. {EQUALLY_MANY['torch']}"
            ) from None
        self._is_queued = True


def _is_state(state: Any, optimizer: Any) -> bool:
    """Returns True if a hook's ``state`` is ``optimizer``, or what Accelerate has wrapped it in."""
    return state is optimizer or getattr(state, "optimizer", None) is optimizer


def _leaves_gradients(hook: Any) -> bool:
    """Returns True for a hook that may leave the gradients as they are: all but those of Torch that average."""
    return getattr(hook, "__name__", "") == "noop_hook" or not str(getattr(hook, "__module__", "")).startswith("torch.")
