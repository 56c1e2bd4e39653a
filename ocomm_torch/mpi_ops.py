"""Horovod's collectives on Torch tensors.

Tensors may have any memory layout and device; those that are not contiguous or not in the host's memory are copied.
Functions whose names end in ``_async`` return an integer handle for ``poll`` and ``synchronize``. Until the handle is
synchronized, neither the input nor the output may be read or changed. A trailing underscore means in place, for tensors
that share no memory with each other; the other functions are differentiable.

The collectives share these arguments:

- ``name`` tells which calls of different ranks belong together. Calls without a name are matched by their order.
- ``op`` is ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; ``average`` is Horovod's
  older way to choose between the first two. An average of integers is rounded towards zero, and so are integers times a
  factor, as in Horovod.
- ``process_set`` names the ranks that take part; all of them must make the call. The default is all ranks of the job.

A collective raises InvalidRequestError (a ValueError) at once if this rank's arguments cannot be right. The call that
waits raises HorovodInternalError (MismatchError, StallError or PeerError) if the ranks disagree or some do not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ocomm import operations
from ocomm import session as sessions
from ocomm.api import Average, Sum, barrier, join, poll, synchronize  # noqa: F401 (Horovod's mpi_ops has them all)
from ocomm.basics import *  # noqa: F403
from ocomm.docstrings import AVERAGE_OR_SUM, GATHERED, HANDLE, ROWS, SHARE, collective
from ocomm.errors import HorovodInternalError, InvalidRequestError, OcommError, UnsupportedError  # noqa: F401
from ocomm.kernels.base import Bytes
from ocomm.kernels.device import DeviceMemory, is_reduced_on_devices
from ocomm.nccl_opening import could_be_bridged, give_up, memory_of
from ocomm.negotiation.request import TensorMemory
from ocomm.operations import (
    Allreduce,
    ProcessSet,
    add_process_set,  # noqa: F401
    choose_op,
    global_process_set,
    handles,
    remove_process_set,  # noqa: F401
)
from ocomm.session import Session
from ocomm.types import DType, ReduceOp
from ocomm_torch.compression import UNCOMPRESSED, Compression, Compressor, OneBitCompressor, has_overflowed
from ocomm_torch.memory.placement import CudaPlacement, refuse_in_a_graph
from ocomm_torch.memory.tensor_memory import why_unreadable

_DTYPES = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.bool: DType.BOOL,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
}


class _Copies:
    """``operations.Copies`` on each GPU's current stream."""

    def __init__(self, devices: set[torch.device]) -> None:
        refuse_in_a_graph()
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def is_over(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class TorchAdapter:
    """The ``operations.Adapter`` of Torch tensors."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"got {type(tensor).__name__}, which is no torch.Tensor")
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            allowed = ", ".join(d.label for d in _DTYPES.values())
            raise TypeError(f"dtype {tensor.dtype} is not supported; use one of {allowed}")
        if tensor.is_nested:
            raise TypeError("it is a nested tensor; send the parts that unbind() returns")
        if tensor.layout is not torch.strided:
            raise TypeError(f"layout {tensor.layout} is not supported; call to_dense() or sparse_allreduce_async()")
        if reason := why_unreadable(tensor):
            raise TypeError(f"it {reason}; send plain tensors, of a DTensor its to_local()")
        return dtype, tuple(tensor.shape)

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.requires_grad:  # detach() releases the GIL, so it is not called for every gradient
            tensor = tensor.detach()
        if tensor.is_cpu:
            return _contiguous(tensor)
        if not tensor.is_cuda:
            return _contiguous(tensor.cpu())[0], False
        # Page-locked, so that the device writes it itself. Torch keeps such memory, and reuses it when the device has
        # finished.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, False

    def copies(self, tensors: Sequence[Any]) -> operations.Copies | None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        return _Copies(devices) if devices else None

    def view(self, host: Any) -> Bytes:
        if host.dtype is torch.bfloat16:
            host = host.view(torch.int16)  # NumPy has no bfloat16
        return host.numpy().reshape(-1).view(np.uint8)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)

    def deliver(self, host: Any, like: Any) -> Any:
        return host if like.is_cpu else host.to(like.device, non_blocking=True)

    def store(self, host: Any, into: Any) -> None:
        into.detach().copy_(host, non_blocking=True)

    def placement(self, session: Session, process_set: ProcessSet, tensors: Sequence[Tensor]) -> CudaPlacement | None:
        """Returns the placement of tensors that are all on one GPU, if sums over the set could stay there; else
        None.
        """
        if not tensors or not isinstance(tensors[0], Tensor) or not tensors[0].is_cuda:
            return None
        number = process_set.number(session)
        if not could_be_bridged(session, number):
            return None
        device = tensors[0].device
        if torch.version.cuda is None or any(tensor.device != device for tensor in tensors):
            return None
        try:
            return CudaPlacement(session.device_kernels(device.index or 0), device)
        except OcommError as error:  # for instance, numba-cuda is missing
            give_up(session.member_set(number), str(error))
            return None


class _OnDevice(TorchAdapter):
    """The adapter of tensors that stay on their device: what it calls the host's memory is the device's."""

    def __init__(self, placement: CudaPlacement) -> None:
        self._placement = placement

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        return _contiguous(tensor)

    def copies(self, tensors: Sequence[Any]) -> None:
        """Returns None; orders ocomm's stream after what Torch's has begun."""
        self._placement.arrive()

    def view(self, host: Any) -> Bytes:
        return self._placement.bytes(host)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def deliver(self, host: Any, like: Any) -> Any:
        return host


def _contiguous(tensor: Tensor) -> tuple[Tensor, bool]:
    """Returns a tensor whose memory has the elements in their order, and whether that is the memory of ``tensor``."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor, True
    return tensor.resolve_neg().contiguous(), False


TORCH = TorchAdapter()


def adapter_of(
    session: Session, tensors: Sequence[Tensor], op: int, factors: tuple[float, float], process_set: ProcessSet
) -> tuple[TorchAdapter, TensorMemory]:
    """Returns how the tensors of one allreduce reach the ranks of a set, and which memory they are in then."""
    placement = TORCH.placement(session, process_set, tensors)
    if placement is None or not all(
        tensor.dtype in _DTYPES and is_reduced_on_devices(_DTYPES[tensor.dtype], op, *factors) for tensor in tensors
    ):
        return TORCH, TensorMemory.HOST
    memory = memory_of(session, process_set.number(session), cast(DeviceMemory, placement.kernels.memory))
    return _OnDevice(placement) if memory is TensorMemory.BRIDGED else TORCH, memory


# allreduce


def _submit_allreduce(call: Allreduce) -> int:
    session = sessions.current()
    factors = call.prescale, call.postscale
    adapter, memory = adapter_of(session, call.tensors, call.op, factors, call.process_set)
    return handles.add(operations.prepare_allreduce(session, adapter, call, memory).submit())


def _changed(tensors: Sequence[Tensor], handle: int) -> int:
    """Returns ``handle``, of a call that writes to the tensors' memory. Autograd, which may have saved them, could not
    know that it does.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return handle


@collective(HANDLE)
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``allreduce``, whose result is a new tensor."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(Allreduce([tensor], name, choose_op(op, average), *factors, process_set))


@collective(HANDLE)
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``allreduce_``; the tensor holds the result once the handle is synchronized."""
    factors = prescale_factor, postscale_factor
    call = Allreduce([tensor], name, choose_op(op, average), *factors, process_set, in_place=True)
    return _changed([tensor], _submit_allreduce(call))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Tensor:
        ctx.settings = (op, prescale, postscale, process_set)
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.settings
        return allreduce(grads[0], None, None, Compression.none, op, prescale, postscale, process_set), *_nothing(5)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over the ranks. Collective; waits for the result.

    The gradient is the same allreduce of the gradient.

    Args:
        tensor: The input, which is not changed. Its shape and dtype are the same on all ranks.
        average: Horovod's older form of ``op``: True for Average, False for Sum. Give one of the two at most.
        name: Matches the calls of different ranks; None to match them by their order.
        compression: A class of ``Compression``. ``Compression.onebit`` needs a name, float32 and Average, and is not
            differentiable. Its errors are kept for each name until the end of the job: use the same names in each
            step, not ``f"g{step}"``, each of which would keep memory.
        op: The reduction, Average if it is None.
        prescale_factor: Multiplies every input.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        InvalidRequestError: The arguments cannot be right.
        HorovodInternalError: The collective failed: MismatchError, StallError or PeerError.
    """
    chosen = choose_op(op, average)
    if compression is OneBitCompressor or isinstance(compression, OneBitCompressor):
        return _onebit_allreduce(tensor, name, chosen, prescale_factor, postscale_factor, process_set)
    settings = chosen, prescale_factor, postscale_factor, process_set
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, *settings)
    if has_overflowed(compression, [reduced], [tensor]):
        return _Allreduce.apply(tensor, _again(name), *settings)
    return compression.decompress(reduced, context)


def _again(name: str | None) -> str | None:
    """Returns the name of a second, uncompressed reduction."""
    return None if name is None else name + UNCOMPRESSED


def _onebit_allreduce(
    tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> Tensor:
    if name is None or op != Average or prescale != 1 or postscale != 1 or tensor.dtype is not torch.float32:
        raise InvalidRequestError(
            f"tensor '{name}': allreduce with Compression.onebit needs a name, under which it keeps its error, and has "
            f"Average of float32 without scale factors only; got {tensor.dtype} and op={ReduceOp(op).label}."
        )
    session = sessions.current()
    host, _ = TORCH.host(tensor)
    copies = TORCH.copies([tensor])
    if copies is not None:
        copies.wait()
    averaged = operations.compressed_allreduce(session, process_set.number(session), name, host.numpy())
    return TORCH.deliver(torch.from_numpy(averaged), tensor)


@collective("The same tensor, with the same bits on every rank.")
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over the ranks in place. Collective; waits for the result. Not differentiable."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


@collective(HANDLE)
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a ``grouped_allreduce``, whose result is a list of new tensors."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(Allreduce(tensors, name, choose_op(op, average), *factors, process_set, grouped=True))


@collective(HANDLE)
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a ``grouped_allreduce_``; the tensors hold the results once the handle is synchronized."""
    factors = prescale_factor, postscale_factor
    call = Allreduce(tensors, name, choose_op(op, average), *factors, process_set, in_place=True, grouped=True)
    return _changed(tensors, _submit_allreduce(call))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> Any:
        ctx.settings = (op, prescale, postscale, process_set)
        return tuple(synchronize(grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.settings
        reduced = grouped_allreduce(grads, None, None, Compression.none, op, prescale, postscale, process_set)
        return *_nothing(5), *reduced


@collective("New tensors of the same shapes, dtypes and devices.")
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces several tensors, which all become ready at the same time: when every rank has submitted all of them.
    Collective; waits for the result.

    The gradient is the same allreduce of the gradients.
    """
    settings = choose_op(op, average), prescale_factor, postscale_factor, process_set
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _GroupedAllreduce.apply(name, *settings, *(compressed for compressed, _ in pairs))
    if has_overflowed(compression, reduced, tensors):
        return list(_GroupedAllreduce.apply(_again(name), *settings, *tensors))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


@collective("The same tensors.")
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces several tensors, as ``grouped_allreduce`` does, in place. Collective; waits for the result. Not
    differentiable.
    """
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


@collective(
    "A function that waits for the sum and returns the coalesced tensor, as in Horovod, instead of a handle.",
    tensor="A sparse COO tensor. Its shape and dtype are the same on all ranks, the number of its values may differ.",
    op="The reduction: Average if it is None, or Sum.",
)
def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts the sum (or average) of sparse COO tensors: an allgather of the indices and values of all ranks."""
    chosen = choose_op(op, None)
    if chosen not in (Average, Sum):
        raise UnsupportedError("a sparse allreduce has Average and Sum only.")
    tensor = tensor.detach().coalesce()
    indices_name, values_name = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices = allgather_async(tensor.indices().t(), indices_name, process_set)
    values = allgather_async(tensor.values(), values_name, process_set)
    members = process_set.size()
    found: list[Tensor] = []  # of both handles, also of one if a call of finish() was interrupted

    def finish() -> Tensor:
        for handle in (indices, values)[len(found) :]:
            found.append(synchronize(handle))
        found_indices, found_values = found
        if chosen == Average:
            found_values = found_values / members
        return torch.sparse_coo_tensor(
            found_indices.t(), found_values, tensor.shape, device=found_values.device, check_invariants=False
        ).coalesce()

    return finish


# allgather


@collective(
    HANDLE,
    tensor=GATHERED,
)
def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an ``allgather``, whose result is a new tensor."""
    operation = operations.allgather(sessions.current(), TORCH, [tensor], name, process_set, False)
    return handles.add(operations.without_sizes(operation))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        gathered, ctx.rows = operations.allgather(sessions.current(), TORCH, [tensor], name, process_set, False).wait()
        ctx.process_set = process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return _own_rows(reduced, ctx.rows, ctx.process_set), *_nothing(2)


def _own_rows(tensor: Tensor, rows: Sequence[int], process_set: ProcessSet) -> Tensor:
    mine = process_set.rank()
    return tensor.narrow(0, sum(rows[:mine]), rows[mine])


@collective(
    "A new tensor.",
    tensor=GATHERED,
)
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the tensors of all ranks along the first dimension, in rank order. Collective; waits for the result.

    The gradient is this rank's rows of the averaged gradient.
    """
    return _Allgather.apply(tensor, name, process_set)


@collective(HANDLE, tensors="The inputs, as for ``allgather``; their number is the same on all ranks.")
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``grouped_allgather``, whose result is a list of new tensors."""
    operation = operations.allgather(sessions.current(), TORCH, tensors, name, process_set, True)
    return handles.add(operation.then(lambda pairs: [tensor for tensor, _ in pairs]))


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        pairs = operations.allgather(sessions.current(), TORCH, tensors, name, process_set, True).wait()
        ctx.rows = [rows for _, rows in pairs]
        ctx.process_set = process_set
        return tuple(tensor for tensor, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        return *_nothing(2), *(_own_rows(g, n, ctx.process_set) for g, n in zip(reduced, ctx.rows, strict=True))


@collective("New tensors.", tensors="The inputs, as for ``allgather``; their number is the same on all ranks.")
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Makes an ``allgather`` of several tensors, which all become ready when every rank has submitted all of them.
    Collective; waits for the result.
    """
    return list(_GroupedAllgather.apply(name, process_set, *tensors))


# broadcast


@collective(HANDLE)
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast``, whose result is a new tensor."""
    return handles.add(operations.broadcast(sessions.current(), TORCH, tensor, root_rank, name, process_set, False))


@collective(HANDLE)
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast_``; the tensor holds the result once the handle is synchronized."""
    operation = operations.broadcast(sessions.current(), TORCH, tensor, root_rank, name, process_set, True)
    return _changed([tensor], handles.add(operation))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.settings = (root_rank, process_set)
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        root_rank, process_set = ctx.settings
        reduced = allreduce(grads[0], op=Average, process_set=process_set)
        is_root = sessions.current().require_topology().rank == root_rank
        if not is_root:
            # Not new zeros: a second backward pass needs this rank, too, for the gradient of that allreduce.
            reduced = reduced.masked_fill(torch.ones_like(reduced, dtype=torch.bool), 0)
        return reduced, *_nothing(3)


@collective("A new tensor with the contents of the root's.")
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Sends a tensor of the rank ``root_rank`` to all ranks. Collective; waits for the result.

    The gradient is the averaged gradient on the root, zeros elsewhere.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


@collective("The same tensor.")
def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replaces a tensor on every rank by that of ``root_rank``, in place. Collective; waits for the result. Not
    differentiable.
    """
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# alltoall


@collective(
    HANDLE,
    tensor=ROWS,
)
def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``alltoall``, with the results that this returns."""
    operation = operations.alltoall(sessions.current(), TORCH, tensor, _list(splits), name, process_set)
    if splits is None:
        return handles.add(operations.without_sizes(operation))
    return handles.add(operation.then(lambda result: (result[0], _counts(result[1]))))


def _counts(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def _list(splits: Any) -> Any:
    return splits.cpu().numpy() if isinstance(splits, Tensor) else splits


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, rows = operations.alltoall(sessions.current(), TORCH, tensor, _list(splits), name, process_set).wait()
        ctx.settings = (rows, process_set, tensor.shape[0])
        counts = _counts(rows)
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, process_set, length = ctx.settings
        gradient, _ = alltoall(grads[0], rows, process_set=process_set)
        if len(gradient) < length:  # the splits left out rows, which were not sent
            gradient = torch.cat([gradient, gradient.new_zeros(length - len(gradient), *gradient.shape[1:])])
        return gradient, *_nothing(3)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends consecutive rows of ``tensor`` to the ranks, in rank order, and returns the rows received. Collective;
    waits.

    The gradient goes back the same way.

    Args:
        tensor: At least one dimension; a row is an element of the first one. The other dimensions are equal on all
            ranks.
        splits: A tensor or sequence of whole numbers: the rows for each rank. Their sum is at most the length of
            ``tensor``. None for equal parts.
        name: Matches the calls of different ranks; None to match them by their order.
        process_set: The ranks that take part.

    Returns:
        The received rows, in rank order. If ``splits`` is given, a pair: these rows, and the number of rows from each
            rank (int32).
    """
    received, rows = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


# reducescatter


@collective(HANDLE, op=AVERAGE_OR_SUM)
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a ``reducescatter``."""
    return _submit_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, False)


@collective(HANDLE, op=AVERAGE_OR_SUM)
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a ``grouped_reducescatter``."""
    return _submit_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True)


def _submit_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    grouped: bool,
) -> int:
    session = sessions.current()
    return handles.add(
        operations.reducescatter(session, TORCH, tensors, name, op, prescale, postscale, process_set, grouped)
    )


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        grouped: bool,
        *tensors: Tensor,
    ) -> Any:
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        ctx.settings = (factor, process_set)
        handle = _submit_reducescatter(tensors, name, op, process_set, prescale, postscale, grouped)
        parts = synchronize(handle)
        return tuple(parts) if grouped else (parts,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        factor, process_set = ctx.settings
        return *_nothing(6), *grouped_allgather([grad * factor for grad in grads], process_set=process_set)


@collective(
    SHARE,
    op=AVERAGE_OR_SUM,
)
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over the ranks and gives each rank a part of the rows of the result. Collective; waits for the
    result.

    The gradient is the allgathered gradient, times the number of ranks for Sum (as in Horovod).
    """
    (part,) = _reducescatter_compressed(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor, False
    )
    return part


def _reducescatter_compressed(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor] | Compressor,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    grouped: bool,
) -> list[Tensor]:
    settings = op, process_set, prescale, postscale, grouped
    pairs = [compression.compress(tensor) for tensor in tensors]
    parts = _GroupedReducescatter.apply(name, *settings, *(compressed for compressed, _ in pairs))
    if getattr(compression, "may_overflow", False):  # each rank sees only its own part, so all must agree
        found = torch.tensor([has_overflowed(compression, parts, tensors)], device="cpu")
        asked = None if name is None else name + ".overflow"
        if synchronize(allreduce_async_(found, name=asked, op=ReduceOp.MAX, process_set=process_set)):
            return list(_GroupedReducescatter.apply(_again(name), *settings, *tensors))
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs, strict=True)]


@collective("This rank's share of each result.", op=AVERAGE_OR_SUM)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Makes a ``reducescatter`` of several tensors, which all become ready when every rank has submitted all of them.
    Collective; waits for the result.
    """
    return _reducescatter_compressed(
        tensors, name, compression, op, process_set, prescale_factor, postscale_factor, True
    )


def _nothing(count: int) -> tuple[None, ...]:
    """Returns the gradients of arguments that have none."""
    return (None,) * count
