"""TensorFlow with GPUs that are none: ``on_fake_gpu``, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import MPI_SIZE

TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.skipif(bool(MPI_SIZE), reason="it starts a process that is alone")
@pytest.mark.parametrize("tier", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_variables_on_gpus_are_trained_there(tier: str, tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    folder, library = Path(tensorflow.sysconfig.get_lib()), tmp_path / "fake_gpu.so"
    include = tensorflow.sysconfig.get_include()
    command = ["gcc", "-shared", "-fPIC", "-pthread", f"-I{include}", TESTS / "fake_gpu.c", "-o", library]
    subprocess.run([*command, f"-L{folder}", "-l:libtensorflow_framework.so.2", f"-Wl,-rpath,{folder}"], check=True)
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", tier]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, TESTS / "frontends" / "on_fake_gpu.py"],
        env={**os.environ, "FAKE_GPU": str(library), "TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=TESTS.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
