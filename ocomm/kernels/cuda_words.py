"""Words of a device's memory, by address, and arithmetic that no compiler changes: as instructions of the device, or in
numba's simulator, where addresses are those of the host's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import cuda, types

if "numba_cuda" not in (cuda.__file__ or ""):
    raise ImportError("numba's own CUDA target is deprecated and cannot run these kernels: pip install numba-cuda")

SIMULATED: bool = bool(numba.config.ENABLE_CUDASIM)
# Numba warns of every launch of fewer than 128 thread blocks, but a segment may have few blocks.
numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

THREADS = 256
QUAD = 4  # elements of one 16-byte access

#: Threads per thread block, and the number of thread blocks that must fit on a multiprocessor. That limits registers to
#: 64 per thread and keeps enough loads under way.
LAUNCH_BOUNDS = (THREADS, 4)

if SIMULATED:

    def inline(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def kernel(function: Callable[..., Any]) -> Any:
        return cuda.jit(function)

    def _checked(address: int, alignment: int) -> int:
        if address & (alignment - 1):
            raise ValueError(f"address {address:#x} is not aligned to {alignment} bytes")
        return int(address)

    def load_quad(address: int) -> tuple[float, ...]:
        return tuple(map(np.float32, (ctypes.c_float * 4).from_address(_checked(address, 16))))

    def load_low_quad(address: int) -> tuple[float, ...]:
        return tuple((ctypes.c_uint16 * 4).from_address(_checked(address, 8)))

    def load_low(address: int) -> Any:
        return ctypes.c_uint16.from_address(_checked(address, 2)).value

    def half_of(word: int) -> Any:
        return np.float32(np.uint16(word).view(np.float16))

    def load_float(address: int) -> Any:
        return np.float32(ctypes.c_float.from_address(_checked(address, 4)).value)

    def load_byte(address: int) -> Any:
        return ctypes.c_uint8.from_address(address).value

    def load_int(address: int) -> Any:
        return ctypes.c_int32.from_address(_checked(address, 4)).value

    def load_long(address: int) -> Any:
        return ctypes.c_int64.from_address(_checked(address, 8)).value

    def store_quad(address: int, a: Any, b: Any, c: Any, d: Any) -> None:
        (ctypes.c_float * 4).from_address(_checked(address, 16))[:] = [float(a), float(b), float(c), float(d)]

    def store_float(address: int, value: Any) -> None:
        ctypes.c_float.from_address(_checked(address, 4)).value = float(value)

    def store_long(address: int, value: int) -> None:
        ctypes.c_int64.from_address(_checked(address, 8)).value = value

    def store_double(address: int, value: float) -> None:
        ctypes.c_double.from_address(_checked(address, 8)).value = value

    def wrapped(value: Any) -> Any:
        return ((int(value) + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)

    def store_low(address: int, value: int) -> None:
        ctypes.c_uint16.from_address(_checked(address, 2)).value = value

    def store_byte(address: int, value: int) -> None:
        ctypes.c_uint8.from_address(address).value = value

    def store_int(address: int, value: int) -> None:
        ctypes.c_uint32.from_address(_checked(address, 4)).value = value

    def float_of(word: int) -> Any:
        return np.uint32(word).view(np.float32)

    def word_of(value: Any) -> int:
        return int(np.float32(value).view(np.uint32))

    def low_of(value: Any) -> int:
        with np.errstate(over="ignore"):
            return int(np.float32(value).astype(np.float16).view(np.uint16))

    def double_of(long: int) -> Any:
        return np.int64(long).view(np.float64)

    def times(a: Any, b: Any) -> Any:
        return a * b

    times_double = times

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    inline = cuda.jit(device=True, forceinline=True)
    kernel = cuda.jit(launch_bounds=LAUNCH_BOUNDS)

    _FLOAT, _SHORT, _INT, _LONG = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
    _VECTOR, _LOW_VECTOR = ir.VectorType(_FLOAT, QUAD), ir.VectorType(_SHORT, QUAD)

    def _global(builder: Any, address: Any, kind: Any) -> Any:
        """Returns a pointer into global memory, so that the hardware need not find out which memory it is."""
        return builder.inttoptr(address, ir.PointerType(kind, addrspace=1))

    def _load(kind: Any, align: int, result: Any) -> Any:
        def typed(typingctx: Any, address: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = builder.load(_global(builder, args[0], kind), align=align)
                # Less than a word is unsigned.
                return builder.zext(value, _INT) if kind.__class__ is ir.IntType and kind.width < 32 else value

            return result(types.int64), codegen

        return intrinsic(typed)

    def _store(kind: Any, align: int, given: Any) -> Any:
        def typed(typingctx: Any, address: Any, value: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = args[1]
                if isinstance(kind, ir.IntType):
                    value = builder.trunc(value, kind)
                builder.store(value, _global(builder, args[0], kind), align=align)
                return context.get_dummy_value()

            return types.void(types.int64, given), codegen

        return intrinsic(typed)

    load_float = _load(_FLOAT, 4, types.float32)
    load_byte = _load(ir.IntType(8), 1, types.int32)
    load_low = _load(_SHORT, 2, types.int32)
    load_int = _load(_INT, 4, types.int32)
    load_long = _load(_LONG, 8, types.int64)
    store_float = _store(_FLOAT, 4, types.float32)
    store_low = _store(_SHORT, 2, types.int64)
    store_byte = _store(ir.IntType(8), 1, types.int64)
    store_int = _store(_INT, 4, types.int64)
    store_long = _store(_LONG, 8, types.int64)
    store_double = _store(ir.DoubleType(), 8, types.float64)

    @inline
    def wrapped(value: Any) -> Any:  # type: ignore[misc]
        """Returns the value itself, which has 64 bits here."""
        return value

    @intrinsic
    def load_quad(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = builder.load(_global(builder, args[0], _VECTOR), align=16)
            parts = [builder.extract_element(vector, ir.Constant(_INT, i)) for i in range(QUAD)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.float32, QUAD)(types.int64), codegen

    @intrinsic
    def load_low_quad(typingctx: Any, address: Any) -> Any:
        """Loads four 16-bit words by one access of 8 bytes."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = builder.load(_global(builder, args[0], _LOW_VECTOR), align=8)
            parts = [builder.extract_element(vector, ir.Constant(_INT, i)) for i in range(QUAD)]
            words = [builder.zext(part, _INT) for part in parts]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.int32, QUAD)(types.int64), codegen

    @intrinsic
    def half_of(typingctx: Any, word: Any) -> Any:
        """Returns a float16 as float32."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            half = builder.bitcast(builder.trunc(args[0], _SHORT), ir.HalfType())
            return builder.fpext(half, _FLOAT)

        return types.float32(types.int64), codegen

    @intrinsic
    def store_quad(typingctx: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.Constant(_VECTOR, ir.Undefined)
            for i in range(QUAD):
                vector = builder.insert_element(vector, args[1 + i], ir.Constant(_INT, i))
            builder.store(vector, _global(builder, args[0], _VECTOR), align=16)
            return context.get_dummy_value()

        return types.void(types.int64, *[types.float32] * QUAD), codegen

    @intrinsic
    def float_of(typingctx: Any, word: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.trunc(args[0], _INT), _FLOAT)

        return types.float32(types.int64), codegen

    @intrinsic
    def word_of(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.zext(builder.bitcast(args[0], _INT), _LONG)

        return types.int64(types.float32), codegen

    @intrinsic
    def low_of(typingctx: Any, value: Any) -> Any:
        """Returns the nearest float16."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            half = builder.fptrunc(args[0], ir.HalfType())
            return builder.zext(builder.bitcast(half, _SHORT), _LONG)

        return types.int64(types.float32), codegen

    @intrinsic
    def double_of(typingctx: Any, long: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], ir.DoubleType())

        return types.float64(types.int64), codegen

    def _product(kind: Any, of: Any, name: str, letter: str) -> Any:
        """Returns a * b, rounded separately, because the compiler would fuse a plain product with a sum."""

        def typed(typingctx: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                product = ir.FunctionType(kind, [kind, kind])
                return builder.asm(product, f"{name} $0, $1, $2;", f"={letter},{letter},{letter}", args, False)

            return of(of, of), codegen

        return intrinsic(typed)

    times = _product(_FLOAT, types.float32, "mul.rn.f32", "f")
    times_double = _product(ir.DoubleType(), types.float64, "mul.rn.f64", "d")
