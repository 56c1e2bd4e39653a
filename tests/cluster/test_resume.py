"""A real job that is killed in the middle goes on: the same losses on the same ranks, losses beside them on others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import MPIRUN, ROOT, run_job

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts mpirun itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun"),
]

EXAMPLE = ROOT / "examples" / "torch_resume.py"
STEPS, EVERY, KILLED_AT = 40, 8, 29


def arguments(folder: Path) -> list[str]:
    return ["--checkpoints", str(folder), "--steps", str(STEPS), "--every", str(EVERY)]


def losses(output: str) -> dict[int, str]:
    """By step, in all digits."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE)}


def run(ranks: int, folder: Path) -> str:
    done = run_job(ranks, EXAMPLE, *arguments(folder))
    assert done.returncode == 0, done.stderr
    assert f"parameters of all {ranks} ranks are equal" in done.stdout
    return done.stdout


def run_and_kill(folder: Path) -> str:
    """Two ranks, until all of them and their launcher get SIGKILL during step KILLED_AT or soon after."""
    command = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable, str(EXAMPLE)]
    with subprocess.Popen(
        [*command, *arguments(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ) as job:
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said += line
            if line.startswith(f"step {KILLED_AT}:"):
                break
        for victim in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
            victim.send_signal(signal.SIGKILL)
        return said + job.stdout.read()


@pytest.mark.long  # nine ranks import Torch; frontends/test_torch_checkpoint_files.py has each part
def test_a_job_killed_in_the_middle_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    expected = losses(run(2, tmp_path / "whole"))
    assert list(expected) == list(range(1, STEPS + 1))

    killed = losses(run_and_kill(tmp_path / "killed"))
    assert KILLED_AT <= max(killed) < STEPS, "it ended before it was killed"
    assert killed == {step: expected[step] for step in killed}
    saved = int((tmp_path / "killed" / "latest").read_text().removeprefix("step-"))
    assert saved in (24, 32)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")

    output = run(2, tmp_path / "killed")
    assert f"goes on after step {saved}: errors loaded" in output
    assert losses(output) == {step: expected[step] for step in range(saved + 1, STEPS + 1)}

    output = run(3, tmp_path / "moved")
    assert f"goes on after step {saved}: errors re-sharded 2 -> 3 ranks: server errors moved with" in output
    moved = losses(output)
    assert list(moved) == list(range(saved + 1, STEPS + 1))
    assert all(abs(float(loss) - float(expected[step])) < 0.1 for step, loss in moved.items())
