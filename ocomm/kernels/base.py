"""What every set of kernels offers: stateless loops over flat float32 buffers, driven by one block table.

The tables are NumPy structured arrays with the memory layout of ``ocomm_block`` and ``ocomm_tensor`` in
``native/ocomm.h``, so that the C loops, the NumPy reference and the CUDA kernels read the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ocomm.types import Bytes as Bytes
from ocomm.types import DType, Location, ReduceOp

#: Checksums read a whole buffer, or one of its PARTS equal parts, numbered from 0, or NOTHING. As in ``ocomm.h``.
PARTS, WHOLE, NOTHING = 64, -1, -2

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

#: What a step's random numbers depend on, besides an element's index; fields as in ``ocomm_noise``.
#: ``step``: committed steps; ``stream``: the rank, ``OWNERS`` for the owners' half; ``steady`` 1: no random numbers but
#: 1/2 for every element.
NOISE = np.dtype([("seed", np.uint64), ("step", np.uint32), ("stream", np.uint32), ("steady", np.uint32)], align=True)
OWNERS = 0xFFFFFFFF

#: Elements [start, start + length) of a tensor stand at element ``position`` of a message's float32 payload.
RUN = np.dtype([("start", np.int64), ("position", np.int64), ("length", np.int64), ("tensor", np.int64)])

#: Some of the memory at an address: ``count`` whole elements from element ``first`` on, and ``tail`` bytes after them.
PIECE = np.dtype([("address", np.uint64), ("first", np.int64), ("count", np.int64), ("tail", np.int64)])

Floats = NDArray[np.float32]
Table = NDArray[np.void]


ALIGNMENT = 64  # bytes; what AVX-512 and DLPack consumers ask for


def aligned(nbytes: int) -> Bytes:
    """A new uint8 array whose first byte is 64-byte aligned; contents undefined."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes]


def view(location: Location, nbytes: int) -> Bytes:
    """So many bytes at an address, or the array itself."""
    if not isinstance(location, int):
        return location
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(location))


def aligned_zeros(numel: int) -> Floats:
    """A new float32 array of zeros which starts on a cache line: the loops are a sixth slower where rows straddle two.

    Arrays made one after the other start at different lines of their pages, because a load waits for an earlier store
    whose address has the same last 12 bits. As with ``np.zeros``, pages take no memory until they are written.
    """
    raw = np.zeros(numel + 1024, np.float32)
    line = next(_lines) * 21 % 63
    start = (-raw.__array_interface__["data"][0] % 64 + line * 64) // 4
    return raw[start : start + numel]


_lines = itertools.count()

#: Elements of a page of memory.
PAGE_NUMEL = mmap.PAGESIZE // 4


def sparse_zeros(numel: int) -> Floats:
    """A new float32 array of zeros on its own pages, each of which takes memory from its first write on.

    NumPy asks for pages of 2 MiB where an array is large; of those, every one would soon be written.
    """
    return np.frombuffer(_pages(4 * numel), np.float32, numel)


def sparse_bytes(nbytes: int) -> Bytes:
    """As ``sparse_zeros``, of bytes."""
    return np.frombuffer(_pages(nbytes), np.uint8, nbytes)


def _pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that knows no others
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


class Memory(Protocol):
    """Where a set of kernels finds what it works on, and makes room for it.

    In the host's memory arrays are NumPy's. Those of a device (``kernels.device.DeviceArray``) can be cut, copied and
    filled, but not looked at; tables, and what messages are made of, are the host's there, too.
    """

    is_device: bool

    def zeros(self, numel: int) -> Floats:
        """A new float32 array of zeros."""
        ...

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        """New memory for messages, and for other bytes that host and kernels share; contents undefined.

        A NumPy array. Kernels on a device work on a copy of it; see ``changed``. ``headers_only``: beside a device the
        host touches no more of it, so that the rest takes none of its memory.
        """
        ...

    def changed(self, staging: Bytes) -> None:
        """The host has written to some staging memory, which kernels shall see."""
        ...

    def wire(self, staging: Bytes) -> Bytes:
        """What kernels see of some staging memory, for the network alone: nobody else may look into it."""
        ...

    def host(self, array: Any) -> Any:
        """Its elements as a NumPy array: itself, or a copy, which waits for the device."""
        ...

    def at(self, address: int, numel: int) -> Floats:
        """A flat view of float32 that somebody else keeps."""
        ...


class HostMemory:
    """See ``Memory``."""

    is_device = False

    def zeros(self, numel: int) -> Floats:
        return aligned_zeros(numel)

    def staging(self, nbytes: int, *, headers_only: bool = False) -> Bytes:
        return aligned(nbytes)

    def changed(self, staging: Bytes) -> None:
        """It is what kernels see."""

    def wire(self, staging: Bytes) -> Bytes:
        return staging

    def host(self, array: Any) -> Any:
        return array

    def at(self, address: int, numel: int) -> Floats:
        if not numel:
            return np.zeros(0, np.float32)
        return np.ctypeslib.as_array((ctypes.c_float * numel).from_address(address))


HOST: Memory = HostMemory()


class Kernels(Protocol):
    """Loops named by what they do; all arrays are one-dimensional and contiguous, nothing is allocated or kept.

    ``mask`` is one bit per flat element, 1 = masked, or None. ``scale`` is ``"l1"`` (mean \\|c\\|) or ``"rms"``.
    A returned bool says whether every scale written is finite.
    """

    name: str
    memory: Memory

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
        """c = values + error; signs and scale of c into ``packed``; error_out = c - scale * sign(c).

        ``values``, ``error`` and ``error_out`` are indexed by the table's ``local``, as every worker's error is.
        """
        ...

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
        """As ``compress`` of beta1 * m + one_minus_beta1 * (grad + weight_decay * param).

        m is the tensor's dense momentum where its address is set, else the previous packed result.
        """
        ...

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
        """The owner's half: mean of all ranks' messages in rank order, plus error, compressed again into ``packed``.

        ``error`` and ``error_out`` are indexed by the table's ``owned``.
        """
        ...

    def unpack(self, blocks: Table, packed: Bytes, mask: Bytes | None, out: Floats) -> None:
        """out = scale * sign, 0 where masked."""
        ...

    def apply(self, blocks: Table, tensors: Table, packed: Bytes, denominator: Floats, mask: Bytes | None) -> None:
        """param = param * decay, then param -= (step_size * scale) * sign / denominator; masked elements only decay."""
        ...

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
        """As ``compress`` of (1 / interval_root) * update + (step_size / interval_root) * m, with
        m = beta1 * momentum + one_minus_beta1 * (grad + weight_decay * param).

        0/1 Adam's half of a sync. ``momentum`` and ``update`` (None: zeros) are flat, and only read. Where
        interval_root is 0, both factors are.
        """
        ...

    def local_step(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        update: Floats | None,
        denominator: Floats,
        mask: Bytes | None,
    ) -> None:
        """0/1 Adam's step without a sync, with g = grad + weight_decay * param and the param before the step:

        momentum = beta1 * momentum + one_minus_beta1 * g; param = param * decay, then
        param -= step_size * (momentum / denominator); update += step_size * momentum, unless it is None (step_size is
        0). A masked element's ``update`` grows all the same, its momentum stays and its param only decays.
        """
        ...

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
        """The end of 0/1 Adam's sync: param = synced * interval_decay - ((interval_root * scale) * sign) /
        denominator, momentum = (scale / interval_root) * sign, synced = param, update = 0.

        ``synced`` holds the params of the last sync; None: the params themselves are those. A masked element only
        decays and its momentum becomes 0.
        """
        ...

    def finite(self, blocks: Table, tensors: Table) -> bool:
        """Whether every element of the blocks' gradients is finite."""
        ...

    def finite_scales(self, blocks: Table, packed: Bytes) -> bool:
        """Whether the scale of every block is finite. ``packed`` is in the host's memory, wherever kernels are."""
        ...

    # Birder, SoftSignSGD and Lion. No scales, no mask. Workers' buffers are indexed by ``local``, owners' errors by
    # ``owned``, ``out`` by ``offset``; ``x_out`` is written beside ``x``, or is the same array. ``noise`` is one row
    # of NOISE.

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
        """The worker's half: y = m / (b + eps) + e, sent as one random sign u per element, whose mean is y in [-1, 1].

        m = beta1 * momentum + one_minus_beta1 * grad; b = beta1 * magnitude + one_minus_beta1 * \\|grad\\|, with
        ``amsgrad`` no less than before; u = +1 iff U < (y + 1) / 2, U in [0, 1); error_out = y - u.
        Returns whether all m, b and y are finite.
        """
        ...

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
        """The owner's half: a = sum of weights[i] * u_i in order, plus error, sent as one random sign per element.

        error_out = a - that sign. Returns whether all a are finite. Both None: no error is added, and none is kept.
        With whole numbers as weights it is then a majority vote: of any sum but 0 the sign is sent, of 0 either one.
        """
        ...

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
        """Lion's worker: the signs of c = beta1 * momentum + one_minus_beta1 * grad, of 0 as ``zero_up`` says.

        momentum_out = beta2 * momentum + one_minus_beta2 * grad. Returns whether all of both are finite.
        """
        ...

    def apply_signs(self, blocks: Table, tensors: Table, packed: Bytes) -> None:
        """param = param * decay, then param -= step_size * sign; tensors with ``skip`` are left alone."""
        ...

    def descend(self, blocks: Table, tensors: Table, averages: Floats) -> None:
        """param = param * decay, then param -= step_size * averages, indexed by ``offset``; tensors with ``skip`` are
        left alone. ``averages`` is used up."""
        ...

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
        """out = m / (b + eps), m and b as in ``quantize``. Returns whether all of them are finite."""
        ...

    def reduce(
        self,
        dtype: DType,
        op: ReduceOp,
        sources: Sequence[Bytes],
        prescale: float,
        postscale: float,
        out: Bytes,
    ) -> None:
        """Elementwise reduction in rank order, float32 accumulation for the 16-bit floats; raw bytes in and out."""
        ...

    def checksum(self, data: Bytes, part: int = WHOLE) -> int:
        """Hash of the whole buffer, or of one of its ``PARTS`` equal parts. Up to 4 KiB it is always the whole."""
        ...

    def checksums(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64], part: int = WHOLE
    ) -> NDArray[np.uint64]:
        """``checksum`` of the buffers at ``addresses``, as a new array; 0 where an address is 0."""
        ...

    def squares(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sums of squares of the float32 buffers at ``addresses``, as a new float64 array; 0 where an address is 0.

        In float64: lane k of 32 adds elements k, k + 32, ...; lanes fold by halves.
        """
        ...


class HostKernels(Kernels, Protocol):
    """What only the host's kernels have: the loops of 1-bit LAMB. Factors are float64, rounded to float32 once."""

    def axpy(self, y: Floats, x: Floats, factor: float) -> None:
        """y += factor * x."""
        ...

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
        """Adam's step ``step``, counted from 1, but for the parameter; momentum and variance in place:

        m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * (g * g);
        update = c1 * m / (sqrt(v * c2) + eps), with c = 1 / (1 - beta^t).
        """
        ...

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
        """1-bit LAMB's step ``step`` of blocks of one tensor, but for the parameter, with m = scale * sign as packed:

        g = (m - beta1 * before) * (1 / (1 - beta1)); fresh = beta2 * fresh + (1 - beta2) * (g * g);
        update = c1 * m / denominator, with c = 1 / (1 - beta^t). Returns the maximum over elements of
        denominator / (max(sqrt(fresh * c2), floor) + eps).

        ``before`` is what ``previous`` has packed or, where that is None, ``dense``, indexed by ``start`` as ``update``
        is; ``floors`` has one number per block, ``denominator`` and ``fresh`` are flat. A masked element's m, before
        and update are 0 and it is in no maximum.
        """
        ...
