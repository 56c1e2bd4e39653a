"""Compression of what an allreduce sends: Horovod's interface, for formats that can be summed.

Subclass ``Compressor`` for another format. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: only the 1-bit optimizers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ocomm.errors import InvalidRequestError


class Compressor:
    """Compresses tensors before a reduction, which sums the results of ``compress``. Subclasses define both methods."""

    #: True if a finite tensor, or a sum of such, can become infinite on the wire. It is then reduced again,
    #: uncompressed.
    may_overflow = False
    #: True if tensors are sent as they are.
    changes_nothing = False

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    changes_nothing = True

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller dtype; sums are computed in float32 and rounded once."""

    wire: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls.wire), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """float16: 11 bits of mantissa, values up to 65504.

    If a reduction is infinite because an element or a sum is beyond 65504, all ranks repeat it in the tensor's own
    dtype. So a large gradient costs a second exchange; in Horovod it makes the parameters infinite. Values that are
    infinite or NaN before compression stay so, for a LossScaleOptimizer to find. Elements below 3e-8 become 0.
    """

    wire = tf.float16
    may_overflow = True


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    wire = tf.bfloat16


class CodesCompressor(Compressor):
    """Whole numbers of ``bits`` bits with a scale for every 128 elements, for ``DistributedOptimizer`` and
    ``DistributedGradientTape``.

    What a step loses is kept and added in the next one, at the rank that sends and at the one that averages.
    """

    bits: int

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        raise InvalidRequestError(
            f"Compression.int{cls.bits} is for DistributedOptimizer and DistributedGradientTape. A single tensor can "
            "be averaged with fp16 and bf16."
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


#: Ends the name of a tensor that is reduced again, uncompressed.
UNCOMPRESSED = ".uncompressed"


def has_overflowed(
    compression: type[Compressor], reduced: Sequence[tf.Tensor], originals: Sequence[tf.Tensor]
) -> tf.Tensor | None:
    """Returns whether an element of a compressed reduction is not finite, possibly because of ``compression``.

    Args:
        compression: The compressor.
        reduced: Results of the reduction, before ``decompress``. They are the same on all ranks, and so is the result.
        originals: The tensors given to ``compress``, of which only the dtypes are used.

    Returns:
        A bool scalar; None if no element can have overflowed.
    """
    if not getattr(compression, "may_overflow", False):  # a user's class need not be a Compressor
        return None
    changed = [r for r, o in zip(reduced, originals, strict=True) if r.dtype != o.dtype]
    if not changed:
        return None
    return tf.logical_not(tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in changed]))
