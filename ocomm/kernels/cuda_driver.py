"""A CUDA device as its driver and ``native/device.c`` have it: context, streams, events and memory.

Calls of the driver need the device's context in the calling thread. Each call sets it and restores the old one, so that
threads of the framework keep theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver

from ocomm._native import ffi, lib
from ocomm.errors import HorovodInternalError
from ocomm.kernels.base import Bytes
from ocomm.kernels.cuda import function_of
from ocomm.kernels.cuda_kernels import SHARED_NBYTES
from ocomm.kernels.cuda_words import THREADS

#: Mode of a thread whose calls do not affect CUDA graphs that other threads capture.
OF_THIS_THREAD = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#: Mode of a thread whose calls do not affect CUDA graphs that it captures itself either.
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

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


def checked(answer: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call. Raises HorovodInternalError with the driver's words."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        _, words = driver.cuGetErrorString(code)
        said = words.decode() if isinstance(words, bytes) else str(words)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"CUDA: {said}")
        raise HorovodInternalError(f"CUDA error {int(code)}: {said}")
    return values[0] if values else None


def check_code(code: int) -> None:
    """Raises HorovodInternalError with the driver's words if a call of C's has failed."""
    if not code:
        return
    try:
        result = driver.CUresult(code)
    except ValueError:  # of a driver that is newer than cuda.bindings
        raise HorovodInternalError(f"CUDA error {code}") from None
    checked((result,))


def pointer(address: int) -> Any:
    """Returns an address for C."""
    return ffi.cast("void *", address)


class CudaContext:
    """The context of CUDA device ``number`` in this process, and the two streams on which ocomm queues everything."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self.owner = os.getpid()
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(number))
        self.identity = bytes(checked(driver.cuDeviceGetUuid(device)).bytes).hex()
        self.handle = checked(driver.cuDevicePrimaryCtxRetain(device))
        self.idle_events: list[Any] = []
        self.first, self.second = self.new_stream(), self.new_stream()
        self.native = _native(*map(int, (self.handle, self.first, self.second, self.new_event())))
        #: Handles of the kernels, by name.
        self._functions: dict[str, int] = {}

    def new_stream(self) -> Any:
        with self.current():
            return checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this context current in the calling thread, which Torch and numba use, too."""
        checked(driver.cuCtxPushCurrent(self.handle))
        try:
            yield
        finally:
            checked(driver.cuCtxPopCurrent())

    def pinned(self, nbytes: int) -> Bytes:
        return np.asarray(_Pinned(self, nbytes))

    def new_event(self) -> Any:
        """Returns a driver's event that nothing waits for."""
        with contextlib.suppress(IndexError):
            return self.idle_events.pop()
        with self.current():
            return checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def recorded(self, stream: Any) -> CudaEvent:
        """Returns an event at the current end of a stream."""
        with self.current():
            event = self.new_event()
            checked(driver.cuEventRecord(event, stream))
        return CudaEvent(self, event)

    def order(self, first: Any, second: Any) -> None:
        """Makes what is queued on the stream ``second`` from now on run after what is queued on ``first`` so far."""
        check_code(lib.ocomm_device_order(self.native, pointer(int(first)), pointer(int(second))))

    def function(self, kernel: str) -> int:
        """Returns the handle of a kernel, which is compiled if that has not been done."""
        if kernel not in self._functions:
            with self.current():
                self._functions[kernel] = function_of(kernel)
        return self._functions[kernel]


def _native(context: int, first: int, second: int, turn: int) -> Any:
    """Returns the ``ocomm_device`` of a context, its two streams and an event of its own."""
    library = ctypes.CDLL("libcuda.so.1")  # which cuda.bindings has loaded
    calls = ffi.new("ocomm_driver *")
    for name, function in _FUNCTIONS.items():
        setattr(calls, name, pointer(ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0))
    calls.context, calls.stream, calls.second, calls.turn = map(pointer, (context, first, second, turn))
    calls.threads, calls.shared_nbytes = THREADS, SHARED_NBYTES
    device = lib.ocomm_device_new(calls)
    if device == ffi.NULL:
        raise MemoryError("no memory for a device")
    return ffi.gc(device, lib.ocomm_device_free)


class CudaBlock:
    """The ``kernels.device.Block`` of a CUDA device."""

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        with context.current(), _beside_captures(), _named(f"{nbytes} bytes on {context.name}"):
            allocated = checked(driver.cuMemAlloc(nbytes))
        self.address = int(allocated)
        weakref.finalize(self, _freed, context, driver.cuMemFree, allocated).atexit = False


class _Pinned:
    """Page-locked memory of the host, with the array interface that keeps it alive."""

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        what = f"{nbytes} bytes of the host, page-locked for {context.name}"
        with context.current(), _beside_captures(), _named(what):
            address = int(checked(driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE)))
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, _freed, context, driver.cuMemFreeHost, address).atexit = False


def _freed(context: CudaContext, free: Any, allocated: Any) -> None:
    # A forked child has these objects without the device. On a device that has failed nothing can be freed.
    if os.getpid() == context.owner:
        with contextlib.suppress(HorovodInternalError), context.current(), _beside_captures():
            free(allocated)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Lets this thread make and free memory while a thread captures a CUDA graph, as torch.cuda.graph does: in the
    usual mode the call would fail, and the graph would be invalid. Memory may be freed in the thread that captures,
    when the garbage collector runs there, so the mode is the relaxed one.
    """
    mode = checked(driver.cuThreadExchangeStreamCaptureMode(_RELAXED))
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(mode))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Adds to a MemoryError what it was that there is no memory for."""
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"{error}: no {what}") from None


class CudaEvent:
    """The ``kernels.device.Event`` of a CUDA device. The driver's event is reused for later ones."""

    def __init__(self, context: CudaContext, event: Any) -> None:
        self._context = context
        self._event = event

    def is_over(self) -> bool:
        if self._event is None:
            return True
        with self._context.current():
            # Else the graph that another thread may be capturing, as torch.cuda.graph does, would be invalid.
            mode = checked(driver.cuThreadExchangeStreamCaptureMode(OF_THIS_THREAD))
            (code,) = driver.cuEventQuery(self._event)
            checked(driver.cuThreadExchangeStreamCaptureMode(mode))
        if code == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked((code,))
        self._context.idle_events.append(self._event)
        self._event = None
        return True
