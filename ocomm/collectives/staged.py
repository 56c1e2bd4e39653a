"""Plans whose buffers are on a device.

``staged`` takes a plan as it would be for the host, in which states are device arrays and messages are staging memory.
Every computation on those becomes an ``Offload``: what has come in is copied to the device, the loop is queued behind
that, and what goes out is copied back behind the loop. Nobody waits: the engine asks for the event at the end, and goes
on with other segments meanwhile, so that the copies of one run under the exchange of the others.

Headers are written and compared by the host, in the host's memory, as ever. So where the network reaches a device's
memory, the direct form, each is a message of its own, and payloads go from device to device: nothing is copied but the
averages, at which the host looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from ocomm.collectives import plan as plans
from ocomm.collectives.plan import HEADER, Computation, Message, Offload, Plan, Stage
from ocomm.compression.wire import RUN
from ocomm.kernels.base import ALIGNMENT, Bytes, Memory, Table
from ocomm.kernels.device import DeviceMemory, Event, Queue
from ocomm.types import Flag

#: Elements that one thread block of a device copies into a message, or out of it.
_CHUNK = 1 << 15


class DeviceTask:
    """See ``plan.Task``: copies and loops, in order, and what they have found in the end.

    ``direct``: messages lie on the device and are not copied.
    """

    def __init__(self, memory: DeviceMemory, direct: bool = False) -> None:
        self.failure: BaseException | None = None
        self._memory = memory
        self._direct = direct
        self._steps: list[Callable[[], None]] = []
        self._queue: Queue | None = None
        self._status = np.zeros(0, np.int32)
        self._flags: list[np.ndarray] = []
        self._event: Event | None = None

    def upload(self, parts: Iterable[Bytes]) -> None:
        """Adds copies of staging memory to the device; neighbours go as one."""
        if not self._direct:
            self._steps += [partial(self._memory.upload, part) for part in _joined(parts)]

    def download(self, part: Bytes) -> None:
        """Adds a copy from the device."""
        if not self._direct:
            self._steps.append(partial(self._memory.download, part))

    def loop(self, flags: np.ndarray | None, loop: str, *arguments: object) -> None:
        """Adds a loop of ``Kernels``. If something is not finite ``flags`` says so. Compiles it, if nobody has yet: the
        engine's thread, which will start it, has others to move on."""
        if self._queue is None:
            self._queue = Queue(self._memory)
        self._queue.prepare(loop)
        self._steps.append(partial(self._queue.call, loop, *arguments))
        if flags is not None:
            self._flags.append(flags)
            if not self._status.size:
                self._status = self._memory.device.pinned(4).view(np.int32)

    def start(self) -> None:
        memory = self._memory
        with memory.lock:
            for step in self._steps:
                step()
            if self._flags:
                assert self._queue is not None
                memory.device.download(self._status.view(np.uint8), self._queue.status.address)
                memory.assign(self._queue.status, 0)
            self._event = memory.device.record()

    def is_over(self) -> bool:
        if self._event is not None and not self._event.is_over():
            return False
        self._event = None
        if self._flags and self._status[0]:
            for flags in self._flags:
                flags[0] |= Flag.NON_FINITE
        return True


class _Upload:
    """See ``plan.Task``: nobody waits for it but the device itself."""

    def __init__(self, memory: DeviceMemory, staging: Bytes) -> None:
        self.failure: BaseException | None = None
        self._memory = memory
        self._staging = staging

    def start(self) -> None:
        self._memory.upload(self._staging)

    def is_over(self) -> bool:
        return True


class _Entry:
    """See ``plan.Task``: the engine's thread has the device's context from then on, as MPI expects of who calls it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.failure: BaseException | None = None
        self._memory = memory

    def start(self) -> None:
        self._memory.device.enter()

    def is_over(self) -> bool:
        return True


def entry(memory: Memory) -> Plan:
    """What all ranks run on a channel before their first plan in the direct form; it has no messages."""
    tasks = [Offload("Enter", _Entry(memory))] if isinstance(memory, DeviceMemory) else []
    return Plan("entry", [[Stage([*tasks])]])


def staged(plan: Plan, memory: Memory, results: Sequence[Bytes] = (), direct: bool = False) -> Plan:
    """``plan`` itself where ``memory`` is the host's; else the plan that does the same through staging memory.

    ``results``: what each segment gathers, where both the host and the device are to have it when the plan is over.

    ``direct``: all ranks have agreed that payloads travel apart from their headers, in messages that follow them; those
    of a device leave and reach its own memory. Not for plans in which messages are put together by the host.
    """
    if direct:
        plan = Plan(plan.name, [_parted(stages, memory) for stages in plan.segments], plan.keepalive)
    if not memory.is_device:
        return plan
    assert isinstance(memory, DeviceMemory)
    segments = [_staged_segment(stages, memory, direct) for stages in plan.segments]
    for stages, result in zip(segments, results, strict=False):
        if direct:
            task = DeviceTask(memory)
            task.download(result)
            stages[-1].compute.append(Offload("Download", task))
        else:
            stages[-1].compute.append(Offload("Upload", _Upload(memory, result)))
    return Plan(plan.name, segments, plan.keepalive)


def _parted(stages: Sequence[Stage], memory: Memory) -> list[Stage]:
    """The same stages, each message as its header, if it has one, and its payload, where the network finds that."""
    computations = [c for stage in stages for c in stage.compute]
    heads = {
        _address(message): HEADER.itemsize + c.presence.nbytes
        for c in computations
        if isinstance(c, (plans.Seal, plans.Check))
        for message in c.messages
    }
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

    return [Stage(stage.compute, parted(stage.sends), parted(stage.receives)) for stage in stages]


def _staged_segment(stages: Sequence[Stage], memory: DeviceMemory, direct: bool) -> list[Stage]:
    at_hand: list[Bytes] = []  # staging memory that was written on the device
    found = []
    for stage in stages:
        compute: list[Computation] = []
        task: DeviceTask | None = None
        for c in stage.compute:
            if isinstance(c, (plans.Seal, plans.Check, plans.Copy)):
                compute.append(c)
                task = None
                continue
            if task is None:  # one event for all that comes one after the other
                task = DeviceTask(memory, direct)
                compute.append(Offload(type(c).__name__, task))
            at_hand += _add(task, c, at_hand)
        found.append(Stage(compute, stage.sends, stage.receives))
    return found


def _add(task: DeviceTask, c: Computation, at_hand: Sequence[Bytes]) -> list[Bytes]:
    """Adds a computation to a task. Returns staging memory that it writes on the device."""

    def missing(messages: Sequence[Bytes]) -> list[Bytes]:
        return [message for message in messages if not any(_is_inside(message, whole) for whole in at_hand)]

    match c:
        case plans.Compress() if c.tensors is None:
            task.loop(c.flags, "compress", c.blocks, c.values, c.error, c.error_out, c.mask, c.scale, c.packed)
            written = c.packed
        case plans.Compress():
            task.loop(
                c.flags, "compress_momentum", c.blocks, c.tensors, c.previous, c.error, c.error_out, c.mask, c.scale,
                c.packed,
            )  # fmt: skip
            written = c.packed
        case plans.CompressUpdate():
            task.loop(
                c.flags, "compress_update", c.blocks, c.tensors, c.momentum, c.update, c.error, c.error_out, c.mask,
                c.scale, c.packed,
            )  # fmt: skip
            written = c.packed
        case plans.CompressQuantized():
            task.loop(
                c.flags, "quantize", c.blocks, c.tensors, c.momentum, c.momentum_out, c.magnitude, c.magnitude_out,
                c.error, c.error_out, c.eps, c.amsgrad, c.noise, c.packed,
            )  # fmt: skip
            written = c.packed
        case plans.CompressSigns():
            task.loop(
                c.flags, "compress_signs", c.blocks, c.tensors, c.momentum, c.momentum_out, c.beta2, c.one_minus_beta2,
                c.zero_up, c.packed,
            )  # fmt: skip
            written = c.packed
        case plans.Average():
            task.upload(missing(c.received))
            task.loop(
                c.flags, "average", c.blocks, c.received, c.origin, c.error, c.error_out, c.mask, c.scale, c.packed
            )
            written = _payload(c.blocks, c.packed)
        case plans.AverageQuantized():
            task.upload(missing(c.received))
            task.loop(
                c.flags, "quantized_average", c.blocks, c.received, c.origin, c.weights, c.error, c.error_out, c.noise,
                c.packed,
            )  # fmt: skip
            written = _payload(c.blocks, c.packed)
        case plans.SoftSign():
            task.loop(
                c.flags, "soft_sign", c.blocks, c.tensors, c.momentum, c.momentum_out, c.magnitude, c.magnitude_out,
                c.eps, c.amsgrad, c.out,
            )  # fmt: skip
            return []
        case plans.Pack():
            task.loop(None, "pack", _chunks(c.runs), c.tensors, c.destination)
            written = _elements(c.runs, c.destination)
        case plans.Place():
            task.upload([_elements(c.runs, c.source)])
            task.loop(None, "place", _chunks(c.runs), c.tensors, c.source)
            return []
        case plans.Reduce():
            task.upload(missing(c.sources))
            task.loop(None, "reduce", c.dtype, c.op, c.sources, c.prescale, c.postscale, c.out)
            written = c.out
        case plans.Unpack():
            task.upload([c.packed])
            task.loop(None, "unpack", c.blocks, c.packed, c.mask, c.out)
            return []
        case _:
            raise AssertionError(f"{type(c).__name__} has no form on a device")
    task.download(written)
    return [written]


def _is_inside(part: Bytes, whole: Bytes) -> bool:
    first, start = _address(part), _address(whole)
    return start <= first and first + part.nbytes <= start + whole.nbytes


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _payload(blocks: Table, packed: Bytes) -> Bytes:
    """Where scales and signs of all blocks are."""
    if not blocks.size:
        return packed[:0]
    ends = blocks["bits"] + (blocks["length"] + 7) // 8
    firsts = np.where(blocks["scale"] >= 0, np.minimum(blocks["scale"], blocks["bits"]), blocks["bits"])
    return packed[int(firsts.min()) : int(max(ends.max(), (blocks["scale"] + 4).max()))]


def _elements(runs: Table, message: Bytes) -> Bytes:
    """Where all runs have their elements."""
    if not runs.size:
        return message[:0]
    return message[4 * int(runs["position"].min()) : 4 * int((runs["position"] + runs["length"]).max())]


def _chunks(runs: Table) -> Table:
    """The same runs, none of them longer than a chunk."""
    counts = -(-runs["length"] // _CHUNK)
    of = np.repeat(np.arange(runs.size), counts)
    first = (np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)) * _CHUNK
    cut = np.zeros(of.size, RUN)
    cut["tensor"] = runs["tensor"][of]
    cut["start"], cut["position"] = runs["start"][of] + first, runs["position"][of] + first
    cut["length"] = np.minimum(runs["length"][of] - first, _CHUNK)
    return cut


def _joined(parts: Iterable[Bytes]) -> list[Bytes]:
    """The same memory in fewer pieces: what lies side by side in one array, but for padding, is one."""
    found: list[Bytes] = []
    for part in sorted(parts, key=_address):
        if found and part.base is found[-1].base and part.base is not None:
            base = part.base
            start = _address(base)
            first = _address(found[-1]) - start
            end = first + found[-1].nbytes
            at = _address(part) - start
            if at - end < ALIGNMENT:
                found[-1] = base[first : at + part.nbytes]
                continue
        found.append(part)
    return found
