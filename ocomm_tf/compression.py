"""Compression of what an allreduce of TensorFlow's tensors sends; ``ocomm.compressors`` has the interface."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ocomm import compressors
from ocomm.compressors import UNCOMPRESSED as UNCOMPRESSED
from ocomm.compressors import CastCompressor, may_have_overflowed
from ocomm.compressors import Compressor as Compressor
from ocomm.compressors import NoneCompressor as NoneCompressor


class _Cast(CastCompressor):
    @staticmethod
    def _is_floating(tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype.is_floating)

    @staticmethod
    def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Cast, compressors.FP16Compressor):
    wire = tf.float16


class BF16Compressor(_Cast, compressors.BF16Compressor):
    wire = tf.bfloat16


class CodesCompressor(compressors.CodesCompressor):
    _refusal = "DistributedOptimizer and DistributedGradientTape. A single tensor can be averaged with fp16 and bf16."


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


def has_overflowed(
    compression: type[Compressor], reduced: Sequence[tf.Tensor], originals: Sequence[tf.Tensor]
) -> tf.Tensor | None:
    """Returns whether an element of a compressed reduction is not finite, possibly because of ``compression``.

    The arguments are those of ``may_have_overflowed``. All ranks have the same results, and so the same answer.

    Returns:
        A bool scalar; None if no element can have overflowed.
    """
    changed = may_have_overflowed(compression, reduced, originals)
    if not changed:
        return None
    return tf.logical_not(tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in changed]))
