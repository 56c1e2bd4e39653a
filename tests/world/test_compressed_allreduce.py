"""compressed_allreduce: nothing is lost over calls, all ranks get the same bits, disagreement is an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ocomm
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.session import Session
from ocomm.types import Settings
from tests.worlds import run_ranks


def values(call: int, rank: int, numel: int = 10_000) -> np.ndarray:
    return np.random.default_rng([call, rank]).normal(size=numel).astype(np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_was_sent_is_what_was_received_plus_residuals(ranks: int) -> None:
    def body(session: Session) -> tuple[list[bytes], np.ndarray, np.ndarray, np.ndarray]:
        received = [ocomm.compressed_allreduce(values(call, ocomm.rank()), "x") for call in range(20)]
        state = session.member_set(0).compressed["x"]
        return [r.tobytes() for r in received], np.sum(received, axis=0), state.error, state.server_error()

    results = run_ranks(ranks, body)
    assert all(result[0] == results[0][0] for result in results)
    sent = (
        np.sum([values(call, rank).astype(np.float64) for call in range(20) for rank in range(ranks)], axis=0) / ranks
    )
    residuals = sum(result[2].astype(np.float64) for result in results) / ranks + sum(r[3] for r in results)
    assert np.allclose(sent, results[0][1] + residuals, atol=2e-4)
    assert np.abs(residuals).max() > 0.1, "the residuals explain nothing: the law was not tested"


def test_the_result_does_not_depend_on_segments_or_window() -> None:
    def body(session: Session) -> bytes:
        return b"".join(ocomm.compressed_allreduce(values(c, ocomm.rank(), 300_000), "x").tobytes() for c in range(3))

    found = {
        tuple(run_ranks(3, body, settings=replace(Settings(), segment_nbytes=nbytes, window=window)))
        for nbytes, window in ((4096, 1), (4096, 8), (1 << 20, 4))
    }
    assert len(found) == 1


def test_a_block_of_zeros_stays_zero() -> None:
    results = run_ranks(2, lambda s: ocomm.compressed_allreduce(np.zeros(5000, np.float32), "zero"))
    assert all(not result.any() for result in results)


def test_nan_on_one_rank_is_an_error_on_all_and_the_errors_stay() -> None:
    def body(session: Session) -> tuple[str, bool]:
        ocomm.compressed_allreduce(values(0, ocomm.rank()), "x")
        before = session.member_set(0).compressed["x"].error
        bad = values(1, ocomm.rank())
        if ocomm.rank() == 1:
            bad[77] = np.nan
        with pytest.raises(NonFiniteError) as raised:
            ocomm.compressed_allreduce(bad, "x")
        same = np.array_equal(before, session.member_set(0).compressed["x"].error)
        ocomm.compressed_allreduce(values(2, ocomm.rank()), "x")
        return str(raised.value), same

    for message, same in run_ranks(2, body):
        assert message == "'x' has NaN or Inf on rank(s) [1]; no error was changed."
        assert same


def test_shapes_that_differ_between_ranks_are_an_error() -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            ocomm.compressed_allreduce(np.zeros(5 + ocomm.rank(), np.float32), "x")
        return str(raised.value)

    assert (
        run_ranks(2, body)
        == [
            "tensor 'compressed_allreduce.x': mismatched registration: rank 0 submitted shape (5,) float32, "
            "rank 1 submitted shape (6,) float32."
        ]
        * 2
    )


def test_another_dtype_is_refused_and_a_scalar_stays_one() -> None:
    def body(session: Session) -> None:
        message = "tensor 'x': compressed_allreduce takes float32, got float64; convert it first."
        with pytest.raises(InvalidRequestError) as raised:
            ocomm.compressed_allreduce(np.ones(8), "x")
        assert str(raised.value) == message
        assert ocomm.compressed_allreduce(np.float32(3), "x").shape == ()

    run_ranks(2, body)


def test_a_set_that_was_not_registered_is_an_error_and_not_the_world() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match=r"process set with ranks \[0\] has not been registered"):
            ocomm.compressed_allreduce(np.ones(8, np.float32), "x", process_set=ocomm.ProcessSet([0]))

    run_ranks(2, body)
