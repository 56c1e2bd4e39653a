"""There may be more of everything than any number that the code fixes, and what an optimizer held is given back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm import operations
from ocomm.collectives.plan import Message, Plan, Stage
from ocomm.collectives.python_engine import PythonEngine
from ocomm.collectives.scratch import aligned
from ocomm.errors import HorovodInternalError, StallError
from ocomm.runtime.background import Runtime
from ocomm.runtime.process_set import MemberSet
from ocomm.session import Session
from ocomm.transport.local import LocalTransport
from ocomm.types import Settings
from tests.world.test_runtime import LIMIT_S, Ranks, outcome, rank_of, start, threads_only
from tests.worlds import PATIENT, run_ranks

#: More than the 1024 channels and 256 process sets that an engine once had room for.
MANY = 1100


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def member(session: Session) -> MemberSet:
    return session.member_set(0)


def numbers_open(session: Session) -> list[int]:
    return member(session)._channels.numbers


def is_closed(session: Session) -> bool:
    gc.collect()  # again and again: it returns at once while another rank's thread collects
    return numbers_open(session) == [0]


def exchange(session: Session, channel: Any, timeout_s: float = LIMIT_S) -> Any:
    """A plan in which each rank sends a byte to the next."""
    size, rank = session.require_topology().size, rank_of(session)
    mine, theirs = aligned(1), aligned(1)
    mine[:], theirs[:] = rank, 255
    stage = Stage([], [Message((rank + 1) % size, mine)], [Message((rank - 1) % size, theirs)])
    return channel.submit(channel.prepare(Plan("ring", [[stage]])), timeout_s, False), theirs


def test_many_channels_may_come_and_go() -> None:
    def body(session: Session) -> None:
        for number in range(MANY):
            session.release_channel(0, session.open_channel(0, f"channel {number}", 0, ""))
        until(lambda: numbers_open(session) == [0])

    run_ranks(2, body)


@pytest.mark.long  # tests/contract/test_engine.py has it for the native engine alone
def test_many_channels_may_be_open_at_once_and_all_work() -> None:
    def body(session: Session) -> None:
        channels = [session.open_channel(0, f"channel {number}", 0, "") for number in range(MANY)]
        assert len(numbers_open(session)) == MANY + 1
        for channel in (channels[0], channels[-1]):
            ticket, theirs = exchange(session, channel)
            assert ticket.wait(LIMIT_S).name == "DONE"
            assert theirs[0] == (rank_of(session) - 1) % 2
        assert (ocomm.allreduce(np.ones(3), op=ocomm.Sum, name="x") == 2).all()

    run_ranks(2, body)


@pytest.mark.parametrize("count", [20, pytest.param(MANY, marks=pytest.mark.long)])
def test_many_process_sets_may_come_and_go(count: int) -> None:
    def body(session: Session) -> None:
        for _ in range(count):
            one = ocomm.add_process_set([1])
            if one.included():
                ocomm.compressed_allreduce(np.ones(8, np.float32), "c", process_set=one)
            assert ocomm.remove_process_set(one)
        assert len(session.registry.members) == 1

    run_ranks(2, body)


@pytest.mark.long
def test_more_process_sets_than_an_engine_once_watched_work_at_once() -> None:
    def body(session: Session) -> None:
        added = []
        for bits in range(1, 2**9 - 1):
            if len(added) < 260:
                added.append(ocomm.add_process_set([rank for rank in range(9) if bits >> rank & 1]))
        for one in added:
            if one.included():
                total = ocomm.allreduce(np.ones(3), op=ocomm.Sum, name="x", process_set=one)
                assert (total == len(one.ranks)).all()

    run_ranks(9, body, timeout_s=300.0)


@pytest.mark.parametrize("numel", [2100, 5000])
def test_a_collective_may_have_more_segments_than_there_are_tags(numel: int) -> None:
    def body(session: Session) -> None:
        for _ in range(2):
            total = ocomm.allreduce(np.arange(numel, dtype=np.float32), op=ocomm.Sum, name="x")
            assert (total == 2 * np.arange(numel)).all()

    run_ranks(2, body, replace(PATIENT, segment_nbytes=4, window=64))


def test_names_dimensions_and_groups_have_no_limit() -> None:
    def body(session: Session) -> None:
        long = "n" * 100_000
        assert (ocomm.allreduce(np.ones((1,) * 32), op=ocomm.Sum, name=long) == 2).all()
        group = ocomm.grouped_allreduce([np.full(1, i) for i in range(3000)], op=ocomm.Sum, name="g")
        assert [int(value[0]) for value in group] == [2 * i for i in range(3000)]

    run_ranks(2, body)


# What is given back, and when


def closed_transports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """(rank, communicator) of all that are given back from now on."""
    closed: list[tuple[int, Any]] = []
    monkeypatch.setattr(LocalTransport, "close", lambda self: closed.append((self.rank, self.identity)))
    return closed


@threads_only
def test_a_channel_is_closed_when_no_rank_uses_it_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closed_transports(monkeypatch)

    def body(session: Session) -> None:
        channel = session.open_channel(0, "used", 0, "")
        ticket, _ = exchange(session, channel)
        assert ticket.wait(LIMIT_S).name == "DONE"
        if rank_of(session) == 1:
            session.release_channel(0, channel)
            assert ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="later")[0] == 2
            until(lambda: not member(session)._channels.is_releasing)
        else:
            ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="later")
        session.agree(0, "looked", "")
        assert numbers_open(session) == [0, 1] and not closed
        session.agree(0, "looked on", "")
        session.release_channel(0, channel)  # again on rank 1, which does no harm
        until(lambda: numbers_open(session) == [0])
        assert exchange(session, channel)[0].wait(LIMIT_S).name == "ABORTED"

    run_ranks(2, body)
    assert sorted(rank for rank, identity in closed[:2]) == [0, 1]
    assert closed[0][1] == closed[1][1]


@threads_only
def test_a_communicator_on_which_messages_may_be_under_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closed_transports(monkeypatch)

    def body(session: Session) -> None:
        channel = session.open_channel(0, "used", 0, "")
        if rank_of(session) == 0:  # the other never takes part
            ticket, _ = exchange(session, channel, timeout_s=0.05)
            assert ticket.wait(LIMIT_S).name == "TIMED_OUT"
        session.release_channel(0, channel)
        until(lambda: numbers_open(session) == [0])
        assert len(member(session)._channels.kept) == 1
        assert not closed
        session.agree(0, "looked", "")

    run_ranks(2, body)


def test_a_channel_in_use_is_released_when_its_plans_are_over() -> None:
    def body(session: Session) -> None:
        channel = session.open_channel(0, "used", 0, "")
        if rank_of(session) == 0:
            exchange(session, channel)
            session.release_channel(0, channel)
            session.agree(0, "submitted", "")
        else:
            session.agree(0, "submitted", "")
            exchange(session, channel)
            session.release_channel(0, channel)
        until(lambda: numbers_open(session) == [0])
        assert not member(session)._channels.kept

    run_ranks(2, body)


def test_an_optimizer_that_is_collected_gives_its_channel_back() -> None:
    torch = pytest.importorskip("torch")
    import ocomm_torch

    def body(session: Session) -> None:
        for interrupted in (False, True):
            model = torch.nn.Linear(3, 2)
            optimizer = ocomm_torch.DistributedOneBitAdam(
                torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), freeze_step=2
            )
            for p in model.parameters():
                torch.nn.init.ones_(p)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            if interrupted:  # its last exchange waits for step()
                model(torch.ones(1, 3)).sum().backward()
            assert len(numbers_open(session)) == 2
            del optimizer, model, p
            until(lambda: is_closed(session))
        assert not any(ticket.state.name == "QUEUED" for ticket in getattr(session.engine, "_alive", []))

    run_ranks(2, body)


# When it cannot be had


@threads_only
@pytest.mark.parametrize("what", ["channel", "communicator"])
def test_a_channel_that_cannot_be_opened_is_an_error_and_no_hang(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)

    def fail(*_: object) -> None:
        raise MemoryError("there is no other")

    if what == "channel":
        monkeypatch.setattr(PythonEngine, "open_channel", fail)
    else:
        monkeypatch.setattr(LocalTransport, "duplicate", fail)

    def body(_: int, session: Session) -> str:
        with pytest.raises(HorovodInternalError) as error:
            session.open_channel(0, "one more", 0, "")
        return str(error.value)

    for text in ranks.together(body):
        assert "there is no other" in text
    ranks.together(lambda _, session: session.shutdown(failed=True))


@threads_only
def test_a_wait_ends_when_the_background_thread_has_died_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocomm.runtime.handle._LOOK_S", 0.05)
    ranks = Ranks(1)
    (session,) = ranks.sessions
    channel = session.open_channel(0, "a step's", 0, "")
    monkeypatch.setattr(Runtime, "_end_plans", lambda self: None)
    monkeypatch.setattr(MemberSet, "close", lambda self, error: None)

    def die(self: Runtime) -> bool:
        return True

    monkeypatch.setattr(Runtime, "cycle", die)
    assert session.runtime is not None and session.engine is not None
    session.engine.wake()
    until(lambda: session.runtime is not None and not session.runtime.is_alive)
    said = outcome(start(session, np.ones(1, np.float32), "x"))
    assert said.startswith("HorovodInternalError: rank 0: ocomm's background thread has ended, so this will never be")
    from ocomm.collectives import waiting

    ticket = channel.submit(channel.prepare(Plan("never", [[Stage()]])), 0.0, False)
    with pytest.raises(HorovodInternalError, match="background thread has ended"):
        waiting.wait(ticket, channel, [0], replace(session.watch(0, "a step"), stall_check_s=0.05), "a step")


@threads_only
def test_a_rank_that_skips_a_compressed_allreduce_is_named() -> None:
    def body(_: int, session: Session) -> str:
        values = np.ones(8, np.float32)
        operations.compressed_allreduce(session, 0, "c", values)
        if rank_of(session) == 1:
            return ""
        with pytest.raises(StallError) as error:
            operations.compressed_allreduce(session, 0, "c", values)
        return str(error.value)

    ranks = Ranks(2, Settings(stall_shutdown_s=1.0, stall_check_s=600.0))
    assert ranks.together(body)[0] == (
        "compressed_allreduce of 'c': call 2 was not over within its timeout of 1 s; rank(s) [1] have not sent their "
        "part, or wait for ranks that they name themselves. All ranks must make the same calls in the same order."
    )
    ranks.together(lambda _, session: session.shutdown(failed=True))
