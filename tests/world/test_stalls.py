"""A job that cannot go on says so at once: who waits for what, and where in the user's code."""

from __future__ import annotations

import _thread
import logging
import multiprocessing
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm import operations
from ocomm.collectives.dense import Context
from ocomm.collectives.plan import Plan, Stage
from ocomm.collectives.waiting import Wait
from ocomm.errors import StallError
from ocomm.ordered import Call, OrderedChannel
from ocomm.runtime import bystanders
from ocomm.runtime.call_sites import user_line
from ocomm.runtime.control import TAG
from ocomm.runtime.deadlock import Report, is_certain
from ocomm.session import Session
from ocomm.transport.local import LocalTransport
from ocomm.types import Settings
from tests.world.test_runtime import LIMIT_S, Ranks, outcome, start, threads_only
from tests.worlds import run_ranks

RAISE = Settings(stall_raise=True, stall_check_s=600.0)


def wait_for_a_name_of_its_own() -> str:
    with pytest.raises(StallError) as error:
        ocomm.allreduce(np.ones(1), name=f"of rank {ocomm.rank()}")
    return re.sub(r"\d+ s ago", "N s ago", re.sub(r":\d+ in", ":N in", str(error.value)))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_wait_for_each_other_are_told_in_seconds_not_minutes(size: int) -> None:
    def body(session: Session) -> str:
        begun = time.monotonic()
        said = wait_for_a_name_of_its_own()
        assert time.monotonic() - begun < LIMIT_S
        # The job goes on, and the next deadlock is found, too.
        assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="x").tolist() == [size]
        assert wait_for_a_name_of_its_own() == said
        return said

    said = run_ranks(size, body, RAISE)
    for rank in range(size):
        others = [other for other in range(size) if other != rank]
        instead = "; ".join(
            f"rank {other} waits for 'allreduce.of rank {other}' instead, at test_stalls.py:N in "
            "wait_for_a_name_of_its_own"
            for other in others
        )
        listed = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
        assert said[rank] == (
            f"tensor 'allreduce.of rank {rank}': rank {rank} submitted it N s ago, {listed} did not. {instead}."
        )


def test_a_circle_through_several_sets_is_found() -> None:
    def body(session: Session) -> str:
        me = ocomm.rank()
        with pytest.raises(StallError) as error:
            ocomm.barrier(ocomm.ProcessSet([me, (me + 1) % 3]))
        return str(error.value)

    said = run_ranks(3, body, RAISE, process_sets=[[0, 1], [1, 2], [0, 2]])
    for rank, text in enumerate(said):
        assert text.startswith(f"tensor 'barrier.noname.1': rank {rank} submitted it ")
        assert f"rank {(rank + 1) % 3} is at test_stalls.py:" in text
        assert text.endswith(
            " Calls without a name are numbered in their order: one more on one rank shifts the rest. Pass name=."
        )


def test_a_rank_that_joined_and_one_that_waits_for_itself_alone_are_no_deadlock() -> None:
    def body(session: Session) -> None:
        if ocomm.rank() == 0:
            inspections(session, 4)
            assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="x").tolist() == [1]
        assert ocomm.join() == 0

    run_ranks(2, body, RAISE)


def inspections(session: Session, count: int) -> None:
    """Returns when the background thread has looked for stalls so many times; this thread meanwhile does not wait."""
    for _ in range(count):
        assert session.runtime is not None
        last = session.runtime._inspected_s
        while session.runtime._inspected_s == last:
            time.sleep(0.01)


def test_a_rank_that_computes_is_waited_for() -> None:
    def body(session: Session) -> None:
        for turn in range(2):
            if ocomm.rank() == turn:
                inspections(session, 4)
            assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="x").tolist() == [2]

    run_ranks(2, body, RAISE)


def test_another_thread_that_still_works_is_waited_for() -> None:
    def body(session: Session) -> None:
        ocomm.barrier()
        submitted = [start(session, np.ones(2, np.float32), "first")]

        def second_thread() -> None:
            submitted.append(start(session, np.ones(2, np.float32), "mine"))
            submitted[1].wait()
            inspections(session, 4)
            submitted.append(start(session, np.ones(2, np.float32), f"of rank {1 - rank}"))
            submitted[2].wait()

        rank = session.require_topology().rank
        thread = threading.Thread(target=second_thread)
        thread.start()
        start(session, np.ones(2, np.float32), f"of rank {rank}").wait()  # the other rank's second thread asks for it
        thread.join()
        submitted[0].wait()

    run_ranks(2, body, RAISE)


@threads_only
def test_by_default_it_is_a_warning_and_who_moves_after_all_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ocomm"):
        ranks = Ranks(2, Settings(stall_check_s=600.0))

        def release() -> None:
            end = time.monotonic() + LIMIT_S
            while len(caplog.records) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            for k, session in enumerate(ranks.sessions):
                start(session, np.ones(4, np.float32), f"of {1 - k}")

        releaser = threading.Thread(target=release)
        releaser.start()
        ranks.together(lambda k, session: start(session, np.ones(4, np.float32), f"of {k}").wait(2 * LIMIT_S))
        releaser.join()
        ranks.together(lambda _, session: session.shutdown())
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text[: len("tensor 'of 0': rank 0 submitted it ")] for text in said] == [
        f"tensor 'of {k}': rank {k} submitted it " for k in range(2)
    ]


def in_step(number: int, *late: int, name: str = "adam") -> Report:
    return Report(True, steps=(Wait("a step", name, number, late),), begun={name: number + 1})


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Report(True), in_step(3, 0)], True),  # rank 0 never came
        ([Report(True, begun={"adam": 3}), in_step(3, 0)], True),
        ([Report(True, begun={"adam": 4}), in_step(3, 0)], False),  # it is done, and its message still on the wire
        ([Report(True, begun={"adam": 4}), in_step(3, 0, 2), Report(True)], True),
        ([in_step(4, 1), in_step(3, 0)], False),  # rank 0 is a step ahead, and rank 1 will follow
        ([in_step(3, 1), in_step(3, 0)], False),
        ([in_step(0, 1, name="adam"), in_step(0, 0, name="lion")], True),  # each waits in another optimizer's step
        ([in_step(0, 1), in_step(0, 2), Report(True)], False),  # rank 0 waits for what rank 1 has sent
        ([in_step(0, 2), in_step(0, 2), Report(True)], True),
        ([Report(True, balance=1), Report(True)], False),
        ([Report(True, balance=1), Report(True, balance=-1)], True),
    ],
)
def test_who_has_not_come_to_a_step_is_known_from_who_has_left_it(reports: list[Report], expected: bool) -> None:
    assert is_certain(dict(enumerate(reports))) is expected


def test_a_line_of_the_users_code_is_found_under_the_libraries() -> None:
    found: list[str] = []
    ready, end = threading.Event(), threading.Event()

    def users_code() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=users_code)
    thread.start()
    ready.wait()
    found.append(user_line([thread.ident or 0]))
    end.set()
    thread.join()
    assert re.fullmatch(r"test_stalls\.py:\d+ in users_code", found[0])


# Calls that all ranks make in one order


@threads_only
def test_ranks_that_wait_in_an_ordered_call_and_elsewhere_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystanders, "bystanders", lambda waiting: [])

    def body(rank: int, session: Session) -> str:
        channels = [OrderedChannel(session, 0, name, 600.0) for name in ("group one", "group two")]
        session.agree(0, "opened", "")
        mine = channels[rank]
        with pytest.raises(StallError) as error:
            mine.start(Call("barrier"), [], [], nothing).wait()
        return str(error.value)

    ranks = Ranks(2, Settings(stall_check_s=600.0, deadlock_s=0.2))
    for rank, text in enumerate(ranks.together(body)):
        name, other = ("group one", "group two")[:: 1 - 2 * rank]
        assert text.startswith(f"{name}: barrier: rank(s) [{1 - rank}] will not come to it: rank {1 - rank} is at ")
        assert f", in {other}: barrier. Give all ranks equally many batches, and make the same calls on all of" in text
    ranks.together(lambda _, session: session.shutdown())


@threads_only
def test_a_rank_that_has_begun_an_ordered_call_is_waited_for_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystanders, "bystanders", lambda waiting: [])
    held = hold_messages_to_rank_1(monkeypatch)

    def body(rank: int, session: Session) -> str:
        one, two = (OrderedChannel(session, 0, name, 600.0) for name in ("group one", "group two"))
        for channel in (one, two):  # the first messages of a channel have the number of control messages
            channel.start(Call("barrier"), [], [], nothing).wait()
        held.set()
        first = one.start(Call("barrier"), [], [], nothing)
        if rank == 0:  # waits for what rank 1 has not begun, and has begun what rank 1 waits for
            threading.Thread(target=release_once_both_wait, args=(session, held)).start()
            two.start(Call("barrier"), [], [], nothing).wait()
            first.wait()
        else:
            first.wait()
            two.start(Call("barrier"), [], [], nothing).wait()
        session.agree(0, "all have arrived", "")
        return "done"

    ranks = Ranks(2, Settings(stall_check_s=600.0, deadlock_s=0.2))
    assert ranks.together(body) == ["done", "done"]
    ranks.together(lambda _, session: session.shutdown())


def hold_messages_to_rank_1(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event; while it is set, what is sent to rank 1 does not come, but for control messages."""
    whole, held = LocalTransport.test, threading.Event()

    def test(transport: LocalTransport, request: Any) -> bool:
        is_on_its_way = held.is_set() and transport.rank == 1 and request is not None and request.key[3] != TAG
        return not is_on_its_way and whole(transport, request)

    monkeypatch.setattr(LocalTransport, "test", test)
    return held


def release_once_both_wait(session: Session, held: threading.Event) -> None:
    """Clears ``held`` some time after both ranks have said that they wait. ``session`` is rank 0's."""
    assert session.runtime is not None
    deadlock = session.runtime._deadlock
    end = time.monotonic() + LIMIT_S
    while len(deadlock._reports) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(deadlock._reports) == 2
    inspections(session, 4)
    held.clear()


def nothing(context: Context, sources: Any, targets: Any) -> Plan:
    return Plan("nothing", [[Stage()]])


# When it becomes an error


@threads_only
@pytest.mark.parametrize("others", [(), ("a thread of the user's",)])
def test_it_is_an_error_after_a_while_where_no_other_thread_could_submit(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bystanders, "bystanders", lambda waiting: list(others))
    ranks = Ranks(2, Settings(stall_check_s=600.0, deadlock_s=0.5))

    def late(rank: int, session: Session) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and not any("submitted it" in r.getMessage() for r in caplog.records):
            time.sleep(0.01)
        inspections(session, 4)  # as long as it takes for the error, and then some
        start(session, np.ones(4, np.float32), f"of {1 - rank}")

    def body(rank: int, session: Session) -> str:
        handle = start(session, np.ones(4, np.float32), f"of {rank}")
        if others:
            threading.Thread(target=late, args=(rank, session)).start()
        return outcome(handle)

    with caplog.at_level(logging.WARNING, "ocomm"):
        said = ranks.together(body)
    for rank, text in enumerate(said):
        if others:
            assert text == "done"
        else:
            assert text.startswith(f"StallError: tensor 'of {rank}': rank {rank} submitted it ")
            assert " No rank can move, so ocomm gave up after 0.5 s (OCOMM_DEADLOCK_SECONDS): " in text
    ranks.together(lambda _, session: session.shutdown())


def test_only_threads_that_serve_others_cannot_submit_by_themselves() -> None:
    free, told = threading.Event(), threading.Event()
    queue: Any = multiprocessing.get_context("spawn").Queue()
    with ThreadPoolExecutor(1, "idle") as idle, ThreadPoolExecutor(1, "busy") as busy:
        idle.submit(int).result()

        def work() -> None:
            told.set()
            free.wait(LIMIT_S)

        timer = threading.Timer(LIMIT_S, int)
        ours = threading.Thread(target=free.wait, args=(LIMIT_S,), name="ocomm-timeline")
        waits = threading.Thread(target=free.wait, args=(LIMIT_S,), name="waits")
        try:
            busy.submit(work)
            queue.put(1)  # starts the thread that feeds it
            for thread in (timer, ours, waits):
                thread.start()
            assert told.wait(LIMIT_S)
            timer.name = "timer"
            end = time.monotonic() + LIMIT_S
            before = threading.main_thread().name
            while (found := bystanders.bystanders({waits.ident or 0})) and "idle_0" in found:
                assert time.monotonic() < end  # it has not yet come back to where it waits
            assert {"busy_0", "timer", before} <= set(found)
            assert not {"idle_0", "waits", "ocomm-timeline", "QueueFeederThread"} & set(found)
        finally:
            free.set()
            timer.cancel()
            queue.close()
            queue.join_thread()
    for thread in (timer, ours, waits):
        thread.join()


def test_a_thread_of_a_library_counts_only_while_it_runs_python() -> None:
    noted, free, ended = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        threading.current_thread()  # makes an entry, as ``logging`` does; up to Python 3.12 it stays
        noted.set()
        free.wait(LIMIT_S)
        ended.set()

    ident = _thread.start_new_thread(run, ())  # as little known to Python as one of a framework's pool
    assert noted.wait(LIMIT_S)
    entry = bystanders.python_threads()[ident]
    assert bystanders.is_foreign(entry) and not bystanders.is_foreign(threading.current_thread())
    free.set()
    assert ended.wait(LIMIT_S)
    end = time.monotonic() + LIMIT_S
    while ident in sys._current_frames():
        assert time.monotonic() < end  # its last lines are still running
    assert ident not in bystanders.python_threads()


@threads_only
def test_a_thread_that_waits_in_tensorflow_for_an_enclosed_step_is_no_bystander(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_tensorflow: set[int] = set()
    monkeypatch.setattr(bystanders, "is_in_tensorflow", in_tensorflow.__contains__)
    (session,) = Ranks(1).sessions
    assert session.runtime is not None
    deadlock, waits = session.runtime._deadlock, session.runtime.waits
    me = threading.get_ident()
    alive: dict[int, threading.Thread] = {me: threading.current_thread()}
    pool = -7  # a thread which Python does not know
    assert deadlock._served(alive, {pool}) == set()
    waits.enclosed.add(pool)
    assert deadlock._served(alive, {pool}) == set()
    in_tensorflow.add(me)
    assert deadlock._served(alive, {pool}) == {me}
    assert deadlock._served(alive, set()) == set()  # the step does not wait
    other = threading.Thread(target=int)
    in_tensorflow.add(-8)
    assert deadlock._served({**alive, -8: other}, {pool}) == set()  # one of the two waits for something else
    session.shutdown()


@threads_only
def test_a_slow_step_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystanders, "bystanders", lambda waiting: [])
    held = hold_messages_to_rank_1(monkeypatch)

    def body(rank: int, session: Session) -> list[float]:
        values = np.ones(4, np.float32)
        operations.compressed_allreduce(session, 0, "x", values)
        session.agree(0, "held from here on", "")
        held.set()
        if rank == 0:
            threading.Thread(target=release_once_both_wait, args=(session, held)).start()
        result = operations.compressed_allreduce(session, 0, "x", values).tolist()
        session.agree(0, "after it", "")  # for which rank 0 waits while its messages are still on their way
        return result

    ranks = Ranks(2, Settings(stall_check_s=600.0, deadlock_s=0.2))
    assert ranks.together(body) == [[1.0] * 4] * 2
    ranks.together(lambda _, session: session.shutdown())
