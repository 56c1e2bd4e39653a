"""The memory of a call's tensors: what a plan reads, and where results are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ocomm.errors import InvalidRequestError, UnsupportedError, clause
from ocomm.kernels.base import Bytes
from ocomm.kernels.reference import reject_unsupported
from ocomm.types import ReduceOp
from ocomm_torch.mpi_ops import TORCH

TORCH_OP = dist.ReduceOp.RedOpType
_OPS = {
    TORCH_OP.SUM: ReduceOp.SUM,
    TORCH_OP.AVG: ReduceOp.AVERAGE,
    TORCH_OP.MIN: ReduceOp.MIN,
    TORCH_OP.MAX: ReduceOp.MAX,
    TORCH_OP.PRODUCT: ReduceOp.PRODUCT,
}
#: Combines two tensors element by element.
Combine = Callable[..., Tensor]
#: Reductions that ocomm's kernels do not have, and what combines two tensors by them.
BITWISE: dict[Any, Combine] = {
    TORCH_OP.BAND: torch.bitwise_and,
    TORCH_OP.BOR: torch.bitwise_or,
    TORCH_OP.BXOR: torch.bitwise_xor,
}


class Output(Protocol):
    """Where a call has its results, until they are the caller's."""

    def store(self) -> None:
        """Writes the results to the caller's tensors."""


def on_host(tensor: Tensor, operation: str) -> Tensor:
    """Returns the tensor without autograd. Raises NotImplementedError unless it is dense and in the host's memory."""
    if not tensor.is_cpu:
        raise NotImplementedError(
            f"{operation}: the tensor is on {tensor.device}, and backend 'ocomm' has collectives of CPU tensors only. "
            "Use backend 'nccl' for tensors of a GPU, in a group of its own."
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{operation}: backend 'ocomm' has no {tensor.layout} tensors; call to_dense(), or use gloo."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory has the tensor's values one after the other: not those of its negative or its conjugate."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: Tensor, operation: str) -> Tensor:
    """Returns the tensor or, unless it ``is_plain``, a copy that is. Raises as ``on_host`` does."""
    return on_host(tensor, operation).contiguous().resolve_neg().resolve_conj()


def bytes_of(tensor: Tensor) -> Bytes:
    """Returns the memory of a plain tensor of any dtype."""
    if tensor.dtype is torch.uint8:
        return tensor.numpy().reshape(-1)
    return _as_bytes(tensor).numpy()


def _as_bytes(tensor: Tensor) -> Tensor:
    # Torch calls a tensor of one element, or none, contiguous with any stride, and ``reshape`` keeps that.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)[6:]  # without "torch."


class Out:
    """The memory for a result: the tensor's own, or that of a contiguous copy, which ``store`` writes back.

    ``filled``: the copy begins with the values of the tensor.
    """

    __slots__ = ("contiguous", "tensor")

    def __init__(self, tensor: Tensor, operation: str, filled: bool = True) -> None:
        self.tensor = on_host(tensor, operation)
        self.contiguous = self.tensor
        if not is_plain(tensor):
            self.contiguous = plain(tensor, operation) if filled else torch.empty(tensor.shape, dtype=tensor.dtype)

    @property
    def bytes(self) -> Bytes:
        return bytes_of(self.contiguous)

    def store(self) -> None:
        if self.contiguous is not self.tensor:
            self.tensor.copy_(self.contiguous)


def joined(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """Returns the bytes of the tensors, one tensor after the other, in new memory."""
    return torch.cat([_as_bytes(plain(t, operation)) for t in tensors])


class Parts:
    """The memory for results that arrive one after the other in ``buffer``. ``store`` copies them to the tensors."""

    __slots__ = ("buffer", "tensors")

    def __init__(self, tensors: Sequence[Tensor], operation: str) -> None:
        self.tensors = [on_host(tensor, operation) for tensor in tensors]
        self.buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)

    def store(self) -> None:
        start = 0
        for tensor in self.tensors:
            part = self.buffer[start : start + tensor.nbytes]
            tensor.copy_(
                (part if part.storage_offset() % 16 == 0 else part.clone()).view(tensor.dtype).view(tensor.shape)
            )
            start += tensor.nbytes


class Combined:
    """The memory for tensors of all ranks, which ``store`` combines into the caller's tensors, in rank order."""

    def __init__(self, tensors: Sequence[Tensor], size: int, combine: Combine) -> None:
        self._tensors = tensors
        self._rows = [torch.empty((size, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]
        self._combine = combine

    @property
    def bytes(self) -> list[Bytes]:
        return [bytes_of(rows) for rows in self._rows]

    def store(self) -> None:
        for tensor, rows in zip(self._tensors, self._rows, strict=True):
            tensor.detach().copy_(functools.reduce(self._combine, rows.unbind()))


def reduction_of(op: Any, tensors: Sequence[Tensor], operation: str) -> ReduceOp | Combine:
    """Returns the reduction of ocomm, or what combines two tensors where ocomm has none.

    Raises NotImplementedError or UnsupportedError for reductions, dtypes, devices and layouts that backend "ocomm" does
    not have, and InvalidRequestError if the tensors have several dtypes or no bits to combine.
    """
    for tensor in tensors:
        on_host(tensor, operation)
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise InvalidRequestError(f"{operation}: the tensors of one call must have one dtype.")
    if op in BITWISE:
        if tensors[0].is_floating_point() or tensors[0].is_complex():
            raise InvalidRequestError(
                f"{operation}: {label_of(op)} is for integers and bool, not {dtype_of(tensors[0])}."
            )
        return BITWISE[op]
    if op not in _OPS:
        raise NotImplementedError(f"{operation}: backend 'ocomm' has no reduction {op}.")
    try:
        dtype, _ = TORCH.describe(tensors[0])
        reject_unsupported(dtype, _OPS[op], 1.0, 1.0)
    except TypeError as error:
        raise UnsupportedError(f"{operation} with backend 'ocomm': {clause(error)}.") from None
    return _OPS[op]


def label_of(op: Any) -> str:
    """Returns the name of a reduction of torch.distributed in messages."""
    if op in BITWISE:
        return BITWISE[op].__name__
    return _OPS[op].label if op in _OPS else str(op)


def op_of(opts: Any) -> Any:
    """Returns the reduction of a call's options; SUM if c10d passes none."""
    op = getattr(opts, "reduceOp", opts)
    op = TORCH_OP.SUM if op is None else op
    return getattr(op, "op", op)


def dtypes_of(tensors: Sequence[Tensor]) -> str:
    return dtype_of(tensors[0]) if len(tensors) == 1 else " + ".join(map(dtype_of, tensors))


def require_same_size(operation: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise InvalidRequestError(
                f"{operation}: the tensor for rank {rank} has {tensor.numel()} elements of {dtype_of(tensor)}, and "
                f"needs {like.numel()} of {dtype_of(like)}."
            )


def row_nbytes(tensor: Tensor, splits: Sequence[int] | None, size: int, what: str) -> list[int]:
    """Returns the number of bytes of each rank's rows. Raises InvalidRequestError if the splits do not fit the rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise InvalidRequestError(f"all_to_all_single: {rows} rows of the {what} do not part among {size} ranks.")
        return [tensor.nbytes // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidRequestError(
            f"all_to_all_single: the {what} has {rows} rows, and its splits are {list(splits)}; they must be {size} "
            "counts that add up to the rows."
        )
    return [n * (tensor.nbytes // rows if rows else 0) for n in splits]
