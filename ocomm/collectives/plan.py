"""A plan: what one exchange computes and sends, as a value.

Python decides and builds plans; an engine runs them. ``native_engine`` runs one in C without the GIL, ``python_engine``
is its slow twin over any transport; both must leave the same bytes in every buffer.

A plan is a list of segments which may overlap in time. A segment is a list of stages which may not: a stage first
runs its computations, then posts its messages, and is over when all of them have arrived and left. So the three-phase
compressed allreduce is three stages: compress and alltoall; average, compress again and allgather; unpack. What
computes is a ``Loop`` of the kernels; the other computations copy, or are about headers.

Buffers are those of the host. What lives on a device is computed by an ``Offload`` (see ``collectives.staged``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.wire import HEADER as HEADER
from ocomm.compression.wire import MAGIC as MAGIC
from ocomm.compression.wire import header_nbytes as header_nbytes
from ocomm.kernels.base import Bytes, Kernels
from ocomm.kernels.loops import LOOPS, Declaration
from ocomm.types import Flag, Location

Flags = NDArray[np.uint32]
P = ParamSpec("P")


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
    """memcpy of ``source``, cut into ``nbytes``, to ``destinations``."""

    source: Bytes
    destinations: Sequence[Location]
    nbytes: Sequence[int]


@dataclass(slots=True, eq=False)
class Loop:
    """A loop of ``Kernels`` with all of its arguments, which are read when the plan runs. Made by ``loop``.

    ``flags`` is one uint32, of a loop that says whether everything was finite, else None: ``Flag.NON_FINITE`` is set in
    it where that is not so.
    """

    declaration: Declaration
    arguments: tuple[Any, ...]
    flags: Flags | None

    @property
    def name(self) -> str:
        return self.declaration.name

    def argument(self, name: str) -> Any:
        """One of them, by its name in the declaration."""
        return self.arguments[self.declaration.names.index(name)]

    def run(self, kernels: Kernels) -> None:
        """At once, by the caller."""
        if getattr(kernels, self.name)(*self.arguments) is False:
            assert self.flags is not None
            self.flags[0] |= Flag.NON_FINITE


def loop(
    method: Callable[Concatenate[Any, P], Any], flags: Flags | None, /, *arguments: P.args, **named: P.kwargs
) -> Loop:
    """The operation that calls a loop: ``loop(Kernels.unpack, None, blocks, packed, mask, out)``.

    ``flags`` as in ``Loop``. TypeError where arguments are missing, or ``flags`` are where there is nothing to report.
    """
    declaration = LOOPS[method.__name__]
    names = declaration.names
    given: tuple[Any, ...] = arguments
    if named:
        given += tuple([named[name] for name in names[len(arguments) :] if name in named])
    if len(given) != len(names) or len(arguments) + len(named) != len(names):
        raise TypeError(f"{declaration.name} takes {', '.join(names)}; got {len(arguments)} and {', '.join(named)}")
    if (flags is not None) != declaration.reports:
        raise TypeError(f"{declaration.name} {'needs' if declaration.reports else 'has nothing for'} flags")
    return Loop(declaration, given, flags)


@dataclass(slots=True, eq=False)
class WriteHeaders:
    """Writes ``header`` (one HEADER row, with ``flags`` OR-ed in) and ``presence`` to the start of each message."""

    header: np.ndarray
    flags: np.ndarray
    presence: Bytes
    messages: Sequence[Bytes]


@dataclass(slots=True, eq=False)
class CheckHeaders:
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


Computation = Copy | CopyIn | CopyOut | Loop | WriteHeaders | CheckHeaders | Offload


def name_of(computation: Computation) -> str:
    """What a computation is called in timelines."""
    return computation.name if isinstance(computation, (Loop, Offload)) else type(computation).__name__


@dataclass(slots=True, eq=False)
class Message:
    """``buffer`` goes to, or is filled from, rank ``peer`` of the channel."""

    peer: int
    buffer: Bytes


@dataclass(slots=True, eq=False)
class Stage:
    """``intra_node``: its messages are dense values for ranks of the same node, which a bridge may carry."""

    compute: list[Computation] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    intra_node: bool = False


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
