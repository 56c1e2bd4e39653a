"""Runs a workload with ranks as threads, and says what a fault has done to it."""

from __future__ import annotations

import faulthandler
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ocomm import session as sessions
from ocomm.errors import MismatchError, OcommError
from ocomm.session import Session
from ocomm.transport.local import Fabric
from ocomm.types import Settings
from tests.callback_mpi import CallbackMpi
from tests.faults.calls import Calls
from tests.faults.layers import FaultyMpi, FaultyTransport
from tests.faults.trail import Trail, differences

Workload = Callable[[Trail], None]
_OUR_THREADS = ("ocomm", "ocomm-timeline", "ocomm-metrics", "ocomm-counters", "ocomm-bounded")


@dataclass
class Rank:
    """What one rank has done."""

    trail: Trail = field(default_factory=Trail)
    calls: Calls = field(default_factory=Calls)
    error: BaseException | None = None
    state: str | None = None


@dataclass
class Run:
    """A run of all ranks. ``stuck`` names the threads that have not ended in time."""

    ranks: list[Rank]
    seconds: float = 0.0
    stuck: list[str] = field(default_factory=list)

    @property
    def error(self) -> BaseException | None:
        """The error of a rank that says most: an AssertionError if there is one, since other ranks fail in its wake."""
        errors = [rank.error for rank in self.ranks if rank.error is not None]
        return next((error for error in errors if isinstance(error, AssertionError)), errors[0] if errors else None)


def run(
    workload: Workload,
    size: int,
    settings: Settings,
    calls: dict[int, Calls] | None = None,
    *,
    native: bool = False,
    hosts: Sequence[str] = (),
    deadline_s: float,
) -> Run:
    """Runs a workload on every rank; a rank that raises ends its session as a script does that raises.

    Args:
        workload: Called on every rank, with its session current.
        size: The number of ranks.
        settings: Those of all ranks.
        calls: The calls of ranks that are to fail; the others only count.
        native: Whether the engine is that in C, over an MPI of callbacks.
        hosts: The host of every rank; () for one host.
        deadline_s: Seconds after which a rank counts as stuck.
    """
    ranks = [Rank(calls=(calls or {}).get(rank, Calls())) for rank in range(size)]
    fabric = Fabric(size)

    def rank_main(number: int) -> None:
        rank, session = ranks[number], Session()
        sessions.use(session)
        mpi = CallbackMpi() if native else None
        abi = None if mpi is None else FaultyMpi(mpi, rank.calls)
        try:
            transport = FaultyTransport(fabric.endpoint(number), rank.calls, mpi)
            session.start(transport, settings, abi=abi, host=hosts[number] if hosts else "a")
            workload(rank.trail)
            session.shutdown()
        except BaseException as error:
            rank.error = error
            session.shutdown(failed=True, why=f"raised {type(error).__name__}: {error}")
        rank.state = rank.trail.end()

    before = set(threading.enumerate())
    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    result = Run(ranks)
    end = began + deadline_s
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    for thread in set(threading.enumerate()) - before:
        if thread in threads or thread.name in _OUR_THREADS:
            thread.join(max(end - time.monotonic(), 0.0))
            if thread.is_alive():
                result.stuck.append(thread.name)
    result.seconds = time.monotonic() - began
    if result.stuck:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        fabric.endpoint(0).abort(1)
    sessions._abandoned.clear()  # nothing but threads of this process has used their buffers
    return result


def problems(clean: Run, run: Run, victim: int | None = None) -> list[str]:
    """Returns how a run with a fault breaks its promises.

    Args:
        clean: The run without a fault.
        run: The run with one.
        victim: The rank on which a call has failed; None if it is not known.
    """
    found = [f"{name} hangs" for name in run.stuck]
    for number, (rank, whole) in enumerate(zip(run.ranks, clean.ranks, strict=True)):
        found += differences(number, whole.trail.steps, rank.trail.steps, rank.state, rank.error is None)
        if isinstance(rank.error, MismatchError):
            found.append(f"rank {number} blames ranks that do not disagree: {rank.error}")
        if rank.error is not None:
            other = None if victim == number else victim
            found += [f"rank {number}: {why}" for why in unnamed(rank.error, other)]
    return found


def unnamed(error: BaseException, victim: int | None) -> list[str]:
    """Returns why an error does not say enough: it is not one of ocomm's or of the system's, or, where another rank is
    the ``victim``, it names no rank.
    """
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, (OcommError, MemoryError, OSError)) or not str(error):
        return [f"an error without a name, {text!r}"]
    if isinstance(error, OSError) and error.filename is None and not re.search(r"rank|OCOMM_", text):
        return [f"an error that does not say what it is about, {text!r}"]
    if victim is not None and not re.search(r"\brank", text):
        return [f"an error that names no rank, {text!r}"]
    return []
