"""The suite's own promise: a rank that hangs ends the run once the others lose patience, and says where it hung."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import LIMIT_S, MPIRUN

PATIENCE_S = 3


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], marks=pytest.mark.long, id="threads"),
        pytest.param([str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", "2"], id="mpirun"),
    ],
)
def test_a_hanging_rank_ends_the_run_with_its_stack(launcher: list[str]) -> None:
    command = [*launcher, sys.executable, "-m", "pytest", "-q", "-s", str(Path(__file__).with_name("hanging_rank.py"))]
    environment = os.environ | {
        "TEST_PATIENCE_S": str(PATIENCE_S),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if launcher:
        environment["TEST_MPI_SIZE"] = "2"
    run = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    said = run.stdout + run.stderr
    assert run.returncode != 0
    assert "wait_forever" in said, said
    assert "StallError" in said, said
