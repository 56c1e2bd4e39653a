"""Control messages between ranks: what is written is read back, and of damaged bytes nothing comes but an error that
names the rank and the message.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.collectives.python_engine import PythonEngine
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.waiting import Wait
from ocomm.errors import HorovodInternalError, LaunchError, OcommError, SettingsError
from ocomm.kernels.reference import ReferenceKernels
from ocomm.negotiation.cache import Announcement, RankCache
from ocomm.negotiation.coordinator import Coordinator, describe_stalls
from ocomm.negotiation.request import (
    RESPONSES_ONLY,
    Fault,
    Kind,
    Reader,
    Request,
    Response,
    TensorMemory,
    Writer,
    read_request,
    read_responses,
    write_request,
    write_responses,
)
from ocomm.negotiation.tree import write_aggregate
from ocomm.runtime.background import Runtime
from ocomm.runtime.control import TAG, MessageType
from ocomm.runtime.deadlock import Report
from ocomm.runtime.exporter import Exporter
from ocomm.runtime.handle import Submission
from ocomm.runtime.handshake import handshake
from ocomm.runtime.process_set import MemberSet
from ocomm.telemetry.counters import OptimizerCounters, RankCounters, Stalled, Waiting, prometheus, read_rank, spelled
from ocomm.transport.local import Fabric
from ocomm.types import DType, Nodes, ReduceOp, Settings
from ocomm.version import __version__
from tests.fuzz.harm import examples, harmed, json_values

SIZE = 3
int64 = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(), max_size=6)  # with lone surrogates, as names of files may have
requests = st.builds(
    Request,
    st.sampled_from([kind for kind in Kind if kind not in RESPONSES_ONLY]),
    texts,
    st.sampled_from(DType),
    st.lists(counts, max_size=4).map(tuple),
    st.sampled_from(ReduceOp),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.lists(int64, max_size=4).map(tuple),
    texts,
    texts,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    texts,
    st.sampled_from(TensorMemory),
)


def tables(kind: Kind, names: int, fault: Fault) -> list[int | None]:
    """The lengths of the tables of sizes, None for any."""
    if fault:
        return []
    fixed = {Kind.TUNE: [3], Kind.CLOSE: [2], Kind.JOIN: [1]}
    return fixed.get(kind, [None] * names if kind in (Kind.ALLGATHER, Kind.ALLTOALL) else [])  # type: ignore[return-value]


@st.composite
def response(draw: st.DrawFn) -> Response:
    kind, fault = draw(st.sampled_from(Kind)), draw(st.sampled_from(Fault))
    least, most = {Kind.TUNE: (0, 0), Kind.CLOSE: (0, 0), Kind.BRIDGE: (0, 0), Kind.JOIN: (0, 1)}.get(kind, (1, 3))
    names = tuple(draw(st.lists(texts, min_size=least, max_size=most)))
    sizes = tuple(
        tuple(draw(st.lists(counts, min_size=length or 0, max_size=4 if length is None else length)))
        for length in tables(kind, len(names), fault)
    )
    ids = tuple(draw(st.lists(int64, min_size=len(names), max_size=len(names)))) if draw(st.booleans()) else ()
    templates = draw(st.just(()) | st.lists(requests, min_size=len(names), max_size=len(names)).map(tuple))
    return Response(kind, names, draw(texts), fault, sizes, ids, templates, draw(st.booleans()))


responses = st.lists(response(), max_size=3).map(tuple)


def written(request: Request) -> bytes:
    writer = Writer()
    write_request(writer, request)
    return writer.bytes()


@examples(50)
@given(requests)
def test_requests_are_read_as_they_were_written(request: Request) -> None:
    reader = Reader(written(request))
    assert read_request(reader) == request
    reader.end()


@examples(50)
@given(responses)
def test_responses_are_read_as_they_were_written(said: tuple[Response, ...]) -> None:
    assert read_responses(write_responses(said)) == said


@examples(100)
@given(st.data())
def test_damaged_responses_are_a_value_error_or_what_would_be_written_so(data: st.DataObject) -> None:
    damaged = data.draw(harmed(write_responses(data.draw(responses))))
    try:
        said = read_responses(damaged)
    except ValueError:
        return
    assert write_responses(said) == damaged


def test_every_truncated_message_is_a_value_error() -> None:
    request = Request(Kind.ALLREDUCE, "name", DType.FLOAT32, (3, 4), splits=(1,), order="torch", group="g", detail="d")
    whole = write_responses((Response(Kind.ALLGATHER, ("a",), sizes=((1, 2),), cache_ids=(3,), templates=(request,)),))
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"byte|characters|kind"):
            read_responses(whole[:length])
    message = RankCache().announcement([request])
    for length in range(len(message)):
        with pytest.raises(ValueError, match="bytes are left at byte"):
            Coordinator(range(2), 0, 4).receive([1], message[:length], 0.0)


def asked(coordinator: Coordinator, caches: Sequence[RankCache], names: str, shape: tuple[int, ...] = (4,)) -> None:
    """All ranks ask for these names, and hear the answers."""
    said = [Request(Kind.ALLREDUCE, name, DType.FLOAT32, shape) for name in names]
    for rank, cache in enumerate(caches):
        coordinator.receive([rank], cache.announcement(said), 0.0)
    for answer in coordinator.decide():
        for cache in caches:
            cache.enter(coordinator.cache.epoch)
            for name, number in zip(answer.names, answer.cache_ids, strict=False):
                if number >= 0:
                    cache.learn(name, number, said[names.index(name)])


def busy_coordinator() -> tuple[Coordinator, list[RankCache]]:
    """With ids of two epochs, and a name that one rank waits for."""
    coordinator, caches = Coordinator(range(10, 10 + SIZE), 1 << 20, 3), [RankCache() for _ in range(SIZE)]
    for _ in range(3):
        asked(coordinator, caches, "abcd")
    coordinator.receive([0], caches[0].announcement([Request(Kind.BROADCAST, "alone", DType.INT8, (2,))]), 0.0)
    return coordinator, caches


@examples(100)
@given(st.data())
def test_a_damaged_announcement_changes_nothing_or_is_one_that_a_rank_could_send(data: st.DataObject) -> None:
    coordinator, caches = busy_coordinator()
    said = [replace(request, kind=data.draw(st.sampled_from([request.kind, Kind.MESSAGE]))) for request in
            data.draw(st.lists(requests, max_size=2))]  # fmt: skip
    said += [Request(Kind.ALLREDUCE, name, DType.FLOAT32, (4,)) for name in data.draw(st.sets(st.sampled_from("abcd")))]
    damaged = data.draw(harmed(caches[1].announcement(said)))
    try:
        coordinator.receive([1], damaged, 1.0)
    except ValueError:
        asked(coordinator, caches, "abcd")  # goes on as if there had been no message
        return
    for now_s in (2.0, 100.0):
        read_responses(write_responses(tuple(coordinator.decide())))
        for stall in coordinator.stalled(now_s, 0.5):
            describe_stalls([stall], coordinator)
    assert coordinator.heard(2, caches[2].announcement([])) == []


# The background thread


class Rank:
    """A rank's runtime, whose rounds the test makes. The other ranks are what the test sends."""

    def __init__(self, rank: int) -> None:
        self.fabric = Fabric(SIZE)
        self.settings = Settings(metrics_port="1")
        control = self.fabric.endpoint(rank)
        engine = PythonEngine(ReferenceKernels(), control.arrival)
        run = engine.run
        engine.run = lambda seconds: run(0.0)  # type: ignore[method-assign]  # without waiting for a message
        ranks = range(SIZE)
        self.world = MemberSet(
            ranks, control, control.duplicate(), engine, Scratch(1 << 20), self.settings, Nodes.flat(SIZE)
        )
        self.clock = 0.0
        self.runtime = Runtime(self.world, engine, self.settings, clock=lambda: self.clock)
        self.runtime.exporter = Exporter(rank, SIZE, partial(RankCounters, rank, "h"), lambda: self.clock)

    def ask(self, name: str, kind: Kind = Kind.ALLREDUCE) -> None:
        values = np.zeros(4, np.float32)
        request = Request(kind, name, DType.FLOAT32, values.shape, ReduceOp.SUM)
        target: Any = values.view(np.uint8)
        if kind is Kind.ALLGATHER:
            target = lambda shape: np.empty(4 * math.prod(shape), np.uint8)  # noqa: E731
        self.world.submit(Submission.of(request, values.view(np.uint8), target))

    def hear(self, source: int, message: bytes) -> None:
        """Takes in a message and makes a few rounds. Raises what would end the background thread."""
        self.fabric.endpoint(source).isend(np.frombuffer(message, np.uint8), self.world.rank, TAG)
        for _ in range(3):
            self.clock += 0.6
            self.runtime.cycle()


def message(word: int, payload: bytes) -> bytes:
    return struct.pack("<B", word) + payload


REPORT = Report(True, 5, 0, "a.py:3", (Wait("step 3", "Adam.1", 2, (0, 2), True),), {"Adam.1": 2}, ("Thread-1",))
COUNTERS = RankCounters(
    1,
    "h",
    (OptimizerCounters("Adam.1", 3, bytes_sent=7.5, waited_s=None),),
    (Waiting("w", (0,)),),
    (Stalled("t", 2.5, (2,)),),
)
ANSWERS = (
    Response(Kind.ALLREDUCE, ("a", "b"), cache_ids=(0, 1)),
    Response(Kind.ALLGATHER, ("g",), sizes=((4, 1, 2),), cache_ids=(-1,)),
    Response(Kind.TUNE, (), sizes=((1 << 20, 100, 1 << 20),)),
    Response(Kind.JOIN, (), sizes=((2,),)),
    Response(Kind.ALLREDUCE, ("c",), "it cannot be", Fault.MISMATCH),
)
AGGREGATE = write_aggregate([((range(1, 2),), Announcement(0, 0, [Request(Kind.ALLREDUCE, "a", DType.FLOAT32, (4,))]))])
#: What a rank hears that is not rank 0, and what rank 0 hears: (sender, message).
HEARD: dict[int, list[tuple[int, bytes]]] = {
    1: [
        (0, message(MessageType.RESPOND, bytes(4) + write_responses(ANSWERS))),
        (0, message(MessageType.RESPOND, bytes(4) + write_responses(ANSWERS[:1]))),
        (0, message(MessageType.GONE, b'[[2, false, "shut down"]]')),
        (
            0,
            message(
                MessageType.STUCK, json.dumps({"reports": {r: asdict(REPORT) for r in range(SIZE)}, "why": ""}).encode()
            ),
        ),
        (0, message(MessageType.ENDED, b'[2, "name", "was interrupted"]')),
        (0, message(MessageType.ALIVE, b"")),
        (0, message(MessageType.CONFIRM, b"")),
        (2, message(MessageType.WHERE, b"")),
    ],
    0: [
        (
            1,
            message(
                MessageType.ANNOUNCE, RankCache().announcement([Request(Kind.ALLREDUCE, "a", DType.FLOAT32, (4,))])
            ),
        ),
        (1, message(MessageType.AGGREGATE, AGGREGATE)),
        (1, message(MessageType.RELAY, struct.pack("<IB", 1, MessageType.RELEASED) + struct.pack("<qq", 3, 5))),
        (1, message(MessageType.LEAVE, b'[1, false, "shut down"]')),
        (1, message(MessageType.INTERRUPTED, b'[1, "name", "was interrupted"]')),
        (1, message(MessageType.BLOCKED, json.dumps(asdict(REPORT)).encode())),
        (1, message(MessageType.ALIVE, b"")),
        (1, message(MessageType.COUNTERS, json.dumps(spelled(COUNTERS)).encode())),
        (1, message(MessageType.RELEASED, struct.pack("<qq", 3, 5))),
        (1, message(MessageType.HERE, "dir/ä.py:7".encode())),
    ],
}
CASES = [(rank, source, whole) for rank, cases in HEARD.items() for source, whole in cases]


def awaiting(rank: int) -> Rank:
    """A rank that waits for what the messages are about."""
    made = Rank(rank)
    for name in "abc":
        made.ask(name)
    made.ask("g", Kind.ALLGATHER)
    made.runtime.cycle()
    return made


@pytest.mark.parametrize(("rank", "source", "whole"), CASES)
def test_a_rank_goes_on_after_what_others_really_send(rank: int, source: int, whole: bytes) -> None:
    awaiting(rank).hear(source, whole)


@examples(30)
@given(st.data())
@pytest.mark.parametrize(("rank", "source", "whole"), CASES)
def test_a_damaged_message_ends_the_thread_by_an_error_that_names_it_or_not_at_all(
    rank: int, source: int, whole: bytes, data: st.DataObject
) -> None:
    payload = data.draw(harmed(whole[1:]) | json_values.map(lambda value: json.dumps(value).encode()))
    word = data.draw(st.sampled_from([whole[0]] * 9 + [*range(256)]))
    made = awaiting(rank)
    try:
        made.hear(source, message(word, payload))
    except OcommError as error:
        assert isinstance(error, HorovodInternalError)
        by = r"\d" if word == MessageType.RELAY else source  # a damaged origin is another rank
        assert re.search(f"rank {by} sent|bytes from rank {by}: ", str(error))
    assert made.runtime.exporter is not None
    prometheus(made.runtime.exporter.job()).encode(errors="replace")


def test_an_empty_message_and_one_of_no_type_name_their_sender() -> None:
    with pytest.raises(
        HorovodInternalError, match="rank 2 sent a control message of 0 bytes and type none, which no rank"
    ):
        Rank(1).hear(2, b"")
    with pytest.raises(
        HorovodInternalError, match="rank 2 sent a control message of 4 bytes and type 77, which no rank"
    ):
        Rank(0).hear(2, b"\x4dabc")


@pytest.mark.parametrize(
    ("rank", "source", "word", "payload", "why"),
    [
        (1, 0, MessageType.RESPOND, bytes(6), "2 bytes are left at byte 0, where 4 are expected"),
        (1, 2, MessageType.RESPOND, bytes(8), "responses come from the parent, and what ranks ask for from children"),
        (1, 0, MessageType.RESPOND, bytes(4) + write_responses((Response(Kind.ALLREDUCE, ("other",)),)),
         "ALLREDUCE of 1 tensors, 'other' first; this rank has asked for [] of 0 of them"),
        (1, 0, MessageType.RESPOND, bytes(4) + write_responses((Response(Kind.BROADCAST, ("a",)),)),
         "BROADCAST of 1 tensors, 'a' first; this rank has asked for ['ALLREDUCE'] of 1 of them"),
        (1, 0, MessageType.RESPOND, bytes(4) + write_responses((Response(Kind.ALLGATHER, ("g",), sizes=((4, 1),)),)),
         "((4, 1),) for ('g',), where 3 numbers of rows are expected"),
        (0, 2, MessageType.COUNTERS, json.dumps(spelled(COUNTERS)).encode(), "counters of rank 1"),
        (0, 2, MessageType.LEAVE, b'[1, true, "x"]', "rank 1 leaves"),
        (0, 2, MessageType.INTERRUPTED, b'[1, "name", "x"]', "no news of exchanges that a rank has ended"),
        (0, 2, MessageType.LEAVE, b'[3, true, "x"]', "rank 3 of 3"),
        (0, 2, MessageType.ANNOUNCE, struct.pack("<III", 1, 0, 0), "epoch 1 after 0, and the newest is 0"),
        (0, 2, MessageType.ANNOUNCE, struct.pack("<IIIB", 0, 1, 0, 4), "id 2 in epoch 0, which has 0"),
        (0, 2, MessageType.ANNOUNCE, RankCache().announcement([Request(Kind.MESSAGE, "m", root=0, splits=(3,))]),
         "message 'm' from rank 0 to (3,)"),
        (0, 2, MessageType.AGGREGATE, AGGREGATE, "an aggregate of ranks that are not below its sender"),
        (0, 1, MessageType.AGGREGATE, AGGREGATE[:-1], "85 bytes are left at byte 24, where 86 are expected"),
        (0, 2, MessageType.BLOCKED, b"[" * 100_000, "JSON that is nested too deeply"),
    ],
)  # fmt: skip
def test_what_no_rank_sends_is_refused_and_told(rank: int, source: int, word: int, payload: bytes, why: str) -> None:
    with pytest.raises(HorovodInternalError) as error:
        awaiting(rank).hear(source, message(word, payload))
    assert str(error.value) == (
        f"rank {rank}: the background thread failed at the message {MessageType(word).name} of {len(payload)} bytes "
        f"from rank {source}: ValueError: {why}"
    )


def test_all_ranks_of_a_job_hear_whose_message_could_not_be_read() -> None:
    from ocomm.session import Session
    from tests.worlds import MPI_SIZE, run_ranks

    if MPI_SIZE:
        pytest.skip(reason="writes into the network of threads")
    import ocomm

    sent = threading.Event()

    def body(session: Session) -> str:
        assert session.runtime is not None
        if ocomm.rank() == 1:
            session.runtime.world.link.send(0, MessageType.RELEASED, b"abc")
            sent.set()
        assert sent.wait(20.0)
        with pytest.raises(HorovodInternalError) as error:
            while True:
                ocomm.allreduce(np.ones(2))
        session.shutdown(failed=True, why="failed")
        return str(error.value)

    told = run_ranks(2, body)
    assert all(
        "at the message RELEASED of 3 bytes from rank 1: error: unpack requires a buffer of 16 bytes" in text
        for text in told
    )


# The handshake

HELLO = {"host": "h", "version": __version__, "process_sets": [], "counts": {"x": 1}} | {
    name: getattr(Settings(), name) for name in Settings.AGREED
}
WELCOME = {"hosts": ["a", "b"], "counts": {"x": 3}}


def shaken(rank: int, said: bytes) -> None:
    fabric = Fabric(2)
    fabric.endpoint(1 - rank).isend(np.frombuffer(said, np.uint8), rank, TAG)
    hosts, numbers = handshake(fabric.endpoint(rank), Settings(start_timeout_s=20.0), (), "h", {"x": 1})
    assert len(hosts) == 2 and all(type(host) is str for host in hosts)
    assert all(type(number) is int for number in numbers.values())


def test_a_handshake_of_two_ranks_is_whole() -> None:
    shaken(0, message(MessageType.HELLO, json.dumps(HELLO).encode()))
    shaken(1, message(MessageType.WELCOME, json.dumps(WELCOME).encode()))


@examples(50)
@given(st.data())
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_handshake_is_an_error_of_launching_that_names_the_rank(rank: int, data: st.DataObject) -> None:
    whole = message(
        *(
            (MessageType.WELCOME, json.dumps(WELCOME).encode())
            if rank
            else (MessageType.HELLO, json.dumps(HELLO).encode())
        )
    )
    damaged = data.draw(harmed(whole) | json_values.map(lambda value: whole[:1] + json.dumps(value).encode()))
    try:
        shaken(rank, damaged)
    except (LaunchError, SettingsError) as error:
        assert f"rank {1 - rank}" in str(error) or "differs between ranks" in str(error) or rank
    except HorovodInternalError as error:
        assert rank and "rank 0 sent a control message" in str(error)


# What a job counts

some_counters = st.builds(
    RankCounters,
    st.integers(0, SIZE - 1),
    texts,
    st.lists(
        st.builds(OptimizerCounters, texts, counts, waited_s=st.none() | st.floats(allow_nan=False)), max_size=2
    ).map(tuple),
    st.lists(st.builds(Waiting, texts, st.lists(st.integers(0, SIZE - 1), max_size=3).map(tuple)), max_size=2).map(
        tuple
    ),
    st.lists(st.builds(Stalled, texts, st.floats(0, 9), st.just((1,))), max_size=2).map(tuple),
    st.floats(0, 9),
)


@examples(50)
@given(some_counters)
def test_counters_are_read_as_they_were_spelled(said: RankCounters) -> None:
    assert read_rank(json.loads(json.dumps(spelled(said))), SIZE) == said


@examples(50)
@given(st.data())
def test_an_object_with_other_values_is_no_counters_of_a_rank(data: st.DataObject) -> None:
    said: Any = spelled(COUNTERS)
    said[data.draw(st.sampled_from([field.name for field in fields(RankCounters)]))] = data.draw(json_values)
    said = json.loads(json.dumps(said))
    with contextlib.suppress(ValueError):
        assert json.loads(json.dumps(spelled(read_rank(said, SIZE)))) == said
