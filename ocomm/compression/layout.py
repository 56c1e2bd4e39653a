"""Where every compressed element lives: its block, its owner, its place in the flat buffers and on the wire.

A layout is fixed for the life of a run. Tensors in registration order are cut into blocks from their own start. A block
has one owner, so an element's errors never move, whichever tensors are fused (docs/algorithms.md, Layout).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.codecs import SCALED_SIGNS, Codec
from ocomm.compression.wire import RUN, header_nbytes
from ocomm.kernels.base import BLOCK, Bytes, Table
from ocomm.types import Nodes

#: In elements. Flat offsets are multiples of it, so that a block starts on a cache line and on a whole byte of a mask.
ALIGNMENT = 16

#: One row per block of the layout, in registration order.
#: ``offset``: first element in the flat buffers; ``start``: first element inside its tensor; ``owned``: first element
#: in its owner's error buffer; ``local``: first element in the buffers of its slice's workers, which are the flat
#: buffers if every rank is a node; ``index``: first element in the layout without padding.
LAYOUT_BLOCK = np.dtype(
    [
        ("offset", np.int64),
        ("start", np.int64),
        ("owned", np.int64),
        ("local", np.int64),
        ("index", np.int64),
        ("length", np.int32),
        ("tensor", np.int32),
        ("owner", np.int32),
        ("slice", np.int32),
    ],
    align=True,
)


def _padded(numbers: Any, multiple: int) -> Any:
    return (numbers + (multiple - 1)) // multiple * multiple


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the exclusive prefix sum."""
    return np.cumsum(sizes) - sizes


def _shared_out(sizes: NDArray[np.int64], to: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the total that each of ``count`` receivers gets, and for each size the sum of earlier sizes with the same
    receiver.
    """
    order = np.argsort(to, kind="stable")
    totals = np.bincount(to, sizes, count).astype(np.int64)
    before = np.empty_like(sizes)
    before[order] = _starts(sizes[order]) - _starts(totals)[to[order]]
    return totals, before


def _digest(*parts: bytes) -> int:
    """Returns a 64-bit unsigned hash of the parts."""
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the ranks must agree on about one tensor. ``shape`` is canonical; ``order`` names the order of its
    elements.
    """

    name: str
    shape: tuple[int, ...]
    order: str = "torch"
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """Where the messages to owners lie in one buffer: slice by slice, and in each slice node by node.

    Each message begins with a header. What a worker sends (alltoall) and what every rank gathers (allgather) have the
    same geometry.
    """

    rank: int
    nodes: Nodes
    header_nbytes: int
    #: Byte position and size of each owner's message, by rank. The size is 0 for a rank that owns nothing.
    message_start: tuple[int, ...]
    message_nbytes: tuple[int, ...]
    #: Byte position of each slice's first message, and the end of the last.
    slice_bounds: tuple[int, ...]

    @property
    def packed_nbytes(self) -> int:
        """Number of bytes of the whole buffer."""
        return self.slice_bounds[-1]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that exchange this rank's slice, with this rank; none if it has no slice."""
        return self.nodes.workers(self.rank)


@dataclass(frozen=True, eq=False)
class SegmentLayout(MessageLayout):
    """Geometry of one segment's packed buffer.

    A message is a header with one presence bit per tensor of the segment, the float32 scales of the owner's blocks if
    blocks have scales, and the codes of their elements (``ceil(bits * length / 8)`` bytes per block, first element in
    the lowest bits), padded to 8 bytes. Codes of 1 bit are signs.
    """

    #: The wire format of the blocks.
    codec: Codec
    #: BLOCK table of all blocks, in bucket order. ``owned`` is -1 if another rank owns the block, ``local`` is -1 if
    #: another rank compresses it, ``scale`` is -1 if blocks have no scales.
    blocks: Table
    #: The rows of ``blocks`` that this rank owns.
    owned_blocks: Table
    #: The rows of ``blocks`` that this rank compresses.
    worker_blocks: Table
    #: Layout indices of the tensors; their order is that of the presence bits.
    tensors: tuple[int, ...]
    #: The slice of each row of ``blocks``.
    block_slices: NDArray[np.int32]
    #: 64-bit hash of the layout and of the blocks covered; the same on all ranks.
    digest: int

    @property
    def ranks(self) -> int:
        return len(self.message_start)

    def runs(self) -> Table:
        """Returns the blocks as runs of adjacent elements: a RUN table, without positions."""
        return runs_of(self.blocks)

    @cached_property
    def slice_runs(self) -> tuple[Table, ...]:
        """RUN tables: how the elements of each slice lie in a float32 message, in the order of ``blocks``."""
        found = []
        for number in range(self.nodes.slices):
            rows = self.blocks[self.block_slices == number]
            runs = np.zeros(rows.size, RUN)
            for field in ("start", "length", "tensor"):
                runs[field] = rows[field]
            joined = (np.diff(runs["tensor"]) == 0) & (runs["start"][1:] == (runs["start"] + runs["length"])[:-1])
            first = np.flatnonzero(np.concatenate([np.ones(min(rows.size, 1), bool), ~joined]))
            lengths = np.add.reduceat(runs["length"], first) if rows.size else runs["length"]
            runs = runs[first]
            runs["length"] = lengths
            runs["position"] = _starts(lengths)
            found.append(runs)
        return tuple(found)

    @cached_property
    def tensor_indices(self) -> NDArray[np.int64]:
        return np.array(self.tensors, np.int64)

    def signature(self, compressor: str) -> int:
        """Returns the 64-bit hash of layout, segment and compressor that ``HEADER["signature"]`` has."""
        return _digest(self.digest.to_bytes(8, "little"), compressor.encode())

    def presence_bits(self, present: NDArray[np.bool_]) -> Bytes:
        """Returns the segment's presence bytes, which follow a header, from one bool per tensor of the layout."""
        bits = np.zeros((len(self.tensors) + 63) // 64 * 8, np.uint8)
        packed = np.packbits(present[self.tensor_indices], bitorder="little")
        bits[: packed.size] = packed
        return bits

    def read_presence(self, bits: Bytes, present: NDArray[np.bool_]) -> None:
        """Reads presence bytes, as ``presence_bits`` makes them, and ORs them into one bool per tensor of the layout,
        in place.
        """
        flags = np.unpackbits(bits, count=len(self.tensors), bitorder="little").view(np.bool_)
        present[self.tensor_indices] |= flags


class Layout:
    """The fixed layout of ``tensors``, in registration order, over ranks or nodes. Immutable.

    With ``nodes`` a block belongs to a slice and a node: its owner is that node's worker of the slice. Blocks are
    assigned in registration order to the least loaded owner; owners are taken in turn within a node, then from node to
    node. So slices are mixed block by block, and every bucket is shared out evenly.

    Args:
        tensors: The tensors, with distinct names.
        ranks: Number of ranks.
        block_size: Number of elements, a multiple of 16, or ``"tensor"`` for one block per tensor.
        nodes: The nodes of the ranks; None for the flat form.

    Raises:
        ValueError: An argument is wrong, or two tensors have the same name.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        ranks: int,
        block_size: int | Literal["tensor"] = 4096,
        nodes: Nodes | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.ranks = ranks
        self.block_size = block_size
        if ranks < 1:
            raise ValueError(f"a layout needs at least one rank, got {ranks}")
        self.nodes = nodes or Nodes.flat(ranks)
        if self.nodes.ranks != ranks:
            raise ValueError(f"a layout of {ranks} ranks cannot have nodes of {self.nodes.ranks}")
        if block_size != "tensor" and (block_size < 1 or block_size % ALIGNMENT):
            raise ValueError(f"block_size must be a multiple of {ALIGNMENT} or 'tensor', got {block_size!r}")
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tensors have the name {twice!r}; give each its own")

        #: Number of elements of each tensor, and its first element in the flat buffers.
        self.numels = np.array([spec.numel for spec in self.tensors], np.int64)
        if block_size == "tensor" and self.numels.size and self.numels.max() > np.iinfo(np.int32).max:
            raise ValueError("block_size='tensor' needs tensors of fewer than 2^31 elements; use blocks of 4096")
        padded = _padded(self.numels, ALIGNMENT)
        self.offsets = _starts(padded)
        #: Number of elements of a flat buffer, with padding.
        self.flat_numel = int(padded.sum())
        self.numel = int(self.numels.sum())

        size = np.maximum(self.numels, 1) if block_size == "tensor" else np.full(len(names), block_size, np.int64)
        counts = (self.numels + size - 1) // size
        #: The row of each tensor's first block, and at the end the number of blocks.
        self.first_block = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        tensor = np.repeat(np.arange(len(names)), counts)
        blocks = np.zeros(int(counts.sum()), LAYOUT_BLOCK)
        blocks["tensor"] = tensor
        blocks["start"] = (np.arange(blocks.size) - self.first_block[tensor]) * size[tensor]
        blocks["offset"] = self.offsets[tensor] + blocks["start"]
        blocks["index"] = _starts(self.numels)[tensor] + blocks["start"]
        blocks["length"] = np.minimum(self.numels[tensor] - blocks["start"], size[tensor])
        slices = self.nodes.slices
        owners = np.array([rank for node in self.nodes.members for rank in node[:slices]], np.int32)
        turn = _least_loaded(blocks["length"], owners.size)
        blocks["owner"], blocks["slice"] = owners[turn], turn % slices
        room = _padded(blocks["length"].astype(np.int64), ALIGNMENT)
        owned_numel, blocks["owned"] = _shared_out(room, blocks["owner"], ranks)
        slice_numel, blocks["local"] = _shared_out(room, blocks["slice"], slices)
        self._owned_numel, self._slice_numel = tuple(owned_numel.tolist()), tuple(slice_numel.tolist())
        #: LAYOUT_BLOCK table of all blocks, in registration order.
        self.blocks: Table = blocks
        for array in (self.blocks, self.numels, self.offsets, self.first_block):
            array.flags.writeable = False

    def __repr__(self) -> str:
        over = f"{self.ranks} ranks" + ("" if self.nodes.is_flat else f" on {len(self.nodes.members)} nodes")
        return f"Layout({len(self.tensors)} tensors, {self.numel} elements, {self.blocks.size} blocks, {over})"

    def slice_of(self, rank: int) -> int:
        """Returns the slice that ``rank`` compresses, -1 for none."""
        position = self.nodes.node_of(rank).index(rank)
        return position if position < self.nodes.slices else -1

    def worker_numel(self, rank: int) -> int:
        """Returns the number of elements of the worker buffers of ``rank``: the blocks of its slice, each padded to
        16.
        """
        number = self.slice_of(rank)
        return self._slice_numel[number] if number >= 0 else 0

    def owned_numel(self, rank: int) -> int:
        """Returns the number of elements of the server error of ``rank``: the blocks it owns, each padded to 16."""
        return self._owned_numel[rank]

    @cached_property
    def digest(self) -> int:
        """64-bit unsigned hash of everything that the ranks must agree on."""
        tensors = [(spec.name, [int(n) for n in spec.shape], spec.order, spec.dtype) for spec in self.tensors]
        described: list[Any] = ["layout 1", self.ranks, self.block_size, tensors]
        if self.nodes != Nodes.flat(self.ranks):
            described += [self.nodes.members, self.nodes.groups]
        return _digest(json.dumps(described).encode())

    def local_span(self, tensor: int, rank: int) -> slice:
        """Returns where the blocks of a tensor that ``rank`` compresses lie in its worker buffers, where they are
        adjacent.
        """
        blocks = self.tensor_blocks(tensor)
        mine = blocks[blocks["slice"] == self.slice_of(rank)]
        if not mine.size:
            return slice(0, 0)
        return slice(int(mine["local"][0]), int(mine["local"][-1]) + int(mine["length"][-1]))

    def owned_span(self, tensor: int, rank: int) -> slice:
        """Returns where the blocks of a tensor that ``rank`` owns lie in its server error, where they are adjacent."""
        blocks = self.tensor_blocks(tensor)
        mine = blocks[blocks["owner"] == rank]
        if not mine.size:
            return slice(0, 0)
        return slice(int(mine["owned"][0]), int(mine["owned"][-1]) + int(mine["length"][-1]))

    def from_worker(self, tensor: int, rank: int, buffer: NDArray[Any]) -> NDArray[Any]:
        """Returns a whole flat tensor from the worker buffer ``buffer`` of ``rank``, with zeros in blocks that others
        compress.

        It is a view if the rank compresses all of the tensor.
        """
        part = buffer[self.local_span(tensor, rank)]
        blocks = self.tensor_blocks(tensor)
        mine = blocks["slice"] == self.slice_of(rank)
        if mine.all():
            return part
        # All blocks but the last have the same length, so they are the rows of a table.
        width = int(blocks["length"].max())
        table = np.zeros((blocks.size, width), buffer.dtype)
        rows = np.zeros(int(mine.sum()) * width, buffer.dtype)
        rows[: part.size] = part
        table[mine] = rows.reshape(-1, width)
        return table.reshape(-1)[: int(self.numels[tensor])]

    def to_worker(self, tensor: int, rank: int, whole: NDArray[Any]) -> NDArray[Any]:
        """Returns the elements of the flat tensor ``whole`` that ``rank`` compresses, in the order of its worker
        buffers.
        """
        blocks = self.tensor_blocks(tensor)
        mine = blocks["slice"] == self.slice_of(rank)
        if mine.all() or not mine.any():
            return whole if mine.any() else whole[:0]
        width = int(blocks["length"].max())
        table = np.zeros(blocks.size * width, whole.dtype)
        table[: whole.size] = whole
        return table.reshape(-1, width)[mine].reshape(-1)[: int(blocks["length"][mine].sum())]

    def tensor_blocks(self, tensor: int) -> Table:
        """Returns the rows of ``blocks`` of one tensor."""
        return self.blocks[self.first_block[tensor] : self.first_block[tensor + 1]]

    def flat_span(self, tensor: int) -> slice:
        """Returns where a tensor lies in the flat buffers."""
        start = int(self.offsets[tensor])
        return slice(start, start + int(self.numels[tensor]))

    def buckets(self, tensors: Sequence[int], count: int) -> list[list[int]]:
        """Cuts tensors, in this order, into at most ``count`` runs of about equal numbers of elements.

        A bucket is sent when its last gradient is ready and the buckets before it have been sent. So the last bucket
        should be small, because the step waits for it, and the first should be ready early, because the network waits
        for it.
        """
        numels = self.numels[list(tensors)]
        of = np.minimum(_starts(numels) * count // max(int(numels.sum()), 1), count - 1)
        cuts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(tensors)]
        return [list(tensors[start:end]) for start, end in pairwise(cuts)]

    def segments(
        self, tensors: Sequence[int], rank: int, segment_nbytes: int, codec: Codec = SCALED_SIGNS
    ) -> list[SegmentLayout]:
        """Cuts a bucket, the tensors with these indices in this order, into segments of whole blocks.

        A tensor may continue in the next segment. Tensors without elements travel in none.

        Args:
            tensors: Indices of the tensors in the layout.
            rank: The rank for which blocks are marked as owned and as compressed.
            segment_nbytes: Approximate number of bytes of scales and codes of a segment, at most one block more.
            codec: The wire format of the blocks.

        Raises:
            ValueError: A tensor comes twice, or ``segment_nbytes`` is not positive.
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
        payload = codec.payload_nbytes(blocks["length"])
        before = _starts(payload)
        total = int(payload.sum())
        # Segments are equal, instead of full ones and a short last one, because the pipeline ends with the last one.
        count = -(-total // segment_nbytes)
        segment = before * count // total
        cuts = np.flatnonzero(np.diff(segment)) + 1
        return [self._segment(part, rank, codec) for part in np.split(blocks, cuts)]

    def _segment(self, blocks: Table, rank: int, codec: Codec) -> SegmentLayout:
        tensor = blocks["tensor"]
        order = np.concatenate([tensor[:1], tensor[1:][np.diff(tensor) != 0]])
        header = header_nbytes(order.size)
        table = np.zeros(blocks.size, BLOCK)
        for field in ("offset", "start", "index", "length", "tensor"):
            table[field] = blocks[field]
        table["owned"] = np.where(blocks["owner"] == rank, blocks["owned"], -1)
        table["local"] = np.where(blocks["slice"] == self.slice_of(rank), blocks["local"], -1)

        owners = np.array(self.nodes.owners)
        message = np.empty(self.ranks, np.int64)
        message[owners] = np.arange(owners.size)
        of = message[blocks["owner"]]  # number of the message that each block is in, in the order of the buffer
        scale_nbytes, scale = _shared_out(4 * codec.scales(blocks["length"]), of, owners.size)
        codes_nbytes, codes = _shared_out(codec.code_nbytes(blocks["length"]), of, owners.size)
        sizes = _padded(header + scale_nbytes + codes_nbytes, 8)
        begins = _starts(sizes)
        table["scale"] = -1 if codec.group is None else begins[of] + header + scale
        table["bits"] = begins[of] + header + scale_nbytes[of] + codes
        starts, nbytes = np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64)
        starts[owners], nbytes[owners] = begins, sizes
        owned = table[blocks["owner"] == rank]
        worker = table if self.nodes.is_flat else table[table["local"] >= 0]
        table.flags.writeable = owned.flags.writeable = worker.flags.writeable = False
        covered = np.stack([blocks["tensor"], blocks["start"], blocks["length"]]).astype("<i8")
        return SegmentLayout(
            rank=rank,
            codec=codec,
            blocks=table,
            owned_blocks=owned,
            worker_blocks=worker,
            nodes=self.nodes,
            slice_bounds=_slice_bounds(self.nodes, starts.tolist(), int(sizes.sum())),
            block_slices=blocks["slice"].copy(),
            message_start=tuple(starts.tolist()),
            message_nbytes=tuple(nbytes.tolist()),
            tensors=tuple(order.tolist()),
            header_nbytes=header,
            digest=_digest(self.digest.to_bytes(8, "little"), covered.tobytes(), codec.label.encode()),
        )

    def dense_bytes(self, rank: int) -> float:
        """Returns the bytes that ``rank`` sends to other nodes in a float32 sum of all tensors, as an allreduce sends
        them: directly, whatever exchanges do.
        """
        return self.nodes.sum_nbytes(4 * self.numel, rank)

    def compressed_bytes(self, rank: int, codec: Codec = SCALED_SIGNS) -> float:
        """Returns the bytes that ``rank`` sends to other nodes in an exchange of all tensors, without headers, on
        average over the workers: ``Nodes.exchange_nbytes`` of the blocks' payload, with 1 bit sum (ceil(length/8) + 4).
        """
        return self.nodes.exchange_nbytes(int(codec.payload_nbytes(self.blocks["length"]).sum()), rank)


def all_blocks(layout: Layout, rank: int) -> Table:
    """Returns the BLOCK table of the whole layout, for loops that do not use messages."""
    segments = layout.segments(list(range(len(layout.tensors))), rank, sys.maxsize)
    return segments[0].blocks if segments else np.zeros(0, BLOCK)


def float_messages(rank: int, nodes: Nodes, header: int, numel: int) -> tuple[MessageLayout, dict[int, range]]:
    """Returns the layout of float32 messages for ``numel`` elements in equal parts, and the elements of each owner's
    part.
    """
    count = len(nodes.owners)
    share = int(_padded(-(-numel // count), ALIGNMENT))
    start, starts, nbytes = 0, [0] * nodes.ranks, [0] * nodes.ranks
    parts = {}
    for k, owner in enumerate(nodes.owners):
        parts[owner] = range(min(share * k, numel), min(share * (k + 1), numel))
        starts[owner], nbytes[owner] = start, int(_padded(header + 4 * len(parts[owner]), 8))
        start += nbytes[owner]
    bounds = _slice_bounds(nodes, starts, start)
    return MessageLayout(rank, nodes, header, tuple(starts), tuple(nbytes), bounds), parts


def _slice_bounds(nodes: Nodes, starts: Sequence[int], end: int) -> tuple[int, ...]:
    first = nodes.owners[:: len(nodes.members)]
    return (*(starts[owner] for owner in first), end)


def _least_loaded(lengths: NDArray[np.int32], owners: int) -> NDArray[np.int64]:
    """Assigns blocks to owners by their number of elements, in order; the lowest owner wins ties."""
    loads = [(0, owner) for owner in range(owners)]  # sorted, so it is a heap
    chosen = []
    for length in lengths.tolist():
        load, owner = loads[0]
        chosen.append(owner)
        heapq.heapreplace(loads, (load + length, owner))
    return np.array(chosen, np.int64)


def runs_of(blocks: Table) -> Table:
    """Returns blocks as runs of adjacent elements: a RUN table, without positions."""
    ends = blocks["start"] + blocks["length"]
    joined = (np.diff(blocks["tensor"]) == 0) & (blocks["start"][1:] == ends[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    runs = np.zeros(first.size, RUN)
    runs["tensor"], runs["start"] = blocks["tensor"][first], blocks["start"][first]
    runs["length"] = np.add.reduceat(blocks["length"].astype(np.int64), first)
    return runs
