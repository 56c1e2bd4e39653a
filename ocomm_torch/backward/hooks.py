"""The hook that hands a parameter's gradient over: each parameter has one, that of the optimizer made last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_handles: Any = WeakTensorKeyDictionary()


def hook_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Calls ``hook`` whenever autograd has accumulated a gradient of ``parameter``, and the hook before it no more.

    An optimizer that a new one has replaced may live on in a cycle of references, on some ranks longer than on others.
    With its hooks it would exchange gradients that the other ranks do not send.

    Args:
        parameter: A parameter that is trained.
        hook: Called with the parameter, in backward.

    Returns:
        What removes the hook: it has a method ``remove()``.
    """
    unhook(parameter)
    handle = _handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def unhook(parameter: Tensor) -> None:
    """Removes the hook of whatever optimizer had ``parameter`` before, for one that needs none."""
    before = _handles.pop(parameter, None)
    if before is not None:
        before.remove()
