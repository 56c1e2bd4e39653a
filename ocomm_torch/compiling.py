"""Keeps exchanges out of torch.compile, which compiles everything that a compiled function calls, even hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def eager(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``method`` so that it, and all that it calls, runs uncompiled inside compiled functions."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _disabled(method)(*args, **kwargs)

    return call


@functools.cache
def _disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(method)  # imports the compiler, so this is done at the first call


@functools.cache
def leave_hooks_alone() -> None:
    """Makes torch.compile skip these packages, so that nothing of them is compiled or becomes part of a graph.

    A hook runs once per gradient, too often for the extra calls of a function of ``torch.compiler.disable``.
    """
    try:
        from torch._dynamo import trace_rules
    except ImportError:  # before Torch 2.2 it has another name
        return
    for package in ("ocomm", "ocomm_torch"):
        trace_rules.add(package)
