"""Jobs that torchrun starts, or nobody: ranks with nothing but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ocomm.bench._lab import Lab, why_not
from ocomm.runtime.own_address import free_port
from tests.cluster.jobs import IS_INTEL_MPI, LIMIT_S, MPICH, ROOT, launchers, run_by, without_launcher

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one"),
]
TRAIN = str(Path(__file__).with_name("train_anywhere.py"))
WAITING = """
import ocomm, time
from ocomm.runtime.pmi_client import shared_memory
ocomm.init()
print(*shared_memory(), flush=True)
ocomm.barrier()
time.sleep(600)
"""


class Ranks:
    """Processes with RANK and WORLD_SIZE: all ranks of a job, or some."""

    def __init__(
        self,
        script: list[str],
        size: int,
        ranks: list[int] | None = None,
        on: Callable[[int, list[str]], list[str]] = lambda rank, command: command,
        **more: str,
    ) -> None:
        meet = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = {
            rank: subprocess.Popen(
                on(rank, [sys.executable, *script]),
                env=without_launcher(**{**meet, "RANK": str(rank), "OCOMM_LOG_LEVEL": "warning", **more}),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (range(size) if ranks is None else ranks)
        }

    def ended(self) -> dict[int, tuple[int, str]]:
        """Exit code and standard error output of every rank. That ends only when the service has ended, too."""
        try:
            said = {rank: process.communicate(timeout=LIMIT_S)[1] for rank, process in self.processes.items()}
        finally:
            for process in self.processes.values():
                process.kill()
        return {rank: (process.returncode, said[rank]) for rank, process in self.processes.items()}


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_by(launchers(2)["torchrun"], *arguments)


def digest(path: Path, ranks: int = 2) -> str:
    size, found = path.read_text().split()
    assert int(size) == ranks
    return found


def test_one_script_has_one_result_under_mpirun_ocommrun_and_torchrun(tmp_path: Path) -> None:
    for name, launcher in launchers(2).items():
        done = run_by(launcher, TRAIN, str(tmp_path / name))
        assert done.returncode == 0, f"{name}: {done.stderr}"
    assert len({digest(tmp_path / name) for name in launchers(2)}) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_nobody_has_started_find_each_other(size: int, tmp_path: Path) -> None:
    job = Ranks([TRAIN, str(tmp_path / "sha")], size)
    assert job.ended() == dict.fromkeys(range(size), (0, ""))
    digest(tmp_path / "sha", size)


def test_two_jobs_run_at_once_on_one_host(tmp_path: Path) -> None:
    jobs = [Ranks([TRAIN, str(tmp_path / str(number))], 2) for number in range(2)]
    for job in jobs:
        assert job.ended() == {0: (0, ""), 1: (0, "")}
    assert digest(tmp_path / "0") == digest(tmp_path / "1")


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    began_s = time.monotonic()
    ended = Ranks(["-c", WAITING], 3, [0, 2], OCOMM_START_TIMEOUT="8").ended()
    assert time.monotonic() - began_s < LIMIT_S / 2
    for code, said in ended.values():
        assert code == 1
        assert "after 8 s ranks [1] have not come to init()" in said


def test_a_killed_rank_ends_the_others_by_name_and_leaves_nothing_for_the_next_job(tmp_path: Path) -> None:
    for killed in (1, 0):
        job = Ranks(["-c", WAITING], 3)
        shared: set[str] = set()
        for process in job.processes.values():
            assert process.stdout is not None
            shared |= set(process.stdout.readline().split())
        assert shared or IS_INTEL_MPI  # which removes its files while it starts
        job.processes[killed].kill()
        for rank, (code, said) in job.ended().items():
            if rank != killed:
                assert code == 1
                assert f"ocomm: rank {rank} ends: rank {killed} has ended without MPI_Finalize." in said
        assert [path for path in shared if os.path.exists(path)] == []
        after = Ranks([TRAIN, str(tmp_path / f"after {killed}")], 2)
        assert after.ended() == {0: (0, ""), 1: (0, "")}


def test_torchrun_starts_a_job_again_in_which_a_rank_was_killed(tmp_path: Path) -> None:
    done = torchrun("--max-restarts", "1", TRAIN, str(tmp_path / "again"), "kill", "1", "10")
    assert done.returncode == 0, done.stderr
    done = torchrun(TRAIN, str(tmp_path / "at once"))
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "again") == digest(tmp_path / "at once")


@pytest.mark.parametrize("killed", ["0", "1"])
def test_agents_of_two_nodes_start_a_job_again_though_each_counts_its_own_restarts(killed: str, tmp_path: Path) -> None:
    """Only the agent whose rank has failed counts a restart; the other starts its ranks again as for a new member."""
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id job"
    job = [*options.split(), "--max-restarts", "2", TRAIN, str(tmp_path / "sha"), "kill", killed, "10"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *job],
            env=without_launcher(OCOMM_START_TIMEOUT="30"),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=LIMIT_S)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert (tmp_path / "sha.killed").exists()
    digest(tmp_path / "sha")


def test_a_process_group_of_torchs_works_before_and_after_init() -> None:
    script = """
import sys, torch, torch.distributed as dist
import ocomm_torch as hvd
if sys.argv[1] == "before":
    dist.init_process_group("gloo")
hvd.init()
if sys.argv[1] == "after":
    dist.init_process_group("gloo")
ones = torch.ones(3)
dist.all_reduce(ones)
assert ones.tolist() == hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
dist.destroy_process_group()
"""
    for when in ("before", "after"):
        for code, said in Ranks(["-c", script, when], 2).ended().values():
            assert code == 0, said


def test_a_store_may_be_given(tmp_path: Path) -> None:
    script = """
import sys, torch.distributed as dist
import ocomm_torch as hvd
hvd.init(store=dist.FileStore(sys.argv[1], 2))
assert hvd.size() == 2
"""
    job = Ranks(["-c", script, str(tmp_path / "store")], 2, MASTER_ADDR="", MASTER_PORT="")
    for code, said in job.ended().values():
        assert code == 0, said


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, url):
    dist.init_process_group("ocomm", init_method=url, rank=rank, world_size=2)
    import ocomm_torch as hvd
    assert (hvd.rank(), hvd.size()) == (rank, 2)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, sys.argv[1:], nprocs=2)
"""


@pytest.mark.parametrize("way", ["tcp://127.0.0.1:PORT", "file://FOLDER/store", "env://"])
def test_processes_of_torch_multiprocessing_meet_in_the_store_of_their_group(way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    url = way.replace("PORT", str(free_port())).replace("FOLDER", str(tmp_path))
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if way == "env://" else {}
    job = subprocess.run(
        [sys.executable, str(script), url],
        env=without_launcher(PYTHONPATH=str(ROOT), **meet),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert job.returncode == 0, job.stdout + job.stderr


def test_what_mpi_has_started_before_init_is_an_error_on_all_ranks() -> None:
    script = "import os\nif os.environ['RANK'] == '1':\n    from mpi4py import MPI\nimport ocomm\nocomm.init()\n"
    for code, said in Ranks(["-c", script], 2).ended().values():
        assert code == 1
        assert f"ranks 1 ({socket.gethostname()}): MPI was started before init(), in a world of one" in said


@pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
@pytest.mark.parametrize("hosts", ["ab", "abab", "aabb", "abb"])
def test_ranks_may_be_dealt_to_hosts_in_any_order(hosts: str, tmp_path: Path) -> None:
    script = """
import sys, numpy as np, ocomm
ocomm.init()
rank, hosts = ocomm.rank(), sys.argv[1]
mine = [each for each in range(len(hosts)) if hosts[each] == hosts[rank]]
assert (ocomm.size(), ocomm.local_rank(), ocomm.local_size()) == (len(hosts), mine.index(rank), len(mine))
total = sum(range(1, len(hosts) + 1))
assert ocomm.allreduce(np.full(100_000, rank + 1.0), op=ocomm.Sum).tolist() == [total] * 100_000
from mpi4py import MPI
assert MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size == len(mine), "MPICH shares memory with others"
"""
    with Lab(2) as lab:
        job = Ranks(
            ["-c", script, hosts],
            len(hosts),
            on=lambda rank, command: lab.on("ab".index(hosts[rank]), command),
            MASTER_ADDR=lab.address(0),
            PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin",
        )
        for code, said in job.ended().values():
            assert code == 0, said


@pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
@pytest.mark.parametrize("names_rank_0", [True, False])
@pytest.mark.parametrize("is_ipv6", [False, True])
def test_hosts_whose_names_nobody_knows_find_each_other(is_ipv6: bool, names_rank_0: bool, tmp_path: Path) -> None:
    """By the address that MASTER_ADDR says, or by those of rank 0's interfaces if only a store is given."""
    script = """
import sys, torch, torch.distributed as dist
import ocomm_torch as hvd
hvd.init(store=None if sys.argv[2] == "True" else dist.FileStore(sys.argv[1], 2))
dist.init_process_group("ocomm", init_method="ocomm://")
ones = torch.ones(3)
dist.all_reduce(ones)
assert ones.tolist() == [2, 2, 2]
dist.destroy_process_group()
"""
    with Lab(2, is_ipv6=is_ipv6) as lab:
        job = Ranks(
            ["-c", script, str(tmp_path / "store"), str(names_rank_0)],
            2,
            on=lambda rank, command: lab.on(rank, ["sh", "-c", f'hostname unknown-{rank}; exec "$@"', "sh", *command]),
            PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin",
            MASTER_ADDR=lab.address(0) if names_rank_0 else "",
        )
        for code, said in job.ended().values():
            assert code == 0, said


@pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
def test_ranks_of_mpich_run_where_there_is_little_shared_memory(tmp_path: Path) -> None:
    """UCX would crash where less than 16 MB are left for its messages on this host, of which there are none."""
    little = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"]
    command, environ = launchers(4)["torchrun"]
    done = run_by(([*little, *command], environ), TRAIN, str(tmp_path / "little"))
    assert done.returncode == 0, done.stderr
    digest(tmp_path / "little", 4)


@pytest.mark.parametrize("may_read", [True, False])
def test_ranks_of_mpich_need_not_read_each_others_memory(may_read: bool, tmp_path: Path) -> None:
    """A container may forbid that; Ubuntu does, which MPICH sees by itself. A test then moves 16 kB, and the
    engine does not nap before each.
    """
    numel = 2_000_000
    script = f"""
import sys, numpy as np, ocomm
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_parameters import values
ocomm.init()
for exchange in range(5):  # the engine spins in the first ones
    naps = -ocomm.session.current().engine.counters()["sleeps"]
    assert ocomm.allreduce(np.ones({numel}, np.float32), op=ocomm.Sum).sum() == {2 * numel}
    naps += ocomm.session.current().engine.counters()["sleeps"]
Path({str(tmp_path)!r}, str(ocomm.rank())).write_text(str((values(sys.argv[1:]), naps)))
"""
    names = [] if IS_INTEL_MPI else ["MPIR_CVAR_CH4_CMA_ENABLE"]
    forbidding = [sys.executable, str(Path(__file__).with_name("without_reading.py"))]
    job = Ranks(["-c", script, *names], 2, on=lambda rank, command: command if may_read else [*forbidding, *command])
    assert job.ended() == {0: (0, ""), 1: (0, "")}
    ubuntus = Path("/proc/sys/kernel/yama/ptrace_scope")
    reads = may_read and not (ubuntus.exists() and int(ubuntus.read_text()))
    pieces = 4 * numel // 16384  # those which a rank sends: half of the array to the other one, twice
    for rank in range(2):
        settings, naps = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert settings == dict.fromkeys(names, int(reads))
        assert naps < pieces / 2
