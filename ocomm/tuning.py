"""Settings of MPI libraries: the one table for ``ocommrun``, which passes them to the launcher, and for ``init()``,
which sets them where another launcher has started the job. Importing this starts nothing and needs no MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MESSAGE_NBYTES = 1 << 20

#: MCA parameters for Open MPI 4 and 5. With its defaults an alltoall of packed bits over TCP takes 1.78 times as long
#: as the wire needs, with these 1.15.
OPEN_MPI: Mapping[str, str] = {
    "btl_tcp_links": "2",
    "btl_tcp_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_rndv_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_max_send_size": str(_MESSAGE_NBYTES),
    # A rank that waits inside MPI must not take the core from the one it waits for.
    "mpi_yield_when_idle": "1",
    # Where a rank dies, its sockets close, and Open MPI aborts the ranks at their other ends. The first of them to tell
    # the launcher is blamed for the end of the job, unless it waits until the launcher has seen the dead one.
    "opal_abort_delay": "5",
}
#: Further MCA parameters where all ranks are on one host: nothing needs TCP, whose port would be open on all
#: interfaces. An exclusion, because which transports for shared memory and devices there are differs between builds.
OPEN_MPI_ON_ONE_HOST: Mapping[str, str] = {"btl": "^tcp"}
#: Environment for MPICH and Intel MPI where all ranks are on one host: UCX and libfabric, whichever MPICH uses, would
#: otherwise open a port on every interface.
MPICH_ON_ONE_HOST: Mapping[str, str] = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
#: Environment for NCCL where all ranks are on one host: its ranks meet at a port of the first interface otherwise.
NCCL_ON_ONE_HOST: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo"}


def environment(library: str, one_host: bool) -> dict[str, str]:
    """The variables by which ``init()`` sets the parameters of an MPI library before MPI_Init.

    Args:
        library: ``Open MPI``, ``MPICH`` or ``Intel MPI``; there are no settings for others.
        one_host: True if all ranks of the job are on one host.
    """
    if library == "Open MPI":
        parameters = {**OPEN_MPI, **(OPEN_MPI_ON_ONE_HOST if one_host else {})}
        return {f"OMPI_MCA_{name}": value for name, value in parameters.items()}
    if library in ("MPICH", "Intel MPI") and one_host:
        return dict(MPICH_ON_ONE_HOST)
    return {}


def mca_names(text: str) -> set[str]:
    """The MCA parameters that a file sets: lines ``name = value``, or ``--mca name value`` in a file for ``--tune``."""
    lines = [line.split("#", 1)[0] for line in text.splitlines()]
    assigned = {match[1] for line in lines if (match := re.match(r"\s*(\w+)\s*=", line))}
    return assigned | {name for line in lines for name in re.findall(r"-mca\s+(\w+)\s", line)}
