"""Compression of what an allreduce of Torch's tensors sends; ``ocomm.compressors`` has the interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ocomm import compressors
from ocomm.compressors import UNCOMPRESSED as UNCOMPRESSED
from ocomm.compressors import CastCompressor, may_have_overflowed
from ocomm.compressors import Compressor as Compressor
from ocomm.compressors import NoneCompressor as NoneCompressor
from ocomm.errors import InvalidRequestError


class _Cast(CastCompressor):
    @staticmethod
    def _is_floating(tensor: torch.Tensor) -> bool:
        return tensor.dtype.is_floating_point

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(_Cast, compressors.FP16Compressor):
    wire = torch.float16


class BF16Compressor(_Cast, compressors.BF16Compressor):
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


class CodesCompressor(compressors.CodesCompressor):
    _refusal = (
        "DistributedOptimizer. A single tensor can be averaged with Compression.onebit and a name, or with fp16 and "
        "bf16."
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


def is_kind(compression: object, kind: type[Compressor]) -> bool:
    """Returns True if a compressor, a class or an object as Horovod takes them, is of the class ``kind``."""
    return issubclass(compression if isinstance(compression, type) else type(compression), kind)


def has_overflowed(
    compression: type[Compressor] | Compressor, reduced: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]
) -> bool:
    """Returns True if an element of a compressed reduction is not finite, possibly because of ``compression``.

    The arguments are those of ``may_have_overflowed``. All ranks have the same results, and so the same answer.
    """
    changed = [r for r in may_have_overflowed(compression, reduced, originals) if r.numel()]
    if not changed:
        return False
    # Both are NaN if an element is NaN. This takes a tenth of the time of a norm or isfinite() on a CPU.
    extremes = [extreme for r in changed for extreme in r.detach().aminmax()]
    return not bool(torch.stack([extreme.to(extremes[0].device) for extreme in extremes]).isfinite().all())
