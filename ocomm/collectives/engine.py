"""What runs plans: the seam between ``native_engine`` (C, without the GIL) and its slow twin ``python_engine``."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.plan import Plan
from ocomm.collectives.tracing import Trace
from ocomm.errors import NotInitializedError
from ocomm.kernels.base import NOTHING, Table
from ocomm.telemetry.timeline import Timeline
from ocomm.transport.base import Transport


class State(enum.IntEnum):
    """Of a submitted plan; ``DONE`` and later are final. The numbers are those of ``native/ocomm.h``."""

    QUEUED = 0
    ACTIVE = 1
    DONE = 2
    MISMATCH = 3  # a message's header differs from ours
    MPI_ERROR = 4
    TIMED_OUT = 5
    ABORTED = 6
    TASK_ERROR = 7  # an ``Offload`` has raised
    WRONG_SIZE = 8  # a message was shorter than it should be


class Reason(enum.IntFlag):
    """Why ``Engine.run`` returned before its time."""

    WOKEN = 1
    COMPLETED = 2  # a plan submitted with notify is over
    CONTROL = 4  # a message waits on a watched transport
    FAILED = 8  # the network failed


class Ticket(Protocol):
    """One submission of a plan. Keeps the plan's memory alive while the network may touch it."""

    @property
    def plan(self) -> Plan: ...

    @property
    def state(self) -> State: ...

    @property
    def error(self) -> int:
        """The rank whose header (MISMATCH) or message (WRONG_SIZE) differs, or MPI's error code (MPI_ERROR)."""
        ...

    @property
    def error_segment(self) -> int:
        """The segment of the plan in which the header differs."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The times of its stages, once it is over; None where the engine had no timeline when it was submitted."""
        ...

    def open(self, segments: int, inputs: Any = None, addresses: Sequence[int] = (), part: int = NOTHING) -> None:
        """Lets the first ``segments`` of the plan start, which was submitted with fewer; ``timeout_s`` counts anew.

        They find the buffers of ``inputs``, of ``Channel.inputs``, at ``addresses``, 0 for none; before they start,
        checksums are taken of ``part`` of each buffer (see ``Kernels.checksum``), or of NOTHING. From any thread; a
        plan that is over is left alone.
        """
        ...

    def wait(self, seconds: float) -> State:
        """Waits until the plan is over or the time is; from any thread, without the GIL where the engine is native."""
        ...


class Channel(Protocol):
    """An order of plans and a window of segments in flight, on a communicator of its own.

    All ranks submit the same plans in the same order. Channels never wait for each other.
    """

    def prepare(self, plan: Plan) -> Any:
        """Whatever of a plan can be made ready once and submitted many times."""
        ...

    def inputs(
        self, tensors: Table, rows: NDArray[np.int64], nbytes: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> Any:
        """Buffers of so many bytes, whose addresses ``Ticket.open`` writes to ``tensors["grad"][rows]``, and whose
        checksums to ``sums``: contiguous arrays, which stay alive with it."""
        ...

    def submit(self, prepared: Any, timeout_s: float, notify: bool, segments: int | None = None) -> Ticket:
        """Queues a prepared plan; ``timeout_s`` counts from now, 0 for none. From any thread.

        Only its first ``segments`` may start, and nothing that is submitted later, before the ticket is opened for
        all. Time in which it waits for that alone, and for no rank, does not count.

        NotInitializedError in a forked child, and after ``Engine.close``.
        """
        ...

    def abandon(self) -> None:
        """Ends every plan of this channel as ABORTED, soon; later submissions are refused."""
        ...

    def close(self) -> int | None:
        """None while a plan that may start is not over, and nothing is done. Else the engine forgets the channel: plans
        that wait to be opened end as ABORTED, and later submissions are refused.

        Returns how many segments have started, all of which are over; -1 if the channel has failed, and messages may be
        under way. The communicator stays the caller's. From the thread of ``Engine.run``.
        """
        ...

    def waiting_for(self) -> list[int]:
        """Ranks whose messages the stages in flight wait for, or waited for when the channel failed."""
        ...


class Engine(Protocol):
    """Runs the plans of all channels of a process. ``run`` belongs to one thread, the rest to any.

    Plans that are submitted while there is a ``timeline`` are written to it, by ``run``, when they are done.
    """

    timeline: Timeline | None

    def open_channel(self, transport: Transport, window: int) -> Channel: ...

    def watch(self, transport: Transport) -> None:
        """``run`` returns CONTROL when a message with tag 0 waits on this transport."""
        ...

    def unwatch(self, transport: Transport) -> None:
        """Undoes ``watch``. From the thread of ``run``."""
        ...

    def run(self, seconds: float) -> Reason:
        """Moves everything on until there is a reason to return or the time is over."""
        ...

    def wake(self) -> None:
        """Makes ``run`` return WOKEN."""
        ...

    def expect(self, waiters: int, wake: bool) -> None:
        """So many threads more (or fewer) wait for a result: a hint to poll more often. Wakes ``run`` if ``wake``."""
        ...

    def fail(self) -> None:
        """Ends every plan as ABORTED, now and later."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while any plan is not over, unless it waits for ``Ticket.open`` alone."""
        ...

    def counters(self) -> dict[str, int]:
        """bytes_sent, messages_sent, plans, polls, sleeps, compute_ns, network_ns since the start; bytes_bridged, not
        among bytes_sent, are what NCCL has sent for plans that are over."""
        ...

    def close(self) -> None:
        """Refuses plans from now on and lets go of all memory. ``run`` is over, and nothing is under way."""
        ...


def require_open(owner: int, is_closed: bool, what: str) -> None:
    """NotInitializedError where nobody will run plan ``what`` of an engine that process ``owner`` has made."""
    if os.getpid() != owner:
        raise NotInitializedError(
            f"{what}: this process (pid {os.getpid()}) was forked from a rank (pid {owner}), which is the one that may "
            "communicate."
        )
    if is_closed:
        raise NotInitializedError(
            f"{what}: the job that this belongs to has been shut down. After init() make a new optimizer and load its "
            "state, or call reconnect()."
        )
