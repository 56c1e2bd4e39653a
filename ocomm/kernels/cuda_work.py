"""Work that ``native/device.c`` queues on a CUDA device for the engine's thread, without Python and its GIL."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from ocomm._native import ffi, lib
from ocomm.kernels.base import Table
from ocomm.kernels.cuda import Launch
from ocomm.kernels.cuda_kernels import SHARED_NBYTES
from ocomm.kernels.cuda_words import THREADS
from ocomm.kernels.device import DeviceArray, DeviceMemory, Queue, Step, Together, Verb

if TYPE_CHECKING:
    from ocomm.kernels.cuda_device import CudaDevice

#: The driver's functions that C calls, by their names in ``ocomm_driver``.
_FUNCTIONS = {
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "exchange_mode": "cuThreadExchangeStreamCaptureMode",
    "upload": "cuMemcpyHtoDAsync_v2",
    "download": "cuMemcpyDtoHAsync_v2",
    "clear": "cuMemsetD8Async",
    "launch": "cuLaunchKernel",
    "record": "cuEventRecord",
    "query": "cuEventQuery",
    "wait": "cuStreamWaitEvent",
}


def native_device(context: int, stream: int, second: int, turn: int) -> Any:
    """Returns the ``ocomm_device`` of a context, its two streams and an event of its own."""
    library = ctypes.CDLL("libcuda.so.1")  # which cuda.bindings has loaded
    driver = ffi.new("ocomm_driver *")
    for name, function in _FUNCTIONS.items():
        setattr(driver, name, _pointer(ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0))
    driver.context, driver.stream, driver.second, driver.turn = map(_pointer, (context, stream, second, turn))
    driver.threads, driver.shared_nbytes = THREADS, SHARED_NBYTES
    device = lib.ocomm_device_new(driver)
    if device == ffi.NULL:
        raise MemoryError("no memory for a device")
    return ffi.gc(device, lib.ocomm_device_free)


def launch(device: CudaDevice, launched: Launch) -> None:
    """Queues a launch on the device's first stream."""
    parameters = _parameters(launched)
    given = ffi.from_buffer("int64_t[]", parameters)
    function = _pointer(device.function(launched.kernel))
    device.check(
        lib.ocomm_device_launch(device.native, function, launched.thread_blocks, given, len(launched.parameters))
    )


def order(device: CudaDevice, first: int, second: int) -> None:
    """Makes what is queued on the stream ``second`` from now on run after what is queued on ``first`` so far."""
    device.check(lib.ocomm_device_order(device.native, _pointer(first), _pointer(second)))


class CudaMirror:
    """The ``kernels.device.Mirror`` of a CUDA device."""

    def __init__(self, device: CudaDevice, memory: DeviceMemory, table: Table) -> None:
        nbytes = table.nbytes
        self.copy = memory.empty(table.size, table.dtype)
        self._device = device
        self._keeps = table, np.zeros(max(nbytes, 1), np.uint8), device.pinned(lib.OCOMM_MIRROR_SLOTS * max(nbytes, 1))
        events = [device.new_event() for _ in range(lib.OCOMM_MIRROR_SLOTS)]
        weakref.finalize(self, device.idle_events.extend, events).atexit = False
        row = self.row = ffi.new("ocomm_mirror *")
        row.table = _pointer(_address(table))
        row.copy, row.nbytes = self.copy.address, nbytes
        row.sent, row.slots = (ffi.cast("uint8_t *", _address(array)) for array in self._keeps[1:])
        for k, event in enumerate(events):
            row.events[k] = _pointer(int(event))

    def current(self, memory: DeviceMemory) -> DeviceArray:
        if not self.is_over():
            memory.wait(self)
        return self.copy

    def is_over(self) -> bool:
        """Returns True if the copy of the table as it is now is queued; False if all slots are under way."""
        answer = lib.ocomm_mirror_send(self._device.native, self.row)
        self._device.check(-min(answer, 0))
        return answer == 0


class CudaWork:
    """The ``kernels.device.Work`` of a CUDA device. Compiles what it launches."""

    def __init__(self, device: CudaDevice, together: Together) -> None:
        flags = together.flags
        self._device = device
        #: What the operations have addresses of.
        self._keeps: list[Any] = [together]
        self._ops: list[tuple[Any, ...]] = []
        for step in together.steps:
            self._add(together.queue, step)
        event = device.new_event()
        # Whoever records it next needs not wait for what it has recorded here.
        weakref.finalize(self, device.idle_events.append, event).atexit = False
        table = ffi.new("ocomm_device_op[]", max(len(self._ops), 1))
        for row, op in zip(table, self._ops, strict=False):
            row.code, row.to, row.noise_at = op[0], op[1], op[4]
            setattr(row, "from", op[2])
            row.number, row.parameters, row.noise = op[3], op[5], op[6]
        pointers = ffi.new("uint32_t *[]", max(len(flags), 1))
        for k, each in enumerate(flags):
            pointers[k] = ffi.cast("uint32_t *", _address(each))
        self._keeps += [table, pointers]
        row = self.row = ffi.new("ocomm_device_work *")
        row.device, row.ops, row.count, row.flags, row.flag_count = (
            device.native, table, len(self._ops), pointers, len(flags),
        )  # fmt: skip
        row.beside, row.awaited, row.event = together.beside, together.awaited, _pointer(int(event))
        row.status = ffi.cast("int32_t *", _address(together.status))
        if together.beside:
            device.second_follows()  # what compiling has copied to the device

    @property
    def task(self) -> tuple[int, int]:
        address_of = ffi.addressof(lib, "ocomm_device_run")
        return int(ffi.cast("intptr_t", address_of)), int(ffi.cast("intptr_t", self.row))

    @property
    def failure(self) -> BaseException | None:
        try:
            self._device.check(self.row.error)
        except Exception as error:
            return error
        return None

    def queue(self, memory: DeviceMemory) -> None:
        assert not self.row.awaited
        with memory.lock:
            lib.ocomm_device_run(self.row, 1)
            if not self.is_over():
                memory.wait(self)

    def is_over(self) -> bool:
        """Returns True if all is queued; tries to, where tables must wait for their slots."""
        if not self.row.is_queued and not self.row.error:
            lib.ocomm_device_run(self.row, 0)
        self._device.check(self.row.error)
        return bool(self.row.is_queued)

    def _add(self, queue: Queue | None, step: Step) -> None:
        nothing = 0, ffi.NULL, ffi.NULL
        if step.verb in (Verb.UPLOAD, Verb.DOWNLOAD):
            part, there = step.arguments
            if step.verb == Verb.UPLOAD:
                self._ops.append((lib.OCOMM_UPLOAD, there.address, _address(part), part.nbytes, *nothing))
            else:
                self._ops.append((lib.OCOMM_DOWNLOAD, _address(part), there.address, part.nbytes, *nothing))
            self._keeps.append(there)
        elif step.verb == Verb.CLEAR:
            (there,) = step.arguments
            self._ops.append((lib.OCOMM_CLEAR, there.address, 0, there.nbytes, *nothing))
            self._keeps.append(there)
        else:
            assert queue is not None and step.verb == Verb.LOOP
            loop, *arguments = step.arguments
            there, mirrors = queue.arguments(loop, arguments)
            launched = self._device.launch_of(queue.status, loop, there)
            self._keeps += [there, mirrors, launched]
            if launched is not None:
                self._ops += [(lib.OCOMM_MIRROR, 0, int(ffi.cast("intptr_t", m.row)), 0, *nothing) for m in mirrors]
                self._launch(launched)

    def _launch(self, launched: Launch) -> None:
        parameters = _parameters(launched)
        row, at = launched.noise or (None, 0)
        noise = ffi.NULL if row is None else ffi.cast("ocomm_noise *", _address(row))
        self._keeps.append(parameters)
        self._ops.append(
            (lib.OCOMM_LAUNCH, self._device.function(launched.kernel), launched.thread_blocks,
             len(launched.parameters), at, ffi.cast("int64_t *", _address(parameters)), noise)
        )  # fmt: skip


def _parameters(launched: Launch) -> np.ndarray:
    assert len(launched.parameters) <= lib.OCOMM_PARAMETERS
    found = np.zeros(len(launched.parameters), np.int64)
    floats = found.view(np.float32)
    for k, value in enumerate(launched.parameters):
        if isinstance(value, np.float32):
            floats[2 * k] = value
        else:
            found[k] = value
    return found


def _pointer(address: int) -> Any:
    return ffi.cast("void *", address)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
