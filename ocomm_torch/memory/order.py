"""The order of a tensor's elements in memory, in which they travel if the tensor has no gaps.

A channels_last parameter, its gradient, moments and errors keep that order, so nothing is copied. Ranks and saved
states must have the same order, which is part of the layout's hash.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = {(0, 2, 3, 1): "channels_last", (0, 2, 3, 4, 1): "channels_last_3d"}


class MemoryOrder:
    """The order of the elements of ``parameter``, which has no gaps and no element twice (``is_dense``)."""

    __slots__ = ("_back", "axes", "name")

    def __init__(self, parameter: torch.Tensor) -> None:
        #: Its axes in the order of memory, the slowest first; None if that is their own order.
        self.axes = None if parameter.is_contiguous() else _axes(parameter)
        #: Name of the order, equal for parameters of one shape and order; "torch" is that of a contiguous tensor.
        self.name = "torch"
        if self.axes is not None:
            self._back = tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))
            self.name = _NAMES.get(self.axes) or "axes" + "".join(f".{axis}" for axis in self.axes)

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns True if memory has the elements of a tensor of this shape, not their negatives, in this order."""
        if tensor.layout is not torch.strided or tensor.is_neg():
            return False
        return (tensor if self.axes is None else tensor.permute(self.axes)).is_contiguous()

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor if it has this order, else a copy that has it."""
        if self.has(tensor):
            return tensor
        dense = tensor.detach().to_dense().resolve_neg()
        return dense.contiguous() if self.axes is None else dense.permute(self.axes).contiguous().permute(self._back)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a tensor of this order as they are in memory, in one dimension; it shares the
        memory.
        """
        return (tensor if self.axes is None else tensor.permute(self.axes)).reshape(-1)

    def shaped(self, flat: torch.Tensor, shape: Any) -> torch.Tensor:
        """Returns a tensor of this order and shape that shares the memory of its elements ``flat``."""
        if self.axes is None:
            return flat.view(shape)
        return flat.view([shape[axis] for axis in self.axes]).permute(self._back)


def is_dense(parameter: torch.Tensor) -> bool:
    """Returns True if the elements lie without gaps, each once, in any order of the axes."""
    return parameter.is_contiguous() or parameter.permute(_axes(parameter)).is_contiguous()


def _axes(parameter: torch.Tensor) -> tuple[int, ...]:
    # The stride of an axis of one element has no meaning.
    long = [axis for axis, size in enumerate(parameter.shape) if size > 1]
    long.sort(key=lambda axis: -parameter.stride(axis))
    return (*long, *(axis for axis, size in enumerate(parameter.shape) if size <= 1))
