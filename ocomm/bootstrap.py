"""Starts and ends the session of the process: finds its launcher and MPI, and leaves the job at exit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ocomm import diagnosis, mpi_settings, torch_store
from ocomm import session as sessions
from ocomm.config import Launch, read_launch, read_settings, unusable, without_meaning
from ocomm.errors import LaunchError, PeerError, clause
from ocomm.pmi_start import PmiStart
from ocomm.runtime.arrival import Arrival
from ocomm.runtime.own_address import free_port, ways_to_this_host
from ocomm.runtime.rendezvous import Store
from ocomm.runtime.supervisor_client import SupervisorClient, take_key
from ocomm.session import Session
from ocomm.telemetry import log
from ocomm.torch_variables import MASTER, malformed, missing
from ocomm.transport import mpi
from ocomm.transport.local import Fabric
from ocomm.types import Settings

_log = logging.getLogger("ocomm")
#: The exception that has ended the script, as "raised ValueError: ...".
_raised: list[str] = []
#: True if that exception says that another rank has failed or left.
_follows = False
#: Seconds for which such a rank waits at its end, so that the launcher sees first how the other rank has ended.
_FOLLOW_S = 1.0
_hooked = False
#: Held while a thread starts the session; others that call ``init()`` meanwhile find it started.
_starting = threading.Lock()
#: What has started MPI, if no launcher of MPI's has.
_pmi: PmiStart | None = None
#: The variable in which a rank says who it is to the processes that it starts, which inherit it: the job, its number in
#: it, and the id of its process. It is no setting, so its name differs from theirs.
_RANK = "_OCOMM_RANK"
#: Number of bytes for MASTER_ADDR and MASTER_PORT; the name of a host has at most 253 characters.
_ADDRESS_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Meeting:
    """What ``torch.distributed.init_process_group`` was told: a store that the ranks share, this process's rank, and
    how many there are.
    """

    store: Store
    rank: int
    size: int


def _is_child() -> bool:
    """Returns whether multiprocessing has started this process."""
    # A spawned process imports its parent's script before multiprocessing says whose child it is.
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_importing or multiprocessing.parent_process() is not None


def _rank_above(environ: Mapping[str, str], launch: Launch) -> str:
    """Returns the id of the process that is the rank of ``launch`` and has started this one; "" if this is the rank.

    What a rank starts inherits its variables. A second process that claims to be that rank makes Open MPI crash in the
    first.
    """
    job, rank, pid = environ.get(_RANK, "  ").split(" ")
    return pid if (job, rank) == (launch.job, str(launch.rank)) and pid != str(os.getpid()) else ""


def initialize(
    communicator: Any = None,
    process_sets: Sequence[Sequence[int]] = (),
    store: Store | None = None,
    meeting: Meeting | None = None,
) -> None:
    """Starts the session of the process: over MPI if a launcher has started the process, else as a single rank.

    If the launcher is not one of MPI's, the ranks meet in a store, and MPI starts by PMI. Collective over all ranks of
    the job, or over those of ``communicator`` if MPI was started before. A second call does nothing, also while another
    thread makes the first, for which it waits.

    Args:
        communicator: An mpi4py Comm, or a list of ranks of COMM_WORLD; None for all ranks.
        process_sets: Lists of ranks, the same on all ranks; they get the ids 1, 2, ...
        store: The ``torch.distributed.Store`` in which the ranks meet if no launcher of MPI's has started them; None to
            find one.
        meeting: How the ranks meet if no launcher has started this process.

    Raises:
        LaunchError: The environment does not say how to find the other ranks, MPI cannot start, or ranks do not come
            within ``start_timeout_s``.
        SettingsError: A setting is unknown, cannot be parsed, or differs between ranks.
    """
    session = sessions.current()
    if session.is_initialized:
        return
    if session.is_forked:
        raise LaunchError(
            f"init() was called in process {os.getpid()}, which was forked from a rank (pid {session.pid}). Only the "
            "processes that the launcher started are ranks."
        )
    with _starting:
        if not session.is_initialized:
            _start(session, communicator, process_sets, store, meeting)


def _start(
    session: Session,
    communicator: Any,
    process_sets: Sequence[Sequence[int]],
    store: Store | None,
    meeting: Meeting | None,
) -> None:
    settings = read_settings(os.environ)
    key = take_key(os.environ)
    log.configure(settings.log_level)
    launch, store = _find_launch(store, meeting)
    if communicator is None and (launch is None or (not launch.is_mpi and launch.size == 1)):
        session.start(Fabric(1).endpoint(0), settings, process_sets)
    else:
        _start_mpi(session, communicator, launch, settings, process_sets, key, store)
    if session.require_topology().rank == 0:
        for complaint in unusable(os.environ):
            _log.warning("%s. The default is used instead", complaint)
        for variable in without_meaning(os.environ):
            _log.info("%s has no meaning for ocomm and is ignored", variable)
    _hook()


def _find_launch(store: Store | None, meeting: Meeting | None) -> tuple[Launch | None, Store | None]:
    """Returns what has started this process, None if it is alone, and where its ranks meet if that is not MPI's.

    Raises:
        LaunchError: This process is no rank, or cannot find the others.
    """
    group = torch_store.default_group()
    launch = read_launch(os.environ)
    if launch is not None and (launch.is_mpi or not _is_child()):
        meeting = None
    # Launchers of notebooks start ranks by multiprocessing, too. Such ranks have a store, a default process group or a
    # meeting for one; workers of data loaders have none.
    is_worker = _is_child() and store is None and group is None and meeting is None
    above = "" if launch is None else _rank_above(os.environ, launch)
    diagnosis.require_rank(launch, above, is_worker, os.environ)
    if launch is not None and launch.is_mpi:
        return launch, store
    if group is not None:
        return Launch("torch.distributed.get_world_size()", group[1], group[0], ""), store
    if meeting is not None:
        return Launch("torch.distributed.init_process_group()", meeting.size, meeting.rank, ""), meeting.store
    if problem := malformed(os.environ):
        raise LaunchError(f"{problem}.")
    if launch is None and store is not None:
        raise LaunchError(
            "init(store=...) needs this process's number and that of all processes: set RANK and WORLD_SIZE, or "
            "call torch.distributed.init_process_group first."
        )
    return launch, store


def _start_mpi(
    session: Session,
    communicator: Any,
    launch: Launch | None,
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    supervisor_key: bytes,
    store: Store | None,
) -> None:
    with_torch_env = settings.torch_env and communicator is None
    if launch is not None:
        diagnosis.require_one_place(launch, settings, with_torch_env, os.environ, sys.modules)
        launch = _with_pmi(launch, store, settings)
        if settings.elastic_supervisor and session.supervisor is None:
            # Before MPI_Init, which a host that is lost meanwhile keeps waiting.
            session.supervisor = _supervisor(launch, settings, supervisor_key)
    world = _open_world(communicator, launch, settings, session.supervisor)
    session.network = mpi.name()
    session.launch_ranks = () if communicator is None else mpi.world_ranks(world.communicator)
    if communicator is None and launch is not None and launch.size != world.size:
        raise LaunchError(diagnosis.other_size(launch, world.size, mpi.library_version(), os.environ))
    session.start(world, settings, process_sets, mpi.abi() if settings.engine == "native" else None)
    if with_torch_env:
        _set_torch_variables(session)
    topology = session.require_topology()
    if topology.rank == 0:
        cannot = diagnosis.left_to_the_launcher(mpi.late_settings(), topology.local_size)
        if launch is not None and launch.is_on_one_host:
            cannot += diagnosis.unread_hosts(session.network, os.environ)
        if cannot:
            _log.warning("%s. ocommrun starts jobs without this.", "; ".join(cannot))


def _with_pmi(launch: Launch, store: Store | None, settings: Settings) -> Launch:
    """Returns ``launch``, with what the ranks have told each other in ``store`` if MPI is to start by PMI, as its
    launcher is another program.
    """
    global _pmi
    if launch.is_mpi or launch.size == 1:
        return launch
    _pmi = _pmi or PmiStart(launch, store, settings)
    return replace(launch, job=_pmi.name, is_on_one_host=_pmi.is_on_one_host)


def _supervisor(launch: Launch, settings: Settings, key: bytes) -> SupervisorClient | None:
    """Connects to ``ocommrun``, which watches this job. Without that, jobs that are not elastic go on, with a
    warning.
    """
    hydras = os.environ.get("PMI_FD", "")  # the descriptor of its connection to this process
    connected = int(hydras) if hydras.isdecimal() else -1
    try:
        return SupervisorClient(settings.elastic_supervisor, key, launch.rank, settings.elastic_generation, connected)
    except LaunchError as error:
        if settings.elastic_folder:
            raise
        _log.warning("%s Where a host is lost the launcher may wait for it for ever.", error)
        return None


def _open_world(
    communicator: Any, launch: Launch | None, settings: Settings, supervisor: SupervisorClient | None
) -> mpi.MpiTransport:
    """Returns the network between all ranks. Starts MPI if it is not, and ends the process if ranks do not come."""
    if launch is None:
        return mpi.open_world(communicator, False)
    if launch.is_on_one_host:
        for name, value in mpi_settings.NCCL_ON_ONE_HOST.items():
            os.environ.setdefault(name, value)
    if launch.is_mpi and launch.job:
        os.environ[_RANK] = f"{launch.job} {launch.rank} {os.getpid()}"
    late_s = settings.start_timeout_s
    with Arrival(launch.job, launch.rank, launch.size, late_s, lambda: _say_late(supervisor), launch.ranks_here):
        world = mpi.open_world(communicator, launch.is_on_one_host, launch.local_size or launch.size)
        if _pmi is not None:
            _pmi.entered()
    return world


def _say_late(supervisor: SupervisorClient | None) -> None:
    if supervisor is not None:
        supervisor.say("late")


def _set_torch_variables(session: Session) -> None:
    """Sets those of torchrun's variables that are missing. Rank 0 chooses the address of process groups. Collective."""
    topology = session.require_topology()
    address = np.zeros(_ADDRESS_NBYTES, np.uint8)
    if topology.rank == 0:
        others = [host for host in topology.hosts if host != topology.hosts[0]]
        own = ways_to_this_host(others)[0] if others else "127.0.0.1"
        chosen = missing(os.environ, dict(zip(MASTER, (own, str(free_port())), strict=True)))
        os.environ.update(chosen)
        said = " ".join(os.environ[name] for name in MASTER).encode()
        address[: len(said)] = np.frombuffer(said, np.uint8)
    session.broadcast(0, "init.master", address)
    master = address.tobytes().rstrip(b"\0").decode().split(" ")
    wanted = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
        **dict(zip(MASTER, master, strict=True)),
    }
    os.environ.update(missing(os.environ, wanted))


def has_raised() -> bool:
    """Returns True if an exception has ended the script."""
    return bool(_raised)


def _hook() -> None:
    """Arranges once per process that it leaves the job at exit, and tells the other ranks if an exception is the
    reason.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    previous = sys.excepthook

    def remember(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        global _follows
        _raised.append(_how(kind, value))
        _follows = issubclass(kind, PeerError) and sessions.of_process().supervisor is None
        previous(kind, value, trace)

    sys.excepthook = remember
    atexit.register(_at_exit)


def _how(kind: type[BaseException], value: BaseException) -> str:
    """Returns how an exception ends this rank, for the others: "raised ValueError: ..."."""
    said = clause(value)
    return f"raised {kind.__name__}: {said}" if said else f"raised {kind.__name__}"


def _at_exit() -> None:
    session = sessions.of_process()
    if session.is_forked:
        return
    if session.supervisor is not None and _raised and session.is_initialized and not session.has_failed:
        # Another rank that has left in order does not know that this one needs it.
        causes = {rank: how for rank, how in session.left_for_good.items() if f"rank {rank} {how}" in _raised[0]}
        session.say_lost({**causes, session.require_topology().rank: _raised[0]})
    elif session.supervisor is not None and not _raised:
        session.supervisor.say("bye")
    session.shutdown(bool(_raised), _raised[0] if _raised else "shut down")
    _finalize(session.left_in_order)  # also if the script has called shutdown() itself


def _finalize(clean: bool) -> None:
    if clean:
        if _pmi is not None:
            _pmi.leave()
        mpi.finalize()
        if _pmi is not None:
            _pmi.left()
    elif not _raised:
        # This rank has come to its end but the job has failed. What sys.exit() was given is not known here.
        with contextlib.suppress(ImportError):  # not built: the engine and the kernels are those in Python
            from ocomm._native import lib

            lib.ocomm_end_with_status()
    elif _follows:
        time.sleep(_FOLLOW_S)
