"""Adasum: a sum of gradients without what they have in common (Maleki et al., arXiv 2006.02924, section 3).

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

Orthogonal gradients are added, parallel ones averaged. More than two are combined pairwise along a binary tree in rank
order. If a level has an odd number, its last gradient goes up unchanged, so any number of ranks works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.types import Bytes, DType

#: A squared norm below this counts as zero: the vector is added as it is.
_TINY = float(np.sqrt(np.finfo(np.float64).tiny))


def adasum(rows: Sequence[Bytes], dtype: DType, prescale: float, postscale: float, out: Bytes) -> None:
    """Combines the tensors of all ranks (bytes of a floating-point dtype, in rank order) into ``out``.

    ``prescale`` multiplies every input, ``postscale`` the result. float64 is computed in float64, other dtypes in
    float32, and dot products always in float64; values are rounded once, at the end. The bits depend on ``rows`` alone.
    """
    with np.errstate(all="ignore"):  # NaN and Inf of the inputs are in the result
        terms = [_load(row, dtype) * _factor(dtype, prescale) for row in rows]
        while len(terms) > 1:
            pairs = [_pair(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = [*pairs, *terms[len(pairs) * 2 :]]
        out[:] = _store(terms[0] * _factor(dtype, postscale), dtype)


def _factor(dtype: DType, factor: float) -> np.floating:
    return np.float64(factor) if dtype == DType.FLOAT64 else np.float32(factor)


def _pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    # Plain sums of products, because a BLAS may sum in another order on another host.
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot = float(np.add.reduce(wide_a * wide_b))
    coefficients = []
    for wide in (wide_a, wide_b):
        square = float(np.add.reduce(wide * wide))
        coefficients.append(1.0 if square < _TINY else 1.0 - dot / (2.0 * square))
    return a.dtype.type(coefficients[0]) * a + a.dtype.type(coefficients[1]) * b


def _load(row: Bytes, dtype: DType) -> NDArray[Any]:
    if dtype == DType.BFLOAT16:
        return (row.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    values = row.view(dtype.label)
    return values if dtype == DType.FLOAT64 else values.astype(np.float32)


def _store(values: NDArray[Any], dtype: DType) -> Bytes:
    if dtype != DType.BFLOAT16:
        return values.astype(dtype.label).view(np.uint8)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)
