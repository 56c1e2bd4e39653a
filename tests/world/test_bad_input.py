"""What goes wrong is an error with names on every rank that waits, and the job goes on where it can."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm import session as sessions
from ocomm.config import read_settings
from ocomm.errors import (
    HorovodInternalError,
    InvalidRequestError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    OcommError,
    PeerError,
    SettingsError,
    StallError,
)
from ocomm.negotiation.coordinator import EQUAL_CALLS
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Submission
from ocomm.session import Session
from ocomm.transport.local import Fabric
from ocomm.types import DType, Settings
from tests.worlds import MPI_SIZE, PATIENCE_S, run_ranks

threads_only = pytest.mark.skipif(bool(MPI_SIZE), reason="a rank that fails ends an mpirun job")


def the_job_goes_on() -> None:
    assert ocomm.allreduce(np.ones(2), op=ocomm.Sum).tolist() == [ocomm.size()] * 2


def disagree(size: int, call: Callable[[int], Any], message: str) -> None:
    """``call(rank)`` raises MismatchError with ``message`` on every rank, and the next collective works."""

    def body(session: Session) -> None:
        with pytest.raises(MismatchError) as error:
            call(ocomm.rank())
        assert str(error.value) == message
        assert isinstance(error.value, HorovodInternalError)
        the_job_goes_on()

    run_ranks(size, body)


def refused(settings: list[Settings]) -> dict[int, str]:
    """What the ranks of these settings say that cannot start, soon; none is left waiting."""
    fabric = Fabric(len(settings))
    said: dict[int, str] = {}

    def rank_main(rank: int) -> None:
        try:
            Session().start(fabric.endpoint(rank), settings[rank])
        except OcommError as error:
            said[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return said


def without_places(text: str) -> str:
    """A report of a stall without times, and without the lines of code that it may have come to know in time."""
    text = re.sub(r"\d+ s ago", "N s ago", text)
    text = re.sub(r", at \S+:\d+ in \w+", "", text)
    return re.sub(r" rank \d is at \S+:\d+ in \w+\.", "", text)


class TestRanksDisagree:
    def test_on_the_shape(self) -> None:
        disagree(
            4,
            lambda rank: ocomm.allreduce(np.ones(5 if rank == 2 else 4, np.float32), name="fc.weight"),
            "tensor 'allreduce.fc.weight': mismatched shape: ranks 0, 1, 3 submitted shape (4,) float32, rank 2 "
            "submitted shape (5,) float32.",
        )

    def test_on_a_shape_of_equal_size(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.broadcast(np.ones((2, 3) if rank else (3, 2)), 0, name="x"),
            "tensor 'broadcast.x': mismatched shape: rank 0 submitted shape (3, 2) float64, rank 1 submitted shape "
            "(2, 3) float64.",
        )

    def test_on_the_rows_of_an_allgather(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.allgather(np.ones((1, 2 + rank)), name="x"),
            "tensor 'allgather.x': mismatched shape: rank 0 submitted shape (*, 2) float64, rank 1 submitted shape "
            "(*, 3) float64.",
        )

    def test_on_the_element_type(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.allreduce(np.ones(4, np.int64 if rank else np.int32), name="x"),
            "tensor 'allreduce.x': mismatched dtype: rank 0 submitted int32, rank 1 submitted int64.",
        )

    def test_on_the_reduction(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.allreduce(np.ones(4), name="x", op=ocomm.Sum if rank else ocomm.Max),
            "tensor 'allreduce.x': mismatched reduction: rank 0 submitted Max, rank 1 submitted Sum.",
        )

    def test_on_the_factors(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.allreduce(np.ones(4), name="x", prescale_factor=1.0 + rank),
            "tensor 'allreduce.x': mismatched prescale and postscale: rank 0 submitted (1.0, 1.0), rank 1 submitted "
            "(2.0, 1.0).",
        )

    def test_on_the_root(self) -> None:
        disagree(
            2,
            lambda rank: ocomm.broadcast(np.ones(4), rank, name="x"),
            "tensor 'broadcast.x': mismatched root rank: rank 0 submitted 0, rank 1 submitted 1.",
        )

    def test_on_what_a_name_is(self) -> None:
        def call(rank: int) -> None:
            kind = Kind.ALLGATHER if rank else Kind.ALLREDUCE
            data = np.zeros(4, np.uint8)
            request = Request(kind, "x", DType.UINT8, (4,))
            sessions.current().submit(0, Submission.of(request, data, data)).wait()

        disagree(
            2,
            call,
            "tensor 'x': mismatched operation: rank 0 submitted allreduce, rank 1 submitted allgather. Give different "
            "operations different names.",
        )

    def test_on_the_order_of_elements(self) -> None:
        def call(rank: int) -> None:
            data = np.zeros(36, np.uint8)
            order = "tensorflow" if rank else "torch"
            request = Request(Kind.ALLREDUCE, "dense.kernel", DType.FLOAT32, (3, 3), order=order)
            sessions.current().submit(0, Submission.of(request, data, data)).wait()

        disagree(
            2,
            call,
            "tensor 'dense.kernel': mismatched element order: rank 0 submitted torch, rank 1 submitted tensorflow.",
        )


class TestOneRankIsWrong:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda: ocomm.allreduce(np.ones(2, np.complex64), name="x"),
                "tensor 'allreduce.x': dtype complex64 is not supported; use one of uint8, int8, int16, int32, int64, "
                "bool, float16, bfloat16, float32, float64, uint16.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2, bool), name="x"),
                "tensor 'allreduce.x': Average is not defined for bool; use Max or Sum (true on any rank), Min or "
                "Product (true on all), or convert the tensor first.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2, bool), name="x", op=ocomm.Sum, prescale_factor=2.0),
                "tensor 'allreduce.x': a bool tensor cannot be scaled; leave out the scale factors.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2), name="x", prescale_factor=None),  # type: ignore[arg-type]
                "tensor 'allreduce.x': prescale_factor and postscale_factor must be numbers, got None and 1.0.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2), name="x", op=[1]),  # type: ignore[arg-type]
                "tensor 'allreduce.x': op=[1] is no reduction; use Average, Sum, Adasum, Min, Max or Product.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2), name="x", op=17),
                "tensor 'allreduce.x': op=17 is no reduction; use Average, Sum, Adasum, Min, Max or Product.",
            ),
            (
                lambda: ocomm.allreduce(np.ones(2), average=True, op=ocomm.Sum),
                "The op parameter supersedes average. Please provide only one of them.",
            ),
            (
                lambda: ocomm.broadcast(np.ones(2), 2, name="x"),
                "tensor 'broadcast.x': broadcast received invalid root rank 2 for provided process set; process set 0 "
                "has the world ranks 0..1.",
            ),
            (
                lambda: ocomm.broadcast(np.ones(2), -1, name="x"),
                "tensor 'broadcast.x': broadcast received invalid root rank -1 for provided process set; process set 0 "
                "has the world ranks 0..1.",
            ),
            (
                lambda: ocomm.allgather(3.0, name="x"),
                "tensor 'allgather.x': allgather needs at least one dimension; reshape it to (1,).",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), name="x"),
                "tensor 'alltoall.x': splits not provided, but first dimension of tensor is not an even multiple of "
                "the number of workers (3 rows, 2 ranks).",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), [1, 1, 1], name="x"),
                "tensor 'alltoall.x': Number of entries in splits does not equal number of workers (3 entries, 2 "
                "ranks).",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), [2, 2], name="x"),
                "tensor 'alltoall.x': Sum of splits entries is greater than the first dimension of tensor (4 > 3).",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), [[1], [2]], name="x"),
                "tensor 'alltoall.x': alltoall expects a 1D splits tensor, got shape (2, 1).",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), [1.0, 2.0], name="x"),
                "tensor 'alltoall.x': alltoall expects splits of whole numbers, got float64.",
            ),
            (
                lambda: ocomm.alltoall(np.ones(3), [-1, 2], name="x"),
                "tensor 'alltoall.x': splits must not be negative, got [-1, 2].",
            ),
            (
                lambda: ocomm.alltoall(np.empty((2**31, 0)), [0, 2**31], name="x"),
                "tensor 'alltoall.x': splits [0, 2147483648] send more than 2147483647 rows to one rank, and counts of "
                "received rows are int32; reshape the tensor to fewer, longer rows.",
            ),
            (
                lambda: ocomm.reducescatter(np.ones(3), name="x", op=ocomm.Max),
                "tensor 'reducescatter.x': reducescatter has Average and Sum, not Max.",
            ),
            (
                lambda: ocomm.allreduce_([1.0]),  # type: ignore[arg-type]
                "an operation in place needs a writable NumPy array, got list.",
            ),
            (
                lambda: ocomm.broadcast_(np.frombuffer(b"ab", np.uint8), 0),
                "an operation in place needs a writable NumPy array, got a read-only array.",
            ),
            (
                lambda: ocomm.poll(-5),
                "handle -5 was not created or has been synchronized already.",
            ),
        ],
    )
    def test_its_call_is_refused_at_once(self, call: Callable[[], Any], message: str) -> None:
        def body(session: Session) -> None:
            if ocomm.rank() == 1:
                with pytest.raises(InvalidRequestError) as error:
                    call()
                assert str(error.value) == message
                assert isinstance(error.value, ValueError)
            the_job_goes_on()

        run_ranks(2, body)

    def test_a_name_in_use_is_refused_and_nothing_of_its_group_is_queued(self) -> None:
        def body(session: Session) -> None:
            message = (
                f"tensor 'grouped_allreduce.g_2of2' is already being processed on rank {ocomm.rank()}. Wait for its "
                "handle first, or give this operation another name. A call that was interrupted ends once all ranks "
                "have made it."
            )
            data = np.zeros(8, np.uint8)
            request = Request(Kind.ALLREDUCE, "grouped_allreduce.g_2of2", DType.FLOAT64, (1,))
            if ocomm.rank() == 0:
                first = session.submit(0, Submission.of(request, data, data))
                with pytest.raises(InvalidRequestError) as error:
                    ocomm.grouped_allreduce([np.ones(1), np.ones(1)], name="g")
                assert str(error.value) == message
            ocomm.barrier()
            if ocomm.rank() == 1:
                first = session.submit(0, Submission.of(request, data, data))
            first.wait()
            out = ocomm.grouped_allreduce([np.ones(1), np.ones(1)], name="g", op=ocomm.Sum)
            assert [o.tolist() for o in out] == [[2.0], [2.0]]

        run_ranks(2, body)


#: Yet so that all who want to come do so in time.
IMPATIENT = Settings(stall_check_s=1.0, stall_shutdown_s=2.0)


class TestSomeDoNotCome:
    @pytest.mark.skipif(bool(MPI_SIZE), reason="the ranks tell each other through an event of this process")
    def test_a_name_that_only_some_submit_is_given_up_with_their_names(self) -> None:
        def lonely(session: Session) -> str:
            if ocomm.rank() == 1:
                come.wait(PATIENCE_S)
                the_job_goes_on()
                return ""
            try:
                with pytest.raises(StallError) as error:
                    ocomm.allreduce(np.ones(1), name="lonely")
            finally:
                come.set()
            the_job_goes_on()
            return str(error.value)

        come = threading.Event()
        first, second, third = run_ranks(3, lonely, IMPATIENT)
        assert first == third and second == ""
        assert without_places(first) == ("tensor 'allreduce.lonely': ranks 0, 2 submitted it N s ago, rank 1 did not.")

    def test_ranks_that_wait_for_different_names_are_told_both(self) -> None:
        def body(session: Session) -> str:
            name = "b" if ocomm.rank() else "a"
            with pytest.raises(StallError) as error:
                ocomm.allreduce(np.ones(1), name=name)
            return without_places(str(error.value))

        messages = run_ranks(2, body, IMPATIENT)
        assert messages == [
            "tensor 'allreduce.a': rank 0 submitted it N s ago, rank 1 did not. rank 1 waits for 'allreduce.b' "
            "instead.",
            "tensor 'allreduce.b': rank 1 submitted it N s ago, rank 0 did not. rank 0 waits for 'allreduce.a' "
            "instead.",
        ]

    @threads_only
    def test_an_exception_on_one_rank_frees_the_others(self) -> None:
        said: list[str] = []

        def body(session: Session) -> None:
            if ocomm.rank() == 1:
                raise RuntimeError("disk full")
            with pytest.raises(PeerError) as error:
                ocomm.allreduce(np.ones(1), name="x")
            said.append(str(error.value))
            with pytest.raises(PeerError):
                ocomm.allreduce(np.ones(1), name="y")

        with pytest.raises(RuntimeError, match=r"^disk full$"):
            run_ranks(3, body)
        assert said == ["rank 1 raised RuntimeError: disk full."] * 2

    @threads_only
    def test_a_rank_that_leaves_in_order_fails_what_needs_it(self) -> None:
        def body(session: Session) -> None:
            if ocomm.rank() == 1:
                return
            with pytest.raises(PeerError) as error:
                ocomm.allreduce(np.ones(1), name="x")
            assert str(error.value) == f"tensor 'allreduce.x': rank 1 has shut down. {EQUAL_CALLS}"

        run_ranks(2, body)


class TestTheJob:
    def test_calls_before_init_are_refused(self) -> None:
        sessions.use(Session())
        calls: list[Callable[[], Any]] = [
            ocomm.rank, ocomm.size, ocomm.local_rank, ocomm.is_homogeneous, ocomm.barrier,
            lambda: ocomm.allreduce(np.ones(1)), lambda: ocomm.broadcast_object(1),
            lambda: ocomm.allreduce(np.ones(1), process_set=ocomm.ProcessSet([0])),
            ocomm.global_process_set.size,
        ]  # fmt: skip
        try:
            assert not ocomm.is_initialized()
            ocomm.shutdown()
            for call in calls:
                with pytest.raises(NotInitializedError) as error:
                    call()
                assert str(error.value) == "ocomm has not been initialized; call init() first."
                assert isinstance(error.value, ValueError)
        finally:
            sessions.use(None)

    def test_a_second_init_is_a_no_op(self) -> None:
        def body(session: Session) -> None:
            runtime = session.runtime
            ocomm.init()
            ocomm.init(process_sets=[[0]])
            assert session.runtime is runtime

        run_ranks(2, body)

    @threads_only
    def test_init_and_shutdown_may_be_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sessions.use(Session())
        try:
            for _ in range(2):
                ocomm.init(comm=[0])
                assert (ocomm.rank(), ocomm.size()) == (0, 1)
                assert ocomm.allreduce(np.ones(2)).tolist() == [1, 1]
                ocomm.shutdown()
                assert not ocomm.is_initialized()
        finally:
            sessions.use(None)

    @threads_only
    def test_a_process_of_horovodruns_gloo_mode_is_told_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
        monkeypatch.setenv("HOROVOD_SIZE", "4")
        with pytest.raises(LaunchError) as error:
            ocomm.init()
        assert str(error.value) == (
            "horovodrun started this process in Gloo mode (HOROVOD_SIZE=4), in which ocomm cannot find the other "
            "ranks. Start the job with ocommrun and the same flags, with horovodrun --mpi, or with mpirun or srun."
        )

    @threads_only
    def test_ranks_that_are_not_there_cannot_start(self) -> None:
        with pytest.raises(InvalidRequestError) as error:
            ocomm.init(comm=[0, 2])
        assert str(error.value) == (
            "init(comm=[0, 2]) on rank 0: give each rank the list that it is in, of distinct ranks of [0]."
        )
        with pytest.raises(InvalidRequestError, match=r"pass the list of all ProcessSets"):
            ocomm.init(process_sets="static")

    def test_an_unknown_setting_is_refused(self) -> None:
        with pytest.raises(SettingsError) as error:
            read_settings({"OCOMM_FUSION_TRESHOLD": "1"})
        assert str(error.value) == (
            "OCOMM_FUSION_TRESHOLD is not a setting of ocomm. Did you mean OCOMM_FUSION_THRESHOLD?"
        )
        with pytest.raises(SettingsError) as error:
            read_settings({"OCOMM_CYCLE_TIME": "fast"})
        assert str(error.value).startswith("OCOMM_CYCLE_TIME='fast' cannot be used: ")

    @threads_only
    def test_settings_that_differ_are_an_error_on_every_rank(self) -> None:
        assert refused([Settings(fusion_threshold=threshold) for threshold in (128, 64, 128)]) == dict.fromkeys(
            range(3),
            "SettingsError: setting 'fusion_threshold' differs between ranks: 128 on ranks [0, 2], 64 on ranks [1]. "
            "Set it to the same value everywhere.",
        )

    @threads_only
    @pytest.mark.parametrize("culprit", [0, 2])
    def test_a_rank_that_cannot_join_is_an_error_on_every_rank_at_once(self, culprit: int) -> None:
        """Before any of them waits for it in MPI."""
        cores = [(9999,) * 3 if rank == culprit else () for rank in range(3)]
        said = refused([Settings(thread_affinity=core, start_timeout_s=600.0) for core in cores])
        why = said.pop(culprit).removesuffix(".")
        assert why.startswith(f"SettingsError: OCOMM_THREAD_AFFINITY: rank {culprit} cannot use core 9999: ")
        others = dict.fromkeys({0, 1, 2} - {culprit}, f"LaunchError: rank {culprit} cannot join the job: {why}.")
        assert said == others
