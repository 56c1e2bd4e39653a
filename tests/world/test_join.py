"""join(): ranks with less data take part in what the others ask for, until all have none left."""

from __future__ import annotations

import numpy as np
import pytest

import ocomm
from ocomm.errors import InvalidRequestError, PeerError
from ocomm.negotiation.coordinator import JOIN_NAME
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Submission
from ocomm.runtime.plans import neutral
from ocomm.session import Session
from ocomm.types import DType, ReduceOp, Settings
from tests.worlds import MPI_SIZE, run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


@SIZES
@pytest.mark.parametrize("engine", ["native", "python"])
def test_ranks_have_steps_of_their_own_number_and_the_rest_counts_as_zeros(size: int, engine: str) -> None:
    def body(session: Session) -> None:
        me = ocomm.rank()
        for epoch in range(2):
            for step in range(3 * me):  # names come again: the response cache must agree with those who are silent
                still = [rank for rank in range(size) if 3 * rank > step]
                handles = [ocomm.allreduce_async(np.full(n, 1.0 + me), name=f"w{n}", op=ocomm.Sum) for n in (3, 9000)]
                for handle in handles:
                    assert (ocomm.synchronize(handle) == sum(1.0 + rank for rank in still)).all()
                average = ocomm.allreduce(np.full(2, 1.0 + me, np.float32), name="a")
                assert average[0] == np.float32(sum(1.0 + rank for rank in still)) * np.float32(1 / size)
            assert ocomm.join() == size - 1
            # All are here again, with everything as before.
            assert ocomm.allreduce(np.ones(3), name="w3", op=ocomm.Sum).tolist() == [size] * 3
            assert epoch < 2

    run_ranks(size, body, Settings(engine=engine))


def test_every_kind_that_can_do_without_a_rank_does() -> None:
    def body(session: Session) -> None:
        me = ocomm.rank()
        if me == 1:
            assert ocomm.join() == 0
            return
        assert ocomm.allgather(np.full((2, 3), me), name="g").shape == (4, 3)
        assert ocomm.allgather(np.full((1 + me, 3), me), name="ragged")[:, 0].tolist() == [0, 2, 2, 2]
        assert ocomm.broadcast(np.full(5000, me), 2, name="b").tolist() == [2] * 5000
        assert ocomm.broadcast_object({"from": me}, 0, name="o") == {"from": 0}
        assert ocomm.allgather_object(me, name="all") == [0, 2]
        received, rows = ocomm.alltoall(np.arange(2) + 10 * me, splits=[1, 0, 1], name="x")
        assert received.tolist() == [me // 2, 10 * 2 + me // 2] and rows.tolist() == [1, 0, 1]
        for op, expected in ((ocomm.Min, 2), (ocomm.Max, 3), (ocomm.Product, 6)):
            assert ocomm.allreduce(np.full(2, 2 if me else 3), name=f"op{op}", op=op).tolist() == [expected] * 2
        many = ocomm.grouped_allreduce([np.full(2, me), np.full(3, me)], name="group", op=ocomm.Sum)
        assert [a.tolist() for a in many] == [[2, 2], [2, 2, 2]]
        ocomm.barrier()
        if me == 0:
            ocomm.allreduce(np.ones(1), name="last")  # with rank 2 joined before
        assert ocomm.join() == 0

    run_ranks(3, body)


def test_what_cannot_be_without_a_rank_is_refused_and_the_job_goes_on() -> None:
    def body(session: Session) -> None:
        if ocomm.rank() == 1:
            assert ocomm.join() == 0
        else:
            cases = {
                "tensor 'broadcast.x': broadcast is not possible: rank 1, the root, has joined.":
                    lambda: ocomm.broadcast(np.ones(2), 1, name="x"),
                "tensor 'reducescatter.x': reducescatter is not possible: rank 1 has joined, and its part of the "
                "result would be lost; use allreduce.":
                    lambda: ocomm.reducescatter(np.ones(2), name="x"),
                "tensor 'alltoall.x': alltoall is not possible: rank 1 has joined, and nobody would take the rows for "
                "it; pass splits that send it none.":
                    lambda: ocomm.alltoall(np.ones(2), name="x"),
                "tensor 'allreduce.x': allreduce is not possible: rank 1 has joined, and with a prescale factor Max "
                "has no element that changes nothing.":
                    lambda: ocomm.allreduce(np.ones(2), name="x", op=ocomm.Max, prescale_factor=2.0),
                "tensor 'compressed_allreduce': channel is not possible: rank 1 has joined, and a 1-bit optimizer "
                "needs all ranks.":
                    lambda: ocomm.compressed_allreduce(np.ones(2, np.float32), "x"),
            }  # fmt: skip
            for message, call in cases.items():
                with pytest.raises(PeerError) as error:
                    call()
                assert str(error.value) == message
            assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="y").tolist() == [1]
            assert ocomm.join() == 0

    run_ranks(2, body)


def test_a_set_has_its_own_joins() -> None:
    def body(session: Session) -> None:
        pair = ocomm.ProcessSet([0, 2])
        me = ocomm.rank()
        if me == 2:
            assert ocomm.join(process_set=pair) == 0
        elif me == 0:
            assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="x", process_set=pair).tolist() == [1]
            assert ocomm.join(process_set=pair) == 0
        assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="x").tolist() == [3]

    run_ranks(3, body, process_sets=[[0, 2]])


def test_a_rank_that_leaves_ends_the_joins_of_the_others() -> None:
    def body(session: Session) -> None:
        if ocomm.rank() == 0:
            return
        with pytest.raises(PeerError) as error:
            ocomm.join()
        assert str(error.value) == "join() cannot end: rank 0 has shut down. All ranks must join."

    if not MPI_SIZE or MPI_SIZE == 2:
        run_ranks(2, body)


def test_a_rank_that_has_joined_submits_nothing_more() -> None:
    def body(session: Session) -> None:
        if ocomm.rank() == 0:
            joined = session.submit(0, Submission.of(Request(Kind.JOIN, JOIN_NAME)))
            with pytest.raises(InvalidRequestError) as error:
                ocomm.allreduce(np.ones(1), name="x")
            assert str(error.value) == (
                "tensor 'allreduce.x': rank 0 has joined; it may submit again when join() has returned."
            )
            assert joined.wait() == [1]
        else:
            ocomm.allreduce(np.ones(1), name="y")
            ocomm.join()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")
def test_neutral_elements_change_nothing(dtype: DType, op: ReduceOp) -> None:
    from ocomm.kernels.reference import ReferenceKernels

    values = np.random.default_rng(0).integers(0, 2 if dtype == DType.BOOL else 100, 16 * dtype.itemsize, np.uint8)
    if dtype.is_floating:
        values.view(np.uint16)[:] &= 0x7BFF  # no NaN, no Inf
    out = np.zeros_like(values)
    ReferenceKernels().reduce(dtype, op, [neutral(dtype, op, 16), values], 1.0, 1.0, out)
    assert (out == values).all()
