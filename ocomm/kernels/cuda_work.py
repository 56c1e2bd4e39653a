"""Work that ``native/device.c`` queues on a CUDA device for the engine's thread, without Python and its GIL."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ocomm._native import ffi, lib
from ocomm.kernels.base import Table
from ocomm.kernels.cuda import CudaKernels, Launch
from ocomm.kernels.cuda_driver import CudaContext, check_code, pointer
from ocomm.kernels.device import DeviceArray, DeviceMemory, Queue, Step, Together, Verb


def launch(context: CudaContext, launched: Launch) -> None:
    """Queues a launch on the device's first stream."""
    parameters = _parameters(launched)
    given = ffi.from_buffer("int64_t[]", parameters)
    function = pointer(context.function(launched.kernel))
    check_code(
        lib.ocomm_device_launch(context.native, function, launched.thread_blocks, given, len(launched.parameters))
    )


class CudaMirror:
    """The ``kernels.device.Mirror`` of a CUDA device."""

    def __init__(self, context: CudaContext, memory: DeviceMemory, table: Table) -> None:
        nbytes = table.nbytes
        self.copy = memory.empty(table.size, table.dtype)
        self._context = context
        self._keeps = table, np.zeros(max(nbytes, 1), np.uint8), context.pinned(lib.OCOMM_MIRROR_SLOTS * max(nbytes, 1))
        events = [context.new_event() for _ in range(lib.OCOMM_MIRROR_SLOTS)]
        weakref.finalize(self, context.idle_events.extend, events).atexit = False
        row = self.row = ffi.new("ocomm_mirror *")
        row.table = pointer(_address(table))
        row.copy, row.nbytes = self.copy.address, nbytes
        row.sent, row.slots = (ffi.cast("uint8_t *", _address(array)) for array in self._keeps[1:])
        for k, event in enumerate(events):
            row.events[k] = pointer(int(event))

    def current(self, memory: DeviceMemory) -> DeviceArray:
        if not self.is_over():
            memory.wait(self)
        return self.copy

    def is_over(self) -> bool:
        """Returns True if the copy of the table as it is now is queued; False if all slots are under way."""
        answer = lib.ocomm_mirror_send(self._context.native, self.row)
        check_code(-min(answer, 0))
        return answer == 0


class CudaWork:
    """The ``kernels.device.Work`` of a CUDA device. Compiles what it launches."""

    def __init__(self, context: CudaContext, together: Together) -> None:
        flags = together.flags
        self._context = context
        #: What the operations have addresses of.
        self._keeps: list[Any] = [together]
        self._ops: list[tuple[Any, ...]] = []
        for step in together.steps:
            self._add(together.queue, step)
        event = context.new_event()
        # Whoever records it next needs not wait for what it has recorded here.
        weakref.finalize(self, context.idle_events.append, event).atexit = False
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
            context.native, table, len(self._ops), pointers, len(flags),
        )  # fmt: skip
        row.beside, row.awaited, row.event = together.beside, together.awaited, pointer(int(event))
        row.status = ffi.cast("int32_t *", _address(together.status))
        if together.beside:
            context.order(context.first, context.second)  # what compiling has copied to the device

    @property
    def task(self) -> tuple[int, int]:
        address_of = ffi.addressof(lib, "ocomm_device_run")
        return int(ffi.cast("intptr_t", address_of)), int(ffi.cast("intptr_t", self.row))

    @property
    def failure(self) -> BaseException | None:
        try:
            check_code(self.row.error)
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
        check_code(self.row.error)
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
            launched = CudaKernels(status=queue.status).launch_of(loop, *there)
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
            (lib.OCOMM_LAUNCH, self._context.function(launched.kernel), launched.thread_blocks,
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


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
