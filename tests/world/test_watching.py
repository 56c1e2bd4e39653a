"""The counters of all ranks on rank 0, of a job that somebody watches."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ocomm.negotiation.request import Kind, Request
from ocomm.runtime import background, stalls
from ocomm.runtime.handle import Submission
from ocomm.session import Session
from ocomm.telemetry.counters import JobCounters, OptimizerCounters, Stalled
from ocomm.types import DType, ReduceOp
from tests.worlds import MPI_SIZE, PATIENCE_S, PATIENT, run_ranks

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="changes intervals of all ranks")


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_nobody_pays_for_counters_that_nobody_wants() -> None:
    def body(session: Session) -> tuple[bool, int]:
        assert session.runtime is not None
        return session.runtime.exporter is None, len([t for t in threading.enumerate() if t.name == "ocomm-metrics"])

    assert run_ranks(2, body) == [(True, 0)] * 2


def test_rank_0_has_the_counters_of_all_ranks_their_hosts_and_what_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(stalls, "_SHOWN_S", 0.1)
    seen = threading.Event()
    told: list[JobCounters] = []
    pages: list[str] = []

    def body(session: Session) -> None:
        rank = session.require_topology().rank
        session.count(lambda: OptimizerCounters(f"of rank {rank}", 7 + rank))
        exporter = session.runtime.exporter if session.runtime is not None else None
        assert exporter is not None
        values = np.zeros(4, np.float32)
        request = Request(Kind.ALLREDUCE, "late", DType.FLOAT32, values.shape, ReduceOp.SUM)
        if rank == 1:
            assert seen.wait(PATIENCE_S)
        handle = session.submit(0, Submission.of(request, values, values))
        if rank == 0:

            def has_all() -> bool:
                told.append(exporter.job())
                ranks = told[-1].ranks
                return len(ranks) == 2 and bool(ranks[0].stalls) and all(one.optimizers for one in ranks)

            until(has_all)
            assert exporter._port is not None
            with urllib.request.urlopen(f"http://127.0.0.1:{exporter._port.port}/metrics", timeout=20) as answer:
                pages.append(answer.read().decode())
            seen.set()
        handle.wait()

    run_ranks(2, body, replace(PATIENT, metrics_port="0"), hosts=["a", "b"])
    zero, one = told[-1].ranks
    assert [(r.rank, r.host, r.optimizers[0].name, r.optimizers[0].steps) for r in (zero, one)] == [
        (0, "a", "of rank 0", 7),
        (1, "b", "of rank 1", 8),
    ]
    assert [Stalled(stall.name, 0.0, stall.missing) for stall in zero.stalls] == [Stalled("late", 0.0, (1,))]
    assert 'ocomm_rank_stalled_tensors{rank="1",host="b"} 1' in pages[0]
    assert 'ocomm_steps_total{rank="1",host="b",optimizer="of rank 1"} 8' in pages[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "ocomm-metrics"]
