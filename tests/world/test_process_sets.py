"""Process sets: collectives among some of the ranks, beside those of the others."""

from __future__ import annotations

import numpy as np
import pytest

import ocomm
from ocomm.errors import InvalidRequestError, MismatchError, StallError
from ocomm.session import Session
from ocomm.types import Settings
from tests.worlds import MPI_SIZE, run_ranks


def test_a_set_has_its_own_numbering() -> None:
    def body(session: Session) -> None:
        pair = ocomm.ProcessSet([3, 1])
        assert (pair.process_set_id, pair.ranks, pair.size()) == (1, [1, 3], 2)
        assert pair.included() == (ocomm.rank() in (1, 3))
        if pair.included():
            assert pair.rank() == (1, 3).index(ocomm.rank())
        world = ocomm.global_process_set
        assert (world.process_set_id, world.ranks, world.size()) == (0, [0, 1, 2, 3], 4)
        assert world.included() and world.rank() == ocomm.rank()
        assert ocomm.ProcessSet([0, 2]).process_set_id is None

    run_ranks(4, body, process_sets=[[1, 3]])


def test_every_collective_works_in_a_set_and_roots_are_world_ranks() -> None:
    def body(session: Session) -> None:
        pair = ocomm.ProcessSet([1, 3])
        if not pair.included():
            return
        me, world_rank = pair.rank(), ocomm.rank()
        assert ocomm.allreduce(np.full(3, world_rank), op=ocomm.Sum, process_set=pair).tolist() == [4, 4, 4]
        assert ocomm.allreduce(np.full(3, 1.0 * world_rank), process_set=pair).tolist() == [2, 2, 2]
        assert ocomm.allgather(np.full(me + 1, world_rank), process_set=pair).tolist() == [1, 3, 3]
        for root in (1, 3):
            assert ocomm.broadcast(np.full(2, world_rank), root, process_set=pair).tolist() == [root, root]
            assert ocomm.broadcast_object(world_rank, root, process_set=pair) == root
        assert ocomm.alltoall(np.array([10, 20]) + me, process_set=pair).tolist() == [10 * me + 10, 10 * me + 11]
        assert ocomm.reducescatter(np.arange(3), op=ocomm.Sum, process_set=pair).tolist() == [[0, 2], [4]][me]
        assert ocomm.allgather_object(world_rank, process_set=pair) == [1, 3]
        ocomm.barrier(pair)

    run_ranks(4, body, process_sets=[[1, 3]])


def test_calls_of_a_set_do_not_shift_the_names_of_the_world() -> None:
    def body(session: Session) -> None:
        pair = ocomm.ProcessSet([0, 1])
        if pair.included():
            ocomm.allreduce(np.ones(1), process_set=pair)
        assert ocomm.allreduce(np.ones(1), op=ocomm.Sum).tolist() == [3]

    run_ranks(3, body, process_sets=[[0, 1]])


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("numel", [10, 100_000])
def test_overlapping_sets_in_opposite_order_do_not_wait_for_each_other(window: int, numel: int) -> None:
    def body(session: Session) -> None:
        sets = [ocomm.ProcessSet([0, 1]), ocomm.ProcessSet([1, 2]), ocomm.ProcessSet([0, 2]), ocomm.global_process_set]
        mine = [ps for ps in sets if ps.included()]
        if ocomm.rank() == 1:
            mine.reverse()
        for _ in range(5):
            handles = [
                ocomm.allreduce_async(np.full(numel, 1.0 + ocomm.rank()), name=f"t{k}", op=ocomm.Sum, process_set=ps)
                for k in range(3)
                for ps in mine
            ]
            if ocomm.rank() == 2:
                handles.reverse()
            results = [ocomm.synchronize(handle) for handle in handles]
            if ocomm.rank() == 2:
                results.reverse()
            for ps, result in zip(mine * 3, results, strict=True):
                assert (result == sum(1.0 + rank for rank in ps.ranks)).all()

    run_ranks(3, body, Settings(window=window, segment_nbytes=65536), process_sets=[[0, 1], [1, 2], [0, 2]])


def test_two_sets_work_at_once() -> None:
    def body(session: Session) -> None:
        sets = [ocomm.ProcessSet([0, 1]), ocomm.ProcessSet([2, 3])]
        (mine,) = [ps for ps in sets if ps.included()]
        for k in range(20 * (mine.process_set_id or 0)):
            total = ocomm.allreduce(np.full(1000, float(ocomm.rank())), name=str(k), op=ocomm.Sum, process_set=mine)
            assert (total == sum(mine.ranks)).all()

    run_ranks(4, body, process_sets=[[0, 1], [2, 3]])


def test_what_a_rank_may_not_do_is_said_in_whole_sentences() -> None:
    def body(session: Session) -> None:
        first = ocomm.ProcessSet([0])
        with pytest.raises(InvalidRequestError) as error:
            ocomm.allreduce(np.ones(1), process_set=ocomm.ProcessSet([1]))
        assert str(error.value) == (
            "process set with ranks [1] has not been registered; pass it to init(process_sets=[...]) or "
            "add_process_set() on every rank."
        )
        if ocomm.rank() == 1:
            with pytest.raises(InvalidRequestError) as error:
                ocomm.allreduce(np.ones(1), process_set=first)
            assert str(error.value) == "rank 1 is not a member of process set 1 (ranks [0])."
            return
        with pytest.raises(InvalidRequestError) as error:
            ocomm.broadcast(np.ones(1), 1, name="x", process_set=first)
        assert str(error.value) == (
            "tensor 'broadcast.x': broadcast received invalid root rank 1 for provided process set; process set 1 has "
            "the world ranks [0]."
        )
        assert ocomm.allreduce(np.ones(1), process_set=first).tolist() == [1]

    run_ranks(2, body, process_sets=[[0]])


def test_roots_that_differ_are_reported_as_world_ranks() -> None:
    def body(session: Session) -> None:
        pair = ocomm.ProcessSet([1, 2])
        if not pair.included():
            return
        with pytest.raises(MismatchError) as error:
            ocomm.broadcast(np.ones(1), ocomm.rank(), name="x", process_set=pair)
        assert str(error.value) == (
            "tensor 'broadcast.x': mismatched root rank: rank 1 submitted 1, rank 2 submitted 2."
        )

    run_ranks(3, body, process_sets=[[1, 2]])


@pytest.mark.parametrize("ranks", [[], [1, 1], ["a"], 5])
def test_a_set_needs_distinct_ranks(ranks: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^ProcessSet takes "):
        ocomm.ProcessSet(ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_sets_come_and_go_while_the_job_runs(engine: str) -> None:
    def body(session: Session) -> None:
        me = ocomm.rank()
        for again in range(3):
            pair = ocomm.add_process_set([3, 1])
            trio = ocomm.add_process_set(ocomm.ProcessSet([0, 1, 2]))
            assert (pair.ranks, pair.process_set_id, trio.process_set_id) == ([1, 3], 2 * again + 1, 2 * again + 2)
            handles = []
            for ps in (pair, trio, ocomm.global_process_set):
                if ps.included():
                    handle = ocomm.allreduce_async(np.full(9000, 1.0 * me), name="x", op=ocomm.Sum, process_set=ps)
                    handles.append((ps, handle))
            for ps, handle in reversed(handles):
                assert (ocomm.synchronize(handle) == sum(ps.ranks)).all()
            if pair.included():
                compressed = ocomm.compressed_allreduce(np.full(8, 2.0, np.float32), "c", process_set=pair)
                assert compressed.tolist() == [2.0] * 8
                assert ocomm.allgather_object(me, process_set=pair) == [1, 3]
            assert ocomm.remove_process_set(pair) and ocomm.remove_process_set(trio)
            assert pair.process_set_id is None and not ocomm.remove_process_set(pair)
            with pytest.raises(InvalidRequestError, match="has not been registered"):
                ocomm.allreduce(np.ones(1), process_set=pair)
        assert not ocomm.remove_process_set(ocomm.global_process_set)
        assert ocomm.allreduce(np.ones(1), op=ocomm.Sum).tolist() == [4]

    run_ranks(4, body, Settings(engine=engine))


def test_what_only_some_ranks_of_a_set_have_asked_for_fails_when_it_is_removed() -> None:
    def body(session: Session) -> None:
        pair = ocomm.add_process_set([0, 1])
        if ocomm.rank() == 0:
            handle = ocomm.allreduce_async(np.ones(3), name="alone", process_set=pair)
        ocomm.remove_process_set(pair)
        if ocomm.rank() == 0:
            with pytest.raises(InvalidRequestError) as error:
                ocomm.synchronize(handle)
            assert str(error.value) == "process set [0, 1] was removed."

    run_ranks(3, body)


def test_a_rank_that_does_not_close_the_channels_of_a_removed_set_ends_the_others_wait() -> None:
    def body(session: Session) -> None:
        pair = ocomm.add_process_set([0, 1])
        if ocomm.rank() == 1:
            session.member_set(1).retire = lambda: False  # type: ignore[method-assign]
        if not pair.included():
            assert ocomm.remove_process_set(pair)
            return
        with pytest.raises(StallError) as error:
            ocomm.remove_process_set(pair)
        assert str(error.value) == (
            f"rank {ocomm.rank()}: process set [0, 1] was removed, but its ranks have not closed its channels after 1 "
            "s (OCOMM_START_TIMEOUT): an exchange on one of them does not end on some rank; see the other ranks."
        )

    run_ranks(3, body, Settings(start_timeout_s=1.0))


def test_a_set_that_cannot_be_added_is_refused_and_the_job_goes_on() -> None:
    def body(session: Session) -> None:
        cases = {
            "Attempted to add a duplicate process set: ranks [0].": [0],
            "Attempted to add a duplicate process set: ranks [0, 1].": [1, 0],
            "process set 2 has ranks [1, 2]; the world has ranks 0..1.": [1, 2],
        }
        for message, ranks in cases.items():
            with pytest.raises(InvalidRequestError) as error:
                ocomm.add_process_set(ranks)
            assert str(error.value) == message
        assert ocomm.add_process_set([1]).process_set_id == 2

    run_ranks(2, body, process_sets=[[0]])


def test_ranks_that_add_different_sets_hear_of_it() -> None:
    def body(session: Session) -> None:
        with pytest.raises(MismatchError) as error:
            ocomm.add_process_set([ocomm.rank()])
        assert str(error.value) == (
            "tensor 'add_process_set.1': mismatched registration: rank 0 submitted ranks [0], rank 1 submitted ranks "
            "[1]."
        )
        assert ocomm.add_process_set([1]).process_set_id == 1

    run_ranks(2, body)


def test_a_set_of_an_mpi_communicator() -> None:
    mpi = pytest.importorskip("mpi4py.MPI")

    def body(session: Session) -> None:
        half = mpi.COMM_WORLD.Split(mpi.COMM_WORLD.Get_rank() % 2)
        mine = ocomm.ProcessSet(half)
        assert mine.ranks == [rank for rank in range(4) if rank % 2 == ocomm.rank() % 2] and mine.mpi_comm is half
        for ranks in ([0, 2], [1, 3]):
            ocomm.add_process_set(ranks)
        assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, process_set=mine).tolist() == [2]
        half.Free()

    if not MPI_SIZE:
        pytest.skip(reason="needs ranks of an MPI job")
    run_ranks(4, body)
