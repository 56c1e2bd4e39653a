"""The order in which a tensor's elements lie in memory: they travel in it, where it has no gaps.

A channels_last parameter, its gradient, moments and errors stay in its own order, so nothing is copied. Ranks and saved
states must have the same order, which is a part of the layout's hash.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = {(0, 2, 3, 1): "channels_last", (0, 2, 3, 4, 1): "channels_last_3d"}


class MemoryOrder:
    """Of the elements of ``parameter``, which has no gaps and no element twice (``is_dense``)."""

    __slots__ = ("_back", "axes", "name")

    def __init__(self, parameter: torch.Tensor) -> None:
        #: Its axes as they lie in memory, the slowest first; None if that is their own order.
        self.axes = None if parameter.is_contiguous() else _axes(parameter)
        #: The same for all parameters of one shape that have one order; "torch" is the order of a contiguous tensor.
        self.name = "torch"
        if self.axes is not None:
            self._back = tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))
            self.name = _NAMES.get(self.axes) or "axes" + "".join(f".{axis}" for axis in self.axes)

    def has(self, tensor: torch.Tensor) -> bool:
        """Do the elements of a tensor of this shape lie so, without gaps?"""
        if tensor.layout is not torch.strided:
            return False
        return (tensor if self.axes is None else tensor.permute(self.axes)).is_contiguous()

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if its elements lie so, else a copy whose elements do."""
        if self.has(tensor):
            return tensor
        dense = tensor.detach().to_dense()
        return dense.contiguous() if self.axes is None else dense.permute(self.axes).contiguous().permute(self._back)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of such a tensor as they lie in memory, in one dimension; it shares the memory."""
        return (tensor if self.axes is None else tensor.permute(self.axes)).reshape(-1)

    def shaped(self, flat: torch.Tensor, shape: Any) -> torch.Tensor:
        """The inverse of ``flat``."""
        if self.axes is None:
            return flat.view(shape)
        return flat.view([shape[axis] for axis in self.axes]).permute(self._back)


def is_dense(parameter: torch.Tensor) -> bool:
    """Do its elements lie without gaps, each once, in whatever order of its axes?"""
    return parameter.is_contiguous() or parameter.permute(_axes(parameter)).is_contiguous()


def _axes(parameter: torch.Tensor) -> tuple[int, ...]:
    # The stride of an axis of one element means nothing.
    long = [axis for axis, size in enumerate(parameter.shape) if size > 1]
    long.sort(key=lambda axis: -parameter.stride(axis))
    return (*long, *(axis for axis, size in enumerate(parameter.shape) if size <= 1))
