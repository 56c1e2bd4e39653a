"""Compression of what an allreduce sends: Horovod's interface, whose results can be summed.

Subclass ``Compressor`` for another one. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: it lives in the 1-bit optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Compressor:
    """Two static methods; the reduction happens on what ``compress`` returns."""

    #: True where a finite tensor, or the sum of some, can become infinite on the wire. It is then reduced again, as it
    #: was before ``compress``.
    may_overflow = False

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The reduced tensor in its original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a smaller type; sums are made in float32 and rounded once."""

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
    """Half precision: 11 bits of mantissa, values up to 65504.

    Where a reduction comes out infinite, because an element or a sum is beyond 65504, all ranks make it once more in
    the tensor's own type. So a large gradient costs a second exchange; in Horovod it makes the parameters infinite.
    What is infinite or NaN before it is compressed stays so, for a LossScaleOptimizer to find. Elements below 3e-8
    become 0.
    """

    wire = tf.float16
    may_overflow = True


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    wire = tf.bfloat16


class Compression:
    """What to pass as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


#: Ends the name of a tensor that is reduced again, as it was before it was compressed.
UNCOMPRESSED = ".uncompressed"


def has_overflowed(
    compression: type[Compressor], reduced: Sequence[tf.Tensor], originals: Sequence[tf.Tensor]
) -> tf.Tensor | None:
    """Whether an element of a compressed reduction is not finite, and it may be ``compression`` that made it so.

    Args:
        compression: what the tensors were sent with.
        reduced: results of the reduction, before ``decompress``. The same on all ranks, and so is what is returned.
        originals: what ``compress`` was given for each, of which the dtypes count.

    Returns:
        A bool scalar; None where it cannot be.
    """
    if not getattr(compression, "may_overflow", False):  # a user's class need not be a Compressor
        return None
    changed = [r for r, o in zip(reduced, originals, strict=True) if r.dtype != o.dtype]
    if not changed:
        return None
    return tf.logical_not(tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in changed]))
