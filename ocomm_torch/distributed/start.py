"""How groups begin: what torch.distributed calls for ``backend="ocomm"`` and ``init_method="ocomm://"``."""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ocomm import api, bootstrap, operations
from ocomm import session as sessions
from ocomm.errors import InvalidRequestError, LaunchError
from ocomm.operations import global_process_set
from ocomm.runtime.own_address import ways_to_this_host
from ocomm.session import Session
from ocomm_torch.compiling import leave_hooks_alone
from ocomm_torch.distributed.group import OcommProcessGroup

#: Seconds for an answer of one of the addresses of rank 0's host; and between two rounds over them.
_WAY_S, _POLL_S = 2.0, 0.1
#: A word that no other job has, by the session of this one.
_tokens: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()


def create(options: Any, backend_options: Any = None) -> OcommProcessGroup:
    """Returns a new process group. Collective over its members, on which torch.distributed calls it.

    Joins the job if the script has not called ``init()``. Where no launcher has started this process, as with
    ``torch.multiprocessing.spawn``, the members of the first group are the ranks, which meet in its store.

    Args:
        options: Torch's ``_DistributedBackendOptions``: store, ranks, name and timeout of the group.
        backend_options: Not used.

    Raises:
        InvalidRequestError: The ranks are not those of ocomm's job or not ascending, or no group of all ranks was made
            before.
        LaunchError: Some members do not come within ``start_timeout_s``.
    """
    if not api.is_initialized():
        store = dist.PrefixStore("ocomm", options.store)
        bootstrap.initialize(meeting=bootstrap.Meeting(store, options.group_rank, options.group_size))
    leave_hooks_alone()
    session = sessions.current()
    topology = session.require_topology()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world, me = topology.size, topology.rank
    if max(ranks) >= world or ranks[options.group_rank] != me:
        raise InvalidRequestError(
            f"this process is rank {ranks[options.group_rank]} of torch.distributed and rank {me} of {world} of "
            "ocomm's job. Leave RANK and WORLD_SIZE to the launcher, or set them as it numbers the ranks."
        )
    if len(ranks) == world:
        is_first = not session.registry.has_members
        session.registry.prepare_members()
        if is_first:
            _tokens[session] = operations.broadcast_object(session, secrets.token_hex(4), 0, None, global_process_set)
    elif not session.registry.has_members:
        raise InvalidRequestError(
            f"a group of ranks {ranks} with backend 'ocomm' needs one of all {world} ranks before it: call "
            "init_process_group('ocomm'), or new_group(backend='ocomm') on all ranks."
        )
    timeout: datetime.timedelta = options.timeout
    return OcommProcessGroup(
        session,
        options.store,
        options.group_rank,
        ranks,
        options.group_id,
        timeout.total_seconds(),
        _tokens.get(session, ""),
    )


def rendezvous(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
    """Yields store, rank and size for ``init_method="ocomm://"``. Collective over the job.

    Rank 0 opens the store. The ranks of ocomm's job know each other, so MASTER_ADDR and MASTER_PORT are not needed.

    Args:
        url: Not used.
        timeout: The timeout of the store.
    """
    if not api.is_initialized():
        api.init()
    session = sessions.current()
    topology = session.require_topology()
    rank, size = topology.rank, topology.size
    store: Any = None
    ways, port = ["127.0.0.1"], 0
    if rank == 0:
        others = [host for host in topology.hosts if host != topology.hosts[0]]
        if others:
            ways = [*filter(None, [os.environ.get("MASTER_ADDR")]), *ways_to_this_host(others)]
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        port = store.port
    ways, port = operations.broadcast_object(session, (ways, port), 0, None, global_process_set)
    if rank != 0:
        store = dist.TCPStore(_first_that_answers(ways, port, timeout.total_seconds()), port, size, False, timeout)
    yield store, rank, size


def _first_that_answers(ways: Sequence[str], port: int, timeout_s: float) -> str:
    """Returns the first of ``ways`` to rank 0's host at which its store can be reached. Raises LaunchError if none can
    be within ``timeout_s``.
    """
    end_s, reasons = time.monotonic() + timeout_s, dict.fromkeys(ways, "not tried")
    while True:
        for way in ways:
            try:
                with socket.create_connection((way, port), timeout=min(_WAY_S, timeout_s)):
                    return way
            except OSError as error:
                reasons[way] = str(error)
        if time.monotonic() > end_s:
            said = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
            raise LaunchError(
                f"the store of torch.distributed, which rank 0 has opened on port {port} of its host, cannot be "
                f"reached: {said}. Is there a firewall? MASTER_ADDR on rank 0 may name an address that others reach."
            )
        time.sleep(_POLL_S)
