"""Programs that read RANK, WORLD_SIZE and LOCAL_RANK find their place under MPI's launchers, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm.torch_variables import MASTER, OF_LAUNCHERS
from tests.cluster.jobs import LIMIT_S, MPIRUN, ROOT

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun beside this Python"),
]
RANK = str(Path(__file__).with_name("rank_torch_env.py"))
OCOMMRUN = [sys.executable, "-m", "ocomm.launch", "-np", "2"]
PLAIN = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", "2"]


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in (*OF_LAUNCHERS, *MASTER)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, **root, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def seen(done: subprocess.CompletedProcess[str], path: Path) -> list[tuple[dict[str, str], dict[str, str]]]:
    """What each rank had before init() and after it."""
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(2)]


def place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("flags", [[], ["--min-np", "2"]], ids=["", "elastic"])
def test_ranks_of_ocommrun_have_the_variables_before_their_script_begins(flags: list[str], tmp_path: Path) -> None:
    ranks = seen(start([*OCOMMRUN, *flags, sys.executable, RANK, str(tmp_path / "env")]), tmp_path / "env")
    for rank, (before, after) in enumerate(ranks):
        assert before == after == {**place(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": before["MASTER_PORT"]}
    assert ranks[0][0]["MASTER_PORT"] == ranks[1][0]["MASTER_PORT"]


def test_ocommrun_leaves_the_variables_alone_where_it_is_told_to(tmp_path: Path) -> None:
    command = [*OCOMMRUN, "--no-torch-env", sys.executable, RANK, str(tmp_path / "env")]
    for before, after in seen(start(command, WORLD_SIZE="7"), tmp_path / "env"):
        assert before == after == {**dict.fromkeys((*OF_LAUNCHERS, *MASTER)), "WORLD_SIZE": "7"}


def test_ocommrun_refuses_a_world_size_that_is_not_the_jobs(tmp_path: Path) -> None:
    done = start([*OCOMMRUN, sys.executable, RANK, str(tmp_path / "env")], WORLD_SIZE="7")
    assert done.returncode == 1
    assert "WORLD_SIZE=7 is set where ocommrun starts 2 ranks" in done.stderr and "--no-torch-env" in done.stderr


def test_init_sets_the_variables_under_a_bare_mpirun(tmp_path: Path) -> None:
    ranks = seen(start([*PLAIN, sys.executable, RANK, str(tmp_path / "env")], MASTER_PORT="4711"), tmp_path / "env")
    for rank, (before, after) in enumerate(ranks):
        assert before == {**dict.fromkeys((*OF_LAUNCHERS, *MASTER)), "MASTER_PORT": "4711"}
        assert after == {**place(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


def test_init_refuses_a_world_size_that_is_not_mpis(tmp_path: Path) -> None:
    done = start([*PLAIN, sys.executable, RANK, str(tmp_path / "env")], WORLD_SIZE="1")
    assert done.returncode != 0
    assert "WORLD_SIZE=1 is set, but this process is one of 2 ranks, as OMPI_COMM_WORLD_SIZE says" in done.stderr


def test_init_comes_before_accelerate_or_says_so(tmp_path: Path) -> None:
    done = start([*PLAIN, sys.executable, RANK, str(tmp_path / "env"), "--accelerate"])
    assert done.returncode != 0
    assert "Accelerate has looked for the other ranks before init(), and found none" in done.stderr
