"""The timeline of a job: Horovod's events, on every rank, and nothing when it is off."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm.errors import MismatchError, NotInitializedError
from ocomm.session import Session
from ocomm.telemetry.timeline import path_of, read
from ocomm.types import Settings
from tests.worlds import MPI_SIZE, run_ranks

ENGINES = pytest.mark.parametrize("engine", ["native", "python"])


def rows(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Events by the name of their row, in order of their begin."""
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            found[names[event["tid"]]].append(event)
    return {name: sorted(row, key=lambda e: e["ts"]) for name, row in found.items()}


def shared_path(tmp_path: Path) -> str:
    """One path for all ranks; under mpirun every rank has another tmp_path."""
    return ocomm.broadcast_object(str(tmp_path / "trace.json"), name="path")


def record(tmp_path: Path, work: Callable[[], None], **arguments: Any) -> list[dict[str, Any]]:
    """This rank's events of ``work``; when it returns all ranks have written theirs."""
    path = shared_path(tmp_path)
    ocomm.start_timeline(path, **arguments)
    ocomm.barrier()  # what a rank asks for before we have started is not seen
    work()
    ocomm.stop_timeline()
    ocomm.barrier()
    return read(path_of(path, ocomm.rank()))


@ENGINES
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_tensor_is_negotiated_queued_copied_and_reduced(size: int, engine: str, tmp_path: Path) -> None:
    def body(session: Session) -> None:
        def work() -> None:
            handles = [ocomm.allreduce_async(np.ones(5000, np.float32), name=f"w{k}") for k in range(3)]
            for handle in handles:
                ocomm.synchronize(handle)

        found = rows(record(tmp_path, work))
        for k in range(3):
            row = found[f"allreduce.w{k}"]
            names = [e["name"] for e in row if "name" in e]
            for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "MPI_ALLREDUCE"):
                assert names.count(name) == 1, (name, names)
            ticks = {n for n in names if n.isdigit()}
            assert ticks == ({str(r) for r in range(size)} if ocomm.rank() == 0 else set())
            negotiated = [e["ts"] for e in row if e["ph"] in "BE"]
            (reduced,) = [e for e in row if e.get("name") == "ALLREDUCE"]
            assert negotiated == sorted(negotiated) and len(negotiated) == 2 and negotiated[1] <= reduced["ts"] + 1
            assert reduced["args"] == {"dtype": "float32", "shape": "[5000]", "bytes": 20000}
            inside = [e for e in row if e["ph"] == "X" and not e["name"].isdigit() and e is not reduced]
            for before, after in itertools.pairwise(inside):
                assert before["ts"] + before["dur"] <= after["ts"] + 1  # a double has quarters of a µs
            assert sum(e["dur"] for e in inside) <= reduced["dur"] + 1
        everything = [e.get("name") for row in found.values() for e in row]
        if "3 fused tensors" in everything:
            assert everything.count("MEMCPY_IN_FUSION_BUFFER") >= 3 <= everything.count("MEMCPY_OUT_FUSION_BUFFER")
        if size > 1:
            sent = sum(e["args"]["bytes_sent"] for row in found.values() for e in row if e.get("name") == "EXCHANGE")
            assert sent > 3 * 20000 * (size - 1) / size

    run_ranks(size, body, Settings(engine=engine, cycle_time_ms=50))


@ENGINES
def test_compressed_exchanges_show_compress_exchange_and_decompress_with_bytes(engine: str, tmp_path: Path) -> None:
    def body(session: Session) -> None:
        values = np.ones(100_000, np.float32)
        ocomm.compressed_allreduce(values, "x")

        def work() -> None:
            ocomm.compressed_allreduce(values, "x")
            ocomm.barrier()  # a plan is written by the background thread, a moment after its end

        found = rows(record(tmp_path, work))
        spans = [e for name, row in found.items() if name.startswith("exchange lane") for e in row]
        order = [e["name"] for e in spans if e["name"] in ("COMPRESS", "EXCHANGE", "AVERAGE", "DECOMPRESS")]
        assert order == ["COMPRESS", "EXCHANGE", "AVERAGE", "EXCHANGE", "DECOMPRESS"] * (len(order) // 5)
        sent = sum(e["args"]["bytes_sent"] for e in spans if e["name"] == "EXCHANGE")
        assert 100_000 / 8 <= sent < 1.1 * 100_000 / 8

    run_ranks(2, body, Settings(engine=engine))


def test_every_operation_has_horovods_names_and_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        alone = ocomm.ProcessSet([0])

        def work() -> None:
            ocomm.allgather(np.ones(2), "g")
            ocomm.broadcast(np.ones(2), 1, "b")
            ocomm.alltoall(np.ones(2), name="a")
            ocomm.reducescatter(np.ones(2), "r")
            if alone.included():
                ocomm.allreduce(np.ones(2), name="s", process_set=alone)
            ocomm.barrier()

        found = rows(record(tmp_path, work, mark_cycles=True))
        expected = {"allgather.g": "ALLGATHER", "broadcast.b": "BROADCAST", "alltoall.a": "ALLTOALL"}
        expected["reducescatter.r"] = "REDUCESCATTER"
        if alone.included():
            expected["allreduce.s (process set 1)"] = "ALLREDUCE"
        for row, kind in expected.items():
            names = {e.get("name") for e in found[row]}
            assert {f"NEGOTIATE_{kind}", kind, f"MPI_{kind}", "QUEUE"} <= names
        assert {e["name"] for e in found["cycles"]} == {"CYCLE_START"}

    run_ranks(2, body, process_sets=[[0]])


def test_a_negotiation_that_fails_ends_in_the_timeline(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        def work() -> None:
            with pytest.raises(MismatchError):
                ocomm.allreduce(np.ones(1 + ocomm.rank()), name="x")

        row = rows(record(tmp_path, work))["allreduce.x"]
        assert [e["ph"] for e in row if e["ph"] in "BE"] == ["B", "E"]
        assert "ALLREDUCE" not in [e.get("name") for e in row]

    run_ranks(2, body)


def test_it_can_be_started_again_into_another_file_and_ends_with_the_job(tmp_path: Path) -> None:
    def body(session: Session) -> str:
        path = shared_path(tmp_path)
        for k in range(3):
            ocomm.start_timeline(f"{path}.{k}")  # ends the one before
            ocomm.barrier()  # a rank ahead of us would be seen asking for the next one
            ocomm.allreduce(np.ones(1), name=f"x{k}")
            ocomm.barrier()
        return path

    (path, *_) = run_ranks(2, body)
    for k in range(3):
        for rank in range(2):
            found = rows(read(path_of(f"{path}.{k}", rank)))
            assert f"allreduce.x{k}" in found and f"allreduce.x{(k + 1) % 3}" not in found


@pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")
def test_a_setting_records_from_the_start(tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    run_ranks(2, lambda session: ocomm.allreduce(np.ones(1), name="x"), Settings(timeline=path))
    for rank in range(2):
        assert "allreduce.x" in rows(read(path_of(path, rank)))
    with pytest.raises(NotInitializedError):
        ocomm.start_timeline(path)


@pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")
def test_a_generation_leaves_the_files_of_the_one_that_failed(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        ocomm.allreduce(np.ones(1), name=f"x{session.settings.elastic_generation}")
        ocomm.start_timeline(str(tmp_path / "asked.json"))

    for generation in range(1, 3):
        run_ranks(2, body, Settings(timeline=str(tmp_path / "t.json"), elastic_generation=generation))
    found = {file.name for file in tmp_path.iterdir()}
    assert found == {
        f"{name}{generation}{rank}.json"
        for name in ("t", "asked")
        for generation in ("", ".generation2")
        for rank in ("", ".1")
    }
    assert "allreduce.x1" in rows(read(tmp_path / "t.1.json"))
    assert "allreduce.x2" in rows(read(tmp_path / "t.generation2.1.json"))


@pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")
def test_a_disk_that_is_full_does_not_hurt_training(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        ocomm.start_timeline("/dev/full")
        for step in range(50):
            assert ocomm.allreduce(np.ones(3), name=f"x{step}", op=ocomm.Sum).tolist() == [1, 1, 1]
        timeline = session.timeline
        ocomm.stop_timeline()
        assert timeline is not None and timeline.is_over

    run_ranks(1, body)
    assert [r.getMessage() for r in caplog.records] == [
        "timeline /dev/full ends here: No space left on device. Training goes on."
    ]


def test_a_job_without_a_timeline_calls_nothing_of_it(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        def calls(work: Callable[[], None]) -> list[str]:
            called: list[str] = []

            def note(frame: Any, event: str, _: Any) -> None:
                if event == "call":
                    called.append(frame.f_code.co_filename)

            sys.setprofile(note)
            try:
                work()
            finally:
                sys.setprofile(None)
            return called

        def work() -> None:
            handles = [ocomm.allreduce_async(np.ones(10, np.float32), name=str(k)) for k in range(10)]
            for handle in handles:
                ocomm.synchronize(handle)

        work()
        off = calls(work)
        assert not any("telemetry" in name or "tracing" in name for name in off)
        assert len(off) <= 10 * 60  # Python calls per tensor in the user's thread, submitted and waited for
        on = []
        record(tmp_path, lambda: on.extend(calls(work)))
        assert any("telemetry" in name for name in on)

    run_ranks(2, body)
