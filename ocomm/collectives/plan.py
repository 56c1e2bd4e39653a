"""A plan: what one exchange computes and sends, as a value.

Python decides and builds plans; an engine runs them. ``native_engine`` runs one in C without the GIL, ``python_engine``
is its slow twin over any transport; both must leave the same bytes in every buffer.

A plan is a list of segments which may overlap in time. A segment is a list of stages which may not: a stage first
runs its computations, then posts its messages, and is over when all of them have arrived and left. So the three-phase
compressed allreduce is three stages: compress and alltoall; average, compress again and allgather; unpack.

Buffers are those of the host. What lives on a device is computed by an ``Offload`` (see ``collectives.staged``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ocomm.compression.wire import HEADER as HEADER
from ocomm.compression.wire import MAGIC as MAGIC
from ocomm.compression.wire import header_nbytes as header_nbytes
from ocomm.kernels.base import Bytes, Floats, Table
from ocomm.types import DType, Location, ReduceOp


@dataclass(slots=True, eq=False)
class Copy:
    """memcpy of one array over another of the same nbytes."""

    source: Bytes
    destination: Bytes


@dataclass(slots=True, eq=False)
class CopyIn:
    """memcpy of ``sources``, so many ``nbytes`` each, side by side into ``destination``, which they fill."""

    sources: Sequence[Location]
    nbytes: Sequence[int]
    destination: Bytes


@dataclass(slots=True, eq=False)
class CopyOut:
    """The inverse: ``source``, cut into ``nbytes``."""

    source: Bytes
    destinations: Sequence[Location]
    nbytes: Sequence[int]


@dataclass(slots=True, eq=False)
class Pack:
    """Gradient elements of each row of a RUN table into ``destination``, float32; zeros where a tensor has none."""

    tensors: Table
    runs: Table
    destination: Bytes


@dataclass(slots=True, eq=False)
class Place:
    """The inverse: elements of ``source`` to where the TENSOR table has the gradients."""

    tensors: Table
    runs: Table
    source: Bytes


@dataclass(slots=True, eq=False)
class Reduce:
    """Order-fixed elementwise reduction; ``out`` may be one of ``sources``."""

    dtype: DType
    op: ReduceOp
    sources: Sequence[Bytes]
    prescale: float
    postscale: float
    out: Bytes


@dataclass(slots=True, eq=False)
class Compress:
    """Worker side. Compresses ``values`` or, where ``tensors`` is given, the momentum of this step.

    ``flags`` is one uint32: a non-finite scale sets ``Flag.NON_FINITE`` in it.
    """

    blocks: Table
    values: Floats | None
    tensors: Table | None
    previous: Bytes | None
    error: Floats
    error_out: Floats
    mask: Bytes | None
    scale: str
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class CompressUpdate:
    """Worker side of a sync of 0/1 Adam: compresses what the steps since the last one add up to, with this step's.

    ``momentum`` and ``update`` (None: zeros) are flat; ``flags`` as for ``Compress``.
    """

    blocks: Table
    tensors: Table
    momentum: Floats
    update: Floats | None
    error: Floats
    error_out: Floats
    mask: Bytes | None
    scale: str
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class Average:
    """Owner side: mean over ranks, plus the owner's error, compressed again. ``received`` in rank order."""

    blocks: Table
    received: Sequence[Bytes]
    origin: int
    error: Floats
    error_out: Floats
    mask: Bytes | None
    scale: str
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class CompressQuantized:
    """Worker side of Birder: momentum, magnitude and error of this step, and the random signs it sends.

    Flat buffers; those written may be those read. ``noise`` is one NOISE row, read when the plan runs: its step may
    change between runs. ``flags`` as for ``Compress``: something computed was not finite.
    """

    blocks: Table
    tensors: Table
    momentum: Floats
    momentum_out: Floats
    magnitude: Floats
    magnitude_out: Floats
    error: Floats
    error_out: Floats
    eps: float
    amsgrad: bool
    noise: np.ndarray
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class AverageQuantized:
    """Owner side of Birder: mean of the signs with ``weights``, plus the owner's error, as random signs again.

    Without an error (both None), and with whole numbers for weights, Lion's majority vote.
    """

    blocks: Table
    received: Sequence[Bytes]
    origin: int
    weights: Floats
    error: Floats | None
    error_out: Floats | None
    noise: np.ndarray
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class CompressSigns:
    """Worker side of Lion: the signs of this step, and its momentum, flat; ``flags`` as for ``CompressQuantized``."""

    blocks: Table
    tensors: Table
    momentum: Floats
    momentum_out: Floats
    beta2: float
    one_minus_beta2: float
    zero_up: bool
    packed: Bytes
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class SoftSign:
    """Momentum and magnitude of this step as ``CompressQuantized`` has them, and their ratio into a flat buffer."""

    blocks: Table
    tensors: Table
    momentum: Floats
    momentum_out: Floats
    magnitude: Floats
    magnitude_out: Floats
    eps: float
    amsgrad: bool
    out: Floats
    flags: np.ndarray


@dataclass(slots=True, eq=False)
class Unpack:
    """Scale times sign into a flat buffer."""

    blocks: Table
    packed: Bytes
    mask: Bytes | None
    out: Floats


@dataclass(slots=True, eq=False)
class Seal:
    """Writes ``header`` (one HEADER row, with ``flags`` OR-ed in) and ``presence`` to the start of each message."""

    header: np.ndarray
    flags: np.ndarray
    presence: Bytes
    messages: Sequence[Bytes]


@dataclass(slots=True, eq=False)
class Check:
    """Compares the headers of ``messages`` with ``header``; a difference ends the plan as MISMATCH.

    At once, where everyone sees all headers (``messages`` in rank order). With ``passed_on``, one HEADER row which goes
    out in later messages, the first difference is written there as a DISAGREEMENT, and the plan ends when its segment
    and all before it are over: then everyone has heard of it. Without ``ends`` it goes on.

    ORs the flags of equal headers into ``flags``, their presence bits into ``presence``; copies an announcement other
    than 0.
    """

    header: np.ndarray
    messages: Sequence[Bytes]
    flags: np.ndarray
    presence: Bytes
    announcement: np.ndarray
    passed_on: np.ndarray | None = None
    ends: bool = True


class Task(Protocol):
    """Something that goes on elsewhere, on a device say, while the engine does other things. Used again and again."""

    #: Why ``start`` or ``is_over`` has raised, the last time.
    failure: BaseException | None

    def start(self) -> None:
        """Sets it off, and returns at once. From the engine's thread."""
        ...

    def is_over(self) -> bool:
        """Asked again and again until it says True, once per ``start``; never waits."""
        ...


@dataclass(slots=True, eq=False)
class Offload:
    """Starts ``task``; what comes next in the stage waits until it is over. ``name`` is that of what it computes.

    ``bytes_sent`` and ``bytes_received``: what a bridge of devices carries to and from other ranks of the node.
    """

    name: str
    task: Task
    bytes_sent: int = 0
    bytes_received: int = 0


Computation = (
    Copy
    | CopyIn
    | CopyOut
    | Pack
    | Place
    | Reduce
    | Compress
    | CompressUpdate
    | CompressQuantized
    | CompressSigns
    | Average
    | AverageQuantized
    | SoftSign
    | Unpack
    | Seal
    | Check
    | Offload
)


@dataclass(slots=True, eq=False)
class Message:
    """``buffer`` goes to, or is filled from, rank ``peer`` of the channel."""

    peer: int
    buffer: Bytes


@dataclass(slots=True, eq=False)
class Stage:
    """``inside``: its messages are dense values for ranks of the same node, which a bridge may carry."""

    compute: list[Computation] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    inside: bool = False


@dataclass(slots=True, eq=False)
class Plan:
    """``segments[k]`` is a list of stages. ``name`` is for messages to people; ``keepalive`` holds borrowed memory."""

    name: str
    segments: list[list[Stage]]
    keepalive: list[Bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.segments:  # empty tensors: nothing to send, but an end to reach
            self.segments.append([Stage()])

    @property
    def bytes_sent(self) -> int:
        """Payload bytes which this rank sends to others."""
        return sum(m.buffer.nbytes for stages in self.segments for stage in stages for m in stage.sends)

    def bytes_sent_to(self, peers: Collection[int]) -> int:
        """Those of them that go to ``peers``."""
        stages = (stage for segment in self.segments for stage in segment)
        return sum(m.buffer.nbytes for stage in stages for m in stage.sends if m.peer in peers)

    @property
    def bytes_bridged(self) -> int:
        """What a bridge of devices carries to other ranks of the node, beside the messages."""
        return sum(offload.bytes_sent for offload in self._offloads())

    def failures(self) -> list[BaseException]:
        """Why tasks of it have raised."""
        return [offload.task.failure for offload in self._offloads() if offload.task.failure is not None]

    def _offloads(self) -> list[Offload]:
        compute = [c for stages in self.segments for stage in stages for c in stage.compute]
        return [c for c in compute if isinstance(c, Offload)]

    @property
    def messages_sent(self) -> int:
        return sum(len(stage.sends) for stages in self.segments for stage in stages)


def read_header(message: Bytes) -> np.void:
    """The HEADER row at the start of a message."""
    return message[: HEADER.itemsize].view(HEADER)[0]
