"""A plan: what one exchange computes and sends, as a value.

Python builds plans; an engine runs them. ``native_engine`` runs one in C without the GIL. ``python_engine`` runs one
slowly over any transport. Both must leave the same bytes in every buffer.

A plan is a list of segments, which may overlap in time. A segment is a list of stages, which may not: a stage first
runs its computations, then posts its messages, and is over when all of them have arrived and left. So the three-phase
compressed allreduce is three stages: compress and alltoall; average, compress again and allgather; unpack. A ``Loop``
of the kernels computes; the other computations copy, or are about headers.

Buffers are in the host's memory. What is on a device is computed by an ``Offload`` (``collectives.staged``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Concatenate, ParamSpec, Protocol, runtime_checkable

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
    """Copies one array to another of the same size in bytes."""

    source: Bytes
    destination: Bytes


@dataclass(slots=True, eq=False)
class CopyIn:
    """Copies ``sources``, of ``nbytes`` each, side by side into ``destination``, which they fill."""

    sources: Sequence[Location]
    nbytes: Sequence[int]
    destination: Bytes


@dataclass(slots=True, eq=False)
class CopyOut:
    """Copies ``source``, cut into parts of ``nbytes``, to ``destinations``."""

    source: Bytes
    destinations: Sequence[Location]
    nbytes: Sequence[int]


@dataclass(slots=True, eq=False)
class Loop:
    """A loop of ``Kernels`` with all its arguments, which are read when the plan runs. Made by ``loop``.

    If the loop reports whether everything was finite, ``flags`` is one uint32, in which ``Flag.NON_FINITE`` is set if
    something was not; else it is None.
    """

    declaration: Declaration
    arguments: tuple[Any, ...]
    flags: Flags | None

    @property
    def name(self) -> str:
        return self.declaration.name

    def argument(self, name: str) -> Any:
        """Returns an argument by its name in the declaration."""
        return self.arguments[self.declaration.names.index(name)]

    def run(self, kernels: Kernels) -> None:
        """Runs the loop now, in this thread."""
        if getattr(kernels, self.name)(*self.arguments) is False:
            assert self.flags is not None
            self.flags[0] |= Flag.NON_FINITE


def loop(
    method: Callable[Concatenate[Any, P], Any], flags: Flags | None, /, *arguments: P.args, **named: P.kwargs
) -> Loop:
    """Returns the computation that calls a loop: ``loop(Kernels.unpack, None, blocks, packed, mask, out)``.

    ``flags`` is that of ``Loop``. Raises TypeError if arguments are missing, or if ``flags`` is given for a loop that
    reports nothing.
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

    Without ``passed_on`` all ranks see all headers (``messages`` in rank order), and the plan ends at once. With
    ``passed_on``, one HEADER row that goes out in later messages, the first difference is written there as a
    DISAGREEMENT. Then the plan ends once its segment and all before it are over, when every rank has been told. Unless
    ``ends``, it goes on.

    ORs the flags of equal headers into ``flags`` and their presence bits into ``presence``; copies an announcement that
    is not 0.
    """

    header: np.ndarray
    messages: Sequence[Bytes]
    flags: np.ndarray
    presence: Bytes
    announcement: np.ndarray
    passed_on: np.ndarray | None = None
    ends: bool = True


class Task(Protocol):
    """Work that goes on elsewhere, such as on a device, while the engine does other things. A task is used
    repeatedly.
    """

    #: The exception that ``start`` or ``is_over`` raised last.
    failure: BaseException | None

    def start(self) -> None:
        """Starts the work and returns at once. Called on the engine's thread."""
        ...

    def is_over(self) -> bool:
        """Returns True if the work is over. Called until that is so, once per ``start``; never waits."""
        ...


@runtime_checkable
class CompiledTask(Task, Protocol):
    """A task that the native engine may run without Python."""

    def compiled(self) -> tuple[int, int] | None:
        """Returns the addresses of a C function, which is called instead of the others, and of its argument
        (``ocomm_task`` in ``native/ocomm.h``); None if there is none. Called when a plan is prepared.
        """
        ...


@dataclass(slots=True, eq=False)
class Offload:
    """Starts ``task``; the next computation of the stage waits until it is over. ``name`` is the name of what it
    computes.

    ``bytes_sent`` and ``bytes_received`` are what a bridge carries to and from other ranks of the node.
    """

    name: str
    task: Task
    bytes_sent: int = 0
    bytes_received: int = 0


Computation = Copy | CopyIn | CopyOut | Loop | WriteHeaders | CheckHeaders | Offload


def name_of(computation: Computation) -> str:
    """Returns the name of a computation in timelines."""
    return computation.name if isinstance(computation, (Loop, Offload)) else type(computation).__name__


@dataclass(slots=True, eq=False)
class Message:
    """``buffer`` is sent to, or received from, rank ``peer`` of the channel."""

    peer: int
    buffer: Bytes


@dataclass(slots=True, eq=False)
class Stage:
    """Computations, and then messages.

    ``intra_node``: the messages are dense values for ranks of the same node, which a bridge may carry.
    """

    compute: list[Computation] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    intra_node: bool = False


def in_pieces(messages: Sequence[Message], nbytes: int) -> list[Message]:
    """Returns the same messages in pieces of at most ``nbytes``, those to different ranks in turns. Both ends of a
    message must cut it.
    """
    cut = [
        [Message(m.peer, m.buffer[first : first + nbytes]) for first in range(0, max(m.buffer.nbytes, 1), nbytes)]
        for m in messages
    ]
    return [piece for row in zip_longest(*cut) for piece in row if piece is not None]


@dataclass(slots=True, eq=False)
class Plan:
    """``segments[k]`` is a list of stages. ``name`` is for messages to people; ``keepalive`` keeps borrowed memory
    alive.

    With ``lanes`` segments share memory: segment k uses that of segment k - ``lanes``, and starts when that is over. 0:
    each has its own.
    """

    name: str
    segments: list[list[Stage]]
    keepalive: list[Any] = field(default_factory=list)
    lanes: int = 0

    def __post_init__(self) -> None:
        if not self.segments:  # of empty tensors; a plan without segments would never end
            self.segments.append([Stage()])

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sends to others."""
        return sum(m.buffer.nbytes for stages in self.segments for stage in stages for m in stage.sends)

    def bytes_sent_to(self, peers: Collection[int]) -> int:
        """Returns the payload bytes that this rank sends to ``peers``."""
        stages = (stage for segment in self.segments for stage in segment)
        return sum(m.buffer.nbytes for stage in stages for m in stage.sends if m.peer in peers)

    @property
    def bytes_bridged(self) -> int:
        """Bytes that a bridge carries to other ranks of the node, in addition to the messages."""
        return sum(offload.bytes_sent for offload in self._offloads())

    def failures(self) -> list[BaseException]:
        """Returns the exceptions of the plan's tasks."""
        return [offload.task.failure for offload in self._offloads() if offload.task.failure is not None]

    def _offloads(self) -> list[Offload]:
        compute = [c for stages in self.segments for stage in stages for c in stage.compute]
        return [c for c in compute if isinstance(c, Offload)]

    @property
    def messages_sent(self) -> int:
        return sum(len(stage.sends) for stages in self.segments for stage in stages)


def read_header(message: Bytes) -> np.void:
    """Returns the HEADER row at the start of a message."""
    return message[: HEADER.itemsize].view(HEADER)[0]
