"""A CUDA device for ``kernels.device``: memory, copies and events through the driver, launches through numba.

Calls of the driver need the device's context in the calling thread. Each call sets it and restores the old one, so that
threads of the framework keep theirs.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np
from cuda.bindings import driver

from ocomm._native import lib
from ocomm.errors import HorovodInternalError
from ocomm.kernels.base import Bytes, Table
from ocomm.kernels.cuda import CudaKernels, Launch, function_of, require_compiler
from ocomm.kernels.cuda_work import CudaMirror, CudaWork, launch, native_device, order
from ocomm.kernels.device import DeviceArray, DeviceMemory, Together

#: Packages of the compiler, for CUDA 12 or 13.
_COMPILER = (
    "numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12",
)  # fmt: skip
#: Mode of a thread whose calls do not affect CUDA graphs that other threads capture.
_OF_THIS_THREAD = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#: Mode of a thread whose calls do not affect CUDA graphs that it captures itself either.
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def _check(answer: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call. Raises HorovodInternalError with the driver's words."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        _, words = driver.cuGetErrorString(code)
        said = words.decode() if isinstance(words, bytes) else str(words)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"CUDA: {said}")
        raise HorovodInternalError(f"CUDA error {int(code)}: {said}")
    return values[0] if values else None


class CudaBlock:
    """The ``kernels.device.Block`` of a CUDA device."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        with device.current(), _beside_captures(), _named(f"{nbytes} bytes on {device.name}"):
            pointer = _check(driver.cuMemAlloc(nbytes))
        self.address = int(pointer)
        weakref.finalize(self, _freed, device, driver.cuMemFree, pointer).atexit = False


class _Pinned:
    """Page-locked memory of the host, with the array interface that keeps it alive."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        what = f"{nbytes} bytes of the host, page-locked for {device.name}"
        with device.current(), _beside_captures(), _named(what):
            address = int(_check(driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE)))
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, _freed, device, driver.cuMemFreeHost, address).atexit = False


def _freed(device: CudaDevice, free: Any, pointer: Any) -> None:
    # A forked child has these objects without the device. On a device that has failed nothing can be freed.
    if os.getpid() == device.owner:
        with contextlib.suppress(HorovodInternalError), device.current(), _beside_captures():
            free(pointer)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Lets this thread make and free memory while a thread captures a CUDA graph, as torch.cuda.graph does: in the
    usual mode the call would fail, and the graph would be invalid. Memory may be freed in the thread that captures,
    when the garbage collector runs there, so the mode is the relaxed one.
    """
    mode = _check(driver.cuThreadExchangeStreamCaptureMode(_RELAXED))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(mode))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Adds to a MemoryError what it was that there is no memory for."""
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"{error}: no {what}") from None


class CudaEvent:
    """The ``kernels.device.Event`` of a CUDA device. The driver's event is reused for later ones."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device = device
        self._event = event

    def is_over(self) -> bool:
        if self._event is None:
            return True
        with self._device.current():
            # Else the graph that another thread may be capturing, as torch.cuda.graph does, would be invalid.
            mode = _check(driver.cuThreadExchangeStreamCaptureMode(_OF_THIS_THREAD))
            (code,) = driver.cuEventQuery(self._event)
            _check(driver.cuThreadExchangeStreamCaptureMode(mode))
        if code == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check((code,))
        self._device.idle_events.append(self._event)
        self._event = None
        return True


class CudaStream:
    """The ``kernels.device.Stream`` of a CUDA device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = device.new_stream()
        self.handle = int(self._stream)

    def record(self) -> CudaEvent:
        return self._device.recorded(self._stream)


class CudaDevice:
    """The ``kernels.device.Device`` of CUDA device ``number`` of this process."""

    def __init__(self, number: int) -> None:
        self.name = f"cuda:{number}"
        self.owner = os.getpid()
        _check(driver.cuInit(0))
        device = _check(driver.cuDeviceGet(number))
        self.identity = bytes(_check(driver.cuDeviceGetUuid(device)).bytes).hex()
        self._context = _check(driver.cuDevicePrimaryCtxRetain(device))
        self.idle_events: list[Any] = []
        self.make_room: Callable[[], None] | None = None
        self._stream, self._second = self.new_stream(), self.new_stream()
        context, streams, turn = int(self._context), (int(self._stream), int(self._second)), int(self.new_event())
        self.native = native_device(context, *streams, turn)
        #: Handles of the kernels, by name.
        self._functions: dict[str, int] = {}

    def new_stream(self) -> Any:
        with self.current():
            return _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this device's context current in the calling thread, which Torch and numba use, too."""
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _check(driver.cuCtxPopCurrent())

    def allocate(self, nbytes: int) -> CudaBlock:
        try:
            return CudaBlock(self, nbytes)
        except MemoryError:
            if self.make_room is None:
                raise
        self.make_room()
        return CudaBlock(self, nbytes)

    def pinned(self, nbytes: int) -> Bytes:
        return np.asarray(_Pinned(self, nbytes))

    def upload(self, to: int, source: Bytes) -> None:
        with self.current():
            first = source.__array_interface__["data"][0]
            _check(driver.cuMemcpyHtoDAsync(to, first, source.nbytes, self._stream))

    def download(self, to: Bytes, source: int) -> None:
        with self.current():
            first = to.__array_interface__["data"][0]
            _check(driver.cuMemcpyDtoHAsync(first, source, to.nbytes, self._stream))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        with self.current():
            _check(driver.cuMemcpyDtoDAsync(to, source, nbytes, self._stream))

    def clear(self, to: int, nbytes: int) -> None:
        with self.current():
            _check(driver.cuMemsetD8Async(to, 0, nbytes, self._stream))

    def record(self) -> CudaEvent:
        return self.recorded(self._stream)

    def recorded(self, stream: Any) -> CudaEvent:
        """Returns an event at the current end of a stream."""
        with self.current():
            event = self.new_event()
            _check(driver.cuEventRecord(event, stream))
        return CudaEvent(self, event)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def new_event(self) -> Any:
        """Returns a driver's event that nothing waits for."""
        with contextlib.suppress(IndexError):
            return self.idle_events.pop()
        with self.current():
            return _check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    @staticmethod
    def check(code: int) -> None:
        """Raises HorovodInternalError with the driver's words if a call of C's has failed."""
        if not code:
            return
        try:
            result = driver.CUresult(code)
        except ValueError:  # of a driver that is newer than cuda.bindings
            raise HorovodInternalError(f"CUDA error {code}") from None
        _check((result,))

    def function(self, kernel: str) -> int:
        """Returns the handle of a kernel, which is compiled if that has not been done."""
        if kernel not in self._functions:
            with self.current():
                self._functions[kernel] = function_of(kernel)
        return self._functions[kernel]

    def launch_of(self, status: DeviceArray, loop: str, arguments: Sequence[Any]) -> Launch | None:
        """Returns what a loop launches that reports to ``status``."""
        return CudaKernels(status=status).launch_of(loop, *arguments)

    def mirror(self, memory: DeviceMemory, table: Table) -> CudaMirror:
        return CudaMirror(self, memory, table)

    def work(self, together: Together) -> CudaWork:
        return CudaWork(self, together)

    def calls(self) -> dict[str, int]:
        """Returns how often C has copied, and asked whether an event is over."""
        counted = lib.ocomm_device_counts(self.native)
        return {"copies": counted.copies, "asks": counted.asks}

    def second_follows(self) -> None:
        """Makes what is queued on the second stream from now on run after what is queued on the first so far."""
        order(self, int(self._stream), int(self._second))

    def require_kernels(self) -> None:
        """Raises ImportError, with the versions installed, if kernels cannot be compiled and loaded. May take seconds
        the first time.
        """
        require_compiler()
        try:
            with self.current():
                self.function("scatter")  # a short kernel
        except Exception as error:  # NVVM, nvJitLink, numba-cuda, cuda.core and the driver have classes of their own
            major, minor = divmod(_check(driver.cuDriverGetVersion()) // 10, 100)
            said = " ".join(str(error).replace("\0", " ").split())
            raise ImportError(
                f"kernels cannot be compiled for {self.name} ({type(error).__name__}: {said}); NVVM must not be newer "
                f"than nvJitLink, nor of a later CUDA than the driver, which is for {major}.{minor}, and there are "
                f"{', '.join(_installed(_COMPILER))}"
            ) from error

    def loops(self, status: DeviceArray) -> _Loops:
        self.require_kernels()  # fails now, with a clear message, instead of in the first step
        return _Loops(self, CudaKernels(status=status))

    def enter(self) -> None:
        _check(driver.cuCtxSetCurrent(self._context))
        _check(driver.cuThreadExchangeStreamCaptureMode(_OF_THIS_THREAD))

    def follow(self, stream: int) -> None:
        order(self, _framework(stream), int(self._stream))

    def precede(self, stream: int) -> None:
        order(self, int(self._stream), _framework(stream))


def _installed(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _framework(stream: int) -> int:
    """Returns a framework's stream. 0 is the legacy default stream, whatever the driver's library takes it for."""
    return stream or int(driver.CU_STREAM_LEGACY)


class _Loops:
    """The loops, launched in the device's context on its first stream."""

    def __init__(self, device: CudaDevice, kernels: CudaKernels) -> None:
        self._device = device
        self._kernels = kernels

    def prepare(self, loop: str) -> None:
        self._device.function(loop)

    def __getattr__(self, loop: str) -> Any:
        def queue(*arguments: Any) -> None:
            launched = self._kernels.launch_of(loop, *arguments)
            if launched is not None:
                launch(self._device, launched)

        return queue
