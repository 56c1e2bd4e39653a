"""The C loops of ``native/kernels.c`` and ``native/reduce.c``, called through cffi; the GIL is free while they run.

Nothing is validated here: a wrong length or a stale address is read or written as it is. What is checked once, when a
plan is built, would otherwise be checked at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm._native import ffi, lib
from ocomm.errors import LaunchError
from ocomm.kernels.base import HOST, WHOLE, Bytes, Floats, Table
from ocomm.kernels.reference import ReferenceKernels, unsupported_reduction
from ocomm.types import DType, ReduceOp

_NULL = ffi.NULL
#: Elements of the smallest pieces of a loop: 10 microseconds' work at least. To share a loop costs about 5.
GRAIN = 32768
# An array's own buffer is several times cheaper to pass on than its ``ctypes`` attribute.
_pointer = ffi.from_buffer


def _optional(mask: Bytes | None) -> object:
    return _NULL if mask is None else _pointer("uint8_t[]", mask)


def _optional_floats(array: Floats | None) -> object:
    return _NULL if array is None else _pointer("float[]", array)


class Pool:
    """``threads - 1`` threads which help whoever runs a large loop; results have the same bits with any number of them.

    They sleep between loops. One loop is shared at a time: a second caller does its own alone. ``grain``: elements that
    are worth waking a thread for; a loop of less than twice as many is not cut. LaunchError if the system has no
    threads left.
    """

    def __init__(self, threads: int, grain: int = GRAIN) -> None:
        pool = lib.ocomm_pool_new(threads, grain)
        if pool == _NULL:
            raise LaunchError(f"no room for {threads} kernel threads; set OCOMM_KERNEL_THREADS to less")
        self.pointer = ffi.gc(pool, lib.ocomm_pool_free)

    def close(self) -> None:
        """Ends the threads, when they have done what they are at; loops are their callers' alone from then on."""
        lib.ocomm_pool_close(self.pointer)


def pointer_to(pool: Pool | None) -> Any:
    """For C; NULL for None."""
    return _NULL if pool is None else pool.pointer


class CpuKernels:
    """See ``ocomm.kernels.base.Kernels`` for the arguments, ``ocomm.kernels.reference`` for what exactly is computed.

    The tables must have the dtypes ``BLOCK`` and ``TENSOR``; all arrays must be contiguous and stay alive for the call.
    Without a ``pool`` all work is the caller's.
    """

    name = "cpu"
    memory = HOST

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pointer_to(pool)

    def compress(
        self,
        blocks: Table,
        values: Floats,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``; ``error_out`` may be ``error``."""
        return bool(
            lib.ocomm_compress(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("float[]", values),
                _pointer("float[]", error),
                _pointer("float[]", error_out),
                _optional(mask),
                scale == "rms",
                _pointer("uint8_t[]", packed),
            )
        )

    def compress_momentum(
        self,
        blocks: Table,
        tensors: Table,
        previous: Bytes | None,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``; ``error_out`` may be ``error``, ``packed`` may not be ``previous``."""
        return bool(
            lib.ocomm_compress_momentum(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
                _optional(previous),
                _pointer("float[]", error),
                _pointer("float[]", error_out),
                _optional(mask),
                scale == "rms",
                _pointer("uint8_t[]", packed),
            )
        )

    def average(
        self,
        blocks: Table,
        received: Sequence[Bytes],
        origin: int,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``; ``error_out`` may be ``error``."""
        messages = [_pointer("uint8_t[]", message) for message in received]
        return bool(
            lib.ocomm_average(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                ffi.new("uint8_t *[]", messages),
                origin,
                len(messages),
                _pointer("float[]", error),
                _pointer("float[]", error_out),
                _optional(mask),
                scale == "rms",
                _pointer("uint8_t[]", packed),
            )
        )

    def unpack(self, blocks: Table, packed: Bytes, mask: Bytes | None, out: Floats) -> None:
        """Writes ``out`` where the blocks are."""
        lib.ocomm_unpack(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("uint8_t[]", packed),
            _optional(mask),
            _pointer("float[]", out),
        )

    def apply(self, blocks: Table, tensors: Table, packed: Bytes, denominator: Floats, mask: Bytes | None) -> None:
        """Updates the tensors behind the ``param`` addresses in place, except those with ``skip``."""
        lib.ocomm_apply(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("ocomm_tensor[]", tensors),
            _pointer("uint8_t[]", packed),
            _pointer("float[]", denominator),
            _optional(mask),
        )

    def compress_update(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        update: Floats | None,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``; ``error_out`` may be ``error``."""
        return bool(
            lib.ocomm_compress_update(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
                _pointer("float[]", momentum),
                _optional_floats(update),
                _pointer("float[]", error),
                _pointer("float[]", error_out),
                _optional(mask),
                scale == "rms",
                _pointer("uint8_t[]", packed),
            )
        )

    def local_step(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        update: Floats | None,
        denominator: Floats,
        mask: Bytes | None,
    ) -> None:
        """Updates ``momentum``, ``update`` and the tensors behind ``param`` in place, but where ``skip`` is set."""
        lib.ocomm_local_step(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("ocomm_tensor[]", tensors),
            _pointer("float[]", momentum),
            _optional_floats(update),
            _pointer("float[]", denominator),
            _optional(mask),
        )

    def apply_update(
        self,
        blocks: Table,
        tensors: Table,
        packed: Bytes,
        denominator: Floats,
        mask: Bytes | None,
        momentum: Floats,
        update: Floats | None,
        synced: Floats | None,
    ) -> None:
        """Updates the tensors behind ``param`` and the flat buffers in place, but where ``skip`` is set."""
        lib.ocomm_apply_update(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("ocomm_tensor[]", tensors),
            _pointer("uint8_t[]", packed),
            _pointer("float[]", denominator),
            _optional(mask),
            _pointer("float[]", momentum),
            _optional_floats(update),
            _optional_floats(synced),
        )

    def finite(self, blocks: Table, tensors: Table) -> bool:
        """Reads the gradients only; a gradient of 0 in the table is finite."""
        return bool(
            lib.ocomm_finite(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
            )
        )

    def finite_scales(self, blocks: Table, packed: Bytes) -> bool:
        """Reads the scales only."""
        return bool(
            lib.ocomm_finite_scales(_pointer("ocomm_block[]", blocks), len(blocks), _pointer("uint8_t[]", packed))
        )

    def quantize(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        magnitude: Floats,
        magnitude_out: Floats,
        error: Floats,
        error_out: Floats,
        eps: float,
        amsgrad: bool,
        noise: NDArray[np.void],
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and the three ``_out``; each may be the array it follows."""
        return bool(
            lib.ocomm_quantize(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
                _pointer("float[]", momentum),
                _pointer("float[]", momentum_out),
                _pointer("float[]", magnitude),
                _pointer("float[]", magnitude_out),
                _pointer("float[]", error),
                _pointer("float[]", error_out),
                eps,
                amsgrad,
                _pointer("ocomm_noise[]", noise),
                _pointer("uint8_t[]", packed),
            )
        )

    def quantized_average(
        self,
        blocks: Table,
        received: Sequence[Bytes],
        origin: int,
        weights: Floats,
        error: Floats | None,
        error_out: Floats | None,
        noise: NDArray[np.void],
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``, which may be ``error``; both may be None."""
        messages = [_pointer("uint8_t[]", message) for message in received]
        return bool(
            lib.ocomm_quantized_average(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                ffi.new("uint8_t *[]", messages),
                origin,
                len(messages),
                _pointer("float[]", weights),
                _optional_floats(error),
                _optional_floats(error_out),
                _pointer("ocomm_noise[]", noise),
                _pointer("uint8_t[]", packed),
            )
        )

    def compress_signs(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        beta2: float,
        one_minus_beta2: float,
        zero_up: bool,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``momentum_out``; the latter may be ``momentum``."""
        return bool(
            lib.ocomm_compress_signs(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
                _pointer("float[]", momentum),
                _pointer("float[]", momentum_out),
                beta2,
                one_minus_beta2,
                zero_up,
                _pointer("uint8_t[]", packed),
            )
        )

    def apply_signs(self, blocks: Table, tensors: Table, packed: Bytes) -> None:
        """Updates the tensors behind the ``param`` addresses in place, except those with ``skip``."""
        lib.ocomm_apply_signs(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("ocomm_tensor[]", tensors),
            _pointer("uint8_t[]", packed),
        )

    # NumPy's operations on whole blocks are loops in C already.
    descend = ReferenceKernels.descend

    def soft_sign(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        magnitude: Floats,
        magnitude_out: Floats,
        eps: float,
        amsgrad: bool,
        out: Floats,
    ) -> bool:
        """Writes ``out`` and the two ``_out``; the latter may be the array they follow."""
        return bool(
            lib.ocomm_soft_sign(
                self._pool,
                _pointer("ocomm_block[]", blocks),
                len(blocks),
                _pointer("ocomm_tensor[]", tensors),
                _pointer("float[]", momentum),
                _pointer("float[]", momentum_out),
                _pointer("float[]", magnitude),
                _pointer("float[]", magnitude_out),
                eps,
                amsgrad,
                _pointer("float[]", out),
            )
        )

    def reduce(
        self,
        dtype: DType,
        op: ReduceOp,
        sources: Sequence[Bytes],
        prescale: float,
        postscale: float,
        out: Bytes,
    ) -> None:
        """Writes ``out``, which may be one of the sources. TypeError for an operation the element type lacks."""
        addresses = [_pointer("uint8_t[]", source) for source in sources]
        numel = len(out) // DType(dtype).itemsize
        pointers = ffi.new("void *[]", addresses)
        answer = lib.ocomm_reduce(
            self._pool, dtype, op, len(addresses), pointers, numel, prescale, postscale, _pointer(out)
        )
        if answer < 0:
            raise TypeError(unsupported_reduction(dtype, op, prescale, postscale))

    def checksum(self, data: Bytes, part: int = WHOLE) -> int:
        """Hash of the whole buffer, or of a part of it."""
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

    def axpy(self, y: Floats, x: Floats, factor: float) -> None:
        """Updates ``y`` in place."""
        lib.ocomm_axpy(self._pool, _pointer("float[]", y), _pointer("float[]", x), factor, y.size)

    def adam_update(
        self,
        gradient: Floats,
        momentum: Floats,
        variance: Floats,
        update: Floats,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
    ) -> None:
        """Updates ``momentum`` and ``variance`` in place, and writes ``update``."""
        lib.ocomm_adam_update(
            self._pool,
            gradient.size,
            _pointer("float[]", gradient),
            _pointer("float[]", momentum),
            _pointer("float[]", variance),
            _pointer("float[]", update),
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            1.0 / (1.0 - beta1**step),
            1.0 / (1.0 - beta2**step),
            eps,
        )

    def lamb_update(
        self,
        blocks: Table,
        packed: Bytes,
        previous: Bytes | None,
        dense: Floats | None,
        mask: Bytes | None,
        floors: Floats,
        denominator: Floats,
        fresh: Floats,
        update: Floats,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
    ) -> float:
        """Updates ``fresh`` in place, and writes ``update``."""
        largest = np.zeros(len(blocks), np.float32)
        lib.ocomm_lamb_update(
            self._pool,
            _pointer("ocomm_block[]", blocks),
            len(blocks),
            _pointer("uint8_t[]", packed),
            _optional(previous),
            _optional_floats(dense if previous is None else None),
            _optional(mask),
            _pointer("float[]", floors),
            _pointer("float[]", denominator),
            _pointer("float[]", fresh),
            _pointer("float[]", update),
            _pointer("float[]", largest),
            beta1,
            1.0 / (1.0 - beta1),
            beta2,
            1.0 - beta2,
            1.0 / (1.0 - beta1**step),
            1.0 / (1.0 - beta2**step),
            eps,
        )
        return float(largest.max(initial=0.0))
