"""Settings of MPI libraries for plain networks. Values only: importing this starts nothing and needs no MPI."""

from __future__ import annotations

from collections.abc import Mapping

_MESSAGE_NBYTES = 1 << 20

#: MCA parameters for Open MPI over TCP. With its defaults an alltoall of packed bits takes 1.78 times as long as the
#: wire needs, with these 1.15.
OPEN_MPI_TCP: Mapping[str, str] = {
    "btl_tcp_links": "2",
    "btl_tcp_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_rndv_eager_limit": str(_MESSAGE_NBYTES),
    "btl_tcp_max_send_size": str(_MESSAGE_NBYTES),
    # A rank that waits inside MPI must not take the core from the one it waits for.
    "mpi_yield_when_idle": "1",
}
