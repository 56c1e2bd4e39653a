"""The account of a compressed step: its parts add up, and the processor computes everything once.

How long that takes is the profile's to say, on a machine that does nothing else: with ``--hold`` it fails if a budget
is exceeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step_profile import excesses
from ocomm.bench._lab import why_not
from tests.cluster.jobs import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long  # a benchmark, whose ranks import Torch and train for seconds
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a lab")
def test_a_compressed_step_computes_everything_once(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    few = ["--hosts", "2", "--rate", "1gbit", "--steps", "8", "--batch", "1", "--json", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_profile", *few],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(output.read_text())["results"]
    numel, segments = result["parameters"], result["kernels"]["apply"]
    assert result["elements"] == {"compress_momentum": numel, "average": numel // 2, "finite_scales": numel}
    assert result["kernels"] == {"apply": segments, "checksums": 1}
    # One exchange and the vote on it; to the other rank, a message of each half of every segment, and the vote's.
    assert (result["per_step"]["plans"], result["per_step"]["messages_sent"]) == (2, 2 * segments + 1)
    parts = result["parts"]
    assert sum(times for name, (_, _, times) in parts.items() if "hook" in name) == result["tensors"]
    assert sum(wall for wall, _, _ in parts.values()) == pytest.approx(result["step_ms"], rel=0.02)


def test_budgets_that_are_exceeded_are_named() -> None:
    spent = {"Adam": 8.0, "codec": 11.5, "hooks": 1.8, "runtime": 1.9, "network": 3.0}
    assert excesses(spent, ["codec", "hooks", "runtime"]) == ["codec: 11.5 ms of 11.0", "hooks: 1.8 ms of 1.0"]
    assert excesses(spent, ["runtime"]) == excesses(spent, []) == []
