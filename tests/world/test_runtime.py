"""The runtime with real threads: leaving, failing, coming back, signs of life, stalls."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm import bootstrap, operations
from ocomm import session as sessions
from ocomm.collectives.engine import Reason
from ocomm.errors import (
    HorovodInternalError,
    InvalidRequestError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    PeerError,
    SettingsError,
    StallError,
)
from ocomm.negotiation.coordinator import EQUAL_CALLS
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime import background
from ocomm.runtime.handle import Handle, Submission
from ocomm.session import Session
from ocomm.transport.local import Fabric, LocalTransport
from ocomm.types import DType, ReduceOp, Settings
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

LIMIT_S = 20.0
#: Rank 0 has the children 1, 2, 4; rank 2 has 3; rank 4 has 5 and 6; rank 6 has 7.
BINARY_TREE = Settings(direct_peers=1)
threads_only = pytest.mark.skipif(MPI_SIZE > 0, reason="would end the MPI job that the tests run in")
alone = pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")


def allreduce(array: np.ndarray, name: str, op: ReduceOp = ReduceOp.SUM) -> Submission:
    raw = array.reshape(-1).view(np.uint8)
    return Submission.of(Request(Kind.ALLREDUCE, name, DType.from_numpy(array.dtype), array.shape, op), raw, raw)


def start(session: Session, array: np.ndarray, name: str) -> Handle:
    return session.submit(0, allreduce(array, name))


def rank_of(session: Session) -> int:
    return session.require_topology().rank


def outcome(handle: Handle) -> str:
    """How a handle ended, as people read it; a handle that does not end fails the test."""
    try:
        handle.wait(LIMIT_S)
        return "done"
    except HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"


class Ranks:
    """Sessions of a local world which a test starts, fails and stops by hand."""

    def __init__(
        self, size: int, settings: Settings | None = None, transport: Callable[..., Any] | None = None
    ) -> None:
        fabric = Fabric(size)
        self.sessions = [Session() for _ in range(size)]
        endpoints = [fabric.endpoint(rank) for rank in range(size)]
        if transport:
            endpoints = [transport(endpoint) for endpoint in endpoints]
        self.together(lambda rank, s: s.start(endpoints[rank], settings or Settings()))

    def together(self, body: Callable[[int, Session], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.sessions)

        def work(rank: int) -> None:
            results[rank] = body(rank, self.sessions[rank])

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(self.sessions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "stuck"
        return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("engine", ["native", "python"])
def test_every_rank_gets_the_sum(size: int, engine: str) -> None:
    def body(session: Session) -> None:
        for step in range(3):
            arrays = [np.full(n, rank_of(session) + step, np.float32) for n in (1, 1000, 70_001)]
            for handle in [start(session, array, f"t{i}") for i, array in enumerate(arrays)]:
                handle.wait()
            for array in arrays:
                assert (array == sum(range(size)) + size * step).all()

    run_ranks(size, body, Settings(engine=engine))


@pytest.mark.parametrize("size", few([1, 2, 4], [2]))
def test_coming_back_twenty_times_leaves_nothing_behind(size: int) -> None:
    before = threading.active_count()
    for _ in range(20):

        def body(session: Session) -> None:
            array = np.ones(10, np.float32)
            start(session, array, "x").wait()
            assert (array == size).all()
            assert session.automatic_name("allreduce") == "allreduce.noname.1"

        run_ranks(size, body)
    assert threading.active_count() <= before


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_hear_it_and_go_on(size: int) -> None:
    def body(session: Session) -> None:
        rank = rank_of(session)
        with pytest.raises(MismatchError) as caught:
            start(session, np.ones(5 if rank == 1 else 4, np.float32), "w").wait(LIMIT_S)
        others = "rank 0" if size == 2 else "ranks 0, 2"
        assert str(caught.value) == (
            f"tensor 'w': mismatched shape: {others} submitted shape (4,) float32, rank 1 submitted shape (5,) float32."
        )
        array = np.ones(4, np.float32)
        start(session, array, "w").wait(LIMIT_S)
        assert (array == size).all()

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_that_is_wrong_on_this_rank_is_refused_before_anything_is_sent(size: int) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            session.submit(0, allreduce(np.ones(3, np.int32), "b", ReduceOp.ADASUM))
        assert str(caught.value) == "tensor 'b': Adasum is not defined for int32."
        twice = allreduce(np.ones(3, np.float32), "a")
        twice.add(twice.requests[0], twice.sources[0], twice.targets[0])
        with pytest.raises(InvalidRequestError) as caught:
            session.submit(0, twice)
        assert str(caught.value) == (
            f"tensor 'a' is already being processed on rank {rank_of(session)}. Wait for its handle first, or give this"
            " operation another name. A call that was interrupted ends once all ranks have made it."
        )
        start(session, np.ones(3, np.float32), "a").wait(LIMIT_S)

    run_ranks(size, body)


@threads_only
def test_a_rank_that_leaves_fails_what_waits_for_it_and_what_comes_later() -> None:
    ranks = Ranks(3)
    waiting = [start(ranks.sessions[rank], np.ones(4, np.float32), "early") for rank in (0, 1)]
    leaver = threading.Thread(target=ranks.sessions[2].shutdown, daemon=True)
    leaver.start()
    assert [outcome(handle) for handle in waiting] == [
        f"PeerError: tensor 'early': rank 2 has shut down. {EQUAL_CALLS}"
    ] * 2
    late = start(ranks.sessions[1], np.ones(4, np.float32), "late")
    assert outcome(late) == f"PeerError: tensor 'late': rank 2 has shut down. {EQUAL_CALLS}"
    assert leaver.is_alive(), "a clean departure waits for the others"
    ranks.sessions.pop()
    assert ranks.together(lambda _, session: session.shutdown()) == [True, True]
    leaver.join(LIMIT_S)
    assert not leaver.is_alive()


@threads_only
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_fails_ends_all_others_with_its_reason(culprit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)  # how long it stays for ranks that do not leave
    ranks = Ranks(3)
    others = [rank for rank in range(3) if rank != culprit]
    waiting = [start(ranks.sessions[rank], np.ones(4, np.float32), "x") for rank in others]
    assert ranks.sessions[culprit].shutdown(failed=True, why="raised ValueError: no data") is False
    assert [outcome(handle) for handle in waiting] == [f"PeerError: rank {culprit} raised ValueError: no data."] * 2
    for rank in others:
        with pytest.raises(PeerError) as caught:
            start(ranks.sessions[rank], np.ones(4, np.float32), "y")
        assert str(caught.value) == f"rank {culprit} raised ValueError: no data."
    left = ranks.together(lambda _, session: session.shutdown())
    assert [left[rank] for rank in others] == [False, False]


class Torn(LocalTransport):
    """A network on which nothing of one communicator arrives once ``cut`` is set."""

    cut = False

    def __init__(self, whole: LocalTransport) -> None:
        super().__init__(whole.fabric, whole.identity, whole.members, whole.rank)

    def duplicate(self) -> LocalTransport:
        return Torn(super().duplicate())

    def test(self, request: Any) -> bool:
        data = len(self.identity) > 1
        return not (Torn.cut and data and request is not None) and super().test(request)


@threads_only
@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_fails_after_a_collective_leaves_the_others_its_result(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.Runtime, "start", lambda runtime: None)  # rounds of the loop are made by hand
    ranks = Ranks(2, Settings(engine="python"), Torn)
    runtimes = [session.runtime for session in ranks.sessions]
    assert all(runtimes)

    def cycle(rank: int) -> None:
        runtimes[rank].engine.wake()  # a round that waits for nothing
        runtimes[rank].cycle()

    arrays = [np.full(1024, rank, np.float32) for rank in (0, 1)]
    request = Request(Kind.BROADCAST, "x", DType.FLOAT32, arrays[0].shape, root=1)
    handles = [
        session.submit(0, Submission.of(request, array.view(np.uint8), array.view(np.uint8)))
        for session, array in zip(ranks.sessions, arrays, strict=True)
    ]
    for rank in (1, 0, 0):  # rank 0 hears of both requests, and begins
        cycle(rank)
    for _ in range(50):
        if not handles[1].poll():
            cycle(1)
    assert handles[1].poll() and not handles[0].poll()
    runtimes[1]._leaving = (True, "raised ValueError: no data")
    cycle(1)
    if is_late:  # the messages arrive after the engine has looked for them, and with them the news of the failure
        look = runtimes[0].engine.run

        def look_too_early(seconds: float) -> Any:
            monkeypatch.setattr(runtimes[0].engine, "run", look)
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(Torn, "cut", True)
                return look(seconds)

        monkeypatch.setattr(runtimes[0].engine, "run", look_too_early)
    cycle(0)
    assert outcome(handles[0]) == "done"
    assert (arrays[0] == 1).all()
    with pytest.raises(PeerError, match=re.escape("rank 1 raised ValueError: no data.")):
        start(ranks.sessions[0], np.ones(4, np.float32), "y")


@threads_only
def test_handles_of_plans_under_way_end_when_the_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torn, "cut", True)
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)
    ranks = Ranks(2, Settings(engine="python"), Torn)
    handles = [start(session, np.ones(4, np.float32), "x") for session in ranks.sessions]
    end = time.monotonic() + LIMIT_S
    while not all(session.engine and session.engine.is_busy for session in ranks.sessions):
        assert time.monotonic() < end, "never under way"
    assert ranks.sessions[0].shutdown(failed=True, why="raised KeyError: 'x'") is False
    assert [outcome(handle) for handle in handles] == [
        "HorovodInternalError: ocomm has been shut down; call init() before the next collective.",
        "PeerError: rank 0 raised KeyError: 'x'.",
    ]
    ranks.sessions[1].shutdown()


@threads_only
def test_a_call_for_whose_result_there_is_no_memory_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)

    def fail(shape: tuple[int, ...]) -> np.ndarray:
        raise MemoryError(f"no room for {shape}")

    ranks = Ranks(2)
    request = Request(Kind.ALLGATHER, "x", DType.UINT8, (3,))
    source = np.ones(3, np.uint8)
    handles = [
        session.submit(0, Submission.of(request, source, allocate))
        for session, allocate in zip(ranks.sessions, (fail, lambda shape: np.empty(shape, np.uint8)), strict=True)
    ]
    assert [outcome(handle) for handle in handles] == [
        "HorovodInternalError: rank 0: the background thread failed: MemoryError: no room for (6,).",
        "PeerError: rank 0 failed: MemoryError: no room for (6,).",
    ]
    ranks.together(lambda _, session: session.shutdown())


@threads_only
def test_an_error_of_mpi_is_told_without_a_traceback_and_leaves_the_cause_to_the_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)
    ranks = Ranks(2)
    engine = ranks.sessions[0].engine
    assert engine is not None
    monkeypatch.setattr(engine, "run", lambda seconds: Reason.FAILED)
    handle = start(ranks.sessions[0], np.ones(4, np.float32), "x")
    why = (
        "rank 0: MPI failed, which ends all exchanges of this rank. The errors of the operations say why: after a "
        "MismatchError it is the calls, whose messages did not fit, and not the network."
    )
    assert outcome(handle) == f"HorovodInternalError: {why}"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [why]
    ranks.together(lambda _, session: session.shutdown())


@threads_only
def test_an_exchange_that_does_not_end_names_whom_it_waits_for_and_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Torn, "cut", True)
    ranks = Ranks(2, Settings(engine="python", stall_shutdown_s=1.0, fusion_threshold=0), Torn)
    handles = [[start(session, np.ones(4, np.float32), name) for name in ("x", "y")] for session in ranks.sessions]
    ends = [list(map(outcome, of_rank)) for of_rank in handles]
    stalls = [
        f"StallError: x on rank {rank} was not over within its timeout of 1 s; rank(s) [{1 - rank}] have not sent "
        "their part, or wait for ranks that they name themselves. All ranks must make the same calls in the same order."
        for rank in range(2)
    ]
    # Whatever else was under way hears why it ends.
    assert [stalls[0]] * 2 == ends[0] or [stalls[1]] * 2 == ends[1]
    ranks.together(lambda _, session: session.shutdown())


class Mute(LocalTransport):
    """A rank whose control messages stop leaving once it is in ``silent``: a process that has been stopped."""

    silent: set[int] = set()  # noqa: RUF012 -- shared on purpose

    def __init__(self, whole: LocalTransport) -> None:
        super().__init__(whole.fabric, whole.identity, whole.members, whole.rank)

    def isend(self, buffer: Any, dest: int, tag: int) -> None:
        if self.rank not in Mute.silent:
            super().isend(buffer, dest, tag)


@threads_only
@pytest.mark.parametrize(
    "size, silent, settings",
    [
        (3, 0, Settings(peer_timeout_s=1.5)),
        (3, 1, Settings(peer_timeout_s=1.5)),
        (3, 0, Settings(stall_shutdown_s=1.5)),
        (5, 0, replace(BINARY_TREE, peer_timeout_s=1.5)),
        (5, 2, replace(BINARY_TREE, peer_timeout_s=1.5)),
        (5, 3, replace(BINARY_TREE, peer_timeout_s=1.5)),
    ],
    ids=["rank 0", "rank 1", "rank 0, by the deadline of stalls", "root of a tree", "inner rank", "rank below another"],
)
def test_a_rank_that_shows_no_sign_of_life_is_named(
    size: int, silent: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_HEARTBEAT_S", 0.5)
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)
    ranks = Ranks(size, settings, Mute)
    others = [rank for rank in range(size) if rank != silent]
    handles = [start(ranks.sessions[rank], np.ones(4, np.float32), "x") for rank in others]
    try:
        Mute.silent.add(silent)
        for handle in handles:
            with pytest.raises(PeerError) as caught:
                handle.wait(LIMIT_S)
            assert re.fullmatch(rf"rank {silent} has not answered for [1-9] s\.", str(caught.value))
        ranks.together(lambda _, session: session.shutdown(failed=True, why="raised PeerError"))
    finally:
        Mute.silent.clear()


@threads_only
@pytest.mark.parametrize("culprit", [0, 2, 3])
def test_all_ranks_of_a_tree_hear_of_one_that_failed(culprit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)
    ranks = Ranks(8, BINARY_TREE)
    handles = {rank: start(ranks.sessions[rank], np.ones(4, np.float32), "x") for rank in range(8) if rank != culprit}
    assert ranks.sessions[culprit].shutdown(failed=True, why="raised ValueError: no data") is False
    assert {outcome(handle) for handle in handles.values()} == {
        f"PeerError: rank {culprit} raised ValueError: no data."
    }
    ranks.together(lambda rank, session: rank != culprit and session.shutdown(failed=True, why="raised PeerError"))


@threads_only
def test_ranks_below_one_whose_background_thread_failed_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAREWELL_S", 0.3)
    ranks = Ranks(8, BINARY_TREE)
    handles = [start(ranks.sessions[rank], np.ones(4, np.float32), "x") for rank in range(8) if rank != 4]
    runtime = ranks.sessions[4].runtime
    assert runtime is not None

    def broken() -> float:
        raise RuntimeError("broken")

    runtime.world.cycle = broken  # type: ignore[method-assign]
    runtime.engine.wake()
    assert {outcome(handle) for handle in handles} == {"PeerError: rank 4 failed: RuntimeError: broken."}
    ranks.together(lambda _, session: session.shutdown(failed=True, why="raised PeerError"))


@threads_only
def test_ranks_of_a_tree_leave_in_any_order() -> None:
    ranks = Ranks(8, BINARY_TREE)
    leavers = [threading.Thread(target=ranks.sessions[rank].shutdown, daemon=True) for rank in (4, 0, 2)]
    for leaver in leavers:
        leaver.start()
    rest = [rank for rank in range(8) if rank not in (4, 0, 2)]
    lonely = [start(ranks.sessions[rank], np.ones(4, np.float32), "x") for rank in rest]
    for handle in lonely:
        said, advice = outcome(handle).split(". ", 1)
        assert re.fullmatch(r"PeerError: tensor 'x': (rank [024] has shut down(; )?){1,3}", said)
        assert advice == EQUAL_CALLS
    assert ranks.together(lambda rank, session: rank in (4, 0, 2) or session.shutdown()) == [True] * 8
    for leaver in leavers:
        leaver.join(LIMIT_S)
        assert not leaver.is_alive()


class Suspended(LocalTransport):
    """A rank of a machine that can be suspended: nothing goes on while it is not awake."""

    awake = threading.Event()

    def __init__(self, whole: LocalTransport) -> None:
        super().__init__(whole.fabric, whole.identity, whole.members, whole.rank)

    def probe(self, tag: int) -> tuple[int, int] | None:
        Suspended.awake.wait(LIMIT_S)
        return super().probe(tag)


@threads_only
def test_ranks_that_were_suspended_together_do_not_blame_each_other() -> None:
    Suspended.awake.set()
    ranks = Ranks(3, Settings(engine="python", peer_timeout_s=1.2), Suspended)
    Suspended.awake.clear()
    threading.Event().wait(2.5)  # the time itself is what is tested
    Suspended.awake.set()
    handles = [start(session, np.ones(4, np.float32), "x") for session in ranks.sessions]
    for handle in handles:
        handle.wait(LIMIT_S)
    assert ranks.together(lambda _, session: session.shutdown()) == [True, True, True]


@threads_only
def test_ranks_that_are_alive_and_idle_are_left_alone() -> None:
    ranks = Ranks(2, Settings(peer_timeout_s=1.0))
    handle = start(ranks.sessions[0], np.ones(4, np.float32), "x")
    with pytest.raises(TimeoutError) as caught:
        handle.wait(2.0)
    assert str(caught.value) == "'x' is not over after 2.0 s"
    start(ranks.sessions[1], np.ones(4, np.float32), "x").wait(LIMIT_S)
    handle.wait(LIMIT_S)
    assert ranks.together(lambda _, session: session.shutdown()) == [True, True]


@threads_only
def test_a_stall_is_told_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ocomm"):
        ranks = Ranks(2, Settings(stall_check_s=0.4, stall_shutdown_s=1.2))
        lonely = start(ranks.sessions[1], np.ones(4, np.float32), "x")
        with pytest.raises(StallError) as caught:
            lonely.wait(LIMIT_S)
        start(ranks.sessions[0], np.ones(4, np.float32), "y")
        assert ranks.together(lambda _, session: session.shutdown()) == [True, True]
    pattern = (
        r"tensor 'x': rank 1 submitted it [0123] s ago, rank 0 did not\. "
        r"rank 0 is at test_runtime\.py:\d+ in test_a_stall_is_told_and_then_given_up\."
    )
    for text in (str(caught.value), caplog.records[0].getMessage()):
        assert re.fullmatch(pattern, text), text


@threads_only
def test_a_rank_that_waits_for_others_to_leave_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ocomm"):
        ranks = Ranks(2, Settings(stall_check_s=0.2, peer_timeout_s=3.0))
        leaver = threading.Thread(target=ranks.sessions[1].shutdown, daemon=True)
        leaver.start()
        end = time.monotonic() + LIMIT_S
        while not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert ranks.sessions[0].shutdown() is True
        leaver.join(LIMIT_S)
    assert caplog.records[0].getMessage() == "rank 1 has shut down and waits for ranks [0] to do so"


@threads_only
@pytest.mark.parametrize(("size", "settings"), [(3, Settings()), (8, BINARY_TREE)])
def test_nobody_sends_a_sign_of_life_after_its_last_word(size: int, settings: Settings) -> None:
    fabric = Fabric(size)
    some = [Session() for _ in range(size)]

    def rank_main(rank: int) -> None:
        some[rank].start(fabric.endpoint(rank), replace(settings, peer_timeout_s=0.003 * size, stall_check=False))
        some[rank].shutdown()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    left = [key for key, waiting in fabric.messages.items() if waiting]
    failed = any(not session.left_in_order for session in some)  # a timeout of 3 ms may well be missed
    assert failed or left == [], "a message nobody received would turn up in the next job"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[background.Runtime], Callable[[int], None]]]:
    """Makes ranks whose rounds a test makes: their runtimes, and what makes a round of one."""
    monkeypatch.setattr(background.Runtime, "start", lambda runtime: None)

    def made(size: int, settings: Settings) -> tuple[list[background.Runtime], Callable[[int], None]]:
        ranks = Ranks(size, replace(settings, engine="python", stall_check=False))
        runtimes = [session.runtime for session in ranks.sessions if session.runtime is not None]

        def cycle(rank: int) -> None:
            runtimes[rank].engine.wake()  # a round that waits for nothing
            runtimes[rank].cycle()

        return runtimes, cycle

    return made


def submit(runtime: background.Runtime, name: str) -> None:
    runtime.world.submit(allreduce(np.ones(4, np.float32), name))


def leave(runtime: background.Runtime) -> None:
    runtime._leaving = (False, "shut down")


def heard(runtime: background.Runtime) -> list[str]:
    """What has arrived at a rank and was not taken in."""
    words = []
    while (message := runtime.world.link.receive()) is not None:
        words.append(message[1].name)
    return words


@threads_only
def test_what_is_queued_when_a_rank_leaves_is_not_announced_behind_its_departure(by_hand: Any) -> None:
    runtimes, cycle = by_hand(2, Settings(cycle_time_ms=60_000))
    submit(runtimes[1], "first")
    cycle(1)
    submit(runtimes[1], "second")  # in the same cycle time
    leave(runtimes[1])
    cycle(1)
    runtimes[1].world._announced_s = -1e9  # it is over
    cycle(1)
    assert heard(runtimes[0]) == ["ANNOUNCE", "LEAVE"]


@threads_only
def test_nor_does_it_leave_with_what_the_ranks_below_say(by_hand: Any) -> None:
    """Rank 4 passes on what ranks 5 to 7 announce; 5 leaves after it."""
    runtimes, cycle = by_hand(8, replace(BINARY_TREE, cycle_time_ms=60_000))
    submit(runtimes[4], "first")
    cycle(4)
    submit(runtimes[4], "second")
    for rank in (4, 5):
        leave(runtimes[rank])
        cycle(rank)
    runtimes[4].world._announced_s = -1e9
    cycle(4)
    assert heard(runtimes[0]) == ["AGGREGATE", "LEAVE", "LEAVE"]


@threads_only
def test_rank_0_says_nothing_behind_the_news_that_all_have_left(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes, cycle = by_hand(2, Settings())
    submit(runtimes[0], "nobody else's")
    leave(runtimes[0])
    cycle(0)
    leave(runtimes[1])
    cycle(1)
    monkeypatch.setattr(runtimes[0].world.link, "flush", lambda: False)  # a message takes its time, so there are rounds
    for _ in range(3):
        cycle(0)
    assert heard(runtimes[1])[-1] == "GONE"


@threads_only
def test_a_departure_does_not_overtake_what_ranks_on_the_way_have_kept(by_hand: Any) -> None:
    """Rank 7 is below 6, which keeps what it asks for until 6 asks for it, too; that is below 4, below 0."""
    runtimes, cycle = by_hand(8, BINARY_TREE)
    assert [runtimes[rank].world.link.parent for rank in (7, 6, 4)] == [6, 4, 0]
    submit(runtimes[7], "x")
    leave(runtimes[7])
    cycle(7)
    cycle(6)
    cycle(4)
    assert heard(runtimes[0]) == ["AGGREGATE", "LEAVE"]


@alone
def test_a_call_without_init_says_so() -> None:
    with pytest.raises(NotInitializedError) as caught:
        Session().submit(0, Submission([], [], []))
    assert str(caught.value) == "ocomm has not been initialized; call init() first."


@alone
def test_a_process_set_that_does_not_exist_is_named() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            session.submit(3, Submission([], [], []))
        assert str(caught.value) == "process set 3 does not exist, or has not been registered."

    run_ranks(1, body)


def _square(number: int) -> int:
    return number * number


@alone
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_compute_but_not_communicate() -> None:
    bootstrap.initialize()
    operations.compressed_allreduce(sessions.current(), 0, "x", np.ones(8, np.float32))
    try:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_square, range(5)) == [0, 1, 4, 9, 16]
            for call in (_submit_in_child, _exchange_in_child):
                message = pool.apply(call)
                assert message.startswith("NotInitializedError: this process (pid ")
                assert message.endswith(
                    f") was forked from rank 0 (pid {os.getpid()}), which is the one that may communicate."
                )
            assert pool.apply(_place_in_child) == (True, 0, 1, 0, [0], True)  # as workers of data loaders ask for it
            message = pool.apply(_init_in_child)
            assert message.startswith("LaunchError: init() was called in process ")
            assert message.endswith(
                f", which was forked from a rank (pid {os.getpid()}). Only the processes that the launcher started are"
                " ranks."
            )
    finally:
        sessions.current().shutdown()


def _submit_in_child() -> str:
    try:
        sessions.current().submit(0, Submission([], [], []))
    except NotInitializedError as error:
        return f"NotInitializedError: {error}"
    return "nothing was raised"


def _exchange_in_child() -> str:
    try:
        operations.compressed_allreduce(sessions.current(), 0, "x", np.ones(8, np.float32))
    except NotInitializedError as error:
        return f"NotInitializedError: {error}"
    return "nothing was raised"


def _place_in_child() -> tuple[Any, ...]:
    world = ocomm.global_process_set
    return ocomm.is_initialized(), ocomm.rank(), ocomm.size(), ocomm.local_rank(), world.ranks, world.included()


def _init_in_child() -> str:
    try:
        bootstrap.initialize()
    except LaunchError as error:
        return f"LaunchError: {error}"
    return "nothing was raised"


@alone
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # it is what is tested
def test_a_forked_child_that_ends_in_the_ordinary_way_does_not_hang() -> None:
    bootstrap.initialize()
    try:
        child = os.fork()
        if child == 0:
            sessions._process_session = None  # type: ignore[assignment]  # the last reference: frees the engine
            os._exit(0)
        end = time.monotonic() + LIMIT_S
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, "the child hangs"
        assert ended[1] == 0
    finally:
        sessions.current().shutdown()


@alone
def test_the_background_thread_runs_on_the_core_that_a_setting_names() -> None:
    core = min(os.sched_getaffinity(0))

    def body(session: Session) -> None:
        start(session, np.ones(1, np.float32), "x").wait()
        (native_id,) = [thread.native_id for thread in threading.enumerate() if thread.name == "ocomm"]
        assert os.sched_getaffinity(native_id or 0) == {core}

    run_ranks(1, body, Settings(thread_affinity=(core,)))
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:  # a launcher's mask may leave the core free for this thread
        os.sched_setaffinity(0, {max(allowed)})
        try:
            run_ranks(1, body, Settings(thread_affinity=(core,)))
            assert os.sched_getaffinity(0) == {max(allowed)}
        finally:
            os.sched_setaffinity(0, allowed)
    with pytest.raises(SettingsError, match=r"rank 0 cannot use core 9999: \[Errno 22\] Invalid argument"):
        run_ranks(1, body, Settings(thread_affinity=(9999,)))
    with pytest.raises(
        (SettingsError, LaunchError), match=r"names 1 cores, but host .* has 2 ranks; name one for each"
    ):
        run_ranks(2, body, Settings(thread_affinity=(core,)))
