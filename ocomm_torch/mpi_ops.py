"""Horovod's collectives on Torch tensors.

Tensors of any layout and device are taken; those which are not contiguous or not in host memory are copied. The
``*_async`` calls return an integer handle for ``poll`` and ``synchronize``; until it is synchronized, neither the input
nor the output may be touched. A trailing underscore means in place. The others are differentiable.

``name`` tells which calls of different ranks belong together; calls without one are matched by their order. ``op`` is
``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``. An average of integers is rounded towards zero, and
so are integers times a factor, as in Horovod.

Errors: InvalidRequestError (a ValueError) at once where this rank's arguments cannot be right, HorovodInternalError
from the synchronizing call where the ranks do not agree or some do not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ocomm import operations
from ocomm import session as sessions
from ocomm.api import Average, Sum
from ocomm.errors import InvalidRequestError, OcommError, UnsupportedError
from ocomm.kernels.base import Bytes
from ocomm.kernels.device import DeviceMemory, is_reduced_on_devices
from ocomm.nccl_opening import could_be_bridged, give_up, memory_of
from ocomm.negotiation.request import TensorMemory
from ocomm.operations import Allreduce, ProcessSet, choose_op, global_process_set, handles
from ocomm.session import Session
from ocomm.types import DType, ReduceOp
from ocomm_torch.compression import UNCOMPRESSED, Compression, Compressor, OneBitCompressor, has_overflowed
from ocomm_torch.placement import CudaPlacement, refuse_in_a_graph

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
    """See ``operations.Copies``: those of each GPU's current stream."""

    def __init__(self, devices: set[torch.device]) -> None:
        refuse_in_a_graph()
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def is_over(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class TorchAdapter:
    """See ``operations.Adapter``."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"got {type(tensor).__name__}, which is no torch.Tensor")
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            allowed = ", ".join(d.label for d in _DTYPES.values())
            raise TypeError(f"dtype {tensor.dtype} is not supported; use one of {allowed}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"layout {tensor.layout} is not supported; call to_dense() or sparse_allreduce_async()")
        return dtype, tuple(tensor.shape)

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.requires_grad:  # detach() gives the GIL away: not once per gradient
            tensor = tensor.detach()
        if tensor.is_cpu:
            return (tensor, True) if tensor.is_contiguous() else (tensor.contiguous(), False)
        if not tensor.is_cuda:
            return tensor.cpu().contiguous(), False
        # Page-locked, so that the device writes it itself. Torch keeps such memory, and gives it out again when the
        # device is done with it.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
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
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def deliver(self, host: Any, like: Any) -> Any:
        return host if like.is_cpu else host.to(like.device, non_blocking=True)

    def store(self, host: Any, into: Any) -> None:
        into.detach().copy_(host, non_blocking=True)

    def placement(self, session: Session, process_set: ProcessSet, tensors: Sequence[Tensor]) -> CudaPlacement | None:
        """Of tensors that are all on one GPU, if sums over the set could stay there; else None."""
        if not tensors or not tensors[0].is_cuda:
            return None
        number = process_set.number(session)
        if not could_be_bridged(session, number):
            return None
        device = tensors[0].device
        if torch.version.cuda is None or any(tensor.device != device for tensor in tensors):
            return None
        try:
            return CudaPlacement(session.device_kernels(device.index or 0), device)
        except OcommError as error:  # no numba-cuda, say
            give_up(session.member_set(number), str(error))
            return None


class _OnDevice(TorchAdapter):
    """Tensors that stay where they are: theirs is the memory that it calls the host's."""

    def __init__(self, placement: CudaPlacement) -> None:
        self._placement = placement

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        return (tensor, True) if tensor.is_contiguous() else (tensor.contiguous(), False)

    def copies(self, tensors: Sequence[Any]) -> None:
        """ocomm's stream comes after what Torch's has begun."""
        self._placement.arrive()

    def view(self, host: Any) -> Bytes:
        return self._placement.bytes(host)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def deliver(self, host: Any, like: Any) -> Any:
        return host


TORCH = TorchAdapter()


def adapter_of(
    session: Session, tensors: Sequence[Tensor], op: int, factors: tuple[float, float], process_set: ProcessSet
) -> tuple[TorchAdapter, TensorMemory]:
    """How the tensors of one allreduce reach the ranks of a set, and where they are then."""
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


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``allreduce``; the handle's result is a new tensor."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(Allreduce([tensor], name, choose_op(op, average), *factors, process_set))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``allreduce_``; the result is in ``tensor`` when the handle is synchronized."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(Allreduce([tensor], name, choose_op(op, average), *factors, process_set, in_place=True))


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
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of ``tensor`` over the ranks, as a new tensor of the same shape and dtype.

    ``prescale_factor`` is applied to every input, ``postscale_factor`` to the result. The gradient is the same
    allreduce of the gradient. ``Compression.onebit``: a name, float32 and Average only, not differentiable.
    """
    chosen = choose_op(op, average)
    if issubclass(compression, OneBitCompressor):
        return _onebit_allreduce(tensor, name, chosen, prescale_factor, postscale_factor, process_set)
    settings = chosen, prescale_factor, postscale_factor, process_set
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, *settings)
    if has_overflowed(compression, [reduced], [tensor]):
        return _Allreduce.apply(tensor, _again(name), *settings)
    return compression.decompress(reduced, context)


def _again(name: str | None) -> str | None:
    """The name of a second reduction, of what the first has sent compressed."""
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


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """``allreduce`` into ``tensor`` itself, which is returned. Not differentiable."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``grouped_allreduce``; the handle's result is a list of new tensors."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(Allreduce(tensors, name, choose_op(op, average), *factors, process_set, grouped=True))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``grouped_allreduce_``; the results are in ``tensors`` when the handle is synchronized."""
    factors = prescale_factor, postscale_factor
    return _submit_allreduce(
        Allreduce(tensors, name, choose_op(op, average), *factors, process_set, in_place=True, grouped=True)
    )


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


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allreduce`` of several tensors, which are reduced when all ranks have submitted all of them."""
    settings = choose_op(op, average), prescale_factor, postscale_factor, process_set
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _GroupedAllreduce.apply(name, *settings, *(compressed for compressed, _ in pairs))
    if has_overflowed(compression, reduced, tensors):
        return list(_GroupedAllreduce.apply(_again(name), *settings, *tensors))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``grouped_allreduce`` into the tensors themselves, which are returned. Not differentiable."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts the sum (or Average) of sparse COO tensors: indices and values of all ranks side by side.

    Returns a function which waits for it and returns the coalesced tensor, as Horovod does, instead of a handle.
    """
    chosen = choose_op(op, None)
    if chosen not in (Average, Sum):
        raise UnsupportedError("a sparse allreduce has Average and Sum only.")
    tensor = tensor.detach().coalesce()
    indices_name, values_name = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices = allgather_async(tensor.indices().t(), indices_name, process_set)
    values = allgather_async(tensor.values(), values_name, process_set)
    members = process_set.size()

    def finish() -> Tensor:
        found_indices, found_values = synchronize(indices), synchronize(values)
        if chosen == Average:
            found_values = found_values / members
        return torch.sparse_coo_tensor(found_indices.t(), found_values, tensor.shape, check_invariants=False).coalesce()

    return finish


# allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts ``allgather``."""
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


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks along the first dimension, which may have another length on every rank.

    The gradient is this rank's rows of the averaged gradient.
    """
    return _Allgather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``grouped_allgather``."""
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


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """``allgather`` of several tensors, gathered when all ranks have submitted all of them."""
    return list(_GroupedAllgather.apply(name, process_set, *tensors))


# broadcast


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast``; the handle's result is a new tensor."""
    return handles.add(operations.broadcast(sessions.current(), TORCH, tensor, root_rank, name, process_set, False))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts ``broadcast_``; the result is in ``tensor`` when the handle is synchronized."""
    return handles.add(operations.broadcast(sessions.current(), TORCH, tensor, root_rank, name, process_set, True))


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
        return reduced if is_root else torch.zeros_like(reduced), *_nothing(3)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of ``root_rank`` (a world rank, also in a process set), as a new tensor.

    The gradient is the averaged gradient on the root, zeros elsewhere.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """``broadcast`` into ``tensor`` itself, which is returned. Not differentiable."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts ``alltoall``."""
    operation = operations.alltoall(sessions.current(), TORCH, tensor, _list(splits), name, process_set)
    if splits is None:
        return handles.add(operations.without_sizes(operation))
    return handles.add(operation.then(lambda result: (result[0], torch.tensor(result[1], dtype=torch.int32))))


def _list(splits: Any) -> Any:
    return splits.cpu().numpy() if isinstance(splits, Tensor) else splits


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, rows = operations.alltoall(sessions.current(), TORCH, tensor, _list(splits), name, process_set).wait()
        ctx.settings = (rows, process_set, tensor.shape[0])
        counts = torch.tensor(rows, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, process_set, length = ctx.settings
        gradient, _ = synchronize(alltoall_async(grads[0], rows, process_set=process_set))
        if len(gradient) < length:  # rows which the splits had left at home
            gradient = torch.cat([gradient, gradient.new_zeros(length - len(gradient), *gradient.shape[1:])])
        return gradient, *_nothing(3)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Deals the rows of ``tensor`` to the ranks, in order, and returns what came from them, in rank order.

    ``splits`` (a tensor or sequence of whole numbers) are the rows for each rank, their sum at most the length of
    ``tensor``; equal parts by default. With it the result is a pair: the tensor, and the rows received from each rank
    (int32). The gradient goes back the same way.
    """
    received, rows = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


# reducescatter


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``reducescatter``."""
    return _submit_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts ``grouped_reducescatter``."""
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


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's part of the reduction (Average or Sum): a share of the rows, the first ranks get the remainder.

    The gradient is the allgathered gradient, times the number of ranks for Sum (as in Horovod).
    """
    (part,) = _reducescatter_compressed(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor, False
    )
    return part


def _reducescatter_compressed(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    grouped: bool,
) -> list[Tensor]:
    settings = op, process_set, prescale, postscale, grouped
    pairs = [compression.compress(tensor) for tensor in tensors]
    parts = _GroupedReducescatter.apply(name, *settings, *(compressed for compressed, _ in pairs))
    if getattr(compression, "may_overflow", False):  # each rank sees its own part alone
        found = torch.tensor([has_overflowed(compression, parts, tensors)])
        asked = None if name is None else name + ".overflow"
        if synchronize(allreduce_async_(found, name=asked, op=ReduceOp.MAX, process_set=process_set)):
            return list(_GroupedReducescatter.apply(_again(name), *settings, *tensors))
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs, strict=True)]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several tensors, reduced when all ranks have submitted all of them."""
    return _reducescatter_compressed(
        tensors, name, compression, op, process_set, prescale_factor, postscale_factor, True
    )


# Waiting


def poll(handle: int) -> bool:
    """True if ``synchronize(handle)`` will not block. InvalidRequestError for an unknown handle."""
    return handles.poll(handle)


def synchronize(handle: int) -> Any:
    """The tensor or tensors of an asynchronous call, waiting for them. None for an unknown handle."""
    return handles.synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    operations.barrier(sessions.current(), process_set)


def _nothing(count: int) -> tuple[None, ...]:
    """Gradients of arguments that have none."""
    return (None,) * count
