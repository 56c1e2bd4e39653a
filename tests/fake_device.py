"""A device without one: memory that the host cannot reach, and a stream that does nothing until it is asked.

Addresses on it are no addresses of this process, so whoever takes them for some ends the process. What is queued is
done one piece per question whether it is over, so what does not ask finds the bytes of before; and a buffer that the
device writes is garbage from the moment that this is queued. A network that reaches such memory needs real addresses:
then what the device has is out of nobody's reach, but still not there before its time.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ocomm.kernels import cpu_kernels, reference
from ocomm.kernels.base import PIECE, TENSOR, Bytes
from ocomm.kernels.device import DeviceArray, DeviceMemory, Together
from ocomm.types import DType

#: Added to an address of this process: no processor has addresses as high as that.
ELSEWHERE = 1 << 60
_GARBAGE = 0x5A
#: What stands for an address in tables.
_ADDRESSES = {TENSOR: ("grad", "param", "momentum"), PIECE: ("address",)}


@dataclass(eq=False)
class FakeBlock:
    memory: np.ndarray
    elsewhere: int

    @property
    def address(self) -> int:
        first = self.memory.__array_interface__["data"][0]
        return self.elsewhere + first + -first % 64


@dataclass
class FakeEvent:
    stream: FakeDevice | FakeStream
    number: int

    def is_over(self) -> bool:
        self.stream.advance(1)
        return self.stream.done >= self.number


class FakeStream:
    """A stream on which one thing begins when the one before it is over, and may wait for other ranks."""

    def __init__(self) -> None:
        self.handle = self
        self._queue: deque[Callable[[], bool]] = deque()
        self._queued = self.done = 0
        self._lock = threading.Lock()

    def queue(self, goes_on: Callable[[], bool]) -> None:
        """``goes_on()`` is asked until it says that it is over."""
        self._queue.append(goes_on)
        self._queued += 1

    def advance(self, count: int) -> None:
        with self._lock:
            if self._queue and self._queue[0]():
                self._queue.popleft()
                self.done += count

    def record(self) -> FakeEvent:
        return FakeEvent(self, self._queued)


class FakeLoops:
    """The host's loops over the device's memory. ``inner`` may be the CUDA kernels, in the simulator."""

    def __init__(self, device: FakeDevice, status: DeviceArray, inner: Any) -> None:
        self._device = device
        self._status = status
        self._inner = inner
        self._prepared: set[str] = set()

    def prepare(self, loop: str) -> None:
        assert threading.current_thread().name != "ocomm", "the engine's thread compiles"
        self._prepared.add(loop)

    def __getattr__(self, loop: str) -> Any:
        method = getattr(self._inner, loop, None) or getattr(reference, loop)

        def queue(*arguments: Any) -> None:
            ready = loop in self._prepared or threading.current_thread().name != "ocomm"
            assert ready, "the engine's thread compiles"

            def run() -> None:
                given, kept = [self._device.real(argument) for argument in arguments], []
                for table in given if self._inner.name != "cuda" else ():
                    if isinstance(table, np.ndarray) and table.dtype == TENSOR:
                        kept += self._device.widen(table, given[0])
                if method(*given) is False:
                    self._device.real(self._status)[0] = 1

            self._device.queue("launch", loop, run)

        return queue


class FakeMirror:
    """See ``kernels.device.Mirror``."""

    def __init__(self, memory: DeviceMemory, table: np.ndarray) -> None:
        self._table = table
        self.copy = memory.empty(table.size, table.dtype)
        self._sent: np.ndarray | None = None

    def current(self, memory: DeviceMemory) -> DeviceArray:
        now = self._table.view(np.uint8).reshape(-1).copy()
        if now.size and (self._sent is None or not np.array_equal(now, self._sent)):
            memory.device.upload(self.copy.address, now)
            self._sent = now
        return self.copy


@dataclass
class FakeDevice:
    """See ``kernels.device.Device``."""

    name: str = "fake:0"
    inner: Any = field(default_factory=cpu_kernels)
    #: What was queued, and when: (verb, what, seconds).
    log: list[tuple[str, str, float]] = field(default_factory=list)
    done: int = 0
    #: How often memory was made, on the device or page-locked.
    allocations: int = 0
    fails: bool = False
    #: Does the network reach its memory? Then addresses there are real.
    reached: bool = False
    make_room: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        #: What is added to an address of this process.
        self.elsewhere = 0 if self.reached else ELSEWHERE
        self.entered: set[str] = set()
        self.identity = self.name
        self._queue: deque[Callable[[], None]] = deque()
        self._blocks: weakref.WeakSet[FakeBlock] = weakref.WeakSet()
        self._queued = 0
        self._lock = threading.RLock()

    @property
    def counts(self) -> Counter[str]:
        return Counter(verb for verb, _, _ in self.log)

    def queue(self, verb: str, what: str, run: Callable[[], None]) -> None:
        with self._lock:
            if self.fails:
                raise RuntimeError("the device has fallen off the bus")
            self.log.append((verb, what, time.monotonic()))
            self._queue.append(run)
            self._queued += 1

    def advance(self, count: int) -> None:
        with self._lock:
            while count and self._queue:
                self.done += 1
                count -= 1
                self._queue.popleft()()

    def real(self, argument: Any) -> Any:
        """An argument of a loop as the device sees it."""
        if isinstance(argument, list):
            return [self.real(part) for part in argument]
        if not isinstance(argument, DeviceArray):
            return argument
        found = self.bytes(argument.address, argument.nbytes).view(argument.dtype)
        if argument.dtype in _ADDRESSES:
            found = found.copy()
            for column in _ADDRESSES[argument.dtype]:
                found[column] %= ELSEWHERE
        return found

    def widen(self, table: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Gives gradients of 16 bits, as far as ``rows`` read them, as float32 to loops that know no others."""
        kept = []
        for row in np.flatnonzero(table["grad_dtype"] * (table["grad"] != 0)).tolist():
            own = rows[rows["tensor"] == row]
            low = self.bytes(int(table["grad"][row]), 2 * int((own["start"] + own["length"]).max(initial=0)))
            if table["grad_dtype"][row] == DType.FLOAT16:
                kept.append(low.view(np.float16).astype(np.float32))
            else:
                kept.append((low.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
            table["grad"][row] = kept[-1].__array_interface__["data"][0]
        return kept

    @staticmethod
    def bytes(address: int, nbytes: int) -> np.ndarray:
        if not nbytes:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address % ELSEWHERE))

    # kernels.device.Device

    def allocate(self, nbytes: int) -> FakeBlock:
        self.allocations += 1
        block = FakeBlock(np.empty(nbytes + 64, np.uint8), self.elsewhere)
        self.bytes(block.address, nbytes)[:] = _GARBAGE
        self._blocks.add(block)
        weakref.finalize(block, self._outlive, block.memory).atexit = False
        return block

    def _outlive(self, memory: np.ndarray) -> None:
        """What is queued may still write to it: a driver waits before it frees."""
        with self._lock:
            self._queue.append(lambda: memory[:0].fill(0))
            self._queued += 1

    def has(self, array: np.ndarray) -> bool:
        """Does it lie in this device's memory?"""
        first = array.__array_interface__["data"][0]
        return any(b.address <= first and first + array.nbytes <= b.address + b.memory.nbytes for b in self._blocks)

    def pinned(self, nbytes: int) -> Bytes:
        self.allocations += 1
        return np.full(nbytes, _GARBAGE, np.uint8)

    def upload(self, to: int, source: Bytes) -> None:
        def run() -> None:
            self.bytes(to, source.nbytes)[:] = source

        self.queue("upload", str(source.nbytes), run)

    def download(self, to: Bytes, source: int) -> None:
        def run() -> None:
            to[:] = self.bytes(source, to.nbytes)

        to[:] = _GARBAGE
        self.queue("download", str(to.nbytes), run)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        def run() -> None:
            self.bytes(to, nbytes)[:] = self.bytes(source, nbytes)

        self.queue("copy", str(nbytes), run)

    def clear(self, to: int, nbytes: int) -> None:
        def run() -> None:
            self.bytes(to, nbytes)[:] = 0

        self.queue("clear", str(nbytes), run)

    def record(self) -> FakeEvent:
        with self._lock:
            return FakeEvent(self, self._queued)

    def stream(self) -> FakeStream:
        return FakeStream()

    def mirror(self, memory: DeviceMemory, table: np.ndarray) -> FakeMirror:
        return FakeMirror(memory, table)

    def work(self, together: Together) -> None:
        """Python queues everything."""

    def loops(self, status: DeviceArray) -> FakeLoops:
        return FakeLoops(self, status, self.inner)

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def follow(self, stream: int) -> None:
        """Torch's work on tensors of the host is over when its calls return."""
        self.log.append(("follow", str(stream), time.monotonic()))

    def precede(self, stream: int) -> None:
        self.advance(len(self._queue))
