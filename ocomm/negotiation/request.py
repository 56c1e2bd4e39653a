"""Requests and responses, and their wire format.

The format is fixed and little-endian: no pickle crosses the network. A request that a rank has made before, word for
word, travels as one bit (``cache``). A value has one spelling, and readers take no other: whatever they accept would be
written with the same bytes.
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


#: Kinds that no rank requests.
RESPONSES_ONLY = frozenset({Kind.TUNE, Kind.BRIDGE, Kind.CLOSE})
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
    """Reads the fields of a message in the order in which they were written.

    All methods raise ValueError if the message ends too early, or has what is never written. Nothing is allocated for
    what the message only announces.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        left = len(self.data) - self.at
        if nbytes > left:
            raise ValueError(f"{left} bytes are left at byte {self.at}, where {nbytes} are expected")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def unpack(self, format_: str) -> tuple[Any, ...]:
        return struct.unpack("<" + format_, self.take(struct.calcsize("<" + format_)))

    def text(self) -> str:
        (count,) = self.unpack("I")
        return self.take(count).decode("utf-8", "surrogatepass")

    def numbers(self) -> tuple[int, ...]:
        (count,) = self.unpack("I")
        return struct.unpack(f"<{count}q", self.take(8 * count))

    def end(self) -> None:
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at} bytes follow its end")


def write_request(writer: Writer, request: Request) -> None:
    writer.pack("BBBB", request.kind, request.dtype, request.op, request.memory)
    writer.pack("iddIQ", request.root, request.prescale, request.postscale, request.group_size, request.digest)
    writer.numbers(request.shape)
    writer.numbers(request.splits)
    for text in (request.name, request.order, request.group, request.detail):
        writer.text(text)


def read_request(reader: Reader) -> Request:
    """Reads what ``write_request`` has written. Raises ValueError for anything else."""
    kind, dtype, op, memory = reader.unpack("BBBB")
    root, prescale, postscale, group_size, digest = reader.unpack("iddIQ")
    shape, splits = reader.numbers(), reader.numbers()
    if kind in RESPONSES_ONLY or min(shape, default=0) < 0:
        raise ValueError(f"a request of kind {kind} and shape {shape}")
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
    """Returns what ``write_responses`` has written. Raises ValueError for anything else."""
    reader = Reader(data)
    (count,) = reader.unpack("I")
    responses = []
    for _ in range(count):
        kind, fault, bridged = reader.unpack("BBB")
        error = reader.text()
        lengths = reader.numbers()
        ends = list(itertools.accumulate(lengths))
        joined = reader.text()
        if min(lengths, default=0) < 0 or sum(lengths) != len(joined) or bridged > 1:
            raise ValueError(f"names of {sum(lengths)} characters in {len(joined)}, bridged {bridged}")
        texts = tuple([joined[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        cache_ids = reader.numbers()
        (tables,) = reader.unpack("I")
        sizes = tuple(reader.numbers() for _ in range(tables))
        (count_of_templates,) = reader.unpack("I")
        templates = tuple(read_request(reader) for _ in range(count_of_templates))
        responses.append(Response(Kind(kind), texts, error, Fault(fault), sizes, cache_ids, templates, bool(bridged)))
        _require_sizes(responses[-1])
    reader.end()
    return tuple(responses)


def _require_sizes(response: Response) -> None:
    """Raises ValueError unless ``sizes``, ``cache_ids`` and ``templates`` are as many as the kind of response has."""
    names, sizes = len(response.names), response.sizes
    expected = {Kind.TUNE: [3], Kind.CLOSE: [2], Kind.JOIN: [1]}.get(response.kind)
    if response.fault:
        is_right = not sizes
    elif expected is not None:
        is_right = [len(table) for table in sizes] == expected and names <= (response.kind is Kind.JOIN)
    elif response.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        is_right = len(sizes) == names > 0
    else:
        is_right = not sizes and (names > 0) == (response.kind is not Kind.BRIDGE)
    is_right = is_right and len(response.cache_ids) in (0, names) and len(response.templates) in (0, names)
    if not is_right or any(number < 0 for table in sizes for number in table):
        raise ValueError(
            f"a response {response.kind.name} of {names} names, {len(response.cache_ids)} ids, "
            f"{len(response.templates)} templates and sizes {sizes}"
        )
