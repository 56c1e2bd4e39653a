"""Dense sums of tensors on the ranks' devices, one device per rank, over the bridge between these devices.

The plan is that of the host (``collectives.dense``), in memory of the device: tensors are copied into it side by side,
the owner of each slice sums in the order of ranks, and results are copied out. Its computations become tasks of the
device, its messages become transfers. If some rank has a tensor in the host's memory, the plan is in page-locked
memory, and the device copies there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ocomm.collectives import dense
from ocomm.collectives.bridge import IntraNode, take_turn
from ocomm.collectives.plan import Computation, CopyIn, CopyOut, Loop, Message, Offload, Plan, Stage, name_of
from ocomm.collectives.scratch import Scratch
from ocomm.collectives.staged import DeviceTask
from ocomm.kernels.base import Bytes
from ocomm.kernels.device import REDUCTIONS, DeviceArray, DeviceMemory, Queue
from ocomm.transport.nccl import Piece
from ocomm.types import DType, Location, ReduceOp


class BridgedSums:
    """The dense sums of one process set, all of whose ranks are connected by the bridge of ``intra_node``.

    ``memory`` is that of this rank's device; at most ``idle_nbytes`` of it are kept for later plans. Making one
    compiles kernels, which may take seconds. After that only the engine's thread uses it, except for ``end``.
    """

    def __init__(self, intra_node: IntraNode, memory: DeviceMemory, idle_nbytes: int) -> None:
        assert intra_node.bridge is not None
        self.bridge = intra_node.bridge
        self._intra_node = intra_node
        self._memory = memory
        self._queue = Queue(memory)
        for loop in REDUCTIONS:
            self._queue.prepare(loop)
        self._on_device = Scratch(idle_nbytes, memory.unreachable)
        self._on_host = Scratch(idle_nbytes, memory.device.pinned)

    def allreduce(
        self,
        context: dense.Context,
        name: str,
        bridged: bool,
        sources: Sequence[Location],
        results: Sequence[Location],
        nbytes: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> tuple[Plan, Scratch]:
        """Returns the plan that ``dense.allreduce`` makes, for device memory, and the owner of its memory.

        ``bridged``: all ranks have all tensors on devices. Else some are ``DeviceArray``, and other ranks may have made
        the host's plan.
        """
        self._memory.device.enter()  # NCCL wants the device's context in the thread that calls it
        scratch = self._on_device if bridged else self._on_host
        context = replace(context, scratch=scratch.take)
        plan = dense.allreduce(context, sources, results, nbytes, dtype, op, prescale, postscale, copied=True)
        if bridged:
            plan.segments = [self._bridged(f"{name}, segment {k}", stages) for k, stages in enumerate(plan.segments)]
        else:
            for stage in (stage for stages in plan.segments for stage in stages):
                stage.compute = [part for c in stage.compute for part in self._through_the_host(c)]
        return plan, scratch

    def _bridged(self, name: str, stages: Sequence[Stage]) -> list[Stage]:
        found: list[Stage] = []
        transfer: list[Computation] = []
        for stage in stages:
            first = Stage(transfer + self._on_the_device(stage.compute))
            found.append(first)
            transfer = []
            if stage.sends or stage.receives:
                second = Stage()
                found.append(second)
                sends, receives = _pieces(stage.sends, self._intra_node), _pieces(stage.receives, self._intra_node)
                transfer.append(
                    take_turn(self._intra_node, f"{name}, stage {len(found)}", first, second, sends, receives)
                )
        assert not transfer, "a segment that ends with a transfer"
        return found

    def _on_the_device(self, computations: Sequence[Computation]) -> list[Computation]:
        """Returns one task for all of these computations."""
        task = DeviceTask(self._memory)
        for c in computations:
            match c:
                case CopyIn():
                    for place, part in _side_by_side(c.sources, c.nbytes, c.destination):
                        task.add(self._memory.assign, self._array(part), place)
                case CopyOut():
                    for place, part in _side_by_side(c.destinations, c.nbytes, c.source):
                        task.add(self._memory.assign, place, self._array(part))
                case Loop(arguments=(dtype, op, sources, prescale, postscale, out)) if c.name == "reduce":
                    parts = [self._array(source) for source in sources]
                    task.add(self._queue.call, c.name, dtype, op, parts, prescale, postscale, self._array(out))
                case _:
                    raise AssertionError(f"{name_of(c)} has no form on a device")
        return [Offload(name_of(computations[0]), task)] if computations else []

    def _through_the_host(self, c: Computation) -> list[Computation]:
        """Makes copies of device arrays tasks of the device; returns other computations as they are."""
        if not isinstance(c, (CopyIn, CopyOut)):
            return [c]
        task, device = DeviceTask(self._memory), self._memory.device
        others: list[Computation] = []
        if isinstance(c, CopyIn):
            for place, part in _side_by_side(c.sources, c.nbytes, c.destination):
                if isinstance(place, DeviceArray):
                    task.add(device.download, part, place.address)
                else:
                    others.append(CopyIn([place], [part.nbytes], part))
        else:
            for place, part in _side_by_side(c.destinations, c.nbytes, c.source):
                if isinstance(place, DeviceArray):
                    task.add(device.upload, place.address, part)
                else:
                    others.append(CopyOut(part, [place], [part.nbytes]))
        return [*others, Offload(name_of(c), task)]

    def _array(self, part: Bytes) -> DeviceArray:
        return DeviceArray(self._memory, _address(part), part.nbytes, np.uint8, part)


def _pieces(messages: Sequence[Message], intra_node: IntraNode) -> list[Piece]:
    return [
        Piece(intra_node.ranks.index(m.peer), _address(m.buffer), m.buffer.nbytes) for m in messages if m.buffer.nbytes
    ]


def _side_by_side(places: Sequence[Any], nbytes: Sequence[int], whole: Bytes) -> list[tuple[Any, Bytes]]:
    """Returns each place with its part of ``whole``."""
    found, at = [], 0
    for place, n in zip(places, nbytes, strict=True):
        if n:
            found.append((place, whole[at : at + n]))
        at += n
    return found


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
