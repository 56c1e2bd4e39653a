"""A device without memory, for counting what plans of large models would allocate and launch on one."""

from __future__ import annotations

from typing import Any

from ocomm.kernels.base import Bytes, Table, sparse_bytes
from ocomm.kernels.device import DeviceArray, DeviceMemory, Together, Verb

#: No address of this process.
_FIRST = 1 << 60


class CountingBlock:
    def __init__(self, address: int) -> None:
        self.address = address


class CountingEvent:
    def is_over(self) -> bool:
        return True


class CountingMirror:
    """See ``kernels.device.Mirror``."""

    def __init__(self, memory: DeviceMemory, table: Table) -> None:
        self.copy = memory.empty(table.size, table.dtype)

    def current(self, memory: DeviceMemory) -> DeviceArray:
        return self.copy


class CountingWork:
    """See ``kernels.device.Work``."""

    task = 0, 0
    failure: BaseException | None = None

    def __init__(self, together: Together) -> None:
        self.together = together

    def queue(self, memory: DeviceMemory) -> None:
        """Does nothing."""


class CountingDevice:
    """See ``kernels.device.Device``. Queues nothing; page-locked memory takes none until it is written."""

    name = identity = "counting:0"
    make_room = None

    def __init__(self) -> None:
        #: Bytes that were allocated on the device and page-locked, and how often memory was made.
        self.nbytes = self.pinned_nbytes = 0
        self.allocations = 0
        #: What was made for engines.
        self.works: list[CountingWork] = []

    def launches(self) -> int:
        """Returns the number of launches of all work."""
        return sum(step.verb == Verb.LOOP for work in self.works for step in work.together.steps)

    def copied(self, verb: Verb) -> int:
        """Returns the bytes of staging memory that all work copies, ``UPLOAD`` or ``DOWNLOAD``."""
        steps = (step for work in self.works for step in work.together.steps if step.verb == verb)
        return sum(step.arguments[0].nbytes for step in steps)

    def allocate(self, nbytes: int) -> CountingBlock:
        self.allocations += 1
        address = _FIRST + self.nbytes
        self.nbytes += -(-nbytes // 64) * 64
        return CountingBlock(address)

    def pinned(self, nbytes: int) -> Bytes:
        self.allocations += 1
        self.pinned_nbytes += nbytes
        return sparse_bytes(nbytes)

    def work(self, together: Together) -> CountingWork:
        for step in together.steps:
            if step.verb == Verb.LOOP:
                assert together.queue is not None
                together.queue.arguments(*step.arguments[:1], step.arguments[1:])
        self.works.append(CountingWork(together))
        return self.works[-1]

    def mirror(self, memory: DeviceMemory, table: Table) -> CountingMirror:
        return CountingMirror(memory, table)

    def record(self) -> CountingEvent:
        return CountingEvent()

    def loops(self, status: DeviceArray) -> Any:
        return self

    def prepare(self, loop: str) -> None:
        """Compiles nothing."""

    def upload(self, to: int, source: Bytes) -> None:
        """Copies nothing."""

    def download(self, to: Bytes, source: int) -> None:
        """Copies nothing."""

    def clear(self, to: int, nbytes: int) -> None:
        """Clears nothing."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copies nothing."""
