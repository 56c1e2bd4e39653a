"""The step benchmark measures what it says: the bytes that each method must send have crossed the cables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm.bench._lab import why_not

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a lab")
def test_every_method_trains_and_sends_what_it_must(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    few = ["--methods", "ddp", "onebit", "birder", "--rounds", "1", "--steps", "2", "--batch", "1"]
    command = [sys.executable, "benchmarks/step.py", "--hosts", "2", "--rate", "1gbit", "--json", str(output), *few]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(output.read_text())["results"]
    dense = 4 * result["parameters"]  # 2 (n-1)/n = 1 with two ranks
    ratio = {row["method"]: dense / row["sent"] for row in result["rows"][1:]}
    # All headers of TCP, IP and Ethernet are in what an interface counts.
    assert ratio["DDP fp32"] == pytest.approx(1, rel=0.1)
    assert ratio["1-bit Adam"] == pytest.approx(31.75, rel=0.08)
    assert ratio["Birder"] == pytest.approx(32, rel=0.08)
    assert result["limit_overlapped_ms"] <= result["limit_after_ms"]
