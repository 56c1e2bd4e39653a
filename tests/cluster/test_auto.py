"""DistributedAuto on shaped links: it measures what the link is, and takes a method that suits it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ocomm.bench._lab import Lab, bits_per_second, why_not
from tests.cluster.jobs import has_mpi

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}"),
    pytest.mark.skipif(not has_mpi(), reason="there is no mpirun"),
]
PROGRAM = Path(__file__).with_name("train_auto.py")


@pytest.mark.long  # the probe alone takes ten seconds
@pytest.mark.alone
@pytest.mark.parametrize(("rate", "delay_ms"), [("5mbit", 0.0), ("1gbit", 0.0), ("10mbit", 100.0)])
def test_two_hosts_choose_together_what_suits_their_link(rate: str, delay_ms: float, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with Lab(2, rate, delay_ms) as lab:
        done = lab.run(lab.mpirun(2, [sys.executable, str(PROGRAM), str(result)], slots=1), 200)
    assert result.exists(), done.stdout + done.stderr
    first, second = json.loads(result.read_text())
    print(first["decision"])
    assert first == second
    assert f"DistributedAuto: {first['method']}, " in first["decision"]
    # A link is not faster than it is shaped, but for what its queue takes at once.
    assert 0 < first["rate"] < 1.5 * bits_per_second(rate)
    if rate == "5mbit":  # 4 MB in each step take 3 s each way, whatever else the machine does
        assert first["first"] == "averages in 8 bits"
        assert first["method"] not in ("exact averages", "averages in 8 bits")
