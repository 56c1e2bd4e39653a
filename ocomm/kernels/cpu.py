"""The C loops of ``native/kernels.c`` and ``native/reduce.c``, called through cffi without the GIL.

Nothing is checked here: with a wrong length or a stale address memory is read or written all the same. Arguments are
checked when a plan is built, not at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ocomm._native import ffi, lib
from ocomm.errors import LaunchError
from ocomm.kernels.base import HOST, SKETCH, WHOLE, Bytes
from ocomm.kernels.loops import DIGEST, LOOPS, Declaration, function
from ocomm.kernels.reference import ReferenceKernels, unsupported_reduction
from ocomm.types import DType, ReduceOp

_NULL = ffi.NULL
#: Number of elements of the smallest pieces of a loop: at least 10 microseconds of work. Sharing a loop costs about 5.
GRAIN = 32768
# Passing an array's own buffer is several times cheaper than its ``ctypes`` attribute.
_pointer = ffi.from_buffer


class Pool:
    """``threads - 1`` threads that help the caller of a large loop. The number of threads does not change the bits of
    results.

    They sleep between loops. One loop is shared at a time; a second caller runs its own alone.

    Args:
        threads: Number of threads, with the caller.
        grain: Number of elements that are worth waking a thread for; a loop of less than twice as many is not cut.

    Raises:
        LaunchError: The system has no threads left.
    """

    def __init__(self, threads: int, grain: int = GRAIN) -> None:
        pool = lib.ocomm_pool_new(threads, grain)
        if pool == _NULL:
            raise LaunchError(f"no room for {threads} kernel threads; set OCOMM_KERNEL_THREADS to less")
        self.pointer = ffi.gc(pool, lib.ocomm_pool_free)

    def close(self) -> None:
        """Ends the threads when they have finished their work; later loops are run by their callers alone."""
        lib.ocomm_pool_close(self.pointer)


def pointer_to(pool: Pool | None) -> Any:
    """Returns the C pointer of a pool; NULL for None."""
    return _NULL if pool is None else pool.pointer


class CpuKernels:
    """The kernels in C. ``ocomm.kernels.loops`` has the arguments; ``ocomm.kernels.reference`` defines what is
    computed.

    The tables must have the dtypes ``BLOCK`` and ``TENSOR``; all arrays must be contiguous and stay alive during the
    call. Without a ``pool`` the caller does all the work.
    """

    name = "cpu"
    memory = HOST

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pointer_to(pool)

    if TYPE_CHECKING:

        def __getattr__(self, loop: str) -> Any:
            """For type checkers: loops are made from their declarations, below."""

    def reduce(
        self, dtype: DType, op: ReduceOp, sources: Sequence[Bytes], prescale: float, postscale: float, out: Bytes
    ) -> None:
        """Writes ``out``, which may be one of the sources. Raises TypeError for an operation that the element type does
        not have.
        """
        if not _reduce(self, dtype, op, sources, prescale, postscale, out):
            raise TypeError(unsupported_reduction(dtype, op, prescale, postscale))

    def checksum(self, data: Bytes, part: int = WHOLE) -> int:
        """Returns a hash of the whole buffer, or of a part of it."""
        return int(lib.ocomm_checksum(_pointer(data), len(data), part))

    def checksums(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64], part: int = WHOLE
    ) -> NDArray[np.uint64]:
        """Returns a new array, one sum per address."""
        addresses, nbytes = np.ascontiguousarray(addresses), np.ascontiguousarray(nbytes)
        sums = np.empty(addresses.size, np.uint64)
        lib.ocomm_checksums(
            _pointer("uint64_t[]", addresses),
            _pointer("int64_t[]", nbytes),
            addresses.size,
            part,
            _pointer("uint64_t[]", sums),
        )
        return sums

    def squares(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns a new array, one sum per address."""
        addresses, numels = np.ascontiguousarray(addresses), np.ascontiguousarray(numels)
        sums = np.empty(addresses.size)
        lib.ocomm_squares(
            _pointer("uint64_t[]", addresses), _pointer("int64_t[]", numels), addresses.size, _pointer("double[]", sums)
        )
        return sums

    sums = ReferenceKernels.sums  # the loop is that of these kernels

    def sketch(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
        """Returns a new array."""
        addresses, numels = np.ascontiguousarray(addresses), np.ascontiguousarray(numels)
        sums = np.empty(SKETCH)
        lib.ocomm_sketch(
            _pointer("uint64_t[]", addresses),
            _pointer("int64_t[]", numels),
            addresses.size,
            seed,
            _pointer("double[]", sums),
        )
        return sums


def _calling(loop: Declaration) -> Any:
    """Returns the method that calls a loop in C."""
    passed = [expression for argument in loop.arguments for expression in argument.called()]
    call = f"call(self._pool, {', '.join(passed)})"
    names = {
        "call": getattr(lib, f"ocomm_{loop.name}"),
        "pointer": _pointer,
        "new": ffi.new,
        "NULL": _NULL,
        "bool": bool,
    }
    return function(loop.name, ["self", *loop.names], call if loop.answer == "None" else f"bool({call})", names)


if getattr(lib, "OCOMM_LOOPS", None) != DIGEST:
    raise ImportError(
        "the extension ocomm._native was built for other loops than ocomm/kernels/loops.py declares: rebuild it "
        "(pip install . or, in a source tree, python setup.py build_ext --inplace)"
    )
_reduce = _calling(LOOPS["reduce"])
for _loop in LOOPS.values():
    if not hasattr(CpuKernels, _loop.name):
        setattr(CpuKernels, _loop.name, getattr(ReferenceKernels, _loop.name) if _loop.code < 0 else _calling(_loop))
