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
#: Environment for MPICH and Intel MPI if all ranks are on one host. UCX or libfabric, whichever MPICH uses, would
#: otherwise open a port on every interface.
MPICH_ON_ONE_HOST: Mapping[str, str] = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
#: Environment for NCCL if all ranks are on one host: its ranks would otherwise meet at a port of the first interface.
NCCL_ON_ONE_HOST: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo"}


def environment(library: str, one_host: bool) -> dict[str, str]:
    """Returns the variables that ``init()`` sets before MPI_Init, for the parameters of an MPI library.

    Args:
        library: ``Open MPI``, ``MPICH`` or ``Intel MPI``; there are no variables for others.
        one_host: True if all ranks of the job are on one host.
    """
    if library == "Open MPI":
        parameters = {**OPEN_MPI, **(OPEN_MPI_ON_ONE_HOST if one_host else {})}
        return {f"OMPI_MCA_{name}": value for name, value in parameters.items()}
    if library in ("MPICH", "Intel MPI") and one_host:
        return dict(MPICH_ON_ONE_HOST)
    return {}


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
