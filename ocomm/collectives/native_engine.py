"""The engine of ``native/engine.c``: plans become C tables, and run without the GIL."""

from __future__ import annotations

import os
import struct
import threading
from array import array as Array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm._native import ffi, lib
from ocomm.collectives import plan as plans
from ocomm.collectives.engine import Reason, State, require_open
from ocomm.collectives.plan import Plan
from ocomm.collectives.tracing import Trace, new_trace, record
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import NOTHING, Table
from ocomm.kernels.cpu import Pool, pointer_to
from ocomm.kernels.loops import IN_C, SLOTS, Declaration, function
from ocomm.telemetry.timeline import Timeline
from ocomm.transport.base import Transport
from ocomm.types import Location

_MESSAGE = np.dtype([("address", np.int64), ("nbytes", np.int64), ("peer", np.int32), ("receive", np.int32)])
_STAGES_PER_SEGMENT = 16  # equals STAGES_PER_TAG in engine.c
_LARGEST_NBYTES = 2**31 - 1  # MPI counts in ints
#: Plans which had messages under way when their engine was closed: MPI may still write to their buffers.
_unfinished: list[_CompiledPlan] = []


_EMPTY = (0,) * SLOTS
_OP = struct.Struct(f"={1 + SLOTS}q")
_INTPTR = ffi.typeof("intptr_t")
_PLAN = ffi.typeof("ocomm_plan *")
_NULL = ffi.NULL
# cffi makes the types of functions and of a struct's fields at their first use. Where two threads do so at the same
# time, cffi 2.1 may end the process with a failed assertion.
for _name in dir(lib):
    getattr(lib, _name)
for _name in ("ocomm_plan", "ocomm_inputs", "ocomm_mpi"):
    ffi.new(f"{_name} *")


def _address(array: np.ndarray | None) -> int:
    if type(array) is np.ndarray:
        return int(ffi.cast(_INTPTR, ffi.from_buffer(array)))  # takes a third of the time of __array_interface__
    return 0 if array is None else array.__array_interface__["data"][0]  # not an array, but like one


def _encoding(loop: Declaration) -> Any:
    """Returns the function that makes an ``ocomm_op`` from a loop's flags and arguments."""
    slots = [expression for argument in loop.arguments for expression in argument.encoded()]
    slots += ["address(flags)"] * loop.reports
    letters = "".join("d" if of in ("float", "double") else "q" for of, _ in loop.c) + "q" * loop.reports
    op = struct.Struct(f"=q{letters}{8 * (SLOTS - len(slots))}x")
    names = {"address": _address, "pack": op.pack}
    return function(loop.name, ["pointers", "flags", *loop.names], f"pack({loop.code}, {', '.join(slots)})", names)


_ENCODED = {loop.name: _encoding(loop) for loop in IN_C}


@ffi.def_extern(error=-1)
def ocomm_run_task(handle: Any, begin: int) -> int:
    """An ``ocomm_task``, called by the engine's thread, which takes the GIL for it."""
    task: plans.Task = ffi.from_handle(handle)
    try:
        if not begin:
            return int(task.is_over())
        task.start()
    except BaseException as error:
        task.failure = error
        return -1
    return 0


class _Compiler:
    """Turns one plan into the tables that the engine reads."""

    def __init__(self) -> None:
        self.ops: list[bytes] = []
        self.messages: list[tuple[int, int, int, int]] = []
        self.keep: list[Any] = []
        self._pointers: dict[int, tuple[Sequence[Any], int]] = {}  # by the id of the arrays, which it keeps alive

    def pointers(self, arrays: Sequence[np.ndarray] | Sequence[Location]) -> int:
        known = self._pointers.get(id(arrays))
        if known is None:
            addresses: Sequence[Any] = arrays
            if set(map(type, arrays)) != {int}:
                addresses = [array if isinstance(array, int) else _address(array) for array in arrays]
            known = self._pointers[id(arrays)] = arrays, self.numbers(addresses)
        return known[1]

    def numbers(self, numbers: Sequence[int]) -> int:
        table = Array("q", numbers)  # takes a third of the time of a NumPy array
        self.keep.append(table)
        return table.buffer_info()[0]

    def op(self, code: int, *slots: int) -> None:
        self.ops.append(_OP.pack(code, *slots, *_EMPTY[len(slots) :]))

    def add(self, c: plans.Computation) -> None:
        a = _address
        match c:
            case plans.Loop():
                self.ops.append(_ENCODED[c.declaration.name](self.pointers, c.flags, *c.arguments))
            case plans.Copy():
                self.op(lib.OCOMM_COPY, a(c.source), a(c.destination), c.source.nbytes)
            case plans.CopyIn():
                lengths = self.numbers(c.nbytes)
                self.op(lib.OCOMM_COPY_IN, self.pointers(c.sources), lengths, len(c.sources), a(c.destination))
            case plans.CopyOut():
                lengths = self.numbers(c.nbytes)
                self.op(lib.OCOMM_COPY_OUT, self.pointers(c.destinations), lengths, len(c.destinations), a(c.source))
            case plans.Offload():
                task = c.task.compiled() if isinstance(c.task, plans.CompiledTask) else None
                if task is None:
                    handle = ffi.new_handle(c.task)
                    self.keep.append(handle)
                    task = int(ffi.cast(_INTPTR, lib.ocomm_run_task)), int(ffi.cast(_INTPTR, handle))
                self.op(lib.OCOMM_OFFLOAD, *task)
            case plans.WriteHeaders():
                self.op(
                    lib.OCOMM_WRITE_HEADERS,
                    *(a(c.header), a(c.flags), a(c.presence), c.presence.nbytes),
                    *(self.pointers(c.messages), len(c.messages)),
                )
            case plans.CheckHeaders():
                self.op(
                    lib.OCOMM_CHECK_HEADERS,
                    *(a(c.header), self.pointers(c.messages), len(c.messages), a(c.flags)),
                    *(a(c.presence), c.presence.nbytes, a(c.announcement), a(c.passed_on), c.ends),
                )


class _CompiledPlan:
    """The C tables of a plan; the plan object holds the arrays they point into."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        compiler = _Compiler()
        stages: list[tuple[int, int, int, int]] = []
        segments: list[tuple[int, int]] = []
        for segment in plan.segments:
            assert len(segment) <= _STAGES_PER_SEGMENT
            segments.append((len(stages), len(segment)))
            for stage in segment:
                first_op, first_message = len(compiler.ops), len(compiler.messages)
                for computation in stage.compute:
                    compiler.add(computation)
                compiler.messages += [(_address(m.buffer), m.buffer.nbytes, m.peer, 0) for m in stage.sends]
                compiler.messages += [(_address(m.buffer), m.buffer.nbytes, m.peer, 1) for m in stage.receives]
                stages.append(
                    (first_op, len(compiler.ops) - first_op, first_message, len(compiler.messages) - first_message)
                )
        self.ops = b"".join(compiler.ops)
        self.messages = np.array(compiler.messages, _MESSAGE)
        if len(self.messages) and (largest := int(self.messages["nbytes"].max())) > _LARGEST_NBYTES:
            raise InvalidRequestError(
                f"{plan.name}: a message of {largest} bytes is more than MPI can send at once, {_LARGEST_NBYTES}; "
                "choose a smaller OCOMM_SEGMENT_BYTES."
            )
        self.stages = np.array(stages, np.int32).reshape(-1)
        self.segments = np.array(segments, np.int32).reshape(-1)
        self.pointers = compiler.keep
        self.bytes_bridged = plan.bytes_bridged
        row = self._row = ffi.new(_PLAN)
        row.ops = ffi.cast("ocomm_op *", ffi.from_buffer(self.ops))
        row.messages = ffi.cast("ocomm_message *", _address(self.messages))
        row.stages = ffi.cast("ocomm_stage *", _address(self.stages))
        row.segments = ffi.cast("ocomm_segment *", _address(self.segments))
        row.segment_count = len(self.segments) // 2
        row.lanes = plan.lanes

    def row(self, notify: bool, timeout_s: float, segments: int | None) -> Any:
        """Returns the C row of one submission."""
        row = ffi.new(_PLAN, self._row[0])
        row.open_segments = row.segment_count if segments is None else segments
        row.notify = notify
        row.timeout_ns = int(timeout_s * 1e9)
        return row


class _Inputs:
    """The C row of buffers whose addresses are told when a plan is opened, and the arrays that it points into."""

    def __init__(
        self, tensors: Table, rows: NDArray[np.int64], nbytes: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> None:
        self._arrays = tensors, rows, nbytes, sums
        self.row = ffi.new("ocomm_inputs *")
        self.row.tensors = ffi.from_buffer("ocomm_tensor[]", tensors)
        self.row.rows = ffi.from_buffer("int64_t[]", rows)
        self.row.nbytes = ffi.from_buffer("int64_t[]", nbytes)
        self.row.sums = ffi.from_buffer("uint64_t[]", sums)
        self.row.count = len(rows)


class NativeTicket:
    """The ``engine.Ticket`` of the native engine."""

    def __init__(self, engine: NativeEngine, channel: Any, prepared: _CompiledPlan, row: Any) -> None:
        self._engine = engine
        self.channel = channel
        self._prepared = prepared
        self._row = row
        self.timeline = engine.timeline
        self.trace: Trace | None = None
        if self.timeline is not None:
            self.trace = new_trace(prepared.plan)
            row.trace = ffi.cast("int64_t *", _address(self.trace))

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

    @property
    def bytes_bridged(self) -> int:
        return self._prepared.bytes_bridged

    @property
    def left_under_way(self) -> _CompiledPlan | None:
        """What the network may still write to, although the plan is over or will not go on; None for nothing."""
        return self._prepared if self._row.segments_started and self._row.state != State.DONE else None

    @property
    def state(self) -> State:
        """The state at this moment. What the plan wrote is visible to another thread for sure only after ``wait``."""
        return State(self._row.state)

    @property
    def error(self) -> int:
        return self._row.error

    @property
    def error_segment(self) -> int:
        return self._row.error_segment

    @property
    def past_segments(self) -> int:
        return self._row.segments_past

    def open(self, segments: int, inputs: Any = None, addresses: Sequence[int] = (), part: int = NOTHING) -> None:
        lib.ocomm_open(self.channel, self._row, segments, inputs.row if inputs else _NULL, addresses, part)

    def wait(self, seconds: float) -> State:
        return State(lib.ocomm_plan_wait(self._engine.pointer, self._row, int(seconds * 1e9)))


class NativeChannel:
    """The ``engine.Channel`` of the native engine."""

    def __init__(self, engine: NativeEngine, transport: Transport, window: int) -> None:
        self._engine = engine
        self._size = transport.size
        handle = getattr(transport, "handle", 0)  # a world of one has no MPI
        pointer = lib.ocomm_channel_new(engine.pointer, handle, transport.size, window)
        if pointer == ffi.NULL:
            raise MemoryError("no memory for another channel")
        # Freed with its last user, because a submitted plan may still be opened after close().
        self._pointer = ffi.gc(pointer, lib.ocomm_channel_free)
        engine.channels.add(self._pointer)

    def prepare(self, plan: Plan) -> _CompiledPlan:
        return _CompiledPlan(plan)

    def inputs(
        self, tensors: Table, rows: NDArray[np.int64], nbytes: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> _Inputs:
        return _Inputs(tensors, rows, nbytes, sums)

    def submit(
        self, prepared: _CompiledPlan, timeout_s: float, notify: bool, segments: int | None = None
    ) -> NativeTicket:
        require_open(self._engine.owner, self._engine.is_closed, prepared.plan.name)
        row = prepared.row(notify, timeout_s, segments)
        ticket = NativeTicket(self._engine, self._pointer, prepared, row)
        self._engine.remember(ticket)
        lib.ocomm_submit(self._pointer, row)
        return ticket

    def abandon(self) -> None:
        lib.ocomm_channel_abandon(self._pointer)

    def close(self) -> int | None:
        segments = lib.ocomm_channel_close(self._pointer)
        if segments == -2:
            return None
        self._engine.forget(self._pointer, keep_plans=segments < 0)
        return segments

    def waiting_for(self) -> list[int]:
        waiting = np.zeros(self._size, np.uint8)
        lib.ocomm_channel_waiting(self._pointer, ffi.from_buffer("uint8_t[]", waiting))
        return np.flatnonzero(waiting).tolist()


class NativeEngine:
    """The ``engine.Engine`` in C.

    ``abi`` is a ``transport.mpi.MpiAbi``, or None for a job of one rank without MPI. ``pool`` helps with computations,
    and is closed by its owner. ``is_alone`` says that no other rank of the job is on this host.
    """

    def __init__(
        self,
        abi: Any = None,
        spin_us: float = 50.0,
        idle_ms: float = 5.0,
        pool: Pool | None = None,
        is_alone: bool = False,
    ) -> None:
        mpi = ffi.NULL
        if abi is not None:
            mpi = ffi.new("ocomm_mpi *")
            for name in ("isend", "irecv", "testsome", "iprobe", "get_count"):
                setattr(mpi, name, ffi.cast("void *", getattr(abi, name)))
            for name in ("byte_type", "handle_nbytes", "status_nbytes", "any_source", "undefined"):
                setattr(mpi, name, getattr(abi, name))
            mpi.tests_move_little = abi.tests_move_little and not is_alone
        self._pool = pool
        pointer = lib.ocomm_engine_new(mpi, pointer_to(pool), int(spin_us * 1e3), int(idle_ms * 1e6))
        if pointer == ffi.NULL:
            raise MemoryError("no memory for the engine")
        # Freed with its last user, not by close(), because another thread may be about to submit, wake or wait.
        self.pointer = ffi.gc(pointer, lib.ocomm_engine_free)
        self.timeline: Timeline | None = None
        self.owner = os.getpid()
        self.is_closed = False
        self._lock = threading.Lock()
        #: Tickets that the C engine knows, so that their memory is kept.
        self.channels: set[Any] = set()
        self._alive: list[NativeTicket] = []
        self._bytes_bridged = 0

    def remember(self, ticket: NativeTicket) -> None:
        """Keeps a plan's memory until it is done. That of a failed plan is kept for good, because the network may still
        use it.
        """
        with self._lock:
            self._alive.append(ticket)

    def forget(self, channel: Any, keep_plans: bool) -> None:
        """Forgets a channel that the C engine has closed. Its plans, which are over, are kept if the network may use
        them.
        """
        self.channels.discard(channel)
        if not keep_plans:
            with self._lock:
                self._alive = [t for t in self._alive if t.channel is not channel or t.state == State.DONE]

    def _forget_done(self) -> None:
        with self._lock:
            everyone = self._alive
            self._alive = [t for t in everyone if t.state != State.DONE]
        if len(self._alive) < len(everyone):
            for ticket in everyone:
                if ticket.bytes_bridged and ticket.state == State.DONE:
                    self._bytes_bridged += ticket.bytes_bridged
                if ticket.trace is not None and ticket.timeline is not None and ticket.state == State.DONE:
                    record(ticket.timeline, ticket.plan, ticket.trace)

    def open_channel(self, transport: Transport, window: int) -> NativeChannel:
        return NativeChannel(self, transport, window)

    def watch(self, transport: Transport) -> None:
        if transport.size > 1 and lib.ocomm_engine_watch(self.pointer, transport.handle):  # type: ignore[attr-defined]
            raise MemoryError("no memory for another process set")

    def unwatch(self, transport: Transport) -> None:
        if transport.size > 1:
            lib.ocomm_engine_unwatch(self.pointer, transport.handle)  # type: ignore[attr-defined]

    def run(self, seconds: float) -> Reason:
        reason = Reason(lib.ocomm_engine_run(self.pointer, int(seconds * 1e9)))
        if self._alive:
            self._forget_done()
        return reason

    def wake(self) -> None:
        lib.ocomm_engine_wake(self.pointer)

    def expect(self, waiters: int, wake: bool) -> None:
        lib.ocomm_engine_expect(self.pointer, waiters, wake)

    def fail(self) -> None:
        lib.ocomm_engine_fail(self.pointer)

    @property
    def is_busy(self) -> bool:
        return bool(lib.ocomm_engine_busy(self.pointer))

    def counters(self) -> dict[str, int]:
        counters = lib.ocomm_engine_counters(self.pointer)
        names = ("bytes_sent", "messages_sent", "plans", "polls", "sleeps", "compute_ns", "network_ns")
        return {**{name: getattr(counters, name) for name in names}, "bytes_bridged": self._bytes_bridged}

    def close(self) -> None:
        self.is_closed = True
        self.fail()
        with self._lock:
            alive, self._alive = self._alive, []  # ends a reference cycle through the engine
        _unfinished.extend(prepared for ticket in alive if (prepared := ticket.left_under_way) is not None)
