"""Requests and responses, and their wire format.

The format is fixed and little-endian: no pickle crosses the network. A request that a rank has made before, word for
word, travels as one bit (``cache``).
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ocomm.types import DType, ReduceOp


class Kind(enum.IntEnum):
    """Operations that are negotiated."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    CHANNEL = 6  # opens a channel for fixed-layout exchanges; ``digest`` names the layout
    JOIN = 7  # this rank has no more data: it counts as ready for everything, until all have joined
    DUPLICATE = 8  # copies the set's communicator; ``detail`` says what for
    TUNE = 9  # a response only: later responses use other settings
    BRIDGE = 10  # a response only: all ranks are to open a bridge between their devices, if they can
    CLOSE = 11  # a response only: no rank uses a channel any more
    MESSAGE = 12  # from rank ``root`` to rank ``splits[0]``: no other rank asks for it


class Fault(enum.IntEnum):
    """Why a response is an error."""

    NONE = 0
    MISMATCH = 1
    STALL = 2
    LEFT = 3  # a rank whose data is needed has left


class TensorMemory(enum.IntEnum):
    """Where a rank has a tensor that is to be summed."""

    HOST = 0
    COPIED = 1  # in the host's memory, a copy of what is on a device that could have a bridge
    BRIDGED = 2  # on a device that has a bridge to the devices of all other ranks


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's request about one tensor. All fields must agree on all ranks, except ``memory``, and ``splits`` and
    ``shape[0]`` of operations whose ranks may have different numbers of rows.

    ``shape`` is the canonical shape; ``order`` names the order of its elements. ``splits`` are the rows for each rank
    (alltoall), or the rank that gets a message. Tensors of one ``group`` of ``group_size`` become ready together or
    not at all. For a channel or barrier ``detail`` and ``digest`` say what it is for; for another operation with an
    automatic name they are the line that called, and a hash of it and its callers.
    """

    kind: Kind
    name: str
    dtype: DType = DType.UINT8
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    order: str = "torch"
    group: str = ""
    group_size: int = 0
    digest: int = 0
    detail: str = ""
    memory: TensorMemory = TensorMemory.HOST
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def askers(self, size: int) -> Sequence[int]:
        """Those of ``size`` ranks that must ask for it before it is ready."""
        return range(size) if self.kind is not Kind.MESSAGE else (self.root, *self.splits)

    @property
    def is_automatic(self) -> bool:
        """True if the user gave the tensor no name, and it is known which line called."""
        return self.digest != 0 and self.kind not in REGISTERED


#: Operations whose ``detail`` and ``digest`` must be equal on all ranks.
REGISTERED = frozenset({Kind.CHANNEL, Kind.DUPLICATE, Kind.BARRIER})


@dataclass(frozen=True, slots=True)
class Response:
    """Tells all ranks to run ``names``, fused in this order, or to fail them all with ``error``.

    - ``sizes``: the first dimensions of all ranks for each name (allgather), or the flattened table of splits
      (alltoall).
    - ``cache_ids``: the ids under which the requests are known from now on, one per name, -1 for none. Empty if all
      ranks have asked under the ids they know.
    - ``templates``: one request per name, for ranks that take part because they have joined; theirs is of the same
      kind.
    - ``bridged``: all ranks have the tensors on devices, and they travel over the bridge between these.

    A TUNE has no names; its ``sizes`` are the new settings (``autotune.Tuned.pack``). A BRIDGE has no names, either.
    Nor has a CLOSE, whose ``sizes`` are the channel's number, and 1 if its communicator is to be freed, else 0. A JOIN
    without a name says that a rank has joined, whose position in the set is in ``sizes``. A JOIN with a name says that
    all have, with the last of them in ``sizes``.
    """

    kind: Kind
    names: tuple[str, ...]
    error: str = ""
    fault: Fault = Fault.NONE
    sizes: tuple[tuple[int, ...], ...] = ()
    cache_ids: tuple[int, ...] = field(default=())
    templates: tuple[Request, ...] = ()
    bridged: bool = False


class Writer:
    """Appends fields to a message."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def pack(self, format_: str, *values: float) -> None:
        self.parts.append(struct.pack("<" + format_, *values))

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")  # a file name in it may have surrogates
        self.pack("I", len(data))
        self.parts.append(data)

    def numbers(self, numbers: Sequence[int]) -> None:
        self.pack("I", len(numbers))
        self.parts.append(struct.pack(f"<{len(numbers)}q", *numbers))

    def bytes(self) -> bytes:
        return b"".join(self.parts)


class Reader:
    """Reads the fields of a message in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def unpack(self, format_: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + format_, self.data, self.at)
        self.at += struct.calcsize("<" + format_)
        return values

    def text(self) -> str:
        (count,) = self.unpack("I")
        self.at += count
        return self.data[self.at - count : self.at].decode("utf-8", "surrogatepass")

    def numbers(self) -> tuple[int, ...]:
        (count,) = self.unpack("I")
        return self.unpack(f"{count}q")


def write_request(writer: Writer, request: Request) -> None:
    writer.pack("BBBB", request.kind, request.dtype, request.op, request.memory)
    writer.pack("iddIQ", request.root, request.prescale, request.postscale, request.group_size, request.digest)
    writer.numbers(request.shape)
    writer.numbers(request.splits)
    for text in (request.name, request.order, request.group, request.detail):
        writer.text(text)


def read_request(reader: Reader) -> Request:
    kind, dtype, op, memory = reader.unpack("BBBB")
    root, prescale, postscale, group_size, digest = reader.unpack("iddIQ")
    shape, splits = reader.numbers(), reader.numbers()
    name, order, group, detail = (reader.text() for _ in range(4))
    return Request(
        Kind(kind),
        name,
        DType(dtype),
        shape,
        ReduceOp(op),
        *(root, prescale, postscale, splits, order, group, group_size, digest, detail, TensorMemory(memory)),
    )


@functools.lru_cache(maxsize=128)  # most steps have the same responses
def write_responses(responses: tuple[Response, ...]) -> bytes:
    writer = Writer()
    writer.pack("I", len(responses))
    for response in responses:
        writer.pack("BBB", response.kind, response.fault, response.bridged)
        writer.text(response.error)
        writer.numbers(list(map(len, response.names)))
        writer.text("".join(response.names))
        writer.numbers(response.cache_ids)
        writer.pack("I", len(response.sizes))
        for sizes in response.sizes:
            writer.numbers(sizes)
        writer.pack("I", len(response.templates))
        for template in response.templates:
            write_request(writer, template)
    return writer.bytes()


@functools.lru_cache(maxsize=128)
def read_responses(data: bytes) -> tuple[Response, ...]:
    reader = Reader(data)
    (count,) = reader.unpack("I")
    responses = []
    for _ in range(count):
        kind, fault, bridged = reader.unpack("BBB")
        error = reader.text()
        ends = list(itertools.accumulate(reader.numbers()))
        joined = reader.text()
        texts = tuple([joined[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        cache_ids = reader.numbers()
        (tables,) = reader.unpack("I")
        sizes = tuple(reader.numbers() for _ in range(tables))
        (count_of_templates,) = reader.unpack("I")
        templates = tuple(read_request(reader) for _ in range(count_of_templates))
        responses.append(Response(Kind(kind), texts, error, Fault(fault), sizes, cache_ids, templates, bool(bridged)))
    return tuple(responses)
