"""Where every compressed element lives: its block, its owner, its place in the flat buffers and on the wire.

A layout is fixed for the life of a run. Tensors in registration order are cut into blocks from their own start; a
block has one owner, so an element's errors never move, whatever is fused with whatever (docs/algorithms.md, Layout).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.wire import header_nbytes
from ocomm.kernels.base import BLOCK, Bytes, Table

#: Elements; flat offsets are multiples of it, so that a block starts on a cache line and on a whole mask byte.
ALIGNMENT = 16

#: One row per block of the layout, in registration order.
#: ``offset``: first element in the flat buffers; ``start``: first element inside its tensor; ``owned``: first element
#: in its owner's error buffer; ``index``: first element in the layout without padding.
LAYOUT_BLOCK = np.dtype(
    [
        ("offset", np.int64),
        ("start", np.int64),
        ("owned", np.int64),
        ("index", np.int64),
        ("length", np.int32),
        ("tensor", np.int32),
        ("owner", np.int32),
    ],
    align=True,
)


def _padded(numbers: Any, multiple: int) -> Any:
    return (numbers + (multiple - 1)) // multiple * multiple


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exclusive prefix sum."""
    return np.cumsum(sizes) - sizes


def _digest(*parts: bytes) -> int:
    """64-bit unsigned hash."""
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the ranks must agree on about one tensor. ``shape`` is canonical, ``order`` tags the order of elements."""

    name: str
    shape: tuple[int, ...]
    order: str = "torch"
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class SegmentLayout:
    """Geometry of one segment's packed buffer: ``[owner 0's message][owner 1's message]...``.

    A message is a header with one presence bit per tensor of the segment, the float32 scales of the owner's blocks, if
    blocks have scales, and their signs (``ceil(length / 8)`` bytes per block, first element in the lowest bit), padded
    to 8 bytes. The same geometry serves what a worker sends (alltoall) and what everybody gathers (allgather).
    """

    rank: int
    #: BLOCK table of all blocks, in bucket order; ``owned`` is -1 where another rank owns the block, ``scale`` where
    #: blocks have none.
    blocks: Table
    #: The rows of ``blocks`` which this rank owns.
    owned_blocks: Table
    #: Byte position and size of each owner's message.
    message_start: tuple[int, ...]
    message_nbytes: tuple[int, ...]
    packed_nbytes: int
    #: Layout indices of the tensors; their order is that of the presence bits.
    tensors: tuple[int, ...]
    header_nbytes: int
    #: 64-bit hash of the layout and of the blocks covered; the same on all ranks.
    digest: int

    @property
    def ranks(self) -> int:
        return len(self.message_start)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to others: its alltoall messages, then its own averages to everyone."""
        own = self.message_nbytes[self.rank]
        return self.packed_nbytes - own + (self.ranks - 1) * own

    @cached_property
    def tensor_indices(self) -> NDArray[np.int64]:
        return np.array(self.tensors, np.int64)

    def signature(self, compressor: str) -> int:
        """64-bit hash for ``HEADER["signature"]``: layout, segment and compressor."""
        return _digest(self.digest.to_bytes(8, "little"), compressor.encode())

    def presence_bits(self, present: NDArray[np.bool_]) -> Bytes:
        """The segment's presence bytes, as they follow a header, from one bool per tensor of the layout."""
        bits = np.zeros((len(self.tensors) + 63) // 64 * 8, np.uint8)
        packed = np.packbits(present[self.tensor_indices], bitorder="little")
        bits[: packed.size] = packed
        return bits

    def read_presence(self, bits: Bytes, present: NDArray[np.bool_]) -> None:
        """The inverse: ORs presence bytes into one bool per tensor of the layout, in place."""
        flags = np.unpackbits(bits, count=len(self.tensors), bitorder="little").view(np.bool_)
        present[self.tensor_indices] |= flags


class Layout:
    """The fixed layout of ``tensors`` (registration order) over ``ranks`` ranks; immutable.

    ``block_size`` counts elements and is a multiple of 16, or is ``"tensor"``: one block per tensor. Raises ValueError
    where that is not so, or if two tensors have the same name.
    """

    def __init__(self, tensors: Iterable[TensorSpec], ranks: int, block_size: int | Literal["tensor"] = 4096) -> None:
        self.tensors = tuple(tensors)
        self.ranks = ranks
        self.block_size = block_size
        if ranks < 1:
            raise ValueError(f"a layout needs at least one rank, got {ranks}")
        if block_size != "tensor" and (block_size < 1 or block_size % ALIGNMENT):
            raise ValueError(f"block_size must be a multiple of {ALIGNMENT} or 'tensor', got {block_size!r}")
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tensors have the name {twice!r}; give each its own")

        #: Elements of each tensor, and its first element in the flat buffers.
        self.numels = np.array([spec.numel for spec in self.tensors], np.int64)
        if block_size == "tensor" and self.numels.size and self.numels.max() > np.iinfo(np.int32).max:
            raise ValueError("block_size='tensor' needs tensors of fewer than 2^31 elements; use blocks of 4096")
        padded = _padded(self.numels, ALIGNMENT)
        self.offsets = _starts(padded)
        #: Elements of a flat buffer, padding included.
        self.flat_numel = int(padded.sum())
        self.numel = int(self.numels.sum())

        size = np.maximum(self.numels, 1) if block_size == "tensor" else np.full(len(names), block_size, np.int64)
        counts = (self.numels + size - 1) // size
        #: Row of each tensor's first block; one more than there are tensors.
        self.first_block = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        tensor = np.repeat(np.arange(len(names)), counts)
        blocks = np.zeros(int(counts.sum()), LAYOUT_BLOCK)
        blocks["tensor"] = tensor
        blocks["start"] = (np.arange(blocks.size) - self.first_block[tensor]) * size[tensor]
        blocks["offset"] = self.offsets[tensor] + blocks["start"]
        blocks["index"] = _starts(self.numels)[tensor] + blocks["start"]
        blocks["length"] = np.minimum(self.numels[tensor] - blocks["start"], size[tensor])
        blocks["owner"] = _owners(blocks["length"], ranks)
        room = _padded(blocks["length"].astype(np.int64), ALIGNMENT)
        owned_numel = []
        for rank in range(ranks):
            mine = blocks["owner"] == rank
            blocks["owned"][mine] = _starts(room[mine])
            owned_numel.append(int(room[mine].sum()))
        self._owned_numel = tuple(owned_numel)
        #: LAYOUT_BLOCK table of all blocks, in registration order.
        self.blocks: Table = blocks
        for array in (self.blocks, self.numels, self.offsets, self.first_block):
            array.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.tensors)} tensors, {self.numel} elements, {self.blocks.size} blocks, {self.ranks} ranks)"
        )

    def owned_numel(self, rank: int) -> int:
        """Elements of the owner error buffer of ``rank``: its blocks, each padded to 16."""
        return self._owned_numel[rank]

    @cached_property
    def digest(self) -> int:
        """64-bit unsigned hash of all that the ranks must agree on."""
        tensors = [(spec.name, [int(n) for n in spec.shape], spec.order, spec.dtype) for spec in self.tensors]
        return _digest(json.dumps(["layout 1", self.ranks, self.block_size, tensors]).encode())

    def tensor_blocks(self, tensor: int) -> Table:
        """The rows of ``blocks`` of one tensor."""
        return self.blocks[self.first_block[tensor] : self.first_block[tensor + 1]]

    def flat_span(self, tensor: int) -> slice:
        """Where a tensor lies in the flat buffers."""
        start = int(self.offsets[tensor])
        return slice(start, start + int(self.numels[tensor]))

    def segments(
        self, tensors: Sequence[int], rank: int, segment_nbytes: int, *, scales: bool = True
    ) -> list[SegmentLayout]:
        """Cuts a bucket, the tensors with these indices in this order, into segments of whole blocks.

        Each segment has about ``segment_nbytes`` bytes of scales and signs, at most one block more; ``scales`` says
        whether blocks have a scale. A tensor may continue in the next segment. Tensors without elements travel in none.
        ``rank`` only decides which blocks are marked as owned. Raises ValueError if a tensor comes twice.
        """
        if len(set(tensors)) != len(tensors):
            raise ValueError("a tensor comes twice in a bucket")
        if segment_nbytes < 1:
            raise ValueError(f"segment_nbytes must be positive, got {segment_nbytes}")
        rows = np.concatenate(
            [np.arange(self.first_block[t], self.first_block[t + 1]) for t in tensors] or [np.zeros(0, np.int64)]
        )
        if not rows.size:
            return []
        blocks = self.blocks[rows]
        payload = payload_nbytes(blocks["length"], scales=scales)
        before = _starts(payload)
        total = int(payload.sum())
        # Equal segments, not full ones and a short last one: the pipeline ends when the last segment does.
        count = -(-total // segment_nbytes)
        segment = before * count // total
        cuts = np.flatnonzero(np.diff(segment)) + 1
        return [self._segment(part, rank, scales) for part in np.split(blocks, cuts)]

    def _segment(self, blocks: Table, rank: int, scales: bool) -> SegmentLayout:
        tensor = blocks["tensor"]
        order = np.concatenate([tensor[:1], tensor[1:][np.diff(tensor) != 0]])
        header = header_nbytes(order.size)
        table = np.zeros(blocks.size, BLOCK)
        for field in ("offset", "start", "index", "length", "tensor"):
            table[field] = blocks[field]
        table["owned"] = np.where(blocks["owner"] == rank, blocks["owned"], -1)

        sign_nbytes = (blocks["length"].astype(np.int64) + 7) // 8
        start, starts, nbytes = 0, [], []
        for owner in range(self.ranks):
            rows = np.flatnonzero(blocks["owner"] == owner)
            signs = start + header
            table["scale"][rows] = -1
            if scales:
                table["scale"][rows] = signs + 4 * np.arange(rows.size)
                signs += 4 * rows.size
            table["bits"][rows] = signs + _starts(sign_nbytes[rows])
            end = _padded(signs + int(sign_nbytes[rows].sum()), 8)
            starts.append(start)
            nbytes.append(end - start)
            start = end
        owned = table[blocks["owner"] == rank]
        table.flags.writeable = owned.flags.writeable = False
        covered = np.stack([blocks["tensor"], blocks["start"], blocks["length"]]).astype("<i8")
        return SegmentLayout(
            rank=rank,
            blocks=table,
            owned_blocks=owned,
            message_start=tuple(starts),
            message_nbytes=tuple(nbytes),
            packed_nbytes=start,
            tensors=tuple(order.tolist()),
            header_nbytes=header,
            digest=_digest(self.digest.to_bytes(8, "little"), covered.tobytes(), b"" if scales else b"no scales"),
        )

    def dense_bytes(self) -> float:
        """Bytes sent per rank and step, on average, by a dense float32 ring or alltoall: 2 (n-1)/n * 4d."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.numel

    def compressed_bytes(self, *, scales: bool = True) -> float:
        """Bytes sent per rank and step, on average, without headers: 2 (n-1)/n * sum (ceil(length/8) + 4).

        Without the 4 where blocks have no scale.
        """
        return 2 * (self.ranks - 1) / self.ranks * int(payload_nbytes(self.blocks["length"], scales=scales).sum())


def payload_nbytes(lengths: NDArray[np.int32], *, scales: bool = True) -> NDArray[np.int64]:
    """Bytes on the wire of blocks of ``lengths`` elements: signs and, where blocks have one, a float32 scale."""
    return (lengths.astype(np.int64) + 7) // 8 + 4 * scales


def _owners(lengths: NDArray[np.int32], ranks: int) -> NDArray[np.int32]:
    """Least-loaded assignment by real elements, in order, ties to the lowest rank."""
    loads = [(0, rank) for rank in range(ranks)]  # sorted, hence a heap
    owners = []
    for length in lengths.tolist():
        load, rank = loads[0]
        owners.append(rank)
        heapq.heapreplace(loads, (load + length, rank))
    return np.array(owners, np.int32)
