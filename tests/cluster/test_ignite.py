"""PyTorch Ignite, which has Horovod among its backends: two ranks, with the real package and none of Horovod."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.jobs import launchers, run_by

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(find_spec("ignite") is None, reason="no Ignite: pip install pytorch-ignite"),
]


@pytest.mark.parametrize("how", ["ocommrun", "spawn"])
def test_its_backend_horovod_runs_on_ocomm(how: str, tmp_path: Path) -> None:
    python = sys.executable
    command = {
        "ocommrun": ["-m", "ocomm.launch", "--as-horovod", "-np", "2", python],
        "spawn": ["-m", "ocomm.as_horovod", python],
    }[how]
    script = Path(__file__).with_name("train_ignite.py")
    done = run_by(([python, *command], launchers(2)["ocommrun"][1]), str(script), str(tmp_path), how)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1))
    assert [first.pop("group"), second.pop("group")] == [[1.0], [2.0]]
    assert first == second
    assert first.pop("accuracy") > 0.9 and first.pop("weights")
    assert first == {
        "model": "horovod-dist",
        "ranks": [2, 2, 1],
        "reduced": {"SUM": 3.0, "AVERAGE": 1.5, "MIN": 1.0, "MAX": 2.0, "PRODUCT": 2.0},
        "gathered": [[1.0, 2.0], ["rank 0", "rank 1"]],
        "broadcast": [2.0, "from 0"],
    }
