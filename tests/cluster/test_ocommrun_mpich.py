"""Jobs that ``ocommrun`` starts under MPICH, or Intel MPI, which lies in the Python environment beside it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocomm.bench._lab import Lab, why_not
from tests.cluster import chaos_elastic
from tests.cluster.chaos import Job, endure
from tests.cluster.harms import Harm, ocommrun
from tests.cluster.jobs import LIMIT_S, MPICH, python_beside_mpich, run_by
from tests.invariants import Expected

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one"),
]
needs_lab = pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
QUIET = {"OCOMM_LOG_LEVEL": "warning"}
#: Hydra labels what it reads at once, so each rank writes its line at once.
SUM = """
import os, numpy as np, ocomm
ocomm.init()
assert ocomm.allreduce(np.full(1_000_000, ocomm.rank() + 1.0), op=ocomm.Sum).tolist() == [10] * 1_000_000
place = ocomm.rank(), ocomm.local_rank(), ocomm.local_size(), ocomm.cross_rank()
os.write(1, "{} {} {} {}\\n".format(*place).encode())
"""


def on_this_host(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``ocommrun -np 4``, with the arguments after it, the last of which is a program."""
    python, environ = python_beside_mpich()
    *flags, program = arguments
    command = [python, "-m", "ocomm.launch", "-np", "4", *flags, python, "-c", program]
    return run_by((command, {**environ, **QUIET}))


def on_two_hosts(*arguments: str) -> subprocess.CompletedProcess[str]:
    *flags, program = arguments
    with Lab(2) as lab:
        command = ocommrun(lab, ["-np", "4", "-H", "host0:2,host1:2", *flags], ["-c", program], mpich=True)
        return lab.run(command, LIMIT_S, QUIET)


@pytest.mark.parametrize("flags", [(), ("--tcp",)])
def test_ranks_of_one_host_add_up(flags: tuple[str, ...]) -> None:
    done = on_this_host(*flags, SUM)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} {rank} 4 0" for rank in range(4)]


@needs_lab
def test_ranks_of_two_hosts_add_up() -> None:
    done = on_two_hosts(SUM)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} {rank % 2} 2 {rank // 2}" for rank in range(4)]


@needs_lab
def test_variables_reach_ranks_on_other_hosts() -> None:
    """ssh passes on nothing of the environment, so that all of it comes through Hydra."""
    program = """
import os
os.write(1, "{FIRST_A} {ZZ}\\n".format(**os.environ).encode())
"""
    with Lab(2) as lab:
        command = ocommrun(lab, ["-np", "2", "-H", "host0:1,host1:1"], ["-c", program], mpich=True)
        done = lab.run(command, LIMIT_S, {"FIRST_A": "1", "ZZ": "2 3"})
    assert (sorted(done.stdout.splitlines()), done.returncode) == (["[0] 1 2 3", "[1] 1 2 3"], 0), done


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("killed", range(4))
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=needs_lab)])
def test_the_rank_that_was_killed_is_named_though_hydra_kills_the_others_at_once(hosts: int, killed: int) -> None:
    """With little time for ocommrun to look at who is there."""
    program = f"""
import os, signal, time, ocomm
ocomm.init()
ocomm.barrier()
if ocomm.rank() == {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    with busy_cores():
        done = on_this_host(program) if hosts == 1 else on_two_hosts(program)
    host = "localhost" if hosts == 1 else f"host{killed // 2}"
    assert done.returncode != 0
    assert f"ocommrun: the job failed: rank {killed} on {host} died\n" in done.stderr


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    program = """
import ocomm
ocomm.init()
if ocomm.rank() == 2:
    raise ValueError("no data")
ocomm.barrier()
"""
    done = on_this_host(program)
    assert done.returncode != 0
    assert "ocommrun: the job failed: rank 2 on localhost raised ValueError: no data\n" in done.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_programs_without_ocomm_is_that_of_the_job(code: int) -> None:
    done = on_this_host(f"raise SystemExit({code})")
    assert (done.returncode, done.stderr) == (code, "")


@needs_lab
@pytest.mark.parametrize("kind", ["cut", "stop"])
def test_a_job_whose_rank_is_not_heard_any_more_ends_and_names_it(kind: str) -> None:
    pytest.importorskip("torch")
    ended = endure(Job((Harm(kind, 1, 0.6),), mpich=True))
    assert not ended.faults, ended


@needs_lab
def test_an_elastic_job_recovers_from_each_harm_with_what_was_committed() -> None:
    ended = chaos_elastic.endure_many(chaos_elastic.many(random.Random(1), mpich=True), Expected())
    assert not any(outcome.faults for outcome in ended.outcomes), ended


@needs_lab
@pytest.mark.parametrize("kind", ["kill", "cut"])
def test_an_elastic_job_goes_on_without_the_host_that_it_has_lost(kind: str) -> None:
    pytest.importorskip("torch")
    ended = chaos_elastic.endure(Harm(kind, 0, 0.5), least=3, mpich=True)
    assert not ended.faults, ended


def test_an_interrupt_reaches_the_ranks() -> None:
    program = """
import os, signal, ocomm
ocomm.init()
if ocomm.rank() == 0:
    os.kill(int(os.environ["OCOMMRUN"]), signal.SIGINT)
try:
    while True:
        ocomm.barrier()
except KeyboardInterrupt:
    os.write(1, f"{ocomm.rank()} saves\\n".encode())
"""
    # A shell may have switched interrupts off for these tests.
    becoming = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ["OCOMMRUN"] = str(os.getpid())
os.execv(sys.argv[1], sys.argv[1:])
"""
    python, environ = python_beside_mpich()
    command = [python, "-m", "ocomm.launch", "-np", "2", python, "-c", program]
    done = run_by(([sys.executable, "-c", becoming, *command], {**environ, **QUIET}))
    ranks = sorted(line for line in done.stdout.splitlines() if not line.startswith("[mpiexec"))
    assert (done.returncode, ranks) == (130, ["[0] 0 saves", "[1] 1 saves"]), done
    assert done.stderr.endswith("ocommrun: ended by SIGINT.\n")


def test_an_output_folder_has_a_file_of_each_rank(tmp_path: Path) -> None:
    done = on_this_host("--output-filename", str(tmp_path), SUM)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank.{rank}.out").read_text() for rank in range(4)] == [
        f"[{rank}] {rank} {rank} 4 0\n" for rank in range(4)
    ]
