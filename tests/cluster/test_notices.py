"""What a real job says on stderr when nothing is wrong: three lines of rank 0, or none."""

from __future__ import annotations

import os
import re

import pytest

from tests.cluster.jobs import MPIRUN, run_job

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts mpirun itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun"),
]

TRAIN = """
import torch, ocomm_torch as hvd
hvd.init()
weight = torch.nn.Parameter(torch.ones(5000))
optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam([weight]), total_steps=20)
for step in range(20):
    optimizer.zero_grad()
    (weight * torch.full((5000,), 1.0 + hvd.rank() + step)).sum().backward()
    optimizer.step()
"""


def test_rank_0_says_three_lines_on_stderr() -> None:
    done = run_job(2, TRAIN)
    assert done.returncode == 0 and done.stdout == ""
    begin, freeze, end = done.stderr.splitlines()
    assert re.fullmatch(
        r"ocomm: 2 ranks on 1 host, (Open MPI|MPICH) [\d.]+, parameters in host memory\. DistributedOneBitAdam, 5000 "
        r"parameters: a step sends 20 kB per rank in the warm-up, about 633 bytes once the variance is frozen, after "
        r"step "
        r"4 at the latest \(a fifth of total_steps\)\.",
        begin,
    )
    assert re.fullmatch(
        r"ocomm: DistributedOneBitAdam: the warm-up is over\. From step 5 on this rank sends \d+ bytes per step "
        r"instead of "
        r"20 kB\.",
        freeze,
    )
    assert re.fullmatch(
        r"ocomm: DistributedOneBitAdam: 20 steps \(4 dense, 16 compressed\)\. This rank sent [\d.]+ kB instead of "
        r"400 kB, "
        r"[\d.]+ times fewer\. step\(\) waited [\d.]+ s for exchanges: .* ms in a dense step, .* ms in a compressed "
        r"one.*",
        end,
    )


@pytest.mark.long
def test_warning_silences_them() -> None:
    done = run_job(2, TRAIN, OCOMM_LOG_LEVEL="warning")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
