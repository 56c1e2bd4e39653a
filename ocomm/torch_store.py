"""Finds the key-value store of a job that torchrun or another launcher of Torch's has started.

No other module of ``ocomm`` imports Torch. This one does so only if it is asked for a store.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ocomm.errors import LaunchError

#: Stores that this process may host. They are kept until it ends, because other ranks may still read from them.
_hosted: list[Any] = []


def default_group() -> tuple[int, int] | None:
    """Returns this process's rank in Torch's default process group, and the group's size; None if there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def find(environment: Mapping[str, str], rank: int, size: int, timeout_s: float) -> Any:
    """Returns the store in which the ranks meet.

    It is the store of Torch's default process group. If there is no group, it is the store of torchrun's agent. Without
    an agent, rank 0 hosts a store, so all ranks must call this.

    Args:
        environment: The environment of this process. MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE are
            read.
        rank: This rank's number.
        size: The number of ranks.
        timeout_s: Seconds to wait for an answer of the store's host.

    Raises:
        LaunchError: Torch or a variable is missing, or the store's host does not answer.
    """
    if default_group() is not None:
        from torch.distributed import distributed_c10d

        return distributed_c10d._get_default_store()
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if absent:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but not {' and '.join(absent)}: the ranks cannot find each "
            "other. Start with torchrun, ocommrun -np N, mpirun or srun, set them to a host and a free port of rank 0, "
            "or pass a torch.distributed.Store as init(store=...)."
        )
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"MASTER_PORT={port} is no port: set it on all ranks to a free port of rank 0's host.")
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={size} are set, as torchrun does it, and such ranks meet in a store of "
            f"Torch's, which cannot be imported here ({error}). Type pip install torch, or start the script with "
            "ocommrun -np N, which needs none."
        ) from error
    is_of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            int(port),
            size,
            is_master=rank == 0 and not is_of_agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # the caller waits, and names the ranks that do not come
            multi_tenant=True,  # init_process_group may be called later, with the same address
        )
    except (RuntimeError, ValueError) as error:
        host = "torchrun's agent" if is_of_agent else "rank 0"
        reason = (str(error).splitlines() or [""])[0]
        raise LaunchError(
            f"rank {rank} of {size}: no store at MASTER_ADDR={address}, MASTER_PORT={port}, where {host} should host "
            f"it, for {timeout_s:.0f} s: {reason} Has rank 0 come to init()? Is that its host, and the port free?"
        ) from error
    _hosted.append(store)
    return store
