"""torch.compile compiles what runs beneath a compiled function, hooks too: exchanges must stay out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def eager(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, which runs as it is beneath compiled functions, and so does all that it calls."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _disabled(method)(*args, **kwargs)

    return call


@functools.cache
def _disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(method)  # imports the compiler: not when this package is imported


@functools.cache
def leave_hooks_alone() -> None:
    """From now on nothing of these packages is compiled by itself, nor made a part of a graph.

    A hook runs once per gradient, too often for the calls around what ``torch.compiler.disable`` returns.
    """
    try:
        from torch._dynamo import trace_rules
    except ImportError:  # before 2.2, where it has another name
        return
    for package in ("ocomm", "ocomm_torch"):
        trace_rules.add(package)
