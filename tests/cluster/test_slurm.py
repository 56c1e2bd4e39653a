"""Jobs under a real Slurm of two nodes, in namespaces of this machine: ``make test-slurm`` brings its packages."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

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
total = ocomm.size() * (ocomm.size() + 1) / 2
assert ocomm.allreduce(np.full(100_000, ocomm.rank() + 1.0), op=ocomm.Sum).tolist() == [total] * 100_000
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


def until(is_so: Callable[[], bool], what: Callable[[], object]) -> None:
    """Waits until it is so; ``what`` says what there is instead."""
    end = time.monotonic() + 100.0
    while not is_so():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


class Batch:
    """A job of sbatch, and what it writes."""

    def __init__(self, *options: str, command: str, **environment: str) -> None:
        # The nodes have a /tmp of their own.
        self._output = ROOT / "build" / f"slurm-{uuid.uuid4()}.out"
        self._output.parent.mkdir(exist_ok=True)
        sbatch = ("sbatch", "--parsable", "--open-mode=append", f"--output={self._output}", *ON_TWO_NODES, *options)
        done = on_head(*sbatch, f"--wrap={command}", **environment)
        assert done.returncode == 0, done
        self.number = done.stdout.strip()

    def text(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def until_it_says(self, word: str) -> None:
        until(lambda: word in self.text(), self.text)

    def end(self) -> str:
        """Waits for the end of the job, and returns what it has written. The job's command writes its status last."""
        self.until_it_says("status ")
        return self.text()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        on_head("scancel", self.number)
        self._output.unlink(missing_ok=True)


def with_status(*command: str) -> str:
    return f"{shlex.join(command)}; echo status $?"


def test_ranks_that_srun_starts_on_two_nodes_add_up() -> None:
    done = on_head(*SRUN, sys.executable, "-c", SUM)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, PLACES, ""), done


def places_on(*nodes: int) -> list[str]:
    """Returns the places of ranks, sorted; the first rank is on the first of ``nodes``, which are 1 and 2."""
    places = []
    for rank, node in enumerate(nodes):
        local = nodes[:rank].count(node)
        cross = int(node == 2 and nodes.count(1) > local)  # among the nodes that have such a local rank
        places.append(f"node{node} {rank} {local} {nodes.count(node)} {cross}")
    return sorted(places)


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ((*ON_TWO_NODES, "--distribution=cyclic"), (1, 2, 1, 2)),
        (("-N2", "-n8", "--ntasks-per-node=4", "--distribution=plane=2"), (1, 1, 2, 2, 1, 1, 2, 2)),
    ],
)
def test_ranks_know_their_places_in_whatever_order_srun_deals_them(
    flags: tuple[str, ...], nodes: tuple[int, ...]
) -> None:
    done = on_head("srun", "--mpi=pmix", "--kill-on-bad-exit=1", *flags, sys.executable, "-c", SUM)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, places_on(*nodes)), done


def test_a_heterogeneous_step_is_one_job() -> None:
    part = ("--mpi=pmix", "--kill-on-bad-exit=1", "-N1")
    program = (sys.executable, "-c", SUM)
    done = on_head("srun", *part, "-wnode1", "-n1", *program, ":", *part, "-wnode2", "-n3", *program)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, places_on(1, 2, 2, 2)), done


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


TRAIN_ON = """
import os, signal, sys, numpy as np, ocomm
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
ocomm.init()
if ocomm.rank() == 0:
    os.write(1, b"it trains\\n")
step = 0
while os.environ.get({variable!r}, {first!r}) == {first!r}:
    step += 1
    if ocomm.allreduce(np.array([len(asked)]), op=ocomm.Sum, name="asked")[0]:
        os.write(1, "stops at {{}}\\n".format(step).encode())
        break
ocomm.barrier()
if ocomm.rank() == 0:
    os.write(1, b"it ends\\n")
"""
TRAINS_UNTIL_REQUEUED = TRAIN_ON.format(variable="SLURM_RESTART_COUNT", first="0")
TRAINS_IN_GENERATION_1 = TRAIN_ON.format(variable="OCOMM_ELASTIC_GENERATION", first="1")


def test_a_job_that_is_requeued_trains_again() -> None:
    with Batch("--requeue", command=with_status(*SRUN, sys.executable, "-c", TRAINS_UNTIL_REQUEUED)) as job:
        job.until_it_says("it trains")
        assert on_head("scontrol", "requeue", job.number).returncode == 0
        start = ("scontrol", "update", f"JobId={job.number}", "StartTime=now")

        def has_trained_again() -> bool:
            on_head(*start)  # a job waits two minutes, unless it is told otherwise once its first run has ended
            return job.text().count("it trains") == 2

        until(has_trained_again, job.text)
        assert job.end().endswith("it ends\nstatus 0\n"), job.text()


def test_a_signal_to_the_step_stops_all_ranks_at_the_same_step() -> None:
    with Batch(command=with_status(*SRUN, sys.executable, "-c", TRAINS_UNTIL_REQUEUED)) as job:
        job.until_it_says("it trains")
        assert on_head("scancel", "--signal=USR1", f"{job.number}.0").returncode == 0
        text = job.end()
        stops = [line for line in text.splitlines() if line.startswith("stops")]
        assert len(stops) == 4 and len({*stops}) == 1 and text.endswith("status 0\n"), text


def test_ocommrun_starts_where_sbatch_withholds_the_environment() -> None:
    ocommrun = (sys.executable, "-m", "ocomm.launch", "-np", "4", sys.executable, "-c", SUM)
    command = with_status("env", f"PYTHONPATH={ROOT}", "OCOMM_LOG_LEVEL=warning", *ocommrun)
    with Batch("--export=NONE", command=command) as job:
        lines = job.end().splitlines()
        assert sorted(line.partition(": ")[2] for line in lines[:-1]) == PLACES and lines[-1] == "status 0", lines


@pytest.mark.parametrize("flags", [(), ("--min-np", "2")])
def test_a_host_whose_daemon_is_lost_is_a_failure_though_the_launcher_may_end_with_0(flags: tuple[str, ...]) -> None:
    ocommrun = (sys.executable, "-m", "ocomm.launch", "-np", "4", *flags)
    with Batch(command=with_status(*ocommrun, sys.executable, "-c", TRAINS_IN_GENERATION_1)) as job:
        job.until_it_says("it trains")
        killed = run(["bash", str(LAB), "run", "node2", "pkill", "-9", "prted"], dict(os.environ), 20.0)
        assert killed.returncode == 0, killed
        text = job.end()
        if flags:
            assert "ocommrun: generation 2: " in text and text.endswith("status 0\n"), text
        else:
            assert "it ends" not in text and not text.endswith("status 0\n"), text
