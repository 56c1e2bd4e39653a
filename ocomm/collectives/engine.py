"""Engines run plans: ``native_engine`` in C without the GIL, and ``python_engine``, which is slow and must equal it."""

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
    """The state of a submitted plan; ``DONE`` and later are final. The numbers are those of ``native/ocomm.h``."""

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
    """Why ``Engine.run`` returned before its time was over."""

    WOKEN = 1
    COMPLETED = 2  # a plan that was submitted with notify is over
    CONTROL = 4  # a message has arrived on a watched transport
    FAILED = 8  # the network failed


class Ticket(Protocol):
    """One submission of a plan. Keeps the plan's memory alive while the network may touch it."""

    @property
    def plan(self) -> Plan: ...

    @property
    def state(self) -> State: ...

    @property
    def error(self) -> int:
        """The rank whose header (MISMATCH) or message (WRONG_SIZE) differs, or MPI's error code (MPI_ERROR), which is
        -1 if there is no memory for more messages.
        """
        ...

    @property
    def error_segment(self) -> int:
        """The segment of the plan in which the header differs."""
        ...

    @property
    def past_segments(self) -> int:
        """A number of first segments of the plan that are over: they will read no memory again."""
        ...

    @property
    def trace(self) -> Trace | None:
        """The times of the plan's stages once it is over; None if the engine had no timeline when it was submitted."""
        ...

    def open(self, segments: int, inputs: Any = None, addresses: Sequence[int] = (), part: int = NOTHING) -> None:
        """Lets the first ``segments`` of a plan start that was submitted with fewer; ``timeout_s`` counts anew. From
        any thread.

        A plan that is over is left alone.

        Args:
            segments: Number of segments that may start.
            inputs: Buffers made by ``Channel.inputs``, which these segments read.
            addresses: Address of each of these buffers, 0 for none.
            part: The part of each buffer of which a checksum is taken before the segments start (``Kernels.checksum``),
                or NOTHING.
        """
        ...

    def wait(self, seconds: float) -> State:
        """Waits until the plan or the time is over; from any thread, without the GIL if the engine is native."""
        ...


class Channel(Protocol):
    """An ordered queue of plans on a communicator of its own, with a window of segments in flight.

    All ranks submit the same plans in the same order. Channels never wait for each other.
    """

    def prepare(self, plan: Plan) -> Any:
        """Prepares a plan once, so that it can be submitted many times."""
        ...

    def inputs(
        self, tensors: Table, rows: NDArray[np.int64], nbytes: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> Any:
        """Returns buffers of ``nbytes`` bytes each, for ``Ticket.open``.

        ``Ticket.open`` writes their addresses to ``tensors["grad"][rows]`` and their checksums to ``sums``. These are
        contiguous arrays, which stay alive with the result.
        """
        ...

    def submit(self, prepared: Any, timeout_s: float, notify: bool, segments: int | None = None) -> Ticket:
        """Queues a prepared plan. From any thread.

        Args:
            prepared: The result of ``prepare``.
            timeout_s: Deadline from now, in seconds; 0 for none. Time in which the plan only waits for ``Ticket.open``
                does not count.
            notify: Whether ``Engine.run`` returns when the plan is over.
            segments: Number of segments that may start before ``Ticket.open``; None for all. No later plan starts
                before all segments may.

        Raises:
            NotInitializedError: This is a forked child, or ``Engine.close`` was called.
        """
        ...

    def abandon(self) -> None:
        """Ends every plan of this channel as ABORTED, soon, and refuses later submissions."""
        ...

    def close(self) -> int | None:
        """Closes the channel, unless a plan that may start is not over: then it does nothing and returns None.

        The engine forgets the channel: plans that wait to be opened end as ABORTED, and later submissions are refused.
        Called on the thread of ``Engine.run``.

        Returns:
            The number of segments that have started, all of which are over; -1 if the channel has failed, so that
            messages may be under way. The communicator still belongs to the caller.
        """
        ...

    def waiting_for(self) -> list[int]:
        """Returns the ranks whose messages the stages in flight wait for, or waited for when the channel failed."""
        ...


class Engine(Protocol):
    """Runs the plans of all channels of a process. ``run`` belongs to one thread; all else may be called from any.

    While there is a ``timeline``, ``run`` writes to it the plans that are submitted, once they are done.
    """

    timeline: Timeline | None

    def open_channel(self, transport: Transport, window: int) -> Channel: ...

    def watch(self, transport: Transport) -> None:
        """Makes ``run`` return CONTROL when a message with tag 0 has arrived on this transport."""
        ...

    def unwatch(self, transport: Transport) -> None:
        """Ends what ``watch`` began. Called on the thread of ``run``."""
        ...

    def run(self, seconds: float) -> Reason:
        """Runs plans until there is a reason to return, or until the time is over."""
        ...

    def wake(self) -> None:
        """Makes ``run`` return WOKEN."""
        ...

    def expect(self, waiters: int, wake: bool) -> None:
        """Notes that ``waiters`` threads more (or less) wait for a result, a hint to poll more often. Wakes ``run`` if
        ``wake``.
        """
        ...

    def fail(self) -> None:
        """Ends every plan as ABORTED, now and later."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while any plan is not over, except for plans that only wait for ``Ticket.open``."""
        ...

    def counters(self) -> dict[str, int]:
        """Returns bytes_sent, messages_sent, plans, polls, sleeps, compute_ns, network_ns and bytes_bridged since the
        start.

        bytes_bridged are the bytes that NCCL has sent for plans that are over; they are not part of bytes_sent.
        """
        ...

    def close(self) -> None:
        """Refuses plans from now on and frees all memory. ``run`` is over, and nothing is under way."""
        ...


def require_open(owner: int, is_closed: bool, what: str) -> None:
    """Raises NotInitializedError if no thread will run plan ``what`` of an engine that process ``owner`` has made."""
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
