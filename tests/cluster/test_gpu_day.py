"""What a GPU is needed for, rehearsed without one: every program runs to its end and writes what is to be published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import ROOT

pytestmark = [pytest.mark.long]

FIGURES = ("step", "staging", "offload")


def rehearse(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    mpirun = f"{Path(sys.executable).with_name('mpirun')} --oversubscribe --bind-to none"
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_day.sh"), "--rehearse", str(folder), *parts],
        cwd=ROOT,
        env={**os.environ, "PY": sys.executable, "MPIRUN": mpirun},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_figures_are_written_with_what_they_are_of(tmp_path: Path) -> None:
    done = rehearse(tmp_path, *FIGURES)
    assert done.returncode == 0, done.stdout
    assert "== ended" in (tmp_path / "gpu-day.log").read_text()
    for part in FIGURES:
        found = json.loads((tmp_path / f"gpu-{part}.json").read_text())
        assert found["rows"] and found["command"].startswith(f"python -m benchmarks.gpu.{part} ")
        assert "rehearsal" in found["about"]["device"] and {"torch", "commit"} <= set(found["about"])


def test_a_part_without_anything_to_run_on_is_no_failure_and_an_unknown_one_is(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "speed", "attention", "ranks")
    assert done.returncode == 0, done.stdout
    assert "rc  77" in done.stdout
    done = rehearse(tmp_path, "spede", "staging")
    assert done.returncode == 1 and "there is no part 'spede'" in done.stdout
    assert (tmp_path / "gpu-staging.json").exists(), "one part does not keep another from running"


def test_the_hosts_part_of_a_step_is_measured_on_a_device_that_computes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    output = tmp_path / "host.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.host", "--rounds", "2", "--json", str(output)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["us"]
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(
        ("backward", "before", "between", "after"), 2
    )
