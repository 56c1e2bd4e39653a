"""Detects that a gradient is used while an exchange reads or writes it, however the user's code does that.

Torch counts a tensor's in-place changes in its version, but not those through ``.data``, ``.numpy()``, DLPack or
``_foreach_mul_([g.data])``. All of these begin with a use of ``p.grad`` through Torch's Python API. So a gradient that
is posted gets the class ``WatchedGradient``, whose ``__torch_function__`` Torch calls before any
such use. It restores the tensor's class, tells the watchers, and continues. That costs two assignments per gradient and
step. The elements of a DTensor are in its local tensor, which every use reads: there a subclass of DTensor notices it.

Not detected: code that accesses the tensor in C++ without Torch's argument parser (a pybind11 extension, TorchScript),
and a write through an address, view or array that was taken before the gradient was posted. For those a part of
every gradient is read again in each step (``verify``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Watcher(Protocol):
    """Something that watches gradients. It is referenced weakly."""

    def used(self, gradients: Sequence[Tensor]) -> None:
        """Called before some of ``gradients``, which others may watch, are used, in the thread that uses them."""
        ...


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


class WatchedGradient(Tensor):
    """A gradient that is watched until it is used or ``release`` is called. Only ``watch`` makes one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # this call is only traced; the graph calls this when it runs
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: list[Tensor] = []
        _find(args, found)
        _find(kwargs.values(), found)
        if torch.compiler.is_compiling():  # a change of class would cause repeated compilation
            with torch._C.DisableTorchFunctionSubclass():
                _report(found)
                return func(*args, **kwargs)
        release(found)
        _report(found)
        return func(*args, **kwargs)


def _report(gradients: Sequence[Tensor]) -> None:
    for watcher in list(_watchers):
        watcher.used(gradients)


def add_watcher(watcher: Watcher) -> None:
    """Calls ``watcher.used`` from now on, while ``watcher`` is alive."""
    _watchers.add(watcher)


def watch(gradients: Iterable[Tensor | None]) -> None:
    """Reports the next use of each gradient that is a plain tensor or a DTensor."""
    for gradient in gradients:
        kind: Any = type(gradient)
        if kind is Tensor:
            gradient.__class__ = WatchedGradient
        elif kind.__name__ == "DTensor":
            gradient.__class__ = _watched(kind)


def release(gradients: Iterable[Tensor | None]) -> None:
    """Stops watching gradients, which are plain tensors again."""
    for gradient in gradients:
        kind: Any = type(gradient)
        if kind is WatchedGradient:
            gradient.__class__ = Tensor
        elif kind.__name__ == "WatchedDTensor":
            gradient.__class__ = kind.__base__


@lru_cache
def _watched(kind: Any) -> Any:
    """Returns the class of DTensors that are watched; ``kind`` is DTensor, whose module may never be imported."""
    slot = kind._local_tensor

    class WatchedDTensor(kind):
        __slots__ = ()

        @property
        def _local_tensor(self) -> Any:
            release([self])
            _report([self])
            return slot.__get__(self)

        @_local_tensor.setter
        def _local_tensor(self, local: Tensor) -> None:
            release([self])
            _report([self])
            slot.__set__(self, local)

    return WatchedDTensor


def _find(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if type(value) is WatchedGradient:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _find(value, found)
        elif isinstance(value, dict):
            _find(value.values(), found)
