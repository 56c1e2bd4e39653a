"""Compiles the CUDA kernels, and launches them: one launch per call."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types
from numpy.typing import NDArray

from ocomm.kernels.cuda_kernels import KERNELS, SHARED_NBYTES, TILE
from ocomm.kernels.cuda_words import LAUNCH_BOUNDS, SIMULATED, THREADS
from ocomm.kernels.device import DeviceArray, is_reduced_on_devices
from ocomm.kernels.loops import LOOPS, NOT_ON_DEVICES, Declaration
from ocomm.types import DType, ReduceOp


def _signature(loop: Any) -> tuple[Any, ...]:
    """Returns the types of the arguments with which ``CudaKernels`` calls the loop."""
    parameters = inspect.signature(loop.py_func).parameters.values()
    return tuple(types.float32 if parameter.annotation == "float" else types.int64 for parameter in parameters)


@functools.cache
def require_compiler() -> None:
    """Raises ImportError, which says what to install, if kernels cannot be compiled."""
    from numba.cuda.cudadrv import nvrtc, nvvm

    try:
        importlib.import_module("numba.cuda.np.arrayobj")
    except AttributeError as error:  # numba-cuda 0.30 and NumPy 2.5
        raise ImportError(
            f"numba-cuda does not know NumPy {np.__version__} ({error}): pip install 'numpy<2.5'"
        ) from error
    try:
        nvrtc.get_supported_ccs()
        nvvm.NVVM()
    except (RuntimeError, ImportError) as error:
        raise ImportError(
            "no NVVM or NVRTC: pip install 'numba-cuda[cu13]', or '[cu12]' where driver or framework are of CUDA 12"
        ) from error


def compiled(loop: Any, capability: tuple[int, int]) -> str:
    """Returns PTX of one of KERNELS for a compute capability. Needs no device. Raises ImportError without NVVM and
    NVRTC.
    """
    from numba.cuda import dispatcher

    require_compiler()
    # numba-cuda compiles the functions that a kernel calls for the device that it finds.
    usual = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        return str(cuda.compile_ptx(loop.py_func, _signature(loop), cc=capability, launch_bounds=LAUNCH_BOUNDS)[0])
    finally:
        dispatcher.get_current_device = usual


def prepare(loop: str) -> Any:
    """Compiles a loop for the current device, which may take a second. Returns numba's kernel."""
    return None if SIMULATED else KERNELS[loop].compile(_signature(KERNELS[loop]))


def function_of(loop: str) -> int:
    """Returns the driver's handle of a loop's kernel, compiled for the current device."""
    return int(prepare(loop)._codelibrary.get_cufunc().kernel.handle)


class Launch(NamedTuple):
    """What a call of a loop launches."""

    kernel: str
    thread_blocks: int
    parameters: tuple[Any, ...]  # np.float32, or int for a parameter of 64 bits
    #: What parameters are addresses of and nobody else keeps.
    keeps: list[Any]
    #: The argument from which five parameters come, and the position of the first; None: no such argument.
    noise: tuple[NDArray[np.void], int] | None = None


_REMEMBERED = 1024  # number of tables of message addresses that are kept


def address_of(array: Any) -> int:
    """Returns the address of an array's first element on the device; 0 for None, which kernels treat as no array."""
    if array is None:
        return 0
    if isinstance(array, DeviceArray):
        return array.address
    interface = getattr(array, "__array_interface__" if SIMULATED else "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"{type(array).__name__} is not an array in the memory of a CUDA device")
    return int(interface["data"][0])


class CudaKernels:
    """The kernels of a CUDA device. ``ocomm.kernels.loops`` has the arguments; ``ocomm.kernels.reference`` defines the
    results.

    All arrays and tables are on the device: anything with ``__cuda_array_interface__`` that is contiguous and whose
    ``len`` is the number of rows. Addresses in the tensor table are device addresses. Given the scale, signs equal the
    reference's exactly; a scale may differ in its last bits, because other partial sums are rounded. A call is one
    launch on ``stream``. A received message may begin at any byte, ``packed`` and its scales at multiples of 4.

    A method that returns a bool waits for the stream, unless there is a ``status``, an int32 on the device. Then the
    returned value means nothing, and ``status`` becomes nonzero if something was not finite.

    ``checksums``, ``squares``, ``sums`` and ``sketch`` are made from the loops ``sum_...`` by ``DeviceKernels``.
    """

    name = "cuda"

    def __init__(self, stream: Any = 0, status: Any = None) -> None:
        self._stream = stream
        self._waits = status is None
        self._status = cuda.to_device(np.zeros(1, np.int32)) if status is None else status
        self._messages: dict[tuple[int, ...], Any] = {}

    def prepare(self, loop: str) -> None:
        """Compiles a loop for the current device; otherwise its first call does that."""
        prepare(loop)

    def launch_of(self, loop: str, *arguments: Any) -> Launch | None:
        """Returns what a call would launch; None for nothing."""
        return getattr(self, f"_launch_of_{loop}")(*arguments)

    def reduce(
        self, dtype: DType, op: ReduceOp, sources: Sequence[Any], prescale: float, postscale: float, out: Any
    ) -> None:
        """Reduces what ``is_reduced_on_devices`` accepts; ``out`` may be one of the sources. A NaN has the device's
        bits.
        """
        self._queue(self._launch_of_reduce(dtype, op, sources, prescale, postscale, out))

    def _launch_of_reduce(
        self, dtype: DType, op: ReduceOp, sources: Sequence[Any], prescale: float, postscale: float, out: Any
    ) -> Launch | None:
        if not is_reduced_on_devices(dtype, op, prescale, postscale):
            raise TypeError(f"{op.label} of {dtype.label} by {prescale} and {postscale} is not done on a device")
        numel, ranks = len(out) // dtype.itemsize, len(sources)
        if not numel:
            return None
        what: tuple[Any, ...] = np.float32(prescale), np.float32(postscale)
        loop = "reduce"
        if dtype in (DType.FLOAT16, DType.BFLOAT16):
            loop, what = "reduce_low", (*what, int(dtype))
        elif dtype == DType.FLOAT64:
            loop, what = "reduce_double", tuple(np.array([prescale, postscale]).view(np.int64).tolist())
        elif dtype != DType.FLOAT32:
            divisor = ranks if op == ReduceOp.AVERAGE else 1
            loop, what = "reduce_whole", (dtype.itemsize, int(dtype not in (DType.UINT8, DType.UINT16)), divisor)
        addresses = self._addresses(sources)
        parameters = address_of(addresses), ranks, numel, *what, address_of(out)
        return Launch(loop, -(-numel // TILE), parameters, [addresses])

    def _queue(self, launch: Launch | None) -> None:
        if launch is not None:
            kernel = KERNELS[launch.kernel]
            kernel[launch.thread_blocks, THREADS, self._stream, SHARED_NBYTES](*launch.parameters)

    def _addresses(self, arrays: Sequence[Any]) -> Any:
        """Returns a device array of addresses, kept from an earlier call with the same arrays if there was one, since
        plans do not change.
        """
        key = tuple(map(address_of, arrays))
        if key not in self._messages:
            if len(self._messages) == _REMEMBERED:
                self._messages.clear()
            self._messages[key] = self._there(np.array(key, np.int64))
        return self._messages[key]

    def _there(self, array: np.ndarray) -> Any:
        """Returns a copy on the device for the next launch.

        ``DeviceMemory`` makes it and keeps the source until then, because a device that can read all of the host's
        memory need not have read it when the call returns.
        """
        if isinstance(self._status, DeviceArray):
            copy = self._status.memory.empty(array.size, array.dtype)
            copy[:] = array
            return copy
        return cuda.to_device(array, stream=self._stream)

    def _all_finite(self) -> bool:
        """Returns True if no kernel has set the flag since the last call."""
        if not self._waits:
            return True
        if self._stream:
            self._stream.synchronize()
        found = bool(self._status.copy_to_host()[0])
        if found:
            self._status.copy_to_device(np.zeros(1, np.int32))
        return not found


def _counted_by(noise: NDArray[np.void]) -> tuple[int, int, int, int, int]:
    """Returns the halves of the seed, step, stream and ``steady`` of one row of NOISE."""
    row = noise.reshape(-1)[0]
    seed = int(row["seed"])
    return seed & 0xFFFFFFFF, seed >> 32, int(row["step"]), int(row["stream"]), int(row["steady"])


#: How an argument becomes a kernel's parameters, by its kind: their annotations, and the function that returns their
#: values. Any other kind is passed as an address. Messages are passed as the address of a table of their addresses.
_PASSED: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {
    "Messages": (("int", "int"), lambda given: (address_of(given), len(given))),
    "Noise": (("int",) * 5, lambda given: _counted_by(given)),
    "Scale": (("int",), lambda given: (int(given == "rms"),)),
    "Float32": (("float",), lambda given: (np.float32(given),)),
    "Int64": (("int",), lambda given: (int(given),)),
    "Truth": (("int",), lambda given: (int(given),)),
    "CodeBits": (("int",), lambda given: (int(given),)),
}
_AN_ADDRESS = ("int",), lambda given: (address_of(given),)


def _launching(loop: Declaration) -> Callable[..., Launch | None]:
    """Returns the method that tells what a loop launches: its kernel, with one thread block for each row of its table.

    Raises TypeError if the kernel has other parameters than its declaration.
    """
    kernel = KERNELS[loop.name]
    ways = [_PASSED.get(argument.kind, _AN_ADDRESS) for argument in loop.arguments]
    passed = [(argument.kind, way) for argument, (_, way) in zip(loop.arguments, ways, strict=True)]
    declared = [annotation for annotations, _ in ways for annotation in annotations] + ["int"] * loop.reports
    found = [parameter.annotation for parameter in inspect.signature(kernel.py_func).parameters.values()]
    if found != declared:
        raise TypeError(f"CUDA kernel {loop.name!r} takes {', '.join(found)}; declared are {', '.join(declared)}")

    def launch_of(self: CudaKernels, *arguments: Any) -> Launch | None:
        rows = len(arguments[0])
        if not rows:
            return None
        parameters: list[Any] = []
        keeps, noise = [], None
        for (kind, way), argument in zip(passed, arguments, strict=True):
            given = argument
            if kind == "Messages":
                given = self._addresses(argument)
                keeps.append(given)
            elif kind == "Noise":
                noise = argument, len(parameters)
            parameters += way(given)
        if loop.reports:
            parameters.append(address_of(self._status))
        return Launch(loop.name, rows, tuple(parameters), keeps, noise)

    return launch_of


def _calling(loop: Declaration) -> Callable[..., bool | None]:
    launch_of = getattr(CudaKernels, f"_launch_of_{loop.name}")

    def call(self: CudaKernels, *arguments: Any) -> bool | None:
        self._queue(launch_of(self, *arguments))
        return self._all_finite() if loop.reports else None

    return call


for _loop in LOOPS.values():
    if _loop.name not in NOT_ON_DEVICES and not hasattr(CudaKernels, _loop.name):
        setattr(CudaKernels, f"_launch_of_{_loop.name}", _launching(_loop))
        setattr(CudaKernels, _loop.name, _calling(_loop))
