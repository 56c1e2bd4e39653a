"""The example with Keras and Torch in one job, as real processes, and two jobs beside each other."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest

import ocomm
from tests.cluster.jobs import LIMIT_S, MPIRUN, ROOT, run_job
from tests.worlds import run_ranks

# Not imported here: TensorFlow takes seconds, and every rank imports its own.
NEEDED = ("torch", "tensorflow", "sklearn", "tabulate")
pytestmark = [
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts mpirun itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun"),
]

EXAMPLE = ROOT / "examples" / "mixed_teams.py"


def run(ranks: int, *arguments: str) -> dict[str, list[str]]:
    """The lines of the table by their first column."""
    done = run_job(ranks, EXAMPLE, *arguments)
    assert done.returncode == 0, done.stderr
    rows = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 7 and row[0] != "" and "---" not in row[0]}


@pytest.mark.long  # four ranks import a framework; the next test has two, frontends/test_teams.py the teams
def test_two_teams_train_beside_each_other_with_one_framework_in_each_process() -> None:
    table = run(4, "--epochs", "3", "--freeze-step", "12")
    of_keras, of_torch = table["Keras, 1-bit Adam"], table["Torch, Birder"]
    assert (of_keras[0], of_keras[1], of_torch[0], of_torch[1]) == ("0, 1", "tensorflow", "2, 3", "torch")
    for _, _, loss, _, _, parameters in (of_keras, of_torch):
        assert float(loss) < 2.2
        assert parameters.startswith("equal, sha256 ")
    assert of_keras[5] != of_torch[5]


@pytest.mark.long
def test_ranks_of_both_frameworks_train_one_model() -> None:
    table = run(2, "--one-model", "--epochs", "2", "--freeze-step", "12")
    assert [table[name][1] for name in ("Keras, 1-bit Adam", "Torch, 1-bit Adam")] == ["tensorflow", "torch"]
    assert float(table["all ranks"][2]) < 2.2
    assert table["all ranks"][5].startswith("equal, sha256 ")
    assert len({row[5] for row in table.values()}) == 1


def exchanges(seed: int) -> str:
    """Hash of what comes out of some hundred dense and compressed exchanges, of numbers that depend on the seed."""
    random = np.random.default_rng([seed, ocomm.rank()])
    digest = hashlib.sha256()
    for _ in range(150):
        values = random.normal(size=20_000).astype(np.float32)
        digest.update(ocomm.allreduce(values, name="dense"))
        digest.update(ocomm.compressed_allreduce(values, "compressed"))
    return digest.hexdigest()


JOB = f"""
import hashlib, sys
import numpy as np
import ocomm

{inspect.getsource(exchanges)}

ocomm.init()
print("digest", exchanges(int(sys.argv[1])), flush=True)
"""


def ocommrun(seed: int) -> list[str]:
    """What a job of two ranks prints."""
    done = subprocess.run(
        [sys.executable, "-m", "ocomm.launch", "-np", "2", sys.executable, "-c", JOB, str(seed)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"digest (\w+)", done.stdout)


@pytest.mark.long
def test_two_jobs_on_one_machine_do_not_disturb_each_other() -> None:
    alone = [run_ranks(2, lambda session, seed=seed: exchanges(seed)) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(ocommrun, (1, 2)))
    assert together == alone
    assert alone[0] != alone[1]
