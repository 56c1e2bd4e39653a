"""The interface of a set of kernels: the loops of ``kernels.loops``, memory, and the tables that loops read.

The tables are NumPy structured arrays with the memory layout of ``ocomm_block`` and ``ocomm_tensor`` in
``native/ocomm.h``, so that the C loops, the NumPy reference and the CUDA kernels read the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ocomm.kernels.loops import Loops
from ocomm.types import Bytes as Bytes
from ocomm.types import Location

#: A checksum reads a WHOLE buffer, one of its PARTS equal parts, numbered from 0, or NOTHING; as in ``ocomm.h``.
PARTS, WHOLE, NOTHING = 64, -1, -2

#: In messages of codes: number of a block's elements that share a scale, and the least magnitude that is sent; as in
#: ``kernels.c``. A group of smaller elements is sent as zeros.
GROUP, LEAST = 128, 2.0**-100

#: One row per scale block; fields as in ``ocomm_block``.
BLOCK = np.dtype(
    [
        ("offset", np.int64),
        ("start", np.int64),
        ("owned", np.int64),
        ("local", np.int64),
        ("bits", np.int64),
        ("scale", np.int64),
        ("index", np.int64),
        ("length", np.int32),
        ("tensor", np.int32),
    ],
    align=True,
)

#: One row per tensor; fields as in ``ocomm_tensor``. Addresses are 0 where C has NULL. ``grad_dtype`` is 0 for float32;
#: kernels on a device also read gradients of ``DType.FLOAT16`` and ``BFLOAT16``, as what they are in float32.
TENSOR = np.dtype(
    [
        ("grad", np.uint64),
        ("param", np.uint64),
        ("momentum", np.uint64),
        ("beta1", np.float32),
        ("one_minus_beta1", np.float32),
        ("weight_decay", np.float32),
        ("step_size", np.float32),
        ("decay", np.float32),
        ("interval_root", np.float32),
        ("interval_decay", np.float32),
        ("skip", np.int32),
        ("grad_dtype", np.int32),
    ],
    align=True,
)

#: What the random numbers of a step depend on, besides an element's index; fields as in ``ocomm_noise``.
#: ``step``: committed steps; ``stream``: the rank, ``OWNERS`` for the server's half; ``steady`` 1: every element gets
#: 1/2 instead of a random number.
NOISE = np.dtype([("seed", np.uint64), ("step", np.uint32), ("stream", np.uint32), ("steady", np.uint32)], align=True)
OWNERS = 0xFFFFFFFF

#: Elements [start, start + length) of a tensor are at element ``position`` of a message's float32 payload.
RUN = np.dtype([("start", np.int64), ("position", np.int64), ("length", np.int64), ("tensor", np.int64)])

#: A part of the memory at an address: ``count`` whole elements from element ``first`` on. ``also`` is the number of
#: bytes after them that a checksum reads, or the key of a sketch's hashes.
PIECE = np.dtype([("address", np.uint64), ("first", np.int64), ("count", np.int64), ("also", np.int64)])

Floats = NDArray[np.float32]
Table = NDArray[np.void]

#: Buckets of a sketch, and elements whose sums in buckets are float32.
SKETCH, SKETCHED = 1024, 1 << 17

#: Number of elements whose sum is float32: a device sends 4 bytes for them.
SUMMED = 1 << 18


def pieces_of(
    addresses: NDArray[np.uint64], counts: NDArray[np.int64], tails: NDArray[np.int64], numel: int
) -> tuple[Table, NDArray[np.int64]]:
    """Returns a PIECE table of the memory at the addresses, cut into ``numel`` elements, and the address that each row
    belongs to.
    """
    there = np.flatnonzero((addresses != 0) & ((counts > 0) | (tails > 0)))
    shares = np.maximum(-(-counts[there] // numel), 1)
    of = np.repeat(there, shares)
    number = np.arange(of.size) - np.repeat(np.cumsum(shares) - shares, shares)
    pieces = np.zeros(of.size, PIECE)
    pieces["address"], pieces["first"] = addresses[of], number * numel
    pieces["count"] = np.minimum(counts[of] - pieces["first"], numel)
    pieces["also"] = np.where(number == np.repeat(shares, shares) - 1, tails[of], 0)
    return pieces, of


ALIGNMENT = 64  # bytes; AVX-512 and users of DLPack need it


def aligned(nbytes: int) -> Bytes:
    """Returns a new uint8 array whose first byte is 64-byte aligned; contents undefined."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes]


def view(location: Location, nbytes: int) -> Bytes:
    """Returns ``nbytes`` bytes at an address, or the array itself."""
    if not isinstance(location, int):
        return location
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(location))


def aligned_zeros(numel: int) -> Floats:
    """Returns a new float32 array of zeros that starts on a cache line: loops are a sixth slower if vectors straddle
    two lines.

    Successive arrays start at different lines of their pages, because a load waits for an earlier store whose address
    has the same last 12 bits. As with ``np.zeros``, pages take no memory until they are written.
    """
    raw = np.zeros(numel + 1024, np.float32)
    line = next(_lines) * 21 % 63
    start = (-raw.__array_interface__["data"][0] % 64 + line * 64) // 4
    return raw[start : start + numel]


_lines = itertools.count()

#: Number of float32 elements in a page of memory.
PAGE_NUMEL = mmap.PAGESIZE // 4


def sparse_zeros(numel: int) -> Floats:
    """Returns a new float32 array of zeros on pages of its own, each of which takes memory from its first write on.

    For a large array NumPy asks for pages of 2 MiB, every one of which would soon be written.
    """
    return np.frombuffer(_pages(4 * numel), np.float32, numel)


def sparse_bytes(nbytes: int) -> Bytes:
    """Returns a new uint8 array of zeros on pages of its own, each of which takes memory from its first write on."""
    return np.frombuffer(_pages(nbytes), np.uint8, nbytes)


def _pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # an operating system without larger pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


class Memory(Protocol):
    """The memory that a set of kernels works on.

    In the host's memory arrays are NumPy's. Arrays of a device (``kernels.device.DeviceArray``) can be cut, copied and
    filled, but their elements cannot be read; tables and messages are in the host's memory there, too.
    """

    is_device: bool

    def zeros(self, numel: int) -> Floats:
        """Returns a new float32 array of zeros."""
        ...

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        """Returns a new NumPy array for messages and for other bytes that host and kernels share; contents undefined.

        Kernels on a device work on a copy of it, which ``changed`` updates. ``headers_only``: with a device, the host
        uses no more of it than headers, so the rest takes none of its memory.
        """
        ...

    def changed(self, staging: Bytes) -> None:
        """Says that the host has written to staging memory, so that kernels see the new contents."""
        ...

    def wire(self, staging: Bytes) -> Bytes:
        """Returns the kernels' copy of staging memory, for the network alone: nobody else may read it."""
        ...

    def host(self, array: Any) -> Any:
        """Returns the elements as a NumPy array: the array itself, or a copy, for which the host waits."""
        ...

    def at(self, address: int, numel: int) -> Floats:
        """Returns a flat float32 view of memory that its owner keeps alive."""
        ...


class HostMemory:
    """The ``Memory`` of the host."""

    is_device = False

    def zeros(self, numel: int) -> Floats:
        return aligned_zeros(numel)

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        return aligned(nbytes)

    def changed(self, staging: Bytes) -> None:
        """Does nothing: kernels see staging memory itself."""

    def wire(self, staging: Bytes) -> Bytes:
        return staging

    def host(self, array: Any) -> Any:
        return array

    def at(self, address: int, numel: int) -> Floats:
        if not numel:
            return np.zeros(0, np.float32)
        return np.ctypeslib.as_array((ctypes.c_float * numel).from_address(address))


HOST: Memory = HostMemory()


class Kernels(Loops, Protocol):
    """The loops, and sums over memory at addresses. Stateless."""

    name: str
    memory: Memory

    def checksum(self, data: Bytes, part: int = WHOLE) -> int:
        """Returns a hash of the whole buffer, or of one of its ``PARTS`` equal parts. Up to 4 KiB it is always that of
        the whole.
        """
        ...

    def checksums(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64], part: int = WHOLE
    ) -> NDArray[np.uint64]:
        """Returns the ``checksum`` of each buffer at ``addresses``, as a new array; 0 for an address of 0."""
        ...

    def squares(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the sum of squares of each float32 buffer at ``addresses``, as a new float64 array; 0 for an address
        of 0.

        It is computed in float64: lane k of 32 adds elements k, k + 32, ...; then lanes are folded by halves.
        """
        ...

    def sums(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the sum of each float32 buffer at ``addresses``, as a new float64 array; 0 for an address of 0. Every
        set of kernels returns the same bits.

        SUMMED elements at a time are added in float32, as ``Loops.sum_floats`` says, and their sums in float64, one
        after the other.
        """
        ...

    def sketch(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
        """Returns the CountSketch of float32 buffers at ``addresses``, 0 for none: the sums of SKETCH buckets, to which
        elements are added with random signs. Its squared norm estimates that of all elements without bias, with a
        relative deviation of sqrt(2 / SKETCH) at most. The mean of the ranks' sketches is the sketch of their mean.

        Row k of 32 elements, in chunk c of SKETCHED elements of buffer i, is added to the 32 buckets that follow one:
        x = mixed(mixed(mixed(mixed(seed, i), c), k), k) has its number, modulo SKETCH, and in bit 32 + j whether
        element j is subtracted. Buckets past the last one are the first ones. In a chunk sums are float32, in the order
        of rows, and those of the buckets past the last one are added at its end; chunks are added in float64.

        Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002.
        """
        ...
