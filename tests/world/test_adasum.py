"""Adasum: adds what is orthogonal, averages what is parallel, for any number of ranks and the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest

import ocomm
from ocomm.collectives.adasum import adasum
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.session import Session
from ocomm.types import DType, Settings
from tests.worlds import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])


def oracle(vectors: list[np.ndarray]) -> np.ndarray:
    """The paper's formula, pair by pair, in float64."""
    while len(vectors) > 1:
        up = []
        for k in range(0, len(vectors), 2):
            if k + 1 == len(vectors):
                up.append(vectors[k])
                continue
            a, b = vectors[k], vectors[k + 1]
            dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
            up.append((1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b)
        vectors = up
    return vectors[0]


def data(rank: int, numel: int = 1000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(numel) + 0.5


@SIZES
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_is_the_papers_formula(size: int, dtype: type) -> None:
    def body(session: Session) -> bytes:
        result = ocomm.allreduce(data(ocomm.rank()).astype(dtype), op=ocomm.Adasum, name="x")
        expected = oracle([data(rank).astype(dtype).astype(np.float64) for rank in range(size)])
        np.testing.assert_allclose(result, expected, rtol=4 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)
        return result.tobytes()

    assert len(set(run_ranks(size, body))) == 1


@SIZES
def test_parallel_vectors_are_averaged_and_orthogonal_ones_added(size: int) -> None:
    def body(session: Session) -> None:
        same = ocomm.allreduce(np.full(64, 3.0, np.float32), op=ocomm.Adasum, name="same")
        if size in (1, 2, 4):  # with other numbers a vector meets the mean of several
            assert same.tolist() == [3.0] * 64
        apart = np.zeros(size, np.float32)
        apart[ocomm.rank()] = 1.0 + ocomm.rank()
        assert ocomm.allreduce(apart, op=ocomm.Adasum).tolist() == [1.0 + rank for rank in range(size)]
        assert ocomm.allreduce(np.zeros(3), op=ocomm.Adasum).tolist() == [0.0] * 3

    run_ranks(size, body)


def test_every_tensor_has_weights_of_its_own_in_place_in_a_group_and_scaled() -> None:
    def body(session: Session) -> None:
        arrays = [data(10 * k + ocomm.rank(), 50 + k) for k in range(4)]
        expected = [oracle([data(10 * k + rank, 50 + k) for rank in range(2)]) for k in range(4)]
        for got, wanted in zip(ocomm.grouped_allreduce(arrays, op=ocomm.Adasum), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
        assert ocomm.allreduce_(arrays[0], op=ocomm.Adasum, prescale_factor=2.0, postscale_factor=0.25) is arrays[0]
        np.testing.assert_allclose(arrays[0], expected[0] / 2, rtol=1e-12)

    run_ranks(2, body, Settings(cycle_time_ms=50))


def test_bfloat16_is_rounded_once_and_to_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.0, np.inf, np.nan], np.float32)
    rows = [(values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)]
    out = np.zeros_like(rows[0])
    adasum(rows, DType.BFLOAT16, 1.0, 1.0, out)
    assert (out == rows[0])[:10].all() and np.isnan((out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[5])
    adasum([rows[0][:2]], DType.BFLOAT16, 1.0, 1.0 + 2**-8, out[:2])  # halfway between 1 and 1 + 2^-7
    assert out[:2].view(np.uint16)[0] == 0x3F80
    adasum([rows[0][:2]], DType.BFLOAT16, 1.0, 1.0 + 3 * 2**-8, out[:2])
    assert out[:2].view(np.uint16)[0] == 0x3F82


def test_what_cannot_be_is_refused() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as error:
            ocomm.allreduce(np.ones(1, np.int32), name="x", op=ocomm.Adasum)
        assert str(error.value) == "tensor 'allreduce.x': Adasum needs floating-point elements, not int32."
        with pytest.raises(InvalidRequestError, match="reducescatter has Average and Sum, not Adasum"):
            ocomm.reducescatter(np.ones(2), name="x", op=ocomm.Adasum)
        with pytest.raises(MismatchError, match="mismatched reduction: rank 0 submitted Adasum, rank 1 submitted Sum"):
            ocomm.allreduce(np.ones(2), name="x", op=ocomm.Sum if ocomm.rank() else ocomm.Adasum)
        if ocomm.rank() == 0:
            assert ocomm.allreduce(np.ones(2), name="y", op=ocomm.Adasum).tolist() == [1.0, 1.0]
        ocomm.join()

    run_ranks(2, body)
