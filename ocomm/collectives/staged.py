"""Plans whose buffers are on a device.

``staged`` takes a plan as it would be for the host, in which states are device arrays and messages are staging memory.
Every computation on those becomes an ``Offload``: what has arrived is copied to the device, the loop is queued behind
that, and what is sent is copied back behind the loop. Nothing waits: the engine asks for the event at the end and runs
other segments meanwhile, so copies of one overlap the exchange of others.

Headers are written and compared by the host, in the host's memory. So in the direct form, where the network reaches a
device's memory, each header is a message of its own, and payloads go from device to device. Then nothing is copied but
the averages, in which the host looks for values that are not finite.

Inside a node a bridge (``collectives.bridge``) may carry dense payloads instead of the network; they are not copied to
the host at all.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ocomm.collectives import plan as plans
from ocomm.collectives.bridge import IntraNode, take_turn
from ocomm.collectives.plan import HEADER, Computation, Message, Offload, Plan, Stage
from ocomm.compression.wire import RUN
from ocomm.kernels.base import ALIGNMENT, GROUP, Bytes, Memory, Table
from ocomm.kernels.device import DeviceMemory, Event, Queue, Step, Together, Verb, Work
from ocomm.kernels.loops import KINDS, NOT_ON_DEVICES
from ocomm.transport.nccl import Piece
from ocomm.types import Flag

#: Elements that one thread block of a device copies into or out of a message.
_CHUNK = 1 << 12


class DeviceTask:
    """A ``plan.Task``: copies and loops, in order, and what they have found at the end.

    ``direct``: messages are on the device and are not copied. ``beside``: it may run on the device's second stream.
    ``awaited``: the engine waits for it; else only what the device is given later does.
    """

    def __init__(
        self, memory: DeviceMemory, direct: bool = False, *, beside: bool = False, awaited: bool = True
    ) -> None:
        self._memory = memory
        self._direct = direct
        self.is_beside = beside
        self._awaited = awaited
        self._steps: list[Step] = []
        self._queue: Queue | None = None
        self._status: Bytes = np.zeros(4, np.uint8)
        self._flags: list[np.ndarray] = []
        self._event: Event | None = None
        self._failure: BaseException | None = None
        self._work: Work | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure if self._work is None else self._work.failure

    @failure.setter
    def failure(self, error: BaseException | None) -> None:
        self._failure = error

    def upload(self, parts: Iterable[Bytes]) -> None:
        """Adds copies of staging memory to the device."""
        for part in parts:
            if part.nbytes and not self._direct:
                self._steps.append(Step(Verb.UPLOAD, (part, self._memory.twin(part))))

    def download(self, part: Bytes) -> None:
        """Adds a copy from the device."""
        if part.nbytes and not self._direct:
            self._steps.append(Step(Verb.DOWNLOAD, (part, self._memory.twin(part))))

    def add(self, queue: Callable[..., None], *arguments: object) -> None:
        """Adds what ``queue(*arguments)`` puts into the device's queue."""
        self._steps.append(Step(Verb.CALL, (queue, *arguments)))

    def loop(self, flags: np.ndarray | None, loop: str, *arguments: object) -> None:
        """Adds a loop of ``Kernels``, which sets ``flags`` if something is not finite.

        Compiles the loop now if that has not been done, because the engine's thread, which will start it, must not stop
        for that.
        """
        if self._queue is None:
            self._queue = Queue(self._memory)
        self._queue.prepare(loop)
        self._steps.append(Step(Verb.LOOP, (loop, *arguments)))
        if flags is not None:
            self._flags.append(flags)
            if len(self._flags) == 1:
                self._status = self._memory.pinned_flag()

    def compiled(self) -> tuple[int, int] | None:
        steps = [*self._steps, *self._last()]
        if all(step.verb != Verb.CALL for step in steps):
            together = Together(self._queue, steps, self._status, self._flags, self.is_beside, self._awaited)
            self._work = self._memory.device.work(together)
        return None if self._work is None else self._work.task

    def _last(self) -> list[Step]:
        """Returns the steps that take what loops have found."""
        if not self._flags:
            return []
        assert self._queue is not None
        found = self._queue.status
        return [Step(Verb.DOWNLOAD, (self._status, found)), Step(Verb.CLEAR, (found,))]

    def start(self) -> None:
        memory = self._memory
        with memory.lock:
            for verb, arguments in [*self._steps, *self._last()]:
                if verb == Verb.UPLOAD:
                    memory.device.upload(arguments[1].address, arguments[0])
                elif verb == Verb.DOWNLOAD:
                    memory.device.download(arguments[0], arguments[1].address)
                elif verb == Verb.CLEAR:
                    memory.assign(arguments[0], 0)
                elif verb == Verb.LOOP:
                    assert self._queue is not None
                    self._queue.call(*arguments)
                else:
                    arguments[0](*arguments[1:])
            self._event = memory.device.record() if self._awaited else None

    def is_over(self) -> bool:
        if self._event is not None and not self._event.is_over():
            return False
        self._event = None
        if self._flags and self._status.view(np.int32)[0]:
            for flags in self._flags:
                flags[0] |= Flag.NON_FINITE
        return True


class _Entry:
    """A ``plan.Task`` after which the engine's thread has the device's context, as MPI wants it of threads that call
    it.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.failure: BaseException | None = None
        self._memory = memory

    def start(self) -> None:
        self._memory.device.enter()

    def is_over(self) -> bool:
        return True


def entry(memory: Memory) -> Plan:
    """Returns the plan that all ranks run first on a channel whose network works on devices; it has no messages."""
    tasks = [Offload("Enter", _Entry(memory))] if isinstance(memory, DeviceMemory) else []
    return Plan("entry", [[Stage([*tasks])]])


def staged(
    plan: Plan, memory: Memory, results: Sequence[Bytes] = (), direct: bool = False, intra_node: IntraNode | None = None
) -> Plan:
    """Returns ``plan`` itself if ``memory`` is the host's, else the plan that does the same through staging memory.

    Args:
        plan: The plan, with device arrays and staging memory.
        memory: The memory that the arrays are in.
        results: What each segment gathers, which the device needs when the plan is over.
        direct: All ranks have agreed that payloads follow their headers in messages of their own; those of a device
            leave and reach its own memory. Not for plans in which the host puts messages together.
        intra_node: All ranks have agreed that bridges carry the payloads of stages inside a node.
    """
    heads = [_heads(stages) for stages in plan.segments]
    if direct:
        segments = [_parted(s, memory, h, intra_node) for s, h in zip(plan.segments, heads, strict=True)]
        plan = Plan(plan.name, segments, plan.keepalive, plan.lanes)
    if not memory.is_device:
        return plan
    assert isinstance(memory, DeviceMemory)
    segments = []
    for number, (stages, of) in enumerate(zip(plan.segments, heads, strict=True)):
        seen = [*results[number : number + 1]]
        segment = _Segment(memory, direct, intra_node, f"{plan.name}, segment {number}", of, stages, seen)
        segments.append(segment.stages)
        for result in seen if not direct else ():  # else the device has it already
            task = DeviceTask(memory, beside=segment.is_beside, awaited=False)
            task.upload([result])
            segment.stages[-1].compute.append(Offload("Upload", task))
    return Plan(plan.name, segments, plan.keepalive, plan.lanes)


def _heads(stages: Sequence[Stage]) -> dict[int, int]:
    """Returns how many bytes of each message are its header, by the message's address."""
    return {
        _address(message): HEADER.itemsize + c.presence.nbytes
        for stage in stages
        for c in stage.compute
        if isinstance(c, (plans.WriteHeaders, plans.CheckHeaders))
        for message in c.messages
    }


def _parted(
    stages: Sequence[Stage], memory: Memory, heads: Mapping[int, int], intra_node: IntraNode | None
) -> list[Stage]:
    """Returns the same stages with each message cut into its header, if it has one, and its payload, where the network
    finds that. Payloads that go over a bridge are left out.
    """
    computations = [c for stage in stages for c in stage.compute]
    assert not any(isinstance(c, plans.Copy) for c in computations), "a message that the host puts together"

    def parted(messages: Sequence[Message]) -> list[Message]:
        found = []
        for message in messages:
            head = heads.get(_address(message.buffer), 0)
            if head:
                found.append(Message(message.peer, message.buffer[:head]))
            payload = message.buffer[head:]
            if payload.nbytes:
                found.append(Message(message.peer, memory.wire(payload)))
        return found

    return [
        stage
        if stage.intra_node and intra_node is not None
        else Stage(stage.compute, parted(stage.sends), parted(stage.receives), stage.intra_node)
        for stage in stages
    ]


class _Segment:
    """One segment as it runs on a device.

    ``heads`` are the header sizes of its messages, ``seen`` is what the host reads when it is over.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        direct: bool,
        intra_node: IntraNode | None,
        name: str,
        heads: Mapping[int, int],
        stages: Sequence[Stage],
        seen: Sequence[Bytes],
    ) -> None:
        self.stages: list[Stage] = []
        self._memory = memory
        self._direct = direct
        self._intra_node = intra_node
        self._name = name
        self._heads = heads
        #: Staging memory of which the device has a current copy. Headers are used by the host alone.
        self._at_hand = _Ranges()
        #: What the host sends, passes on or reads.
        self._of_host = _Ranges()
        for stage in stages:
            if not (stage.intra_node and intra_node is not None):
                for part in [*(m.buffer for m in stage.sends), *_copied(stage)]:
                    self._of_host.add(part)
        for part in seen:
            self._of_host.add(part)
        #: May what follows run beside the first stream? Averages of early buckets need not wait there for late
        #: gradients: what they read was written before a task of this segment that the engine has seen to be over.
        self.is_beside = False
        self._next: list[Computation] = []
        is_sent = any(stage.sends or stage.receives for stage in stages)
        for stage in stages:
            compute = self._next + self._computed(stage)
            if any(isinstance(c, Offload) for c in compute):
                self.is_beside = intra_node is None and not (direct and is_sent)
            self._next = []
            if stage.intra_node and intra_node is not None:
                self._bridge(stage, compute, intra_node)
            else:
                self.stages.append(Stage(compute, stage.sends, stage.receives))
                for message in stage.receives:
                    self._at_hand.remove(message.buffer)
        assert not self._next, "a segment that ends with a transfer"

    def _computed(self, stage: Stage) -> list[Computation]:
        """Returns the stage's computations, as tasks of the device those that are not about headers and not the
        host's.
        """
        # Payloads that go over a bridge stay on the device.
        stays = stage.intra_node and self._intra_node is not None
        compute: list[Computation] = []
        task: DeviceTask | None = None
        for c in stage.compute:
            if isinstance(c, (plans.WriteHeaders, plans.CheckHeaders, plans.Copy)):
                compute.append(c)
                task = None
                for message in c.messages if isinstance(c, plans.WriteHeaders) else ():
                    self._at_hand.remove(message[: self._heads[_address(message)]])
                continue
            if isinstance(c, plans.Loop) and c.name in NOT_ON_DEVICES:
                compute += [*self._fetched(c), c]
                task = None
                continue
            # What reads or writes by addresses in a table stays where these tables are copied.
            beside = self.is_beside and isinstance(c, plans.Loop) and not c.declaration.has("Tensors")
            if task is None or task.is_beside != beside:  # else computations share one task and its event
                task = DeviceTask(self._memory, self._direct, beside=beside)
                compute.append(Offload(plans.name_of(c), task))
            read, written = _add(task, c, self._missing)
            for part in read:
                self._at_hand.add(part)
            if written is not None:
                self._at_hand.add(written)
                if not stays and self._of_host.touch(written):
                    task.download(written)
        return compute

    def _fetched(self, c: plans.Loop) -> list[Offload]:
        """Returns what brings to the host what a loop reads there, if that has been gathered on the device."""
        if not self._direct:
            return []
        task = DeviceTask(self._memory)
        for argument, given in zip(c.declaration.arguments, c.arguments, strict=True):
            if argument.kind == "Gathered":
                task.download(given)
        return [Offload("Download", task)]

    def _missing(self, parts: Iterable[Bytes]) -> list[Bytes]:
        """Returns those parts of staging memory that the device does not have, adjacent ones as one."""
        pieces = [piece for part in parts for piece in self._at_hand.missing(part)]
        return _joined([p for p in pieces if p.nbytes > self._heads.get(_address(p), 0)], self._at_hand)

    def _bridge(self, stage: Stage, compute: list[Computation], intra_node: IntraNode) -> None:
        """Adds two stages: headers, with the news that this rank is ready; then the number of the transfer, which the
        next begins with.
        """
        sends, receives = self._payloads(stage.sends), self._payloads(stage.receives)
        missing = self._missing(payload for _, payload in sends)
        if missing and not self._direct:
            task = DeviceTask(self._memory)
            task.upload(missing)
            compute.append(Offload("Upload", task))
        for _, payload in [*sends, *receives]:
            self._at_hand.add(payload)
        first = Stage(compute, self._headers(stage.sends), self._headers(stage.receives))
        second = Stage()
        self.stages += [first, second]
        if intra_node.bridge is None:
            return

        def pieces(payloads: Sequence[tuple[int, Bytes]]) -> list[Piece]:
            return [Piece(intra_node.ranks.index(peer), self._memory.twin(p).address, p.nbytes) for peer, p in payloads]

        what = f"{self._name}, stage {len(self.stages)}"
        self._next = [take_turn(intra_node, what, first, second, pieces(sends), pieces(receives))]

    def _headers(self, messages: Sequence[Message]) -> list[Message]:
        return [Message(m.peer, m.buffer[: self._heads[_address(m.buffer)]]) for m in messages]

    def _payloads(self, messages: Sequence[Message]) -> list[tuple[int, Bytes]]:
        found = [(m.peer, m.buffer[self._heads[_address(m.buffer)] :]) for m in messages]
        return [(peer, payload) for peer, payload in found if payload.nbytes]


def _copied(stage: Stage) -> list[Bytes]:
    return [c.source for c in stage.compute if isinstance(c, plans.Copy)]


class _Ranges:
    """A set of bytes of the host's memory, as ranges of addresses."""

    def __init__(self) -> None:
        self._all: list[tuple[int, int]] = []  # ranges that do not overlap, in order

    def remove(self, part: Bytes) -> None:
        low, high = _span(part)
        cut = [piece for a, b in self._all for piece in ((a, min(b, low)), (max(a, high), b))]
        self._all = [(a, b) for a, b in cut if a < b]

    def add(self, part: Bytes) -> None:
        if part.nbytes:
            self.remove(part)
            bisect.insort(self._all, _span(part))

    def touch(self, part: Bytes) -> bool:
        """Returns True if any byte of ``part`` is in the set."""
        low, high = _span(part)
        return any(a < high and low < b for a, b in self._all)

    def missing(self, part: Bytes) -> list[Bytes]:
        """Returns the pieces of ``part`` that are not in the set."""
        low, high = _span(part)
        found, at = [], low
        for a, b in [*((a, b) for a, b in self._all if a < high and low < b), (high, high)]:
            if at < a:
                found.append(part[at - low : a - low])
            at = max(at, b)
        return found


def _span(part: Bytes) -> tuple[int, int]:
    start = _address(part)
    return start, start + part.nbytes


def _add(
    task: DeviceTask, c: Computation, missing: Callable[[Iterable[Bytes]], list[Bytes]]
) -> tuple[list[Bytes], Bytes | None]:
    """Adds a computation to a task. Returns the staging memory that it copies to the device, and what it writes there.

    ``missing`` returns those parts of staging memory that the device does not have.
    """
    if not isinstance(c, plans.Loop):
        raise AssertionError(f"{type(c).__name__} has no form on a device")
    read: list[Bytes] = []
    written: Bytes | None = None
    arguments = []
    tables = {argument.kind: given for argument, given in zip(c.declaration.arguments, c.arguments, strict=True)}
    for argument, given in zip(c.declaration.arguments, c.arguments, strict=True):
        kind = KINDS[argument.kind]
        if kind.staged == "missing":
            read += missing(given if argument.kind == "Messages" else [_part(kind.by, tables, given)])
        elif kind.staged == "all":
            read.append(given)
        elif kind.staged == "written" and isinstance(given, np.ndarray):  # else the device keeps it
            written = _part(kind.by, tables, given)
        arguments.append(_chunks(given) if kind.staged == "cut" else given)
    task.upload(read)
    task.loop(c.flags, c.name, *arguments)
    return read, written


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _part(by: str, arguments: Mapping[str, Any], staging: Bytes) -> Bytes:
    """Returns the memory that a loop uses of some staging memory: where the table of kind ``by`` says, or all of it."""
    if by == "Blocks":
        return _payload(arguments["Blocks"], staging, arguments.get("CodeBits", 1))
    return _elements(arguments["Runs"], staging) if by == "Runs" else staging


def _payload(blocks: Table, packed: Bytes, bits: int) -> Bytes:
    """Returns the memory of the scales and codes of all blocks. Codes of 1 bit are signs."""
    if not blocks.size:
        return packed[:0]
    lengths = blocks["length"].astype(np.int64)
    ends = blocks["bits"] + (lengths * bits + 7) // 8
    firsts = np.where(blocks["scale"] >= 0, np.minimum(blocks["scale"], blocks["bits"]), blocks["bits"])
    scale_ends = blocks["scale"] + 4 * (1 if bits == 1 else -(-lengths // GROUP))
    return packed[int(firsts.min()) : int(max(ends.max(), scale_ends.max()))]


def _elements(runs: Table, message: Bytes) -> Bytes:
    """Returns the memory of the elements of all runs."""
    if not runs.size:
        return message[:0]
    return message[4 * int(runs["position"].min()) : 4 * int((runs["position"] + runs["length"]).max())]


def _chunks(runs: Table) -> Table:
    """Returns the same runs, cut so that none is longer than a chunk."""
    counts = -(-runs["length"] // _CHUNK)
    of = np.repeat(np.arange(runs.size), counts)
    first = (np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)) * _CHUNK
    cut = np.zeros(of.size, RUN)
    cut["tensor"] = runs["tensor"][of]
    cut["start"], cut["position"] = runs["start"][of] + first, runs["position"][of] + first
    cut["length"] = np.minimum(runs["length"][of] - first, _CHUNK)
    return cut


def _joined(parts: Iterable[Bytes], kept: _Ranges) -> list[Bytes]:
    """Returns the same memory in fewer pieces: those that are adjacent in one array, but for padding, become one. Not
    what is ``kept``.
    """
    found: list[Bytes] = []
    for part in sorted(parts, key=_address):
        if found and part.base is found[-1].base and part.base is not None:
            base = part.base
            start = _address(base)
            first = _address(found[-1]) - start
            end = first + found[-1].nbytes
            at = _address(part) - start
            if at - end < ALIGNMENT and not kept.touch(base[end:at]):
                found[-1] = base[first : at + part.nbytes]
                continue
        found.append(part)
    return found
