"""Scripts of Keras 2 (tf_keras), which TF_USE_LEGACY_KERAS=1 makes ``tf.keras``: they average as Horovod does."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from tests.cluster.jobs import run
from tests.tiers import few
from tests.worlds import MPI_SIZE

pytestmark = [
    pytest.mark.skipif(find_spec("tf_keras") is None, reason="Keras 2 (tf_keras) is not installed"),
    pytest.mark.skipif(MPI_SIZE > 0, reason="starts a process of its own"),
]


@pytest.mark.parametrize(
    "names",
    few(
        [
            "same_as_one_process built_by_its_first_batch tape refused",
            "schedule_and_files scaled_files wrapper_of_an_optimizer loss_scale",
            "without_eager_execution",
        ],
        ["same_as_one_process built_by_its_first_batch tape refused"],
    ),
)
def test_scripts_of_keras_2(names: str) -> None:
    command = [sys.executable, "-m", "tests.frontends.keras_2", *names.split()]
    done = run(command, {**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == names.split()
