"""Buffers and loops on a device, for an optimizer's core and the exchange.

Everything is queued on one stream of the device, in the order of the calls, and the host waits only in methods that say
so. So buffers need no locks. Only tables that are copied to the device, and the bytes of messages, must stay unchanged
until the device has read them, which ``DeviceMemory`` ensures.

``Device`` is what differs between devices: memory, copies, events and launches.
"""

from __future__ import annotations

import bisect
import enum
import functools
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ocomm.errors import HorovodInternalError
from ocomm.kernels.base import (
    ALIGNMENT,
    PIECE,
    SKETCH,
    SKETCHED,
    SUMMED,
    WHOLE,
    Bytes,
    Floats,
    Kernels,
    Table,
    pieces_of,
    sparse_bytes,
)
from ocomm.kernels.loops import KINDS, LOOPS, ArgumentKind
from ocomm.kernels.reference import CHECKSUM_SPREAD, sketch_keys
from ocomm.types import DType, ReduceOp

#: Number of tables that are kept on the device without being in use, such as those of buckets that are cut again.
_REMEMBERED = 4096
#: Bytes of page-locked memory through which the host reads arrays, a part at a time.
_WINDOW_NBYTES = 1 << 22
#: Number of pieces of page-locked memory that are kept for writing arrays, and their largest size.
_SPARES, _SPARE_NBYTES = 32, 1 << 20
#: Arrays of the device of at most ``_SMALL_NBYTES`` are cut from ``_SLAB_NBYTES`` of it, because the driver takes as
#: long for one of them as for a large one, and a plan has thousands. Page-locked flags are cut likewise.
_SMALL_NBYTES, _SLAB_NBYTES = 1 << 16, 1 << 20
#: Number of sums over memory whose tables are kept.
_SUMS = 16
#: Cut memory for thread blocks, each of which adds so many elements.
_cut = functools.partial(pieces_of, numel=1 << 16)
_cut_for_sums = functools.partial(pieces_of, numel=SUMMED)


class Event(Protocol):
    """A point in the device's queue."""

    def is_over(self) -> bool:
        """Returns True if everything queued before it is done. Never waits."""
        ...


class Block(Protocol):
    """Memory on the device, freed with the last reference."""

    @property
    def address(self) -> int: ...


class Stream(Protocol):
    """A second stream of the device, for a network that works on the device."""

    #: The stream's handle for such a network.
    handle: Any

    def record(self) -> Event:
        """Returns an event at the current end of the stream."""
        ...


class Verb(enum.IntEnum):
    """What a ``Step`` does."""

    UPLOAD = 0  # staging memory, and its copy on the device, which is written
    DOWNLOAD = 1  # staging memory, which is written, and its copy on the device
    CLEAR = 2  # an array of the device
    LOOP = 3  # the name of a loop, and its arguments as on the host
    CALL = 4  # a function, which queues something, and its arguments


class Step(NamedTuple):
    """A part of what is queued together."""

    verb: Verb
    arguments: tuple[Any, ...]


class Together(NamedTuple):
    """What is queued together.

    Args:
        queue: Has the loops of the steps.
        steps: What is queued, in order; no ``CALL``.
        status: 4 bytes of page-locked memory that the last step has filled; nonzero if something was not finite.
        flags: Get ``Flag.NON_FINITE`` then.
        beside: They run on a second stream, on which nothing waits for what is queued on the first.
        awaited: The engine waits until they are over. Else what is queued on the first stream later does.
    """

    queue: Queue | None
    steps: Sequence[Step]
    status: Bytes
    flags: Sequence[np.ndarray]
    beside: bool
    awaited: bool


class Mirror(Protocol):
    """A table of the host that changes, and its ``copy`` on the device."""

    copy: DeviceArray

    def current(self, memory: DeviceMemory) -> DeviceArray:
        """Queues a copy if the table has changed, and returns it. What is copied may change at once."""
        ...


class Work(Protocol):
    """What is queued together, in a form that the native engine queues without Python."""

    @property
    def task(self) -> tuple[int, int]:
        """Addresses of an ``ocomm_task`` and of its argument."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What it failed of; None if it did not."""
        ...

    def queue(self, memory: DeviceMemory) -> None:
        """Queues it from this thread, of what is not awaited. Raises HorovodInternalError."""
        ...


class Device(Protocol):
    """One device and one stream on it. Everything but ``allocate`` and ``pinned`` is queued. May be called from any
    thread.
    """

    name: str
    #: Identifies the device in all processes that use it.
    identity: str
    #: Called when memory is short, so that a framework frees memory that it keeps for later.
    make_room: Callable[[], None] | None

    def allocate(self, nbytes: int) -> Block:
        """Returns new memory, at a multiple of 64 bytes; contents undefined. Raises MemoryError if there is none."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Returns a new array of the host that the device can read and write itself; contents undefined."""
        ...

    def upload(self, to: int, source: Bytes) -> None: ...

    def download(self, to: Bytes, source: int) -> None: ...

    def copy(self, to: int, source: int, nbytes: int) -> None: ...

    def clear(self, to: int, nbytes: int) -> None:
        """Fills memory with zero bytes."""
        ...

    def record(self) -> Event:
        """Returns an event at the current end of the queue."""
        ...

    def stream(self) -> Stream:
        """Returns a new stream. Nothing on it waits for other streams, nor do they wait for it."""
        ...

    def mirror(self, memory: DeviceMemory, table: Table) -> Mirror:
        """Returns the mirror of a table that changes."""
        ...

    def work(self, together: Together) -> Work | None:
        """Returns steps in the form for the native engine; None if there is none, and Python must queue them."""
        ...

    def loops(self, status: DeviceArray) -> Any:
        """Returns the loops of ``kernels.loops`` over device arrays only. They never wait.

        Instead of returning a bool they make ``status``, one int32, nonzero. ``prepare(loop)`` compiles a loop, so that
        it can be queued without delay.
        """
        ...

    def enter(self) -> None:
        """Makes this device the calling thread's current one from now on."""
        ...

    def follow(self, stream: int) -> None:
        """Makes what is queued from now on run after what a framework has queued on its stream ``stream`` so far."""
        ...

    def precede(self, stream: int) -> None:
        """Makes what a framework queues on ``stream`` from now on run after what is queued so far."""
        ...


class DeviceArray:
    """A one-dimensional, contiguous array on a device, with those features of NumPy's arrays that read no elements.

    A slice is a view. A slice can be assigned another device array, an array of the host, or 0. NumPy's functions
    refuse device arrays; ``Memory.host`` returns a copy.
    """

    __slots__ = ("address", "block", "dtype", "memory", "size")
    __array_ufunc__ = None
    __iter__ = None

    def __init__(self, memory: DeviceMemory, address: int, size: int, dtype: Any, block: Any) -> None:
        self.memory = memory
        self.address = address
        self.size = size
        self.dtype = np.dtype(dtype)
        self.block = block

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"an array on {self.memory.device.name} cannot be compared")

    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"an array on {self.memory.device.name} is not in the host's memory")

    def __getitem__(self, part: slice) -> DeviceArray:
        first, last, step = part.indices(self.size)
        assert step == 1, "a view with gaps"
        at = self.address + first * self.dtype.itemsize
        return DeviceArray(self.memory, at, max(last - first, 0), self.dtype, self.block)

    def __setitem__(self, part: slice, value: Any) -> None:
        self.memory.assign(self[part], value)

    def view(self, dtype: Any) -> DeviceArray:
        """Returns the same bytes as another type."""
        return DeviceArray(self.memory, self.address, self.nbytes // np.dtype(dtype).itemsize, dtype, self.block)

    def reshape(self, shape: int) -> DeviceArray:
        """Returns the array itself, which is flat already."""
        assert shape == -1
        return self

    def copy(self) -> DeviceArray:
        """Returns another array with the same elements."""
        new = self.memory.empty(self.size, self.dtype)
        new[:] = self
        return new


class _Wire:
    """An address on a device in the form that NumPy accepts; keeps the array that it belongs to alive."""

    def __init__(self, part: DeviceArray) -> None:
        self.part = part
        self.__array_interface__ = {
            "shape": (part.nbytes,),
            "typestr": "|u1",
            "data": (part.address, False),
            "version": 3,
        }


#: The kernels that ``reduce`` launches, by element type; ``prepare("reduce")`` compiles only that of float32.
REDUCTIONS = ("reduce", "reduce_low", "reduce_double", "reduce_whole")


def is_reduced_on_devices(dtype: DType, op: int, prescale: float, postscale: float) -> bool:
    """Returns True if there is a loop for this reduction on devices: sums; sums of integers only without factors."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or dtype == DType.BOOL:
        return False
    return dtype.is_floating or prescale == postscale == 1


class DeviceMemory:
    """The ``Memory`` of a device. Tables of the host and staging memory have copies on the device, which are kept up to
    date.

    A table is copied when kernels are first called with it, a TENSOR table whenever it has changed since. Block and run
    tables never change, so that they are recognised by their address.
    """

    is_device = True

    def __init__(self, device: Device, timeout_s: float = 0.0) -> None:
        self.device = device
        #: Limit, in seconds, for the host's waits for the device; 0: no limit.
        self.timeout_s = timeout_s
        #: Whether the network can send from this memory and receive into it, as far as this process knows.
        self.reached_by_network = False
        #: Held while calls are queued that belong together.
        self.lock = threading.RLock()
        #: Number of times that the host has waited for the device.
        self.waits = 0
        self._staged: dict[int, tuple[int, DeviceArray]] = {}  # address -> (number of bytes, their copy)
        self._starts: list[int] | None = None
        self._tables: OrderedDict[tuple[int, int], tuple[Table, DeviceArray]] = OrderedDict()
        self._mirrors: OrderedDict[tuple[int, int], Mirror] = OrderedDict()
        self._underway: list[tuple[Event, Bytes]] = []  # memory that is being copied and that nobody else keeps alive
        self._spares: list[Bytes] = []  # such memory that can be reused
        self._window: Bytes = np.zeros(0, np.uint8)
        #: What small arrays are cut from, and how many bytes of it are in use. An array keeps its slab alive.
        self._slab: Block | None = None
        self._slab_used = 0
        self._pinned_slab: Bytes = np.zeros(0, np.uint8)
        self._reading = threading.Lock()  # held while the window is in use

    def empty(self, size: int, dtype: Any) -> DeviceArray:
        """Returns a new array; contents undefined."""
        nbytes = size * np.dtype(dtype).itemsize
        if nbytes > _SMALL_NBYTES:
            block = self.device.allocate(nbytes)
            return DeviceArray(self, block.address, size, dtype, block)
        with self.lock:
            if self._slab is None or self._slab_used + nbytes > _SLAB_NBYTES:
                self._slab, self._slab_used = self.device.allocate(_SLAB_NBYTES), 0
            block, first = self._slab, self._slab_used
            self._slab_used += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return DeviceArray(self, block.address + first, size, dtype, block)

    def pinned_flag(self) -> Bytes:
        """Returns 4 bytes of page-locked memory; contents undefined."""
        with self.lock:
            if not self._pinned_slab.size:
                self._pinned_slab = self.device.pinned(_SMALL_NBYTES)
            flag, self._pinned_slab = self._pinned_slab[:4], self._pinned_slab[ALIGNMENT:]
        return flag

    def zeros(self, numel: int) -> Floats:
        array = self.empty(numel, np.float32)
        self.assign(array, 0)
        return cast(Floats, array)

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        # Pages of sparse memory that are never used take no memory.
        staging = sparse_bytes(max(nbytes, 1)) if headers_only else self.device.pinned(max(nbytes, 1))
        first = staging.__array_interface__["data"][0]
        with self.lock:
            self._staged[first] = nbytes, self.empty(nbytes, np.uint8)
            self._starts = None
        weakref.finalize(staging, self._forget, first).atexit = False
        return staging[:nbytes]

    def _forget(self, first: int) -> None:
        with self.lock:
            self._staged.pop(first, None)
            self._starts = None

    def changed(self, staging: Bytes) -> None:
        self.upload(staging)

    def wire(self, staging: Bytes) -> Bytes:
        return np.asarray(_Wire(self.twin(staging)))

    def unreachable(self, nbytes: int) -> Bytes:
        """Returns new memory of the device as an array that can be cut, but whose elements the host must not read."""
        return np.asarray(_Wire(self.empty(nbytes, np.uint8)))

    def host(self, array: Any) -> Any:
        if not isinstance(array, DeviceArray):
            return array
        copy = np.empty(array.size, array.dtype)
        flat = copy.view(np.uint8)
        with self._reading:
            if not self._window.size:
                self._window = self.device.pinned(_WINDOW_NBYTES)
            for first in range(0, flat.size, _WINDOW_NBYTES):
                part = flat[first : first + _WINDOW_NBYTES]
                with self.lock:
                    self.device.download(self._window[: part.size], array.address + first)
                self.wait()
                part[:] = self._window[: part.size]
        return copy

    def at(self, address: int, numel: int) -> Floats:
        return cast(Floats, DeviceArray(self, address, numel, np.float32, None))

    def wait(self, event: Event | None = None) -> None:
        """Waits until what is queued now, or before ``event``, is done. Raises HorovodInternalError after
        ``timeout_s``.
        """
        self.waits += 1
        if event is None:
            with self.lock:
                event = self.device.record()
        nap, end = 5e-6, time.monotonic() + (self.timeout_s or math.inf)
        while not event.is_over():
            if time.monotonic() > end:
                raise HorovodInternalError(
                    f"{self.device.name} has not done after {self.timeout_s:.0f} s what it was given to do, by ocomm "
                    "or by the framework, whose streams ocomm follows."
                )
            time.sleep(nap)
            nap = min(2 * nap, 1e-3)

    def assign(self, array: DeviceArray, value: Any) -> None:
        """Fills ``array`` with the elements of an array of the same size, or with zeros."""
        if not array.nbytes:
            return
        with self.lock:
            if isinstance(value, DeviceArray):
                assert value.nbytes == array.nbytes, "arrays of different sizes"
                self.device.copy(array.address, value.address, array.nbytes)
            elif isinstance(value, np.ndarray):
                memory = self.spare(array.nbytes)
                source = memory[: array.nbytes]
                source[:] = np.ascontiguousarray(value, array.dtype).reshape(-1).view(np.uint8)
                self.device.upload(array.address, source)
                self.give_back(memory, self.device.record())
            else:
                assert value == 0, "an array can be filled with zeros only"
                self.device.clear(array.address, array.nbytes)

    def spare(self, nbytes: int) -> Bytes:
        """Returns page-locked memory of at least ``nbytes`` bytes that is not in use, for ``give_back``."""
        underway, self._underway = self._underway, []
        for event, memory in underway:
            if not event.is_over():
                self._underway.append((event, memory))
            elif memory.size <= _SPARE_NBYTES and len(self._spares) < _SPARES:
                self._spares.append(memory)
        fitting = [k for k, memory in enumerate(self._spares) if nbytes <= memory.size <= 4 * nbytes]
        return self._spares.pop(fitting[0]) if fitting else self.device.pinned(nbytes)

    def give_back(self, spare: Bytes, event: Event) -> None:
        """Takes memory back that is not in use any more when ``event`` is over."""
        with self.lock:
            self._underway.append((event, spare))

    # Staging memory

    def twin(self, staging: Bytes) -> DeviceArray:
        """Returns the device's copy of staging memory. Raises ValueError for other memory."""
        address = staging.__array_interface__["data"][0]
        with self.lock:
            if self._starts is None:
                self._starts = sorted(self._staged)
            at = bisect.bisect_right(self._starts, address) - 1
            if at >= 0:
                first = self._starts[at]
                nbytes, copy = self._staged[first]
                if address + staging.nbytes <= first + nbytes:
                    return copy[address - first : address - first + staging.nbytes]
        raise ValueError(f"{staging.nbytes} bytes that are not staging memory of {self.device.name}")

    def upload(self, staging: Bytes) -> None:
        """Copies staging memory of the host to the device."""
        if staging.nbytes:
            with self.lock:
                self.device.upload(self.twin(staging).address, staging)

    # Tables

    def table(self, table: Any) -> DeviceArray:
        """Returns the device's copy of a table that never changes."""
        key = table.__array_interface__["data"][0], table.nbytes
        known = self._tables.get(key)
        if known is None:
            copy = self.empty(table.size, table.dtype)
            if table.size:
                self.assign(copy.view(np.uint8), table.view(np.uint8).reshape(-1))
            while len(self._tables) >= _REMEMBERED:
                self._tables.popitem(last=False)
            # The table is kept alive, so that no other table gets its address.
            known = self._tables[key] = table, copy
        self._tables.move_to_end(key)
        return known[1]

    def rows(self, table: Table) -> DeviceArray:
        """Returns the device's copy of a TENSOR table as it is now."""
        return self.mirror(table).current(self)

    def mirror(self, table: Table) -> Mirror:
        """Returns the mirror of a TENSOR table."""
        key = table.__array_interface__["data"][0], table.nbytes
        mirror = self._mirrors.get(key)
        if mirror is None:
            while len(self._mirrors) >= _REMEMBERED:
                self._mirrors.popitem(last=False)
            mirror = self._mirrors[key] = self.device.mirror(self, table)
        self._mirrors.move_to_end(key)
        return mirror


class Queue:
    """Queues loops, which take the same arguments as on the host.

    Arrays are the device's, or staging memory, whose copies are read and written; ``kernels.loops.KINDS`` says which.
    The result of a loop is in ``status``, one int32: nonzero if something was not finite since it was last cleared.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.status = memory.empty(1, np.int32)
        memory.assign(self.status, 0)
        self._loops = memory.device.loops(self.status)

    def prepare(self, loop: str) -> None:
        """Compiles the loop, so that it can be queued without delay. May take seconds."""
        self._loops.prepare(loop)

    def call(self, loop: str, *arguments: Any) -> None:
        """Queues one loop."""
        given = zip(LOOPS[loop].arguments, arguments, strict=True)
        with self._memory.lock:
            getattr(self._loops, loop)(*(self._there(KINDS[declared.kind], argument) for declared, argument in given))

    def arguments(self, loop: str, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns what the device gets for the arguments of later calls, and the mirrors that must be current then."""
        found, mirrors = [], []
        with self._memory.lock:
            for declared, argument in zip(LOOPS[loop].arguments, arguments, strict=True):
                kind = KINDS[declared.kind]
                if kind.device == "rows":
                    mirrors.append(self._memory.mirror(argument))
                found.append(mirrors[-1].copy if kind.device == "rows" else self._there(kind, argument))
        return found, mirrors

    def _there(self, kind: ArgumentKind, argument: Any) -> Any:
        """Returns what the device gets for an argument."""
        if kind.device == "table":
            return self._memory.table(argument)
        if kind.device == "rows":
            return self._memory.rows(argument)
        if kind.device == "twins":
            return [self._twin(message) for message in argument]
        return argument if kind.device == "itself" else self._twin(argument)

    def _twin(self, argument: Any) -> Any:
        return self._memory.twin(argument) if isinstance(argument, np.ndarray) else argument


class DeviceKernels:
    """``Kernels`` whose buffers are on a device. A loop without a result is queued, a loop with one waits.

    Addresses in TENSOR tables are device addresses.
    """

    def __init__(self, device: Device, timeout_s: float = 0.0) -> None:
        self.name = device.name
        self.memory = DeviceMemory(device, timeout_s)
        self._queue = Queue(self.memory)
        self._status = self.memory.device.pinned(4).view(np.int32)
        self._asking = threading.Lock()  # held while `_status` or one of the following is in use
        #: By loop and number of addresses: the addresses and sizes of the last sums, what was made of them, and what
        #: queues the loop.
        self._sums: dict[tuple[str, int], tuple[bytes, NDArray[np.int64], Any, Any, Any]] = {}

    def __getattr__(self, loop: str) -> Any:
        if loop not in LOOPS:
            raise AttributeError(loop)
        return functools.partial(self._answered if LOOPS[loop].reports else self._queue.call, loop)

    def _answered(self, loop: str, *arguments: Any) -> bool:
        memory, status = self.memory, self._queue.status
        with self._asking:
            with memory.lock:
                self._queue.call(loop, *arguments)
                memory.device.download(self._status.view(np.uint8), status.address)
                memory.assign(status, 0)
            memory.wait()
            return not self._status[0]

    def batch(self, loop: str, calls: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
        """Returns a function that queues a loop, which has no result, with each of these arguments, and keeps them."""
        memory = self.memory
        steps = [Step(Verb.LOOP, (loop, *arguments)) for arguments in calls]
        work = memory.device.work(Together(self._queue, steps, np.zeros(4, np.uint8), [], beside=False, awaited=False))

        def queue() -> None:
            if work is not None:
                work.queue(memory)
                return
            for arguments in calls:
                self._queue.call(loop, *arguments)

        return queue

    def checksum(self, data: Any, part: int = WHOLE) -> int:
        """Returns the checksum of a device array."""
        return int(self.checksums(np.array([data.address], np.uint64), np.array([data.nbytes]), part)[0])

    def checksums(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64], part: int = WHOLE
    ) -> NDArray[np.uint64]:
        """Returns the same numbers as on the host, for memory of the device. Waits. Whole buffers only."""
        assert part == WHOLE, "parts are not read on a device"
        return self.begin_checksums(addresses, nbytes).result()

    def begin_checksums(self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64]) -> Later:
        """Queues ``checksums``. The result is of the bytes that what is queued so far leaves there."""

        def complete(of: NDArray[np.int64], found: NDArray[np.uint64]) -> NDArray[np.uint64]:
            sums = nbytes.astype(np.uint64) * CHECKSUM_SPREAD
            np.add.at(sums, of, found)
            sums[addresses == 0] = 0
            return sums

        return self._begin_sums("sum_words", addresses, nbytes // 8, nbytes % 8, np.uint64, complete)

    def squares(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns sums of squares, added in another order than on the host. Waits."""
        return self._sums_of("sum_squares", addresses, numels, np.float64, _cut)

    def sums(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the same numbers as on the host, for memory of the device. Waits."""
        return self._sums_of("sum_floats", addresses, numels, np.float32, _cut_for_sums)

    def _sums_of(
        self,
        loop: str,
        addresses: NDArray[np.uint64],
        numels: NDArray[np.int64],
        dtype: Any,
        cut: Callable[..., tuple[Table, Any]],
    ) -> NDArray[np.float64]:
        """Returns the sum that a loop, whose sums are ``dtype``, computes of each buffer. Waits."""

        def complete(of: NDArray[np.int64], found: NDArray[Any]) -> NDArray[np.float64]:
            sums = np.zeros(addresses.size)
            np.add.at(sums, of, found)
            return sums

        return self._begin_sums(loop, addresses, numels, np.zeros_like(numels), dtype, complete, cut).result()

    def sketch(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
        """Returns the same numbers as on the host, for memory of the device. Waits."""

        def complete(_: Any, found: NDArray[np.float32]) -> NDArray[np.float64]:
            return found.reshape(-1, SKETCH).sum(0, np.float64)  # one chunk after the other

        seeds = np.full_like(numels, seed)
        return self._begin_sums("sum_buckets", addresses, numels, seeds, np.float32, complete, _chunks, SKETCH).result()

    def _begin_sums(
        self,
        loop: str,
        addresses: NDArray[np.uint64],
        counts: NDArray[np.int64],
        also: NDArray[np.int64],
        dtype: Any,
        complete: Callable[[Any, Any], Any],
        cut: Callable[..., tuple[Table, Any]] = _cut,
        width: int = 1,
    ) -> Later:
        """Queues sums over memory, ``width`` for each piece that ``cut`` makes. ``complete`` makes the result of the
        number of the address, and the sums, of each piece.
        """
        memory, key = self.memory, (loop, addresses.size)
        given = addresses.tobytes() + counts.tobytes() + also.tobytes()
        with self._asking, memory.lock:
            known, of, table, sums, queue = self._sums.get(key, (b"", np.zeros(0, np.int64), None, None, None))
            if known != given:
                pieces, of = cut(addresses, counts, also)
                if table is None or table.size != pieces.size:
                    if len(self._sums) == _SUMS:
                        self._sums.clear()
                    table, sums = memory.empty(pieces.size, PIECE), memory.empty(width * pieces.size, dtype)
                    queue = self.batch(loop, [(table, sums)])
                memory.assign(table.view(np.uint8), pieces.view(np.uint8))
                self._sums[key] = given, of, table, sums, queue
            queue()
            spare = memory.spare(max(sums.nbytes, 1))
            found = spare[: sums.nbytes]
            if found.size:
                memory.device.download(found, sums.address)
            event = memory.device.record()
        return Later(memory, spare, event, lambda: complete(of, found.view(dtype)))


class Later:
    """A result that is on its way from the device, to page-locked memory that is lent for it."""

    def __init__(self, memory: DeviceMemory, spare: Bytes, event: Event, complete: Callable[[], Any]) -> None:
        self._memory = memory
        self._spare = spare
        self._event: Event | None = event
        self._complete = complete
        self._result: Any = None

    def result(self) -> Any:
        """Returns the result. Waits if it is not there yet. Raises HorovodInternalError after the memory's
        ``timeout_s``.
        """
        if self._event is not None:
            if not self._event.is_over():
                self._memory.wait(self._event)
            self._result = self._complete()
            self.drop()
        return self._result

    def drop(self) -> None:
        """Gives the memory back, which may still be written to. There will be no result if there was none."""
        if self._event is not None:
            self._memory.give_back(self._spare, self._event)
        self._event = None


def _chunks(addresses: NDArray[np.uint64], counts: NDArray[np.int64], seeds: NDArray[np.int64]) -> tuple[Table, Any]:
    """Returns a PIECE table of the chunks of a sketch, and the address that each row belongs to."""
    pieces, of = pieces_of(addresses, counts, np.zeros_like(counts), SKETCHED)
    pieces["also"] = sketch_keys(seeds[of], of, pieces["first"])
    return pieces, of


def device_kernels(device: Device, timeout_s: float = 0.0) -> Kernels:
    """Returns kernels on a device, for which the host waits at most ``timeout_s`` seconds; 0: no limit."""
    return cast(Kernels, DeviceKernels(device, timeout_s))
