"""Real jobs in subprocesses: always bounded, never with a terminal.

Jobs that no launcher of MPI's starts need MPICH, beside Open MPI in no environment: TEST_MPICH is a folder with its
lib/libmpi.so.12 (a virtual environment into which pip has installed mpich), by default what ``make test-mpich`` makes.
Intel MPI (impi-rt), which is made from MPICH, may take its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ocomm.errors import LaunchError
from ocomm.launch import processes
from ocomm.launch.flavour import find_launcher
from ocomm.launch.session_directory import BASE
from ocomm.runtime.own_address import free_port
from ocomm.torch_variables import MASTER, OF_LAUNCHERS

MPIRUN = Path(sys.executable).with_name("mpirun")
ROOT = Path(__file__).resolve().parents[2]
MPICH = Path(os.environ.get("TEST_MPICH", ROOT / ".venv-mpich"))
IS_INTEL_MPI = (MPICH / "bin" / "impi_info").exists()
#: Seconds after which a job hangs: it takes a tenth of that on a machine of its own.
LIMIT_S = 240.0


def has_mpi() -> bool:
    """Whether ``ocommrun`` finds an MPI's launcher."""
    try:
        find_launcher(sys.executable, os.environ)
    except LaunchError:
        return False
    return True


def run_job(
    ranks: int, script: str | Path, *arguments: str, timeout_s: float = LIMIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``mpirun -np ranks python script``; ``script`` is a file, or the program itself."""
    program = [str(script)] if isinstance(script, Path) else ["-c", script]
    launcher = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **environment}
    return run_by(([*launcher, sys.executable], environ), *program, *arguments, timeout_s=timeout_s)


def without_launcher(**more: str) -> dict[str, str]:
    """The environment of a process that no launcher has started, and whose MPI is MPICH."""
    clean = {name: value for name, value in os.environ.items() if name not in (*OF_LAUNCHERS, *MASTER)}
    mpich = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(MPICH / "lib")}
    return {**clean, **mpich, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def python_beside_mpich() -> tuple[str, dict[str, str]]:
    """A Python in whose environment there is MPICH, and variables with which it has all modules of this one."""
    modules = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    return str(MPICH / "bin" / "python"), without_launcher(PYTHONPATH=modules)


def launchers(ranks: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands that start a script, which comes after them, on ``ranks`` ranks of this machine, with environments."""
    with_open_mpi = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    python, number = sys.executable, str(ranks)
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", number, "--master-port", str(free_port())]
    return {
        "mpirun": ([str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", number, python], with_open_mpi),
        "ocommrun": ([python, "-m", "ocomm.launch", "-np", number, python], with_open_mpi),
        "torchrun": (torchrun, without_launcher()),
    }


def run_by(
    launcher: tuple[list[str], dict[str, str]], *arguments: str, timeout_s: float = LIMIT_S, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Starts a script with a launcher, such as one of ``launchers``: its command and environment."""
    command, environ = launcher
    # A launcher that was killed may have left a folder with the number that this one gets.
    with tempfile.TemporaryDirectory() as place:
        return run([*command, *arguments], {**environ, BASE: place}, timeout_s, folder)


def run(
    command: list[str], environ: dict[str, str], timeout_s: float = LIMIT_S, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a job. If it does not end, the test fails and says what it has printed and where its processes wait."""
    begin = time.time()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            out, err = job.communicate(timeout=timeout_s)
        except BaseException as error:
            waiting = "\n".join(_waiting(begin))
            for pid in (*processes.offspring(job.pid), job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out, err = job.communicate(timeout=LIMIT_S)
            pytest.fail(f"not over after {timeout_s:.0f} s: {command}\n{out}\n{err}\n{waiting}")
        return subprocess.CompletedProcess(command, job.returncode, out, err)


def _waiting(since: float) -> Iterator[str]:
    """One line for each thread of all processes that were started ``since``: among them may be one that the job needs,
    and which is no child of it.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.create_time() < since - 1:
                continue
            words = " ".join(process.cmdline())[:120] or process.name()
            for thread in process.threads():
                place = Path(f"/proc/{process.pid}/task/{thread.id}/wchan").read_text()
                yield f"{process.pid} of {process.ppid()}: {process.status()} in {place or '-'}: {words!r}"
