"""Compression of what an allreduce sends, for all frameworks: Horovod's interface, for formats that can be summed.

Subclass ``Compressor`` for another format. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: the 1-bit optimizers have it, and Torch's ``allreduce`` handles it separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ocomm.errors import InvalidRequestError


class Compressor:
    """Compresses tensors before a reduction, which sums the results of ``compress``. Subclasses define both methods."""

    #: True if a finite tensor, or a sum of such, can become infinite on the wire. It is then reduced again,
    #: uncompressed.
    may_overflow = False
    #: True if tensors are sent as they are.
    changes_nothing = False

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to send, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    changes_nothing = True

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller dtype; sums are computed in float32 and rounded once.

    A framework's class has that dtype, and functions of a tensor, and of a tensor and a dtype.
    """

    wire: Any
    _is_floating: Any
    _cast: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls._cast(tensor, cls.wire), tensor.dtype) if cls._is_floating(tensor) else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls._cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """float16: 11 bits of mantissa, values up to 65504.

    If a reduction is infinite because an element or a sum is beyond 65504, all ranks repeat it in the tensor's own
    dtype. So a large gradient costs a second exchange; in Horovod it makes the parameters infinite. Values that are
    infinite or NaN before compression stay so, for a loss scaler to find. Elements below 3e-8 become 0.
    """

    may_overflow = True


class BF16Compressor(CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""


class CodesCompressor(Compressor):
    """Whole numbers of ``bits`` bits with a scale for every 128 elements, for distributed optimizers.

    What a step loses is kept and added in the next one, at the rank that sends and at the one that averages.
    """

    bits: int
    #: The end of the error of a single tensor: what takes the compressor, and what a tensor can be averaged with.
    _refusal: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        raise InvalidRequestError(f"Compression.int{cls.bits} is for {cls._refusal}")


#: Ends the name of a tensor that is reduced again, uncompressed.
UNCOMPRESSED = ".uncompressed"


def may_have_overflowed(
    compression: type[Compressor] | Compressor, reduced: Sequence[Any], originals: Sequence[Any]
) -> list[Any]:
    """Returns those tensors of a compressed reduction that ``compression`` can have made infinite.

    Args:
        compression: The compressor.
        reduced: Results of the reduction, before ``decompress``.
        originals: The tensors given to ``compress``, of which only the dtypes are used.
    """
    if not getattr(compression, "may_overflow", False):  # a user's class need not be a Compressor
        return []
    return [r for r, o in zip(reduced, originals, strict=True) if r.dtype != o.dtype]
