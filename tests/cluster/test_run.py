"""``ocomm.run`` from Python, and scripts that still say horovod."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ocomm
from ocomm.errors import LaunchError
from tests.cluster.jobs import has_mpi, run

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not has_mpi(), reason="there is no mpirun"),
]


def test_a_function_runs_on_all_ranks_and_its_results_come_back() -> None:
    factor = 3

    def work(offset: int, *, scale: int) -> tuple[int, int, float]:
        import subprocess

        import numpy

        import ocomm

        assert b"_OCOMM_RUN_KEY" not in subprocess.run(["env"], capture_output=True).stdout
        ocomm.init()
        total = ocomm.allreduce(numpy.ones(4, numpy.float32) * ocomm.rank(), op=ocomm.Sum)
        return ocomm.rank(), offset + factor * scale, float(total[0])

    # The last three are how Horovod's examples call it.
    results = ocomm.run(work, (1,), {"scale": 2}, num_proc=3, use_gloo=True, use_mpi=True, verbose=0)
    assert results == [(rank, 7, 3.0) for rank in range(3)]


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_job_without_ranks_is_refused_and_returns_no_empty_list(ranks: int) -> None:
    with pytest.raises(LaunchError, match=f"^np={ranks}: a job has 1 rank or more.$"):
        ocomm.run(print, np=ranks)


def test_an_exception_on_one_rank_comes_back_with_its_traceback_and_ends_the_others() -> None:
    def work() -> None:
        import ocomm

        ocomm.init()
        if ocomm.rank() == 1:
            raise ValueError("no more data")
        ocomm.barrier()

    with pytest.raises(LaunchError, match=r"rank 1 failed:\n(.*\n)*ValueError: no more data"):
        ocomm.run(work, num_proc=2)


def test_a_rank_that_ends_without_a_result_is_named() -> None:
    def work() -> None:
        import os

        os._exit(3)

    with pytest.raises(LaunchError, match=r"there is no result of rank\(s\) \[0\]"):
        ocomm.run(work, num_proc=1)


_WITH_HOROVODS_NAMES = """
import multiprocessing
import subprocess
import sys

import horovod  # workers that are not forked import this file, too


def version(_):
    return horovod.__version__


if __name__ == "__main__":
    for how in ("fork", "spawn", "forkserver"):  # before there are threads
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(f"<{how}: {pool.map(version, [0])}>")

    import torch
    import horovod.torch as hvd
    from horovod.torch import DistributedOptimizer

    hvd.init()
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    print(f"<{hvd.rank()} of {hvd.size()}: {total.tolist()} {sys.argv[1:]}>")
    optimizer = torch.optim.SGD([torch.nn.Parameter(total)], lr=1.0)
    print(f"<{type(optimizer).__module__}, {type(DistributedOptimizer(optimizer)).__module__}>")
    try:
        import horovod.torch.mpi_ops.none
    except ModuleNotFoundError as error:
        print(f"<{error}>")
    command = [sys.executable, "-c", "import horovod.common.util as util; print(util.mpi_built())"]
    print(f"<another: {subprocess.run(command, capture_output=True, text=True).stdout.strip()}>")
"""


def test_a_script_may_keep_its_import_of_horovod(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WITH_HOROVODS_NAMES)
    shell = tmp_path / "train.sh"
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} "$(dirname "$0")/train.py" "$@"\n')
    shell.chmod(0o755)
    # One rank: only whether the names are there is new, and each rank imports Torch.
    command = [sys.executable, "-m", "ocomm.launch", "--as-horovod", "-np", "1", str(shell), "--x"]
    done = run(command, {**os.environ})
    assert done.returncode == 0, done.stderr
    for line in (
        "<0 of 1: [1.0, 1.0] ['--x']>",
        "<fork: ['0.28.1']>",
        "<spawn: ['0.28.1']>",
        "<forkserver: ['0.28.1']>",
        "<another: True>",
        "<torch.optim.sgd, horovod.torch.optimizer>",
        "<horovod.torch.mpi_ops.none would be ocomm_torch.mpi_ops.none, which ocomm does not have>",
    ):
        assert line in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_script_that_calls_horovods_run_has_its_names_on_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "import horovod\n"
        "import horovod.torch as hvd\n"
        "def train(scale):\n"
        "    hvd.init()\n"
        "    return hvd.rank(), hvd.allreduce(torch.ones(2) * scale, op=hvd.Sum).tolist()\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(train, args=(3,), np=2, use_gloo=False, use_mpi=True, verbose=2))\n"
    )
    # The script is a job of one rank, whose place in it is none of its own ranks'.
    command = [sys.executable, "-m", "ocomm.launch", "--as-horovod", "-np", "1", sys.executable, str(script)]
    done = run(command, {**os.environ})
    assert done.returncode == 0, done.stderr
    assert "[(0, [6.0, 6.0]), (1, [6.0, 6.0])]" in done.stdout
