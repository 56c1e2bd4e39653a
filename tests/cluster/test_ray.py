"""Ray Train: a job of two workers on one machine, with the real package."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.jobs import MPICH, launchers, run_by, without_launcher

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: pip install 'ocomm[ray]'"),
    pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one"),
]


def test_ray_train_has_the_parameters_of_mpirun(tmp_path: Path) -> None:
    here = Path(__file__).parent
    by_mpirun = run_by(launchers(2)["mpirun"], str(here / "train_anywhere.py"), str(tmp_path / "mpirun"))
    assert by_mpirun.returncode == 0, by_mpirun.stderr
    launcher = [sys.executable], without_launcher(RAY_USAGE_STATS_ENABLED="0")
    by_ray = run_by(launcher, str(here / "train_ray.py"), str(tmp_path), timeout_s=480)
    assert by_ray.returncode == 0, by_ray.stdout + by_ray.stderr
    expected = (tmp_path / "mpirun").read_text()
    assert [(tmp_path / name).read_text() for name in ("tasks", "trainer")] == [expected, expected]
