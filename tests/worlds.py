"""Runs one function as every rank of a job: as threads of this process, or, under mpirun, as real ranks.

A test is written once, as a function of its session, and its results come back as a list over ranks either way. Under
mpirun every rank runs the same pytest; a test for another number of ranks than mpirun's is skipped there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ocomm import session as sessions
from ocomm.session import Session
from ocomm.transport.base import Transport
from ocomm.transport.local import Fabric
from ocomm.types import Settings

#: Number of ranks if these tests run under mpirun, else 0.
MPI_SIZE = int(os.environ.get("TEST_MPI_SIZE", "0"))
_mpi_world: Any = None
#: Seconds after which the others give up on a rank that does not come: many, for one that traces a graph on a busy
#: machine. Only a test that fails waits for so long.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "60"))
PATIENT = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S)
# TensorFlow runs the graphs of all ranks of a process in one pool, of a thread per core, where each rank may wait.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
#: Seconds for the other ranks to end once one has failed.
GRACE_S = 5.0
_collections = itertools.count()


def run_ranks(
    size: int,
    body: Callable[[Session], Any],
    settings: Settings | None = None,
    process_sets: Sequence[Sequence[int]] = (),
    timeout_s: float = 2 * PATIENCE_S,
    hosts: Sequence[str] = (),
    network: Callable[[Transport], Transport] = lambda endpoint: endpoint,
) -> list[Any]:
    """``body(session)`` on ``size`` ranks, with that session current; returns what each rank returned.

    The first exception of any rank ends all of them and is raised here. A rank that hangs ends the run after
    ``PATIENCE_S`` seconds of the others' waiting, with its stack. ``hosts`` are the host names that the ranks give.
    ``network`` takes the place of the network between threads, which it is given; not under mpirun.
    """
    settings = settings or PATIENT
    if MPI_SIZE:
        if size != MPI_SIZE:
            pytest.skip(reason=f"needs {size} ranks, this run has {MPI_SIZE}")
        return _run_as_mpi_rank(body, settings, process_sets, hosts)
    return _run_as_threads(size, body, settings, process_sets, timeout_s, hosts, network)


def _run_as_threads(
    size: int,
    body: Callable[[Session], Any],
    settings: Settings,
    process_sets: Sequence[Sequence[int]],
    timeout_s: float,
    hosts: Sequence[str],
    network: Callable[[Transport], Transport],
) -> list[Any]:
    fabric = Fabric(size)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        session = Session()
        sessions.use(session)
        try:
            endpoint = network(fabric.endpoint(rank))
            session.start(endpoint, settings, process_sets, host=hosts[rank] if hosts else None)
            results[rank] = body(session)
            session.shutdown()
        except BaseException as error:
            failures.append((rank, error))
            session.shutdown(failed=True, why=f"raised {type(error).__name__}: {error}")

    if "tensorflow" in sys.modules:
        _collect()
    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            thread.join(0.1)
            if failures:
                end = min(end, time.monotonic() + GRACE_S)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        faulthandler.dump_traceback(all_threads=True)
    if failures:
        raise failures[0][1]
    if stuck:
        pytest.fail(f"{', '.join(stuck)} did not end in {timeout_s} s")
    return results


def _collect() -> None:
    """Frees what graphs of earlier tests have left behind: a rank that did it was once held up for a minute.

    What is alive now mostly lives for long, frameworks and what they keep. Only each hundredth call looks at it again,
    because that takes a tenth of a second and more.
    """
    if next(_collections) % 100 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def interrupt_soon(error: type[BaseException]) -> None:
    """Raises ``error`` in this thread a moment later, between two of its instructions, as a signal handler may."""
    thread = ctypes.c_ulong(threading.get_ident())
    threading.Timer(0.2, ctypes.pythonapi.PyThreadState_SetAsyncExc, (thread, ctypes.py_object(error))).start()


def mpi_world_copy() -> Any:
    """A communicator of all ranks of mpirun. Collective."""
    global _mpi_world
    from ocomm.transport import mpi

    if _mpi_world is None:
        _mpi_world = mpi.open_world()
    pending = _mpi_world.duplicate()
    while (copy := _mpi_world.duplicated(pending)) is None:
        pass
    return copy


def _run_as_mpi_rank(
    body: Callable[[Session], Any], settings: Settings, process_sets: Sequence[Sequence[int]], hosts: Sequence[str]
) -> list[Any]:
    from ocomm.transport import mpi

    session = Session()
    sessions.use(session)
    try:
        control = mpi_world_copy()
        abi = mpi.abi() if settings.engine == "native" else None
        session.start(control, settings, process_sets, abi, hosts[control.rank] if hosts else None)
        result = body(session)
        session.shutdown()
        return _mpi_world.communicator.allgather(result)
    except BaseException:
        # The others wait for this rank: end them now, with this stack as the reason.
        traceback.print_exc()
        sys.stderr.flush()
        _mpi_world.abort(1)
        raise
    finally:
        sessions.use(None)
