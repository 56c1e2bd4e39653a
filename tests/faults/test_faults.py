"""One fault of each kind, and, in the long tier, one at every call."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.cluster.jobs import ROOT
from tests.faults import scenarios, workloads, world
from tests.faults.allocations import library
from tests.faults.calls import Calls, Fault
from tests.faults.trail import Trail, differences
from tests.worlds import MPI_SIZE

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="makes worlds of its own")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every rank would log the failure that it is about to have."""
    logger = logging.getLogger("ocomm")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@lru_cache
def clean(native: bool) -> world.Run:
    run = world.run(workloads.everything, workloads.RANKS, workloads.SETTINGS, native=native, deadline_s=60.0)
    assert not run.stuck and [rank.error for rank in run.ranks] == [None] * workloads.RANKS
    return run


#: Layer, rank, the beginning of a site, and a call that it has in every run.
ONE_OF_EACH = [
    ("transport", 1, "isend in control", 20),
    ("transport", 2, "isend in python_engine", 100),
    ("transport", 1, "duplicated in channels", 2),
    ("transport", 2, "close in channels:free", 1),
    ("transport", 1, "subset in registry", 1),
    ("mpi", 2, "MPI_Isend", 150),
    ("mpi", 1, "MPI_Testsome", 10),
    ("mpi", 2, "MPI_Get_count", 3),
]


@pytest.mark.parametrize(("layer", "victim", "site", "number"), ONE_OF_EACH)
def test_after_a_fault_nothing_hangs_and_every_state_is_that_of_a_whole_step(
    layer: str, victim: int, site: str, number: int
) -> None:
    native = layer == "mpi"
    whole = clean(native)
    found = next(each for each in whole.ranks[victim].calls.counts if each.startswith(site))
    calls = Calls(Fault(found, number))
    run = world.run(
        workloads.everything, workloads.RANKS, workloads.SETTINGS, {victim: calls}, native=native, deadline_s=60.0
    )
    assert calls.has_failed and world.problems(whole, run, victim) == []


# The service and its ranks are processes, which leave their sockets to their end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "site"),
    [("commits", "write in folder:write_copy"), ("telemetry", "write in timeline"), ("pmi", "sendall in pmi")],
)
def test_after_a_fault_of_a_file_or_socket_ranks_go_on_whole_or_know_why_not(
    name: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "PATIENCE_S", 20.0)
    counted = Calls()
    assert scenarios.SCENARIOS[name](counted) == []
    found = next(each for each in counted.counts if each.startswith(site))
    calls = Calls(Fault(found, counted.counts[found] if name == "pmi" else 1))
    assert scenarios.SCENARIOS[name](calls) == [] and calls.has_failed


def test_half_a_step_a_step_too_many_and_a_quiet_end_are_noticed() -> None:
    trail = Trail()
    values = [1.0]
    trail.look_at("start", lambda: values)
    values[0] = 2.0
    trail.did("step")
    whole, after = list(trail.steps), trail.end()
    assert differences(0, whole, whole[:1], after, False) == []
    assert differences(0, whole, whole[:1], "half", False) != []
    assert differences(0, whole, [*whole, "another x"], after, False) != []
    assert differences(0, whole, whole[:1], after, True) != []


def faults(*asked: str) -> None:
    command = [sys.executable, "-m", "tests.faults", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_allocation_of_an_engine_that_fails_is_an_error_that_says_what_there_is_no_memory_for(
    tmp_path: Path,
) -> None:
    preload = library(tmp_path)
    if preload is None:
        pytest.skip(reason="no gcc")
    command = [sys.executable, "-m", "tests.faults.engine_alone"]
    environ = {**os.environ, "LD_PRELOAD": str(preload)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert first == "no fault: everything" and len(lines) >= 10, done.stdout
    said = "LaunchError: no room for 2 kernel threads|MemoryError: no memory for|this rank has no memory left for more"
    assert [line for line in lines if not re.search(said, line)] == []
    assert any("memory left for more messages" in line for line in lines)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layer", ["transport", "mpi", "allocations", "files"])
def test_a_fault_at_every_call_in_process(layer: str) -> None:
    faults(layer)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_50_faults_of_jobs_under_mpirun() -> None:
    faults("mpirun", "--sample", "50")
