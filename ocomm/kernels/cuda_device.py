"""A CUDA device for ``kernels.device``: memory, copies and events through the driver, launches through numba."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from cuda.bindings import driver

from ocomm._native import lib
from ocomm.kernels.base import Bytes, Table
from ocomm.kernels.cuda import CudaKernels, require_compiler
from ocomm.kernels.cuda_driver import OF_THIS_THREAD, CudaBlock, CudaContext, CudaEvent, checked
from ocomm.kernels.cuda_work import CudaMirror, CudaWork, launch
from ocomm.kernels.device import DeviceArray, DeviceMemory, Together

#: Packages of the compiler, for CUDA 12 or 13.
_COMPILER = (
    "numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12",
)  # fmt: skip


class CudaStream:
    """The ``kernels.device.Stream`` of a CUDA device."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._stream = context.new_stream()
        self.handle = int(self._stream)

    def record(self) -> CudaEvent:
        return self._context.recorded(self._stream)


class CudaDevice:
    """The ``kernels.device.Device`` of CUDA device ``number`` of this process."""

    def __init__(self, number: int) -> None:
        self.context = CudaContext(number)
        self.name, self.identity = self.context.name, self.context.identity
        self.make_room: Callable[[], None] | None = None

    def allocate(self, nbytes: int) -> CudaBlock:
        try:
            return CudaBlock(self.context, nbytes)
        except MemoryError:
            if self.make_room is None:
                raise
        self.make_room()
        return CudaBlock(self.context, nbytes)

    def pinned(self, nbytes: int) -> Bytes:
        return self.context.pinned(nbytes)

    def upload(self, to: int, source: Bytes) -> None:
        with self.context.current():
            first = source.__array_interface__["data"][0]
            checked(driver.cuMemcpyHtoDAsync(to, first, source.nbytes, self.context.first))

    def download(self, to: Bytes, source: int) -> None:
        with self.context.current():
            first = to.__array_interface__["data"][0]
            checked(driver.cuMemcpyDtoHAsync(first, source, to.nbytes, self.context.first))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        with self.context.current():
            checked(driver.cuMemcpyDtoDAsync(to, source, nbytes, self.context.first))

    def clear(self, to: int, nbytes: int) -> None:
        with self.context.current():
            checked(driver.cuMemsetD8Async(to, 0, nbytes, self.context.first))

    def record(self) -> CudaEvent:
        return self.context.recorded(self.context.first)

    def stream(self) -> CudaStream:
        return CudaStream(self.context)

    def mirror(self, memory: DeviceMemory, table: Table) -> CudaMirror:
        return CudaMirror(self.context, memory, table)

    def work(self, together: Together) -> CudaWork:
        return CudaWork(self.context, together)

    def calls(self) -> dict[str, int]:
        """Returns how often C has copied, and asked whether an event is over."""
        counted = lib.ocomm_device_counts(self.context.native)
        return {"copies": counted.copies, "asks": counted.asks}

    def require_kernels(self) -> None:
        """Raises ImportError, with the versions installed, if kernels cannot be compiled and loaded. May take seconds
        the first time.
        """
        require_compiler()
        try:
            with self.context.current():
                self.context.function("scatter")  # a short kernel
        except Exception as error:  # NVVM, nvJitLink, numba-cuda, cuda.core and the driver have classes of their own
            major, minor = divmod(checked(driver.cuDriverGetVersion()) // 10, 100)
            said = " ".join(str(error).replace("\0", " ").split())
            raise ImportError(
                f"kernels cannot be compiled for {self.name} ({type(error).__name__}: {said}); NVVM must not be newer "
                f"than nvJitLink, nor of a later CUDA than the driver, which is for {major}.{minor}, and there are "
                f"{', '.join(_installed(_COMPILER))}"
            ) from error

    def loops(self, status: DeviceArray) -> _Loops:
        self.require_kernels()  # fails now, with a clear message, instead of in the first step
        return _Loops(self.context, CudaKernels(status=status))

    def enter(self) -> None:
        checked(driver.cuCtxSetCurrent(self.context.handle))
        checked(driver.cuThreadExchangeStreamCaptureMode(OF_THIS_THREAD))

    def follow(self, stream: int) -> None:
        self.context.order(_framework(stream), self.context.first)

    def precede(self, stream: int) -> None:
        self.context.order(self.context.first, _framework(stream))


def _installed(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _framework(stream: int) -> int:
    """Returns a framework's stream. 0 is the legacy default stream, whatever the driver's library takes it for."""
    return stream or int(driver.CU_STREAM_LEGACY)


class _Loops:
    """The loops, launched in the device's context on its first stream."""

    def __init__(self, context: CudaContext, kernels: CudaKernels) -> None:
        self._context = context
        self._kernels = kernels

    def prepare(self, loop: str) -> None:
        self._context.function(loop)

    def __getattr__(self, loop: str) -> Any:
        def queue(*arguments: Any) -> None:
            launched = self._kernels.launch_of(loop, *arguments)
            if launched is not None:
                launch(self._context, launched)

        return queue
