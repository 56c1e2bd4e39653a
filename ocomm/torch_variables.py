"""RANK, WORLD_SIZE and the other variables by which torchrun tells a process where it stands.

Torch's ``env://``, Accelerate, Lightning and others read them. Launchers of MPI set variables of their own instead, so
``ocommrun`` and ``init()`` set these. Decisions only: environments come in as values.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The launchers' own variables, of Open MPI, of MPICH and Intel MPI, and of srun, for those of torchrun.
OF_LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
#: Where rank 0 listens for a process group of Torch's: the same on all ranks.
MASTER = ("MASTER_ADDR", "MASTER_PORT")


def contradiction(environment: Mapping[str, str], rank: int, size: int, source: str) -> str:
    """Why ``environment`` cannot be that of this rank, as a sentence; "" if it can.

    Args:
        environment: Of this process.
        rank: This rank's number, as ``source`` says.
        size: The number of ranks, as ``source`` says.
        source: What says so, a variable of the launcher for instance.
    """
    for name, expected, is_said in (("WORLD_SIZE", size, f"one of {size} ranks"), ("RANK", rank, f"rank {rank}")):
        found = environment.get(name)
        if found is not None and found != str(expected):
            return f"{name}={found} is set, but this process is {is_said}, as {source} says"
    return ""


def inherited(environment: Mapping[str, str], size: int | None) -> list[str]:
    """Variables of a launcher's environment that its ranks must not inherit, as each has another value.

    Args:
        environment: Of the launcher.
        size: The number of ranks; None if it may change from start to start.
    """
    wrong = [name for name in ("RANK", "LOCAL_RANK") if name in environment and (size != 1 or environment[name] != "0")]
    sizes = [name for name in ("WORLD_SIZE",) if name in environment and environment[name] != str(size)]
    return wrong + sizes


def missing(environment: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Those of ``wanted`` that ``environment`` does not have."""
    return {name: value for name, value in wanted.items() if name not in environment}


def exports(launcher: str) -> str:
    """A line for a POSIX shell that sets the variables of a rank which are missing, from those of its launcher.

    Args:
        launcher: The launcher's own variable with the number of a rank: one of ``OF_LAUNCHERS["RANK"]``.
    """
    column = OF_LAUNCHERS["RANK"].index(launcher)
    own = {name: theirs[column] for name, theirs in OF_LAUNCHERS.items() if column < len(theirs)}
    return "export " + " ".join(f'{name}="${{{name}-${theirs}}}"' for name, theirs in own.items())
