"""The loops as CUDA kernels, through numba-cuda: one thread block per scale block.

Everything is passed by address, because tensors of the table are addresses, too, which need not be aligned. A block
whose elements start on a multiple of 16 bytes is read and written four elements at a time, any other block one by one.

A thread block works on tiles of 4096 elements. Thread t holds the quads of elements 4 t, 4 t + 1024, 4 t + 2048 and 4 t
+ 3072 of its tile, so that the 16-byte accesses of a warp are adjacent. Signs are collected in shared memory, four bits
per quad, and written as whole words. A block of one tile is read once and written once; in a longer one the earlier
tiles wait in ``error_out`` until the scale is known.

The same source runs in numba's simulator (``NUMBA_ENABLE_CUDASIM=1``), where addresses are those of the host's memory.
Therefore it uses neither warp votes nor shuffles, and all of it is in one module: while a kernel runs, the simulator
replaces ``cuda`` in that module alone.

An average copies the signs of eight messages at a time to shared memory, one message per warp, in words in which each
thread has its bits of all four rows: loads of all messages are under way together, and a word takes each thread one
access per message. Threads read codes themselves, and only their scales are shared.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda, types

from ocomm.kernels.base import BLOCK, GROUP, LEAST, PIECE, RUN, SKETCH, TENSOR
from ocomm.kernels.cuda_words import (
    QUAD,
    THREADS,
    double_of,
    float_of,
    half_of,
    inline,
    kernel,
    load_byte,
    load_float,
    load_int,
    load_long,
    load_low,
    load_low_quad,
    load_quad,
    low_of,
    store_byte,
    store_double,
    store_float,
    store_int,
    store_long,
    store_low,
    store_quad,
    times,
    times_double,
    word_of,
    wrapped,
)
from ocomm.types import DType

ROW = THREADS * QUAD
ROUNDS = 4
TILE = ROUNDS * ROW
HELD = ROUNDS * QUAD  # elements per thread

WARP = 32
#: Messages whose signs or scales of a tile are in shared memory at once: each warp copies those of one.
AT_ONCE = THREADS // WARP

#: Bytes of shared memory: a tile's signs by quad, then a float and an int32 per thread; or an int32 for each quad of a
#: tile; or the signs of AT_ONCE messages; behind it a float for each message; or a hash per thread and the sums of a
#: sketch. The launch allocates it, since the simulator may give two threads different arrays if a kernel allocates it.
_SKETCH_NBYTES = 8 * THREADS + 4 * (SKETCH + WARP)
SHARED_NBYTES = max(TILE // QUAD + 8 * THREADS, TILE, AT_ONCE * TILE // 8, _SKETCH_NBYTES) + 4 * AT_ONCE
_BUCKETS = 2 * THREADS
_PARTIAL = TILE // QUAD // 4
_HIDDEN = _PARTIAL + THREADS
_SCALES = SHARED_NBYTES // 4 - AT_ONCE
_FOLD = 16  # two steps of 16 additions combine the sums of 256 threads

_BLOCK_NBYTES, _TENSOR_NBYTES = BLOCK.itemsize, TENSOR.itemsize
_OFFSET, _START, _OWNED, _LOCAL, _BITS, _SCALE, _INDEX, _LENGTH, _ROW_OF_TENSOR = (
    BLOCK.fields[name][1]  # type: ignore[index]
    for name in ("offset", "start", "owned", "local", "bits", "scale", "index", "length", "tensor")
)
_GRAD, _PARAM, _MOMENTUM, _BETA1, _ONE_MINUS_BETA1, _WEIGHT_DECAY, _STEP_SIZE, _DECAY, _INTERVAL_ROOT = (
    TENSOR.fields[name][1]  # type: ignore[index]
    for name in (
        "grad",
        "param",
        "momentum",
        "beta1",
        "one_minus_beta1",
        "weight_decay",
        "step_size",
        "decay",
        "interval_root",
    )
)
_INTERVAL_DECAY, _SKIP, _GRAD_DTYPE = (
    TENSOR.fields[name][1]  # type: ignore[index]
    for name in ("interval_decay", "skip", "grad_dtype")
)
_BFLOAT16 = int(DType.BFLOAT16)

_RUN_NBYTES, _PIECE_NBYTES = RUN.itemsize, PIECE.itemsize
_RUN_START, _RUN_POSITION, _RUN_LENGTH, _RUN_TENSOR = (
    RUN.fields[name][1]  # type: ignore[index]
    for name in ("start", "position", "length", "tensor")
)
_ADDRESS, _FIRST, _COUNT, _ALSO = (PIECE.fields[name][1] for name in ("address", "first", "count", "also"))  # type: ignore[index]
#: Constants of checksums as signed numbers; ``reference`` has them unsigned.
_STEP, _SPREAD = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)

_ZERO = np.float32(0)
_MINUS_ZERO = np.float32(-0.0)  # adding it changes no number, not even negative zero
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_UNIT = np.float32(2.0**-24)


@inline
def _thread() -> int:
    """Returns the thread's number so that the compiler sees that it is not negative: a negative index of an array
    would count from its end.
    """
    return cuda.threadIdx.x & (THREADS - 1)


# What a thread holds: ``rounds`` quads, a row apart. ``left`` is the number of the block's elements from the first quad
# on; it may be negative.


@inline
def _fetch(first: int, left: int, rounds: int, out: Any) -> None:
    """Its elements of the floats, of which its first is at ``first``; 0 past the end."""
    if first & 15 == 0 and left >= (rounds - 1) * ROW + QUAD:
        for u in range(rounds):
            a, b, c, d = load_quad(first + 4 * u * ROW)
            out[QUAD * u] = a
            out[QUAD * u + 1] = b
            out[QUAD * u + 2] = c
            out[QUAD * u + 3] = d
    else:
        for u in range(rounds):
            for k in range(QUAD):
                j = u * ROW + k
                out[QUAD * u + k] = load_float(first + 4 * j) if j < left else _ZERO


@inline
def _widened(word: int, dtype: int) -> Any:
    return float_of(int(word) << 16) if dtype == _BFLOAT16 else half_of(word)


@inline
def _fetch_grad(tensor: int, grad: int, start: int, left: int, rounds: int, out: Any) -> None:
    """Loads this thread's elements of the gradient at ``grad`` as float32; ``start`` is the first element of its
    block.
    """
    dtype = load_int(tensor + _GRAD_DTYPE)
    if dtype == 0:
        _fetch(grad + 4 * start, left, rounds, out)
    else:
        _fetch_low(grad + 2 * start, left, rounds, dtype, out)


@inline
def _fetch_low(first: int, left: int, rounds: int, dtype: int, out: Any) -> None:
    """Loads this thread's elements of 16 bits as float32."""
    if first & 7 == 0 and left >= (rounds - 1) * ROW + QUAD:
        for u in range(rounds):
            a, b, c, d = load_low_quad(first + 2 * u * ROW)
            out[QUAD * u] = _widened(a, dtype)
            out[QUAD * u + 1] = _widened(b, dtype)
            out[QUAD * u + 2] = _widened(c, dtype)
            out[QUAD * u + 3] = _widened(d, dtype)
    else:
        for u in range(rounds):
            for k in range(QUAD):
                j = u * ROW + k
                out[QUAD * u + k] = _widened(load_low(first + 2 * j), dtype) if j < left else _ZERO


@inline
def _put(first: int, left: int, rounds: int, values: Any) -> None:
    if first & 15 == 0 and left >= (rounds - 1) * ROW + QUAD:
        for u in range(rounds):
            i = QUAD * u
            store_quad(first + 4 * u * ROW, values[i], values[i + 1], values[i + 2], values[i + 3])
    else:
        for u in range(rounds):
            for k in range(QUAD):
                j = u * ROW + k
                if j < left:
                    store_float(first + 4 * j, values[QUAD * u + k])


@inline
def _narrowed(value: Any, dtype: int) -> int:
    """Returns the nearest 16-bit element; of two, the even one."""
    if dtype != _BFLOAT16:
        return low_of(value)
    word = word_of(value)
    if value != value:
        return word >> 16 | 0x40
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@inline
def _put_low(first: int, left: int, dtype: int, values: Any) -> None:
    if first & 7 == 0 and left >= QUAD:
        low = _narrowed(values[0], dtype) | _narrowed(values[1], dtype) << 16
        store_long(first, low | _narrowed(values[2], dtype) << 32 | _narrowed(values[3], dtype) << 48)
    else:
        for k in range(QUAD):
            if k < left:
                store_low(first + 2 * k, _narrowed(values[k], dtype))


@inline
def _bits_of(first: int, at: int, left: int, rounds: int) -> int:
    """Returns one bit per element that the thread holds, the first one lowest: bit ``at`` and so on of the bytes at
    ``first``.
    """
    found = 0
    for u in range(rounds):
        if u * ROW < left:
            found |= ((load_byte(first + (at >> 3) + u * (ROW >> 3)) >> (at & 4)) & 15) << (QUAD * u)
    return found


@inline
def _beyond(left: int, rounds: int) -> int:
    """Returns one bit per element that the thread holds: 1 if it is past the block's end."""
    found = 0
    if left < (rounds - 1) * ROW + QUAD:
        for u in range(rounds):
            for k in range(QUAD):
                if u * ROW + k >= left:
                    found |= 1 << (QUAD * u + k)
    return found


@inline
def _read_scale(address: int) -> Any:
    """Loads a float of a message, which may begin at any byte."""
    if address & 3 == 0:
        return load_float(address)
    word = 0
    for k in range(4):
        word |= int(load_byte(address + k)) << (8 * k)
    return float_of(word)


@inline
def _copy_signs(message: int, end: int, left: int) -> None:
    """Copies the signs of a tile from a message into this warp's part of shared memory; zeros if ``message`` is 0.

    The signs of the tile's block end at byte ``end`` of the message; ``left`` is the number of its elements from the
    tile's first on. A word in shared memory has the signs of two threads, one byte for each of their quads.
    """
    words = cuda.shared.array(0, types.uint32)
    quads = cuda.shared.array(0, types.uint8)
    rows = cuda.local.array(ROUNDS, types.int64)
    t = _thread()
    lane = t & (WARP - 1)
    nbytes = ((left + 7) >> 3) - 4 * lane
    first = message + end - nbytes
    if message == 0:
        for k in range(4):
            words[4 * t + k] = 0
    elif first & 3 == 0 and nbytes >= (ROUNDS - 1) * (ROW >> 3) + 4:
        for u in range(ROUNDS):
            rows[u] = load_int(first + u * (ROW >> 3))
        for k in range(4):
            word = 0
            for u in range(ROUNDS):
                word |= ((rows[u] >> (8 * k)) & 255) << (8 * u)
            words[4 * t + k] = word
    else:
        for u in range(ROUNDS):
            for k in range(4):
                at = u * (ROW >> 3) + k
                quads[16 * t + 4 * k + u] = load_byte(first + at) if at < nbytes else 0


@inline
def _sum_signs(received: int, ranks: int, end: int, scale_at: int, weights: int, left: int, total: Any) -> None:
    """Computes the sums, in the order of ranks, of what this thread's elements of a tile are in the messages.

    The signs of the tile's block end at byte ``end`` of each message; ``left`` is the number of its elements from the
    tile's first on. Scales are at ``scale_at`` of each message, or the floats at ``weights`` if that is not 0. Has
    barriers.
    """
    words = cuda.shared.array(0, types.uint32)
    scales = cuda.shared.array(0, types.float32)
    t = _thread()
    for i in range(HELD):
        total[i] = _MINUS_ZERO
    for first in range(0, ranks, AT_ONCE):
        rank = first + (t >> 5)
        # Messages are added in pairs. One that does not exist has the scale +0.0 and no bits, and adding -0.0 changes
        # nothing.
        message, scale = 0, _ZERO
        if rank < ranks:
            message = load_long(received + 8 * rank)
            scale = load_float(weights + 4 * rank) if weights != 0 else _read_scale(message + scale_at)
        _copy_signs(message, end, left)
        if t & (WARP - 1) == 0:
            scales[_SCALES + (t >> 5)] = scale
        cuda.syncthreads()
        at = 0
        while at < min(AT_ONCE, ranks - first):
            for j in range(at, at + 2):
                scale = scales[np.uint64(_SCALES + j)]
                word = int(words[np.uint64((TILE // 32) * j + (t >> 1))])
                # None of the thread's bits is the lowest one, which is not tested together with others.
                positive = (word << 1) >> (QUAD * (t & 1))
                for i in range(HELD):
                    up = (positive >> (i + QUAD * (i // QUAD) + 1)) & 1
                    total[i] = total[i] + (scale if up else -scale)
            at += 2
        cuda.syncthreads()


@inline
def _write_signs(found: int, target: int, left: int) -> None:
    """Writes the signs of a tile, to which each thread contributes its own: a byte at ``target`` for every 8 of the
    ``left`` elements from the tile's first on. Has a barrier.
    """
    quads = cuda.shared.array(0, types.uint8)
    t = _thread()
    for u in range(ROUNDS):
        quads[u * THREADS + t] = (found >> (QUAD * u)) & 15
    cuda.syncthreads()
    nbytes = (min(left, TILE) + 7) >> 3
    at = 4 * t
    if at < nbytes:
        word = 0
        for k in range(8):
            word |= int(quads[8 * t + k]) << (4 * k)
        if target & 3 == 0 and at + 4 <= nbytes:
            store_int(target + at, word)
        else:
            for k in range(4):
                if at + k < nbytes:
                    store_byte(target + at + k, (word >> (8 * k)) & 255)


@inline
def _magnitudes(c: Any, silent: int, rms: int, total: Any) -> Any:
    """Returns ``total`` plus the magnitudes of a tile's c, without those of ``silent`` elements."""
    for u in range(ROUNDS):
        row = _ZERO
        for k in range(QUAD):
            x = c[QUAD * u + k]
            if (silent >> (QUAD * u + k)) & 1:
                # +0.0, or NaN if c is not finite, so that a bad gradient is detected although its element is masked.
                x = x - x
            row = row + (times(x, x) if rms else abs(x))
        total = total + row
    return total


@inline
def _first_pass(
    c: Any, kept: Any, keeps: bool, masked: int, left: int, rms: int, total: Any, signs: int, last: bool, error_out: int
) -> Any:
    """Writes the signs of a tile's c, and replaces c by the error before the scale is subtracted.

    That is ``kept`` for masked elements, if the caller ``keeps``. Returns ``total`` plus the tile's magnitudes. Has
    barriers.
    """
    beyond = _beyond(left, ROUNDS)
    silent = masked | beyond
    found = 0
    for i in range(HELD):
        if c[i] >= _ZERO:
            found |= 1 << i
    total = _magnitudes(c, 0, rms, total) if silent == 0 else _magnitudes(c, silent, rms, total)
    if keeps and masked != 0:
        for i in range(HELD):
            if (masked >> i) & 1:
                c[i] = kept[i]
    _write_signs((found | masked) & ~beyond, signs, left + QUAD * cuda.threadIdx.x)
    if not last:
        _put(error_out, left, ROUNDS, c)
        cuda.syncthreads()
    return total


@inline
def _scale_of(total: Any, hidden: int, mask: int, length: int, rms: int) -> Any:
    """Returns the scale of the block from the sums of all threads; the same in all threads. Has barriers."""
    partial = cuda.shared.array(0, types.float32)
    counts = cuda.shared.array(0, types.int32)
    t = _thread()
    partial[_PARTIAL + t] = total
    if mask != 0:
        counts[_HIDDEN + t] = hidden
    cuda.syncthreads()
    if t < _FOLD:
        total = _ZERO
        for i in range(THREADS // _FOLD):
            total = total + partial[_PARTIAL + t + _FOLD * i]
        partial[_PARTIAL + t] = total
        if mask != 0:
            hidden = 0
            for i in range(THREADS // _FOLD):
                hidden += counts[_HIDDEN + t + _FOLD * i]
            counts[_HIDDEN + t] = hidden
    cuda.syncthreads()
    total = _ZERO
    elements = length
    for i in range(_FOLD):
        total = total + partial[_PARTIAL + i]
    if mask != 0:
        for i in range(_FOLD):
            elements -= counts[_HIDDEN + i]
    mean = times(total, _ONE / np.float32(elements) if elements > 0 else _ZERO)
    return np.float32(math.sqrt(mean)) if rms else mean


@inline
def _keep_the_rest(c: Any, masked: int, scale: Any, left: int, error_out: int) -> None:
    """Writes what the receivers of a tile will not get to its error."""
    for i in range(HELD):
        rest = c[i] - (scale if c[i] >= _ZERO else -scale)
        c[i] = rest if masked == 0 or not (masked >> i) & 1 else c[i]
    _put(error_out, left, ROUNDS, c)


@inline
def _finish(
    c: Any, masked: int, hidden: int, total: Any, block: int, mask: int, rms: int, error_out: int, packed: int,
    status: int,
) -> None:  # fmt: skip
    """Computes the scale of a block whose tiles have all been read, and its error. ``c`` holds the last tile."""
    length = load_int(block + _LENGTH)
    scale = _scale_of(total, hidden, mask, length, rms)
    t = cuda.threadIdx.x
    if t == 0:
        store_float(packed + load_long(block + _SCALE), scale)
        if scale - scale != _ZERO:
            store_int(status, 1)
    at = ((length - 1) & -TILE) + QUAD * t
    _keep_the_rest(c, masked, scale, length - at, error_out + 4 * at)
    while at >= TILE:
        at -= TILE
        _fetch(error_out + 4 * at, length - at, ROUNDS, c)
        masked = _bits_of(mask + (load_long(block + _OFFSET) >> 3), at, length - at, ROUNDS) if mask != 0 else 0
        _keep_the_rest(c, masked, scale, length - at, error_out + 4 * at)


@kernel
def compress(
    blocks: int, values: int, error: int, error_out: int, mask: int, rms: int, packed: int, status: int
) -> None:
    c = cuda.local.array(HELD, types.float32)
    e = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    local = 4 * load_long(block + _LOCAL)
    hidden_bits = mask + (load_long(block + _OFFSET) >> 3)
    signs = packed + load_long(block + _BITS)
    total, hidden, masked = _ZERO, 0, 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        _fetch(values + local + 4 * at, left, ROUNDS, c)
        _fetch(error + local + 4 * at, left, ROUNDS, e)
        if mask != 0:
            masked = _bits_of(hidden_bits, at, left, ROUNDS) & ~_beyond(left, ROUNDS)
            hidden += cuda.popc(masked)
        for i in range(HELD):
            c[i] = c[i] + e[i]
        total = _first_pass(
            c, e, False, masked, left, rms, total, signs + (base >> 3), base + TILE >= length,
            error_out + local + 4 * at,
        )  # fmt: skip
    _finish(c, masked, hidden, total, block, mask, rms, error_out + local, packed, status)


@inline
def _gradient(tensor: int, start: int, left: int, rounds: int, out: Any, scratch: Any) -> None:
    """Loads this thread's gradients with the coupled weight decay; ``start`` is its first element inside the tensor."""
    grad = load_long(tensor + _GRAD)
    if grad != 0:
        _fetch_grad(tensor, grad, start, left, rounds, out)
    else:
        for i in range(QUAD * rounds):
            out[i] = _ZERO
    decay = load_float(tensor + _WEIGHT_DECAY)
    if decay != _ZERO:
        _fetch(load_long(tensor + _PARAM) + 4 * start, left, rounds, scratch)
        for i in range(QUAD * rounds):
            out[i] = out[i] + times(decay, scratch[i])


@kernel
def compress_momentum(
    blocks: int, tensors: int, previous: int, error: int, error_out: int, mask: int, rms: int, packed: int, status: int
) -> None:
    c = cuda.local.array(HELD, types.float32)
    g = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local = 4 * load_long(block + _LOCAL)
    start = load_long(block + _START)
    hidden_bits = mask + (load_long(block + _OFFSET) >> 3)
    bits = load_long(block + _BITS)
    momentum = load_long(tensor + _MOMENTUM)
    beta, rest = load_float(tensor + _BETA1), load_float(tensor + _ONE_MINUS_BETA1)
    total, hidden, masked = _ZERO, 0, 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        if mask != 0:
            masked = _bits_of(hidden_bits, at, left, ROUNDS) & ~_beyond(left, ROUNDS)
            hidden += cuda.popc(masked)
        _gradient(tensor, start + at, left, ROUNDS, g, c)
        if momentum != 0:
            _fetch(momentum + 4 * (start + at), left, ROUNDS, c)
            for i in range(HELD):
                c[i] = times(beta, c[i])
        elif previous != 0:
            decayed = times(beta, _read_scale(previous + load_long(block + _SCALE)))
            positive = _bits_of(previous + bits, at, left, ROUNDS)
            for i in range(HELD):
                c[i] = _ZERO if (masked >> i) & 1 else (decayed if (positive >> i) & 1 else -decayed)
        else:
            for i in range(HELD):
                c[i] = _ZERO
        for i in range(HELD):
            c[i] = c[i] + times(rest, g[i])
        _fetch(error + local + 4 * at, left, ROUNDS, g)
        for i in range(HELD):
            c[i] = c[i] + g[i]
        total = _first_pass(
            c, g, False, masked, left, rms, total, packed + bits + (base >> 3), base + TILE >= length,
            error_out + local + 4 * at,
        )  # fmt: skip
    _finish(c, masked, hidden, total, block, mask, rms, error_out + local, packed, status)


@kernel
def compress_update(
    blocks: int, tensors: int, momentum: int, update: int, error: int, error_out: int, mask: int, rms: int,
    packed: int, status: int,
) -> None:  # fmt: skip
    c = cuda.local.array(HELD, types.float32)
    g = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local = 4 * load_long(block + _LOCAL)
    start = load_long(block + _START)
    offset = load_long(block + _OFFSET)
    signs = packed + load_long(block + _BITS)
    beta, rest = load_float(tensor + _BETA1), load_float(tensor + _ONE_MINUS_BETA1)
    step, root = load_float(tensor + _STEP_SIZE), load_float(tensor + _INTERVAL_ROOT)
    per_root = _ONE / root if root > _ZERO else _ZERO
    share = step / root if root > _ZERO else _ZERO
    total, hidden, masked = _ZERO, 0, 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        if mask != 0:
            masked = _bits_of(mask + (offset >> 3), at, left, ROUNDS) & ~_beyond(left, ROUNDS)
            hidden += cuda.popc(masked)
        _gradient(tensor, start + at, left, ROUNDS, g, c)
        _fetch(momentum + 4 * (offset + at), left, ROUNDS, c)
        for i in range(HELD):
            c[i] = times(share, times(beta, c[i]) + times(rest, g[i]))
        if update != 0:
            _fetch(update + 4 * (offset + at), left, ROUNDS, g)
            for i in range(HELD):
                c[i] = times(per_root, g[i]) + c[i]
        else:
            for i in range(HELD):
                c[i] = _ZERO + c[i]
        _fetch(error + local + 4 * at, left, ROUNDS, g)
        for i in range(HELD):
            c[i] = c[i] + g[i]
        total = _first_pass(
            c, g, False, masked, left, rms, total, signs + (base >> 3), base + TILE >= length,
            error_out + local + 4 * at,
        )  # fmt: skip
    _finish(c, masked, hidden, total, block, mask, rms, error_out + local, packed, status)


@kernel
def average(
    blocks: int, received: int, ranks: int, origin: int, error: int, error_out: int, mask: int, rms: int, packed: int,
    status: int,
) -> None:  # fmt: skip
    """Averages and compresses again. ``received`` is the address of the ``ranks`` addresses of the messages."""
    a = cuda.local.array(HELD, types.float32)
    e = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    owned = 4 * load_long(block + _OWNED)
    hidden_bits = mask + (load_long(block + _OFFSET) >> 3)
    bits, scale_at = load_long(block + _BITS), load_long(block + _SCALE) - origin
    over_ranks = _ONE / np.float32(ranks)  # as rounded from float64, which has more than twice the digits
    total, hidden, masked = _ZERO, 0, 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        _fetch(error + owned + 4 * at, left, ROUNDS, e)
        _sum_signs(received, ranks, bits - origin + ((length + 7) >> 3), scale_at, 0, length - base, a)
        if mask != 0:
            masked = _bits_of(hidden_bits, at, left, ROUNDS) & ~_beyond(left, ROUNDS)
            hidden += cuda.popc(masked)
        for i in range(HELD):
            a[i] = times(a[i], over_ranks) + e[i]
        total = _first_pass(
            a, e, True, masked, left, rms, total, packed + bits + (base >> 3), base + TILE >= length,
            error_out + owned + 4 * at,
        )  # fmt: skip
    _finish(a, masked, hidden, total, block, mask, rms, error_out + owned, packed, status)


# Loops that compute no scale work quad by quad.


@kernel
def unpack(blocks: int, packed: int, mask: int, out: int) -> None:
    values = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    offset = load_long(block + _OFFSET)
    scale = _read_scale(packed + load_long(block + _SCALE))
    signs = packed + load_long(block + _BITS)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        positive = _bits_of(signs, at, length - at, 1)
        masked = _bits_of(mask + (offset >> 3), at, length - at, 1) if mask != 0 else 0
        for k in range(QUAD):
            values[k] = _ZERO if (masked >> k) & 1 else (scale if (positive >> k) & 1 else -scale)
        _put(out + 4 * (offset + at), length - at, 1, values)


@kernel
def apply(blocks: int, tensors: int, packed: int, denominator: int, mask: int) -> None:
    p = cuda.local.array(QUAD, types.float32)
    below = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    if load_int(tensor + _SKIP) != 0:
        return
    length = load_int(block + _LENGTH)
    offset = load_long(block + _OFFSET)
    param = load_long(tensor + _PARAM) + 4 * load_long(block + _START)
    decay = load_float(tensor + _DECAY)
    step = times(load_float(tensor + _STEP_SIZE), _read_scale(packed + load_long(block + _SCALE)))
    signs = packed + load_long(block + _BITS)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        left = length - at
        _fetch(param + 4 * at, left, 1, p)
        _fetch(denominator + 4 * (offset + at), left, 1, below)
        positive = _bits_of(signs, at, left, 1)
        masked = _bits_of(mask + (offset >> 3), at, left, 1) if mask != 0 else 0
        for k in range(QUAD):
            x = times(p[k], decay) if decay != _ONE else p[k]
            moved = x - (step if (positive >> k) & 1 else -step) / below[k]
            p[k] = x if (masked >> k) & 1 else moved
        _put(param + 4 * at, left, 1, p)


@kernel
def local_step(blocks: int, tensors: int, momentum: int, update: int, denominator: int, mask: int) -> None:
    p = cuda.local.array(QUAD, types.float32)
    g = cuda.local.array(QUAD, types.float32)
    m = cuda.local.array(QUAD, types.float32)
    below = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    if load_int(tensor + _SKIP) != 0:
        return
    length = load_int(block + _LENGTH)
    offset = load_long(block + _OFFSET)
    start = load_long(block + _START)
    param = load_long(tensor + _PARAM) + 4 * start
    beta, rest = load_float(tensor + _BETA1), load_float(tensor + _ONE_MINUS_BETA1)
    step, decay = load_float(tensor + _STEP_SIZE), load_float(tensor + _DECAY)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        left = length - at
        flat = 4 * (offset + at)
        _fetch(momentum + flat, left, 1, m)
        _fetch(denominator + flat, left, 1, below)
        _gradient(tensor, start + at, left, 1, g, p)
        _fetch(param + 4 * at, left, 1, p)
        masked = _bits_of(mask + (offset >> 3), at, left, 1) if mask != 0 else 0
        for k in range(QUAD):
            moved = times(beta, m[k]) + times(rest, g[k])
            x = times(p[k], decay) if decay != _ONE else p[k]
            stepped = x - times(step, moved / below[k])
            p[k] = x if (masked >> k) & 1 else stepped
            m[k] = m[k] if (masked >> k) & 1 else moved
            g[k] = moved
        _put(param + 4 * at, left, 1, p)
        _put(momentum + flat, left, 1, m)
        if update != 0:
            _fetch(update + flat, left, 1, p)
            for k in range(QUAD):
                p[k] = p[k] + times(step, g[k])
            _put(update + flat, left, 1, p)


@kernel
def apply_update(
    blocks: int, tensors: int, packed: int, denominator: int, mask: int, momentum: int, update: int, synced: int
) -> None:
    p = cuda.local.array(QUAD, types.float32)
    m = cuda.local.array(QUAD, types.float32)
    below = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    if load_int(tensor + _SKIP) != 0:
        return
    length = load_int(block + _LENGTH)
    offset = load_long(block + _OFFSET)
    param = load_long(tensor + _PARAM) + 4 * load_long(block + _START)
    decay = load_float(tensor + _INTERVAL_DECAY)
    root, scale = load_float(tensor + _INTERVAL_ROOT), _read_scale(packed + load_long(block + _SCALE))
    mean, sent = scale / root, times(root, scale)
    signs = packed + load_long(block + _BITS)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        left = length - at
        flat = 4 * (offset + at)
        _fetch(synced + flat if synced != 0 else param + 4 * at, left, 1, p)
        _fetch(denominator + flat, left, 1, below)
        positive = _bits_of(signs, at, left, 1)
        masked = _bits_of(mask + (offset >> 3), at, left, 1) if mask != 0 else 0
        for k in range(QUAD):
            x = times(p[k], decay) if decay != _ONE else p[k]
            moved = x - (sent if (positive >> k) & 1 else -sent) / below[k]
            p[k] = x if (masked >> k) & 1 else moved
            m[k] = _ZERO if (masked >> k) & 1 else (mean if (positive >> k) & 1 else -mean)
        _put(param + 4 * at, left, 1, p)
        _put(momentum + flat, left, 1, m)
        if synced != 0:
            _put(synced + flat, left, 1, p)
        if update != 0:
            for k in range(QUAD):
                p[k] = _ZERO
            _put(update + flat, left, 1, p)


@kernel
def finite(blocks: int, tensors: int, status: int) -> None:
    g = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    grad = load_long(tensor + _GRAD)
    if grad == 0:
        return
    length = load_int(block + _LENGTH)
    start = load_long(block + _START)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        _fetch_grad(tensor, grad, start + at, length - at, 1, g)
        for k in range(QUAD):
            if g[k] - g[k] != _ZERO:
                store_int(status, 1)


# Birder, SoftSignSGD and Lion.


@inline
def _philox(quad: int, low: int, high: int, step: int, stream: int) -> Any:
    """Returns four random words for four elements: Philox-4x32-7, as ``reference.philox4x32``."""
    a, b = np.uint32(np.uint64(quad) & _WORD), np.uint32(np.uint64(quad) >> _32)
    c, d = np.uint32(step), np.uint32(stream)
    first, second = np.uint64(low), np.uint64(high)
    for _ in range(7):
        p, q = np.uint64(a) * _FIRST_FACTOR, np.uint64(c) * _SECOND_FACTOR
        a, b = np.uint32((q >> _32) ^ b ^ first), np.uint32(q & _WORD)
        c, d = np.uint32((p >> _32) ^ d ^ second), np.uint32(p & _WORD)
        first = (first + _FIRST_KEY_STEP) & _WORD
        second = (second + _SECOND_KEY_STEP) & _WORD
    return a, b, c, d


_WORD, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_FIRST_KEY_STEP, _SECOND_KEY_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@inline
def _unit(word: Any) -> Any:
    """Returns a random word as a multiple of 2^-24 in [0, 1)."""
    return times(np.float32(np.int32(word >> np.uint64(8))), _UNIT)


@inline
def _uniform(index: int, low: int, high: int, step: int, stream: int, steady: int, out: Any) -> None:
    """Computes the random numbers of four elements from ``index`` on, which need two counters unless ``index`` is a
    multiple of 4.
    """
    if steady != 0:
        for k in range(QUAD):
            out[k] = _HALF
        return
    a, b, c, d = _philox(index >> 2, low, high, step, stream)
    shift = index & 3
    if shift != 0:
        w, x, y, _ = _philox((index >> 2) + 1, low, high, step, stream)
        if shift == 1:
            a, b, c, d = b, c, d, w
        elif shift == 2:
            a, b, c, d = c, d, w, x
        else:
            a, b, c, d = d, w, x, y
    out[0] = _unit(a)
    out[1] = _unit(b)
    out[2] = _unit(c)
    out[3] = _unit(d)


@inline
def _ratio(
    tensor: int, start: int, left: int, momentum: int, momentum_out: int, magnitude: int, magnitude_out: int,
    eps: float, amsgrad: int, status: int, out: Any,
) -> None:  # fmt: skip
    """Computes a quad of this step's m and b, written to their addresses, and of m / (b + eps), 0 past the end."""
    m = cuda.local.array(QUAD, types.float32)
    b = cuda.local.array(QUAD, types.float32)
    grad = load_long(tensor + _GRAD)
    beta, rest = load_float(tensor + _BETA1), load_float(tensor + _ONE_MINUS_BETA1)
    _fetch(momentum, left, 1, m)
    _fetch(magnitude, left, 1, b)
    if grad != 0:
        _fetch_grad(tensor, grad, start, left, 1, out)
    else:
        for k in range(QUAD):
            out[k] = _ZERO
    for k in range(QUAD):
        m[k] = times(beta, m[k]) + times(rest, out[k])
        now = times(beta, b[k]) + times(rest, abs(out[k]))
        b[k] = b[k] if amsgrad and b[k] > now else now
        # Past the end the ratio would be 0 / eps, and eps may be 0.
        out[k] = m[k] / (b[k] + eps) if k < left else _ZERO
        if (m[k] - m[k]) + (b[k] - b[k]) + (out[k] - out[k]) != _ZERO:
            store_int(status, 1)
    _put(momentum_out, left, 1, m)
    _put(magnitude_out, left, 1, b)


@inline
def _random_signs(y: Any, number: Any, left: int, error_out: int, status: int) -> int:
    """Returns four random signs whose mean is y if that is in [-1, 1]. What they lose of y is written to ``error_out``,
    unless it is 0.
    """
    found, bad = 0, _ZERO
    for k in range(QUAD):
        bad = bad + (y[k] - y[k])
        positive = number[k] < times(y[k] + _ONE, _HALF)
        if positive and k < left:
            found |= 1 << k
        y[k] = y[k] - (_ONE if positive else -_ONE)
    if bad != _ZERO:
        store_int(status, 1)
    if error_out != 0:
        _put(error_out, left, 1, y)
    return found


@kernel
def compress_quantized(
    blocks: int, tensors: int, momentum: int, momentum_out: int, magnitude: int, magnitude_out: int, error: int,
    error_out: int, eps: float, amsgrad: int, low: int, high: int, step: int, stream: int, steady: int, packed: int,
    status: int,
) -> None:  # fmt: skip
    """The worker's half of Birder. ``low`` and ``high`` are the halves of the seed."""
    y = cuda.local.array(QUAD, types.float32)
    other = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local, start, index = load_long(block + _LOCAL), load_long(block + _START), load_long(block + _INDEX)
    signs = packed + load_long(block + _BITS)
    for base in range(0, length, TILE):
        found = 0
        for u in range(ROUNDS):
            at = base + u * ROW + QUAD * cuda.threadIdx.x
            left = length - at
            if left > 0:
                flat = 4 * (local + at)
                _ratio(
                    tensor, start + at, left, momentum + flat, momentum_out + flat, magnitude + flat,
                    magnitude_out + flat, eps, amsgrad, status, y,
                )  # fmt: skip
                _fetch(error + flat, left, 1, other)
                for k in range(QUAD):
                    y[k] = y[k] + other[k]
                _uniform(index + at, low, high, step, stream, steady, other)
                found |= _random_signs(y, other, left, error_out + flat, status) << (QUAD * u)
        _write_signs(found, signs + (base >> 3), length - base)
        if base + TILE < length:
            cuda.syncthreads()


@kernel
def average_quantized(
    blocks: int, received: int, ranks: int, origin: int, weights: int, error: int, error_out: int, low: int, high: int,
    step: int, stream: int, steady: int, packed: int, status: int,
) -> None:  # fmt: skip
    """The server's half of Birder. ``received`` is the address of the ``ranks`` addresses of the messages."""
    a = cuda.local.array(HELD, types.float32)
    e = cuda.local.array(HELD, types.float32)
    y = cuda.local.array(QUAD, types.float32)
    number = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    owned, index, bits = 4 * load_long(block + _OWNED), load_long(block + _INDEX), load_long(block + _BITS)
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        _sum_signs(received, ranks, bits - origin + ((length + 7) >> 3), 0, weights, length - base, a)
        if error != 0:
            _fetch(error + owned + 4 * at, length - at, ROUNDS, e)
            for i in range(HELD):
                a[i] = a[i] + e[i]
        found = 0
        for u in range(ROUNDS):
            left = length - at - u * ROW
            if left > 0:
                for k in range(QUAD):
                    y[k] = a[QUAD * u + k]
                _uniform(index + at + u * ROW, low, high, step, stream, steady, number)
                rest = error_out + owned + 4 * (at + u * ROW) if error_out != 0 else 0
                found |= _random_signs(y, number, left, rest, status) << (QUAD * u)
        _write_signs(found, packed + bits + (base >> 3), length - base)
        if base + TILE < length:
            cuda.syncthreads()


@kernel
def compress_signs(
    blocks: int, tensors: int, momentum: int, momentum_out: int, beta2: float, rest2: float, zero_up: int, packed: int,
    status: int,
) -> None:  # fmt: skip
    """The worker's half of Lion. ``rest2`` is the rounded 1 - beta2."""
    m = cuda.local.array(QUAD, types.float32)
    g = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local, start = load_long(block + _LOCAL), load_long(block + _START)
    signs = packed + load_long(block + _BITS)
    grad = load_long(tensor + _GRAD)
    beta, rest = load_float(tensor + _BETA1), load_float(tensor + _ONE_MINUS_BETA1)
    for base in range(0, length, TILE):
        found = 0
        for u in range(ROUNDS):
            at = base + u * ROW + QUAD * cuda.threadIdx.x
            left = length - at
            if left > 0:
                flat = 4 * (local + at)
                _fetch(momentum + flat, left, 1, m)
                if grad != 0:
                    _fetch_grad(tensor, grad, start + at, left, 1, g)
                else:
                    for k in range(QUAD):
                        g[k] = _ZERO
                for k in range(QUAD):
                    c = times(beta, m[k]) + times(rest, g[k])
                    m[k] = times(beta2, m[k]) + times(rest2, g[k])
                    if (c - c) + (m[k] - m[k]) != _ZERO:
                        store_int(status, 1)
                    if (c > _ZERO or (zero_up and c == _ZERO)) and k < left:
                        found |= 1 << (QUAD * u + k)
                _put(momentum_out + flat, left, 1, m)
        _write_signs(found, signs + (base >> 3), length - base)
        if base + TILE < length:
            cuda.syncthreads()


@kernel
def apply_signs(blocks: int, tensors: int, packed: int) -> None:
    p = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    if load_int(tensor + _SKIP) != 0:
        return
    length = load_int(block + _LENGTH)
    param = load_long(tensor + _PARAM) + 4 * load_long(block + _START)
    step, decay = load_float(tensor + _STEP_SIZE), load_float(tensor + _DECAY)
    signs = packed + load_long(block + _BITS)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        _fetch(param + 4 * at, length - at, 1, p)
        positive = _bits_of(signs, at, length - at, 1)
        for k in range(QUAD):
            x = times(p[k], decay) if decay != _ONE else p[k]
            p[k] = x - (step if (positive >> k) & 1 else -step)
        _put(param + 4 * at, length - at, 1, p)


@kernel
def soft_sign(
    blocks: int, tensors: int, momentum: int, momentum_out: int, magnitude: int, magnitude_out: int, eps: float,
    amsgrad: int, out: int, status: int,
) -> None:  # fmt: skip
    ratio = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local, offset, start = load_long(block + _LOCAL), load_long(block + _OFFSET), load_long(block + _START)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        flat = 4 * (local + at)
        _ratio(
            tensor, start + at, length - at, momentum + flat, momentum_out + flat, magnitude + flat,
            magnitude_out + flat, eps, amsgrad, status, ratio,
        )  # fmt: skip
        _put(out + 4 * (offset + at), length - at, 1, ratio)


@kernel
def descend(blocks: int, tensors: int, averages: int) -> None:
    p = cuda.local.array(QUAD, types.float32)
    a = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    if load_int(tensor + _SKIP) != 0:
        return
    length = load_int(block + _LENGTH)
    param = load_long(tensor + _PARAM) + 4 * load_long(block + _START)
    average = averages + 4 * load_long(block + _OFFSET)
    step, decay = load_float(tensor + _STEP_SIZE), load_float(tensor + _DECAY)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        _fetch(param + 4 * at, length - at, 1, p)
        _fetch(average + 4 * at, length - at, 1, a)
        for k in range(QUAD):
            x = times(p[k], decay) if decay != _ONE else p[k]
            p[k] = x - times(a[k], step)
        _put(param + 4 * at, length - at, 1, p)


@kernel
def adam_step(
    blocks: int, tensors: int, gradients: int, momentum: int, variance: int, scale: float, rest1: float, beta2: float,
    rest2: float, root: float, eps: float,
) -> None:  # fmt: skip
    g = cuda.local.array(QUAD, types.float32)
    p = cuda.local.array(QUAD, types.float32)
    m = cuda.local.array(QUAD, types.float32)
    v = cuda.local.array(QUAD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    owned = 4 * load_long(block + _OWNED)
    param = load_long(tensor + _PARAM) + 4 * load_long(block + _START)
    weight_decay, decay = load_float(tensor + _WEIGHT_DECAY), load_float(tensor + _DECAY)
    step = load_float(tensor + _STEP_SIZE)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        left, own = length - at, owned + 4 * at
        _fetch(gradients + own, left, 1, g)
        _fetch(param + 4 * at, left, 1, p)
        _fetch(momentum + own, left, 1, m)
        _fetch(variance + own, left, 1, v)
        for k in range(QUAD):
            x = times(g[k], scale) if scale != _ONE else g[k]
            if weight_decay != _ZERO:
                x = x + times(weight_decay, p[k])
            m[k] = m[k] + times(rest1, x - m[k])
            v[k] = times(v[k], beta2) + times(times(rest2, x), x)
            y = times(p[k], decay) if decay != _ONE else p[k]
            p[k] = y - times(step, m[k] / (types.float32(math.sqrt(v[k])) / root + eps))
        _put(param + 4 * at, left, 1, p)
        _put(momentum + own, left, 1, m)
        _put(variance + own, left, 1, v)


# Dense values in 16, 8 or 4 bits. In each of its quads' rows a warp has one group of elements that share a scale.


@inline
def _whole_word(address: int, bits: int) -> int:
    """Loads the codes of a quad at a multiple of their ``bits`` / 2 bytes."""
    if bits == 16:
        return load_long(address)
    return int(load_int(address) if bits == 8 else load_low(address))


@inline
def _load_codes(first: int, at: int, left: int, bits: int, codes: Any) -> None:
    """Loads the codes of each quad of this thread's elements of a tile as one word, 0 past the end.

    ``first`` is the address of the block's codes. ``left`` is the number of the block's elements from the thread's
    first on, which is ``at``.
    """
    address, nbytes, row = first + ((at * bits) >> 3), bits >> 1, ROW * bits >> 3
    if address & (nbytes - 1) == 0 and left >= (ROUNDS - 1) * ROW + QUAD:
        for u in range(ROUNDS):
            codes[u] = _whole_word(address + u * row, bits)
    else:
        for u in range(ROUNDS):
            rest, word = left - u * ROW, 0
            for k in range(nbytes):
                if 8 * k < bits * rest:
                    word |= int(load_byte(address + u * row + k)) << (8 * k)
            if rest < QUAD:
                word &= (1 << (bits * max(rest, 0))) - 1
            codes[u] = wrapped(word)


@inline
def _decoded(word: int, k: int, bits: int, scale: Any) -> Any:
    """Returns what code ``k`` of a word stands for."""
    if bits == 16:
        return float_of(((word >> (16 * k)) & 0xFFFF) << 16)
    # As the last bits of 2^23 a code is a float at once; what is added to make it positive is subtracted again.
    half = 1 << (bits - 1)
    code = ((word & 0xFFFFFFFF) >> (bits * k)) & ((1 << bits) - 1)
    return times(float_of(code ^ half ^ _WHOLE) - np.float32((1 << 23) + half), scale)


_WHOLE = 0x4B000000  # the bits of 2^23


@inline
def _values_of_codes(first: int, scales: int, at: int, left: int, bits: int, out: Any) -> None:
    """Computes what the codes of this thread's elements of a tile stand for, 0 past the end.

    ``first`` and ``scales`` are the addresses of the block's codes and scales.
    """
    codes = cuda.local.array(ROUNDS, types.int64)
    _load_codes(first, at, left, bits, codes)
    for u in range(ROUNDS):
        scale = _read_scale(scales + 4 * ((at + u * ROW) // GROUP)) if bits < 16 and u * ROW < left else _ZERO
        for k in range(QUAD):
            out[QUAD * u + k] = _decoded(codes[u], k, bits, scale)


@inline
def _sum_codes(
    received: int, ranks: int, codes_at: int, scales_at: int, base: int, left: int, bits: int, total: Any
) -> None:
    """Computes the sums, in the order of ranks, of what this thread's elements of a tile are in the messages; 0 past
    the end.

    The codes of the tile's block are at ``codes_at`` of each message, its scales at ``scales_at``. The tile begins
    with the block's element ``base``; ``left`` is the number of elements from there on. Has barriers if codes have
    scales.
    """
    codes = cuda.local.array(ROUNDS, types.int64)
    scales = cuda.shared.array(0, types.float32)
    t = _thread()
    lane = t & (WARP - 1)
    for i in range(HELD):
        total[i] = _MINUS_ZERO
    for start_rank in range(0, ranks, AT_ONCE):
        if bits < 16:
            scale = _ZERO
            if start_rank + (t >> 5) < ranks and lane * GROUP < left:
                message = load_long(received + 8 * (start_rank + (t >> 5)))
                scale = _read_scale(message + scales_at + 4 * (base // GROUP + lane))
            scales[t] = scale
            cuda.syncthreads()
        for rank in range(start_rank, min(start_rank + AT_ONCE, ranks)):
            message = load_long(received + 8 * rank)
            _load_codes(message + codes_at, base + QUAD * t, left - QUAD * t, bits, codes)
            for u in range(ROUNDS):
                scale = _ZERO
                if bits < 16:
                    scale = scales[np.uint64(WARP * (rank - start_rank) + u * (ROW // GROUP) + (t >> 5))]
                for k in range(QUAD):
                    total[QUAD * u + k] = total[QUAD * u + k] + _decoded(codes[u], k, bits, scale)
        if bits < 16:
            cuda.syncthreads()


@inline
def _store_codes(word: int, target: int, rest: int, bits: int) -> None:
    """Writes the codes of a quad, of which ``rest`` elements are before the end: ``bits`` / 2 bytes."""
    nbytes = bits >> 1
    if rest >= QUAD and target & (nbytes - 1) == 0:
        if bits == 16:
            store_long(target, word)
        elif bits == 8:
            store_int(target, word)
        else:
            store_low(target, word)
    else:
        for k in range(nbytes):
            if 8 * k < bits * rest:
                store_byte(target + k, (word >> (8 * k)) & 255)


@inline
def _send_codes(c: Any, block: int, at: int, left: int, bits: int, error_out: int, packed: int, status: int) -> None:
    """Sends this thread's elements of a tile, 0 past the end, and writes what is lost to ``error_out``, unless it is 0.

    ``left`` is the number of the block's elements from its first on, which is ``at``. Has barriers.
    """
    most = cuda.shared.array(0, types.int32)
    t = cuda.threadIdx.x
    target, scales = packed + load_long(block + _BITS), packed + load_long(block + _SCALE)
    for u in range(ROUNDS):
        largest = 0
        for k in range(QUAD):
            largest = max(largest, int(word_of(abs(c[QUAD * u + k]))))
        most[u * THREADS + t] = largest
    cuda.syncthreads()
    # 32 groups of 32 quads: four threads fold eight quads each, then every thread what is left of its groups.
    if t < THREADS // 2:
        largest = 0
        for k in range(8):
            largest = max(largest, int(most[8 * t + k]))
        most[8 * t] = largest
    cuda.syncthreads()
    levels = np.float32(127) if bits == 8 else np.float32(7)
    for u in range(ROUNDS):
        rest = left - u * ROW
        largest = 0
        for k in range(4):
            largest = max(largest, int(most[(u * THREADS + (t & -32)) + 8 * k]))
        word = 0
        bad = False
        if bits == 16:
            for k in range(QUAD):
                i = QUAD * u + k
                low = _narrowed(c[i], _BFLOAT16)
                bad = bad or low & 0x7F80 == 0x7F80
                word |= low << (16 * k)
                c[i] = c[i] - float_of(low << 16)
        else:
            top = float_of(largest)
            bad = largest >= _INFINITE
            sends = not bad and top >= _LEAST
            scale = _NAN if bad else (top / levels if sends else _ZERO)
            factor = levels / top if sends else _ZERO
            for k in range(QUAD):
                i = QUAD * u + k
                rounded = _ROUNDER if bad else times(c[i], factor) + _ROUNDER
                word |= (word_of(rounded) & ((1 << bits) - 1)) << (bits * k)
                c[i] = c[i] - times(rounded - _ROUNDER, scale)
            if rest > 0 and t & 31 == 0:
                store_float(scales + 4 * ((at + u * ROW) // GROUP), scale)
        if rest > 0:
            if bad:
                store_int(status, 1)
            _store_codes(word, target + (((at + u * ROW) * bits) >> 3), rest, bits)
    if error_out != 0:
        _put(error_out + 4 * at, left, ROUNDS, c)
    cuda.syncthreads()


_INFINITE = 0x7F800000
_NAN, _LEAST = np.float32(np.nan), np.float32(LEAST)
#: A float of at most 2^22 plus this is rounded to a whole number, which is what its last bits are.
_ROUNDER = np.float32(1.5 * 2.0**23)


@kernel
def compress_codes(blocks: int, tensors: int, error: int, error_out: int, bits: int, packed: int, status: int) -> None:
    c = cuda.local.array(HELD, types.float32)
    e = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_int(block + _ROW_OF_TENSOR)
    length = load_int(block + _LENGTH)
    local, start = 4 * load_long(block + _LOCAL), load_long(block + _START)
    grad = load_long(tensor + _GRAD)
    left_out = error_out + local if error_out != 0 else 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        if grad != 0:
            _fetch_grad(tensor, grad, start + at, left, ROUNDS, c)
        else:
            for i in range(HELD):
                c[i] = _ZERO
        if error != 0:
            _fetch(error + local + 4 * at, left, ROUNDS, e)
            for i in range(HELD):
                c[i] = c[i] + e[i]
        _send_codes(c, block, at, left, bits, left_out, packed, status)


@kernel
def average_codes(
    blocks: int, received: int, ranks: int, origin: int, error: int, error_out: int, bits: int, packed: int,
    status: int,
) -> None:  # fmt: skip
    """Averages and sends codes again. ``received`` is the address of the ``ranks`` addresses of the messages."""
    a = cuda.local.array(HELD, types.float32)
    e = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    owned = 4 * load_long(block + _OWNED)
    codes_at, scales_at = load_long(block + _BITS) - origin, load_long(block + _SCALE) - origin
    over_ranks = _ONE / np.float32(ranks)  # as rounded from float64, which has more than twice the digits
    left_out = error_out + owned if error_out != 0 else 0
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        left = length - at
        if bits == 16:
            _sum_codes(received, ranks, codes_at, scales_at, base, length - base, 16, a)
        elif bits == 8:
            _sum_codes(received, ranks, codes_at, scales_at, base, length - base, 8, a)
        else:
            _sum_codes(received, ranks, codes_at, scales_at, base, length - base, 4, a)
        for i in range(HELD):
            a[i] = times(a[i], over_ranks)
        if error != 0:
            _fetch(error + owned + 4 * at, left, ROUNDS, e)
            for i in range(HELD):
                a[i] = a[i] + e[i]
        _send_codes(a, block, at, left, bits, left_out, packed, status)


@kernel
def unpack_codes(blocks: int, packed: int, bits: int, out: int) -> None:
    values = cuda.local.array(HELD, types.float32)
    block = blocks + _BLOCK_NBYTES * cuda.blockIdx.x
    length = load_int(block + _LENGTH)
    offset = load_long(block + _OFFSET)
    codes, scales = packed + load_long(block + _BITS), packed + load_long(block + _SCALE)
    for base in range(0, length, TILE):
        at = base + QUAD * cuda.threadIdx.x
        if bits == 16:
            _values_of_codes(codes, scales, at, length - at, 16, values)
        elif bits == 8:
            _values_of_codes(codes, scales, at, length - at, 8, values)
        else:
            _values_of_codes(codes, scales, at, length - at, 4, values)
        _put(out + 4 * (offset + at), length - at, ROUNDS, values)


# Dense values: one thread block per row of a table.


@kernel
def gather(runs: int, tensors: int, destination: int) -> None:
    values = cuda.local.array(QUAD, types.float32)
    run = runs + _RUN_NBYTES * cuda.blockIdx.x
    tensor = tensors + _TENSOR_NBYTES * load_long(run + _RUN_TENSOR)
    grad = load_long(tensor + _GRAD)
    length = load_long(run + _RUN_LENGTH)
    start, target = load_long(run + _RUN_START), destination + 4 * load_long(run + _RUN_POSITION)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        if grad != 0:
            _fetch_grad(tensor, grad, start + at, length - at, 1, values)
        else:
            for k in range(QUAD):
                values[k] = _ZERO
        _put(target + 4 * at, length - at, 1, values)


@kernel
def scatter(runs: int, tensors: int, source: int) -> None:
    values = cuda.local.array(QUAD, types.float32)
    run = runs + _RUN_NBYTES * cuda.blockIdx.x
    target = load_long(tensors + _TENSOR_NBYTES * load_long(run + _RUN_TENSOR) + _GRAD) + 4 * load_long(
        run + _RUN_START
    )
    length = load_long(run + _RUN_LENGTH)
    first = source + 4 * load_long(run + _RUN_POSITION)
    for at in range(QUAD * cuda.threadIdx.x, length, ROW):
        _fetch(first + 4 * at, length - at, 1, values)
        _put(target + 4 * at, length - at, 1, values)


@kernel
def reduce(sources: int, ranks: int, numel: int, before: float, after: float, out: int) -> None:
    """Sums what is at the ``ranks`` addresses at ``sources``, in their order, each times ``before``; multiplies the sum
    by ``after``. One thread block per tile.
    """
    total = cuda.local.array(QUAD, types.float32)
    other = cuda.local.array(QUAD, types.float32)
    base = TILE * cuda.blockIdx.x
    for at in range(base + QUAD * cuda.threadIdx.x, min(base + TILE, numel), ROW):
        left = numel - at
        _fetch(load_long(sources) + 4 * at, left, 1, total)
        for k in range(QUAD):
            total[k] = times(total[k], before)
        for i in range(1, ranks):
            _fetch(load_long(sources + 8 * i) + 4 * at, left, 1, other)
            for k in range(QUAD):
                total[k] = total[k] + times(other[k], before)
        for k in range(QUAD):
            total[k] = times(total[k], after)
        _put(out + 4 * at, left, 1, total)


@kernel
def reduce_low(sources: int, ranks: int, numel: int, before: float, after: float, dtype: int, out: int) -> None:
    """``reduce`` for float16 or bfloat16, computed in float32."""
    total = cuda.local.array(QUAD, types.float32)
    other = cuda.local.array(QUAD, types.float32)
    base = TILE * cuda.blockIdx.x
    for at in range(base + QUAD * cuda.threadIdx.x, min(base + TILE, numel), ROW):
        left = numel - at
        _fetch_low(load_long(sources) + 2 * at, left, 1, dtype, total)
        for k in range(QUAD):
            total[k] = times(total[k], before)
        for i in range(1, ranks):
            _fetch_low(load_long(sources + 8 * i) + 2 * at, left, 1, dtype, other)
            for k in range(QUAD):
                total[k] = total[k] + times(other[k], before)
        for k in range(QUAD):
            total[k] = times(total[k], after)
        _put_low(out + 2 * at, left, dtype, total)


@kernel
def reduce_double(sources: int, ranks: int, numel: int, before: int, after: int, out: int) -> None:
    """``reduce`` for float64; the factors are passed as their bits."""
    factor = double_of(before)
    base = TILE * cuda.blockIdx.x
    for at in range(base + cuda.threadIdx.x, min(base + TILE, numel), THREADS):
        total = times_double(double_of(load_long(load_long(sources) + 8 * at)), factor)
        for i in range(1, ranks):
            total += times_double(double_of(load_long(load_long(sources + 8 * i) + 8 * at)), factor)
        store_double(out + 8 * at, times_double(total, double_of(after)))


@inline
def _whole(address: int, nbytes: int, signed: int) -> int:
    if nbytes == 8:
        return load_long(address)
    if nbytes == 4:
        return int(load_int(address))
    word = int(load_byte(address)) if nbytes == 1 else int(load_low(address))
    half = 1 << (8 * nbytes - 1)
    return word - 2 * half if signed != 0 and word >= half else word


@kernel
def reduce_whole(sources: int, ranks: int, numel: int, nbytes: int, signed: int, divisor: int, out: int) -> None:
    """``reduce`` for integers of ``nbytes`` bytes, in 64 bits; divides the sum by ``divisor``, rounded towards zero."""
    base = TILE * cuda.blockIdx.x
    for at in range(base + cuda.threadIdx.x, min(base + TILE, numel), THREADS):
        total = _whole(load_long(sources) + nbytes * at, nbytes, signed)
        for i in range(1, ranks):
            total = wrapped(total + _whole(load_long(sources + 8 * i) + nbytes * at, nbytes, signed))
        if divisor > 1:
            below = total // divisor
            total = below + 1 if total < 0 and below * divisor != total else below
        if nbytes == 8:
            store_long(out + 8 * at, total)
        elif nbytes == 4:
            store_int(out + 4 * at, total)
        elif nbytes == 2:
            store_low(out + 2 * at, total)
        else:
            store_byte(out + at, total)


# Sums over memory at an address: one thread block per row of a PIECE table.


@inline
def _mixed(word: int, position: int) -> int:
    x = wrapped(word + wrapped(wrapped(position + 1) * _STEP))
    return wrapped((x ^ ((x >> 32) & 0xFFFFFFFF)) * _SPREAD)


@inline
def _word(address: int, nbytes: int) -> int:
    """Loads ``nbytes`` bytes, at most 8, from any address; the others are 0."""
    word = 0
    for k in range(nbytes):
        word |= wrapped(int(load_byte(address + k)) << (8 * k))
    return word


@kernel
def sum_words(pieces: int, sums: int) -> None:
    partial = cuda.shared.array(0, types.int64)
    piece = pieces + _PIECE_NBYTES * cuda.blockIdx.x
    first, count, tail = load_long(piece + _FIRST), load_long(piece + _COUNT), load_long(piece + _ALSO)
    start = load_long(piece + _ADDRESS) + 8 * first
    t = cuda.threadIdx.x
    total = 0
    for k in range(t, count, THREADS):
        word = load_long(start + 8 * k) if start & 7 == 0 else _word(start + 8 * k, 8)
        total = wrapped(total + _mixed(word, first + k))
    if t == 0 and tail > 0:
        total = wrapped(total + _mixed(_word(start + 8 * count, tail), first + count))
    partial[t] = total
    cuda.syncthreads()
    if t == 0:
        for k in range(1, THREADS):
            total = wrapped(total + int(partial[k]))
        store_long(sums + 8 * cuda.blockIdx.x, total)


@kernel
def sum_squares(pieces: int, sums: int) -> None:
    partial = cuda.shared.array(0, types.float64)
    piece = pieces + _PIECE_NBYTES * cuda.blockIdx.x
    count = load_long(piece + _COUNT)
    start = load_long(piece + _ADDRESS) + 4 * load_long(piece + _FIRST)
    t = cuda.threadIdx.x
    total = 0.0
    for k in range(t, count, THREADS):
        x = np.float64(load_float(start + 4 * k))
        total = total + x * x
    partial[t] = total
    cuda.syncthreads()
    if t == 0:
        for k in range(1, THREADS):
            total = total + partial[k]
        store_double(sums + 8 * cuda.blockIdx.x, total)


@kernel
def sum_floats(pieces: int, sums: int) -> None:
    partial = cuda.shared.array(0, types.float32)
    piece = pieces + _PIECE_NBYTES * cuda.blockIdx.x
    count = load_long(piece + _COUNT)
    start = load_long(piece + _ADDRESS) + 4 * load_long(piece + _FIRST)
    t = _thread()
    total = _ZERO
    for k in range(t, count, THREADS):
        total = total + load_float(start + 4 * k)
    partial[t] = total
    width = THREADS // 2
    while width > 0:
        cuda.syncthreads()
        if t < width:
            partial[t] = partial[t] + partial[t + width]
        width //= 2
    if t == 0:
        store_float(sums + 4 * cuda.blockIdx.x, partial[0])


@kernel
def sum_buckets(pieces: int, sums: int) -> None:
    hashes, parts = cuda.shared.array(0, types.int64), cuda.shared.array(0, types.float32)
    piece = pieces + _PIECE_NBYTES * cuda.blockIdx.x
    count, key = load_long(piece + _COUNT), load_long(piece + _ALSO)
    start = load_long(piece + _ADDRESS) + 4 * load_long(piece + _FIRST)
    t = _thread()
    # Sum k is added to by thread k modulo THREADS alone, row after row, as on the host.
    for k in range(t, SKETCH + WARP, THREADS):
        parts[_BUCKETS + k] = _ZERO
    rows = (count + WARP - 1) // WARP
    for first in range(0, rows, THREADS):
        hashes[t] = _mixed(_mixed(key, first + t), first + t)
        cuda.syncthreads()
        for k in range(min(THREADS, rows - first)):
            found = hashes[k]
            lane = (t - found) & (THREADS - 1)
            at = WARP * (first + k) + lane
            if lane < WARP and at < count:
                x = load_float(start + 4 * at)
                bucket = _BUCKETS + (found & (SKETCH - 1)) + lane
                parts[bucket] = parts[bucket] + (-x if (found >> (32 + lane)) & 1 else x)
        cuda.syncthreads()
    for k in range(t, SKETCH, THREADS):
        total = parts[_BUCKETS + k]
        if k < WARP:
            total = total + parts[_BUCKETS + SKETCH + k]
        store_float(sums + 4 * (SKETCH * cuda.blockIdx.x + k), total)


#: All kernels, by the names of their loops and of the parts of such.
KERNELS: dict[str, Any] = {
    loop.py_func.__name__: loop
    for loop in (
        compress, compress_momentum, compress_update, average, unpack, apply, local_step, apply_update, finite,
        compress_quantized, average_quantized, compress_signs, apply_signs, soft_sign, compress_codes, average_codes,
        unpack_codes, descend, adam_step, gather, scatter, reduce, reduce_low, reduce_double, reduce_whole, sum_words,
        sum_squares, sum_floats, sum_buckets,
    )
}  # fmt: skip
