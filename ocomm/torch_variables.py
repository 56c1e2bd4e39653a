"""Decides about the variables by which torchrun tells a process its place in the job: RANK, WORLD_SIZE and others.

Torch's ``env://``, Accelerate, Lightning and others read them. Launchers of MPI set variables of their own instead, so
``ocommrun`` and ``init()`` set torchrun's. Environments come in as arguments; nothing here reads or changes one.
"""

from __future__ import annotations

from collections.abc import Mapping

#: For each variable of torchrun, the variables of Open MPI, of MPICH and Intel MPI, and of srun with the same value.
OF_LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
#: The variables with the address at which rank 0 listens for a process group of Torch's; the same on all ranks.
MASTER = ("MASTER_ADDR", "MASTER_PORT")


def contradiction(environment: Mapping[str, str], rank: int, size: int, source: str) -> str:
    """Returns why ``environment`` cannot be that of this rank, as a sentence; "" if it can.

    Args:
        environment: The environment of this process.
        rank: This rank's number, as ``source`` says.
        size: The number of ranks, as ``source`` says.
        source: The origin of both numbers, such as a variable of the launcher.
    """
    for name, expected, is_said in (("WORLD_SIZE", size, f"one of {size} ranks"), ("RANK", rank, f"rank {rank}")):
        found = environment.get(name)
        if found is not None and found != str(expected):
            return f"{name}={found} is set, but this process is {is_said}, as {source} says"
    return ""


def malformed(environment: Mapping[str, str]) -> str:
    """Returns why RANK and WORLD_SIZE give this process no place among the ranks, as a sentence; "" if they do, or if
    WORLD_SIZE is not set.

    Args:
        environment: The environment of this process, which no launcher of MPI's has started.
    """
    size, rank = environment.get("WORLD_SIZE", ""), environment.get("RANK", "")
    if not size:
        return ""
    if not size.isdecimal() or int(size) == 0:
        return f"WORLD_SIZE={size} is no number of ranks: set it to a whole number of 1 or more, or unset it"
    places = f"number the ranks from 0 to {int(size) - 1} by RANK, or unset WORLD_SIZE"
    if not rank and size != "1":
        return f"WORLD_SIZE={size} is set, but not RANK: {places}"
    if rank and not (rank.isdecimal() and int(rank) < int(size)):
        return f"RANK={rank} is no rank of WORLD_SIZE={size}: {places}"
    return ""


def inherited(environment: Mapping[str, str], size: int | None) -> list[str]:
    """Returns the variables that ranks must not inherit from their launcher, because theirs have other values.

    Args:
        environment: The environment of the launcher.
        size: The number of ranks; None if it may change from one start to the next.
    """
    wrong = [name for name in ("RANK", "LOCAL_RANK") if name in environment and (size != 1 or environment[name] != "0")]
    sizes = [name for name in ("WORLD_SIZE",) if name in environment and environment[name] != str(size)]
    return wrong + sizes


def missing(environment: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of ``wanted`` that ``environment`` does not have, with their values."""
    return {name: value for name, value in wanted.items() if name not in environment}


def exports(launcher: str) -> str:
    """Returns a line for a POSIX shell that sets torchrun's variables from the launcher's, except those that are set.

    Args:
        launcher: The launcher's variable with the number of a rank: one of ``OF_LAUNCHERS["RANK"]``.
    """
    column = OF_LAUNCHERS["RANK"].index(launcher)
    own = {name: theirs[column] for name, theirs in OF_LAUNCHERS.items() if column < len(theirs)}
    return "export " + " ".join(f'{name}="${{{name}-${theirs}}}"' for name, theirs in own.items())
