"""Benchmarks measure what they say: the bytes that each method of a step must send have crossed the cables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm.bench._lab import why_not
from tests.cluster.jobs import LIMIT_S, MPIRUN, run_job

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long  # a benchmark; test_wire_bytes.py counts the bytes of a step
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a lab")
def test_every_method_trains_and_sends_what_it_must(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    few = ["--methods", "ddp", "onebit", "birder", "--rounds", "1", "--steps", "2", "--batch", "1"]
    command = [sys.executable, "-m", "benchmarks.step", "--hosts", "2", "--rate", "1gbit", "--json", str(output), *few]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(output.read_text())["results"]
    dense = 4 * result["parameters"]  # 2 (n-1)/n = 1 with two ranks
    ratio = {row["method"]: dense / row["sent"] for row in result["rows"][1:]}
    # All headers of TCP, IP and Ethernet are in what an interface counts.
    assert ratio["DDP fp32"] == pytest.approx(1, rel=0.1)
    assert ratio["1-bit Adam"] == pytest.approx(31.75, rel=0.08)
    assert ratio["Birder"] == pytest.approx(32, rel=0.08)
    assert result["limits"]["limit, overlapped"] <= result["limits"]["limit, after backward"]


@pytest.mark.skipif("TEST_MPI_SIZE" in os.environ or not MPIRUN.exists(), reason="starts mpirun itself")
def test_what_the_runtime_costs_is_printed_in_three_lines() -> None:
    few = "sys.argv[1:] = '--tensors 5 --nbytes 100000 --rounds 1 --calls 3 --idle-s 0.1'.split()"
    program = f"import sys; {few}; from ocomm.bench.__main__ import main; sys.exit(main(['runtime', *sys.argv[1:]]))"
    done = run_job(2, program)
    assert done.returncode == 0, done.stderr
    burst, latency, idle = done.stdout.splitlines()
    assert re.fullmatch(r"burst +5 tensors, 0 MB: [\d.]+ ms, one MPI_Allreduce: [\d.]+ ms, ratio [\d.]+", burst)
    assert re.fullmatch(r"latency +4096 bytes, known name: [\d.]+ ms", latency)
    assert re.fullmatch(r"idle +[\d.]+ % of a core, the most of 2 ranks", idle)
