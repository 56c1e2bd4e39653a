"""Settings of MPI libraries, in one table. ``ocommrun`` passes them to the launcher; ``init()`` sets them if another
launcher has started the job. Importing this module starts nothing and needs no MPI.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence

_MESSAGE_NBYTES = 1 << 20

#: MCA parameters for Open MPI 4 to 6. With its defaults an alltoall of packed bits over TCP takes 1.78 times as long
#: as the wire needs, with these 1.15.
OPEN_MPI: Mapping[str, str] = {
    "btl_tcp_links": "2",
    "btl_tcp_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_rndv_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_max_send_size": str(_MESSAGE_NBYTES),
    # A rank that waits inside MPI must not take the core from the rank it waits for.
    "mpi_yield_when_idle": "1",
    # When a rank dies, its sockets close, and Open MPI aborts the ranks at their other ends. The launcher would name
    # the first of those as the cause, unless they wait until it has seen the rank that died.
    "opal_abort_delay": "5",
}
#: Further MCA parameters if all ranks are on one host: nothing needs TCP, whose port would be open on all interfaces.
#: They exclude TCP instead of naming other transports, because those differ between builds of Open MPI.
OPEN_MPI_ON_ONE_HOST: Mapping[str, str] = {"btl": "^tcp"}
#: Environment for MPICH. Messages on a host go through shared memory of its own, 1.1 MB of ``/dev/shm`` for each rank.
#: UCX would take 4.3 MB more for each, and crash while ranks start if less than 16 MB are left, as of the 64 MB of a
#: container with 11 ranks. It has System V's shared memory instead, which ends with the ranks, too.
MPICH: Mapping[str, str] = {"UCX_TLS": "^posix"}
#: Environment for MPICH where a container forbids that a rank reads another one's memory. MPICH looks for Ubuntu's way
#: of forbidding it alone, and ends jobs with "process_vm_readv failed".
MPICH_WITHOUT_READING: Mapping[str, str] = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}
#: Environment for MPICH and Intel MPI if all ranks are on one host. UCX or libfabric, whichever MPICH uses, would
#: otherwise open a port on every interface.
MPICH_ON_ONE_HOST: Mapping[str, str] = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
#: Environment for NCCL if all ranks are on one host: its ranks would otherwise meet at a port of the first interface.
NCCL_ON_ONE_HOST: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo"}
#: Bytes of shared memory that Open MPI reserves for each rank, and the fewest with which it is left: 16 ranks exchange
#: with 128 kB each.
_SEGMENT_NBYTES = 16 << 20
_SMALLEST_SEGMENT_NBYTES = 256 << 10
_PAGE_NBYTES = 4096
#: The variable that names Open MPI's file of hosts, up to version 4. Operators of Kubernetes set it, and version 5 does
#: not read it.
OLD_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
#: Variables in which launchers of Open MPI, MPICH and Intel MPI look for a file of hosts if they are given none.
HOSTFILES = ("PRTE_MCA_prte_default_hostfile", OLD_HOSTFILE, "HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")


def environment(library: str, one_host: bool) -> dict[str, str]:
    """Returns the variables that ``init()`` sets before MPI_Init, for the parameters of an MPI library.

    Args:
        library: ``Open MPI``, ``MPICH`` or ``Intel MPI``; there are no variables for others.
        one_host: True if all ranks of the job are on one host.
    """
    if library == "Open MPI":
        parameters = {**OPEN_MPI, **(OPEN_MPI_ON_ONE_HOST if one_host else {})}
        return {f"OMPI_MCA_{name}": value for name, value in parameters.items()}
    variables = dict(MPICH) if library == "MPICH" else {}
    if library in ("MPICH", "Intel MPI") and one_host:
        variables |= MPICH_ON_ONE_HOST
    return variables


def pmix_security(offered: str) -> dict[str, str]:
    """Returns the variable for a PMIx whose server offers ``offered`` in ``PMIX_SECURITY_MODE``: none if it need not
    choose.

    Slurm offers "munge,native". The PMIx of the Open MPI that pip installs has no munge, and would print two blocks of
    alarm for each rank before it takes the other one.
    """
    modes = offered.split(",")
    return {"PMIX_MCA_psec": "native"} if "native" in modes and len(modes) > 1 else {}


def segment(major: int, ranks: int, free_nbytes: int) -> dict[str, str]:
    """Returns the variable that lets the ranks of a host share what shared memory it has; none where it is enough.

    Open MPI takes pages of a rank's segment as they are needed, and a rank dies of a bus error where there is none
    left: a container has 64 MB unless told otherwise.

    Args:
        major: Version of Open MPI.
        ranks: Number of ranks on the host.
        free_nbytes: Bytes of ``/dev/shm`` that are free. Half of them are left to others.
    """
    share = free_nbytes // (2 * ranks) // _PAGE_NBYTES * _PAGE_NBYTES
    if share >= _SEGMENT_NBYTES:
        return {}
    component = "vader" if major < 5 else "sm"
    return {f"OMPI_MCA_btl_{component}_segment_size": str(max(share, _SMALLEST_SEGMENT_NBYTES))}


def mca_values(text: str) -> dict[str, str]:
    """Returns the MCA parameters that a file sets by ``name = value``, or by ``--mca name value`` in a file for
    ``--tune``.
    """
    lines = [line.split("#", 1)[0] for line in text.splitlines()]
    assigned = {match[1]: match[2] for line in lines if (match := re.match(r"\s*(\w+)\s*=\s*(.*?)\s*$", line))}
    return assigned | {name: value for line in lines for name, value in re.findall(r"-mca\s+(\w+)\s+(\S+)", line)}


def merged_value(wanted: str, found: str | None) -> str | None:
    """Returns the value to set for a parameter that should be ``wanted``, where files say ``found``; None if theirs
    stays.

    What only excludes, as ``^uct,ofi`` of Debian does, excludes what is wanted as well.
    """
    if found is None:
        return wanted
    if not (wanted.startswith("^") and found.startswith("^")):
        return None
    return "^" + ",".join(dict.fromkeys([*found[1:].split(","), *wanted[1:].split(",")]))


def mpich_remedy(roots: Sequence[str] = ("/usr/lib", "/usr/lib64")) -> str:
    """Returns what to type where MPICH's library is there, and mpi4py does not find it because Debian and Ubuntu name
    it libmpich.so.12; "" where it is not there.

    Args:
        roots: Folders in which it is looked for, and in the folders in them.
    """
    found = sorted(path for root in roots for part in ("", "*/") for path in glob.glob(f"{root}/{part}libmpich.so.12"))
    if not found:
        return ""
    return (
        f"{found[0]} is MPICH, but mpi4py looks for libmpi.so.12. Give it that name, and use it: mkdir -p ~/mpich; "
        f"ln -s {found[0]} ~/mpich/libmpi.so.12; export LD_LIBRARY_PATH=~/mpich MPI4PY_MPIABI=mpich."
    )
