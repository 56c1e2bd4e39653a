"""Compression of what an allreduce sends: Horovod's interface, whose results can be summed.

Subclass ``Compressor`` for another one. 1-bit compression does not fit this interface, because a sum of signs is not
a sign: it lives in the 1-bit optimizers.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Two static methods; the reduction happens on what ``compress`` returns."""

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
    """Half precision: 11 bits of mantissa. A value, or a sum, beyond 65504 becomes infinite, as in Horovod; where
    gradients may be that large take ``bf16``."""

    wire = tf.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    wire = tf.bfloat16


class Compression:
    """What to pass as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
