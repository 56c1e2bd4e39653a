"""Compression of what an allreduce sends: Horovod's interface, whose results can be summed.

Subclass ``Compressor`` for another one. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: ``allreduce`` has a way of its own for it, and training has the 1-bit optimizers.
"""

from __future__ import annotations

from typing import Any

import torch

from ocomm.errors import InvalidRequestError


class Compressor:
    """Two static methods; the reduction happens on what ``compress`` returns."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller type; sums are made in float32 and rounded once."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.wire), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Half precision: 11 bits of mantissa, values up to 65504."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    wire = torch.bfloat16


class OneBitCompressor(Compressor):
    """1 bit per element with error feedback, for ``allreduce(tensor, name=..., compression=Compression.onebit)``.

    What one call leaves out is kept under ``name`` and goes into the next. For gradients take a 1-bit optimizer: the
    same bits spent on Adam's gradients instead of its momentum train clearly worse.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise InvalidRequestError(
            "Compression.onebit is for allreduce() with a name. To train with 1 bit, wrap the optimizer in "
            "DistributedOneBitAdam, DistributedZeroOneAdam or DistributedBirder instead of DistributedOptimizer."
        )


class Compression:
    """What to pass as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    onebit = OneBitCompressor
