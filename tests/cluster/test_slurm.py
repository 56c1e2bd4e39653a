"""Jobs under a real Slurm of two nodes, in namespaces of this machine: ``make test-slurm`` brings its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import ROOT, run

LAB = ROOT / "tools" / "slurm_lab.sh"
ON_TWO_NODES = ("-N2", "-n4", "--ntasks-per-node=2")
SRUN = ("srun", "--mpi=pmix", "--kill-on-bad-exit=1", *ON_TWO_NODES)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif("TEST_SLURM" not in os.environ, reason="no Slurm: make test-slurm brings one"),
]

SUM = """
import os, socket, numpy as np, ocomm
ocomm.init()
assert ocomm.allreduce(np.full(100_000, ocomm.rank() + 1.0), op=ocomm.Sum).tolist() == [10] * 100_000
place = socket.gethostname(), ocomm.rank(), ocomm.local_rank(), ocomm.local_size(), ocomm.cross_rank()
os.write(1, "{} {} {} {} {}\\n".format(*place).encode())
"""
PLACES = [f"node{1 + rank // 2} {rank} {rank % 2} 2 {rank // 2}" for rank in range(4)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    subprocess.run(["bash", LAB, "up", "2", "8"], check=True, timeout=120)
    yield
    subprocess.run(["bash", LAB, "down"], check=True, timeout=60)


def on_head(*command: str, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ = {**os.environ, **allowed, "OCOMM_LOG_LEVEL": "warning", "PYTHONPATH": str(ROOT), **environment}
    return run(["bash", str(LAB), "run", "head", *command], environ, timeout_s)


def test_ranks_that_srun_starts_on_two_nodes_add_up() -> None:
    done = on_head(*SRUN, sys.executable, "-c", SUM)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, PLACES, ""), done


LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
typedef void (*done_t)(int, void *);
typedef int (*fence_t)(const void *, size_t, const void *, size_t, done_t, void *);
struct end { done_t done; void *data; int status; };
static void *later(void *given) {
    struct end *end = given;
    sleep(1);
    end->done(end->status, end->data);
    return NULL;
}
static void wait_first(int status, void *given) {
    pthread_t thread;
    ((struct end *)given)->status = status;
    pthread_create(&thread, NULL, later, given);
}
/* Open MPI ends MPI_Init with it. */
int PMIx_Fence_nb(const void *ranks, size_t count, const void *info, size_t infos, done_t done, void *data) {
    fence_t fence = (fence_t)dlsym(dlopen("libpmix.so.2", RTLD_NOW | RTLD_NOLOAD), "PMIx_Fence_nb");
    struct end *end = malloc(sizeof *end);
    end->done = done;
    end->data = data;
    return fence(ranks, count, info, infos, wait_first, end);
}
"""


def test_a_rank_that_leaves_mpi_init_late_gets_no_message_before() -> None:
    """Slurm's fence lets the ranks of a node through before those of others: Open MPI crashed in the late rank."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    library = folder / "late_rank.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library, "-ldl"], input=LATE, text=True, check=True)
    start = f'[ "$SLURM_PROCID" = 0 ] && export LD_PRELOAD={library}; exec "$@"'
    done = on_head(*SRUN, "bash", "-c", start, "bash", sys.executable, "-c", SUM)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, PLACES), done


def test_ocommrun_in_an_allocation_finds_its_nodes() -> None:
    ocommrun = (sys.executable, "-m", "ocomm.launch", "-np", "4")
    done = on_head("salloc", *ON_TWO_NODES, *ocommrun, sys.executable, "-c", SUM)
    places = sorted(line.partition(": ")[2] for line in done.stdout.splitlines())
    assert (done.returncode, places) == (0, PLACES), done


def test_an_error_of_one_rank_ends_all_tasks() -> None:
    program = f"{SUM}\nif ocomm.rank() == 3: raise ValueError('of rank 3')\nocomm.barrier()\n"
    done = on_head(*SRUN, sys.executable, "-c", program)
    assert done.returncode != 0 and "of rank 3" in done.stderr, done


def test_tasks_without_pmix_are_told_how_to_start() -> None:
    done = on_head("srun", *ON_TWO_NODES, sys.executable, "-c", SUM)
    assert done.returncode != 0 and "srun --mpi=pmix" in done.stderr, done


def test_a_model_trains_alike_under_srun() -> None:
    program = """
import torch, ocomm_torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1000, 10)
optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(model.parameters(), lr=1e-3), freeze_step=3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(16, 1000)).square().mean().backward()
    optimizer.step()
hvd.check_replicas(model.state_dict())
assert optimizer.compression_report()["compressed_steps"] == 5
"""
    done = on_head(*SRUN, sys.executable, "-c", program, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done
