"""What a rank of a process set does for a response: a plan for the engine, on the memory of the users' tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from ocomm.collectives import dense
from ocomm.collectives.bridged import BridgedSums
from ocomm.collectives.plan import Plan, Stage
from ocomm.collectives.scratch import Scratch, aligned
from ocomm.errors import InvalidRequestError, UnsupportedError, clause
from ocomm.kernels.base import view
from ocomm.kernels.device import DeviceArray
from ocomm.kernels.reference import reject_unsupported
from ocomm.negotiation.request import Kind, Request, Response
from ocomm.runtime.handle import Submission
from ocomm.types import Bytes, DType, Location, Nodes, ReduceOp

#: Tensors of submissions: each with its position among the requests of one.
Tensors = Sequence[tuple[Submission, int]]
# Module globals, because looking up a member of an enumeration takes five times as long.
_AVERAGE, _SUM, _BOOL = ReduceOp.AVERAGE, ReduceOp.SUM, DType.BOOL


class Planner:
    """Makes the plans of rank ``rank`` of ``size``.

    Args:
        rank: The rank's position in the process set.
        size: The number of ranks.
        segment_nbytes: The size of segments of dense sums.
        scratch: The memory of plans that need more than the tensors'.
        nodes: How dense sums go.
    """

    def __init__(self, rank: int, size: int, segment_nbytes: int, scratch: Scratch, nodes: Nodes) -> None:
        self.rank = rank
        self.size = size
        self._scratch = scratch
        self._context = dense.Context(rank, size, segment_nbytes, scratch.take, nodes)

    @property
    def segment_nbytes(self) -> int:
        return self._context.segment_nbytes

    def use_segments(self, nbytes: int) -> None:
        """Uses segments of another size from the next plan on."""
        self._context = replace(self._context, segment_nbytes=nbytes)

    def plan(self, response: Response, tensors: Tensors, bridged: BridgedSums | None) -> tuple[Plan, object, Scratch]:
        """Returns the plan of a response, the result of a tensor that is not fused, and the owner of the plan's
        memory. ``bridged`` sums tensors on devices where that goes from device to device.
        """
        submission, position = tensors[0]
        request = submission.requests[position]
        if request.kind is Kind.MESSAGE:
            return self._message_plan(response, submission.sources[position], request), None, self._scratch
        source = view(submission.sources[position], request.nbytes)
        result: object = None
        scratch = self._scratch
        match response.kind:
            case Kind.ALLREDUCE if request.op == ReduceOp.ADASUM:
                everyone = aligned(self.size * request.nbytes)
                plan = dense.allgather(self._context, [(source, everyone, [request.nbytes] * self.size)])
                result = everyone.reshape(self.size, request.nbytes)
            case Kind.ALLREDUCE:
                plan, scratch = self._allreduce_plan(response, tensors, request, bridged)
            case Kind.ALLGATHER:
                lengths = self._counts(response, self.size)
                row_nbytes = _row_nbytes(request)
                target = _allocate(submission, position, (sum(lengths), *request.shape[1:]))
                plan = dense.allgather(self._context, [(source, target, [n * row_nbytes for n in lengths])])
                result = lengths
            case Kind.BROADCAST:
                target = view(_target(submission, position), request.nbytes)
                plan = dense.broadcast(self._context, source, target, request.root)
            case Kind.ALLTOALL:
                table = self._counts(response, self.size**2)
                row_nbytes = _row_nbytes(request)
                splits = [table[r * self.size : (r + 1) * self.size] for r in range(self.size)]
                received = tuple(row[self.rank] for row in splits)
                target = _allocate(submission, position, (sum(received), *request.shape[1:]))
                nbytes = [[n * row_nbytes for n in row] for row in splits]
                plan = dense.alltoall(self._context, source, target, nbytes)
                result = received
            case Kind.REDUCESCATTER:
                rows = split_rows(request.shape[0] if request.shape else 1, self.size)
                row_nbytes = _row_nbytes(request)
                target = _allocate(submission, position, (rows[self.rank], *request.shape[1:]))
                plan = dense.reducescatter(
                    self._context,
                    source,
                    target,
                    [n * row_nbytes for n in rows],
                    request.dtype,
                    request.op,
                    request.prescale,
                    request.postscale,
                )
            case _:
                plan = Plan("barrier", [[Stage()]])
        plan.name = response.names[0] if len(response.names) == 1 else f"{len(response.names)} fused tensors"
        return plan, result, scratch

    def _counts(self, response: Response, expected: int) -> tuple[int, ...]:
        """Returns the numbers of rows that all ranks must know. Raises ValueError if they are not so many."""
        if len(response.names) != 1 or len(response.sizes[0]) != expected:
            raise ValueError(f"{response.sizes} for {response.names}, where {expected} numbers of rows are expected")
        return response.sizes[0]

    def _message_plan(self, response: Response, memory: Location, request: Request) -> Plan:
        """Returns this rank's plan for a message between two ranks of the set.

        The other ranks have an empty plan, so that the message has the same place in the order of plans on all ranks.
        """
        ends = request.root, request.splits[0]
        buffer = view(memory, request.nbytes) if self.rank in ends else None
        plan = dense.message(self._context, buffer, request.nbytes, *ends)
        plan.name = response.names[0]
        return plan

    def _allreduce_plan(
        self, response: Response, tensors: Tensors, request: Request, bridged: BridgedSums | None
    ) -> tuple[Plan, Scratch]:
        """Returns the plan of a sum of fused tensors that are like ``request``, and the owner of its memory."""
        sources = [submission.sources[position] for submission, position in tensors]
        what = (
            sources,
            cast(list[Location], [submission.targets[position] for submission, position in tensors]),
            [submission.requests[position].nbytes for submission, position in tensors],
            request.dtype,
            request.op,
            request.prescale,
            request.postscale,
        )
        if bridged is not None and any(isinstance(source, DeviceArray) for source in sources):
            return bridged.allreduce(self._context, response.names[0], response.bridged, *what)
        return dense.allreduce(self._context, *what), self._scratch


def stand_in(template: Request) -> Submission:
    """Returns what a rank that has joined contributes to an operation of the others: values that change no result."""
    if template.kind == Kind.ALLREDUCE:
        nothing = neutral(template.dtype, template.op, template.numel)
        return Submission.of(template, nothing, nothing)
    if template.kind == Kind.BROADCAST:
        room = np.empty(template.nbytes, np.uint8)
        return Submission.of(template, room, room)
    if template.kind == Kind.MESSAGE:  # of two others
        return Submission.of(template)

    def allocate(shape: tuple[int, ...]) -> Bytes:
        return np.empty(math.prod(shape) * template.dtype.itemsize, np.uint8)

    return Submission.of(template, np.zeros(0, np.uint8), allocate)


def neutral(dtype: DType, op: ReduceOp, numel: int) -> Bytes:
    """Returns elements that change nothing in a reduction: 0 for sums, 1 for products, the extremes for Min and Max."""
    kind = np.dtype(np.uint16 if dtype == DType.BFLOAT16 else dtype.label)
    value: float = 0
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        is_min = op == ReduceOp.MIN
        if dtype == DType.BFLOAT16:
            value = 0x7F80 if is_min else 0xFF80
        elif dtype.is_floating:
            value = np.inf if is_min else -np.inf
        elif dtype == DType.BOOL:
            value = is_min
        else:
            value = np.iinfo(kind).max if is_min else np.iinfo(kind).min
    elif op == ReduceOp.PRODUCT:
        value = 0x3F80 if dtype == DType.BFLOAT16 else 1
    return np.full(numel, value, kind).view(np.uint8)


def check_reduction(request: Request) -> None:
    """Raises UnsupportedError for a reduction that the element type does not have, InvalidRequestError for factors that
    are not numbers.
    """
    if type(request.prescale) is not float or type(request.postscale) is not float:
        try:
            struct.pack("dd", request.prescale, request.postscale)
        except struct.error:
            raise InvalidRequestError(
                f"tensor '{request.name}': prescale_factor and postscale_factor must be numbers, got "
                f"{request.prescale!r} and {request.postscale!r}."
            ) from None
    if (request.op is _AVERAGE or request.op is _SUM) and request.dtype is not _BOOL:
        return  # the usual case, once per gradient
    is_adasum = request.kind == Kind.ALLREDUCE and request.op == ReduceOp.ADASUM and request.dtype.is_floating
    if request.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) and not is_adasum:
        try:
            reject_unsupported(request.dtype, request.op, request.prescale, request.postscale)
        except TypeError as error:
            raise UnsupportedError(f"tensor '{request.name}': {clause(error)}.") from None


def split_rows(rows: int, size: int) -> list[int]:
    """Returns the rows of each rank when ``rows`` are shared out; the first ranks get the remainder, as in Horovod."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _row_nbytes(request: Request) -> int:
    count = request.dtype.itemsize
    for n in request.shape[1:]:
        count *= n
    return count


def _target(submission: Submission, position: int) -> Location:
    target = submission.targets[position]
    assert not callable(target)
    return target


def _allocate(submission: Submission, position: int, shape: tuple[int, ...]) -> Bytes:
    allocate = submission.targets[position]
    assert callable(allocate)
    return allocate(shape)
