"""Compression of what an allreduce sends: Horovod's interface, for formats that can be summed.

Subclass ``Compressor`` for another format. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: ``allreduce`` handles it separately, and training has the 1-bit optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ocomm.errors import InvalidRequestError


class Compressor:
    """Compresses tensors before a reduction, which sums the results of ``compress``. Subclasses define both methods."""

    #: True if a finite tensor, or a sum of such, can become infinite on the wire. It is then reduced again,
    #: uncompressed.
    may_overflow = False
    #: True if tensors are sent as they are.
    changes_nothing = False

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    changes_nothing = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller dtype; sums are computed in float32 and rounded once."""

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
    """float16: 11 bits of mantissa, values up to 65504.

    If a reduction is infinite because an element or a sum is beyond 65504, all ranks repeat it in the tensor's own
    dtype. So a large gradient costs a second exchange; in Horovod it makes the parameters infinite. Values that are
    infinite or NaN before compression stay so, for ``GradScaler`` to find. Elements below 3e-8 become 0.
    """

    wire = torch.float16
    may_overflow = True


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    wire = torch.bfloat16


class OneBitCompressor(Compressor):
    """1 bit per element with error feedback, for ``allreduce(tensor, name=..., compression=Compression.onebit)``.

    What one call loses is kept under ``name`` and added to the next. For gradients use a 1-bit optimizer: the same bits
    spent on Adam's gradients instead of its momentum train clearly worse.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise InvalidRequestError(
            "Compression.onebit is for allreduce() with a name. To train with 1 bit, wrap the optimizer in "
            "DistributedOneBitAdam, DistributedZeroOneAdam or DistributedBirder instead of DistributedOptimizer."
        )


class CodesCompressor(Compressor):
    """Whole numbers of ``bits`` bits with a scale for every 128 elements, for ``DistributedOptimizer``.

    What a step loses is kept and added in the next one, at the rank that sends and at the one that averages.
    """

    bits: int

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise InvalidRequestError(
            f"Compression.int{cls.bits} is for DistributedOptimizer. A single tensor can be averaged with "
            "Compression.onebit and a name, or with fp16 and bf16."
        )


class Int8Compressor(CodesCompressor):
    """8 bits per element: a quarter of the bytes of float32."""

    bits = 8


class Int4Compressor(CodesCompressor):
    """4 bits per element: an eighth of the bytes of float32."""

    bits = 4


class Compression:
    """The values of the argument ``compression``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    onebit = OneBitCompressor


#: Ends the name of a tensor that is reduced again, uncompressed.
UNCOMPRESSED = ".uncompressed"


def is_kind(compression: object, kind: type[Compressor]) -> bool:
    """Returns True if a compressor, a class or an object as Horovod takes them, is of the class ``kind``."""
    return issubclass(compression if isinstance(compression, type) else type(compression), kind)


def has_overflowed(
    compression: type[Compressor] | Compressor, reduced: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]
) -> bool:
    """Returns True if an element of a compressed reduction is not finite, possibly because of ``compression``.

    Args:
        compression: The compressor.
        reduced: Results of the reduction, before ``decompress``. They are the same on all ranks, and so is the result.
        originals: The tensors given to ``compress``, of which only the dtypes are used.
    """
    if not getattr(compression, "may_overflow", False):  # a user's class need not be a Compressor
        return False
    changed = [r for r, o in zip(reduced, originals, strict=True) if r.dtype != o.dtype and r.numel()]
    if not changed:
        return False
    # Both are NaN if an element is NaN. This takes a tenth of the time of a norm or isfinite() on a CPU.
    extremes = [extreme for r in changed for extreme in r.detach().aminmax()]
    return not bool(torch.stack([extreme.to(extremes[0].device) for extreme in extremes]).isfinite().all())
