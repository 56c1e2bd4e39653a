"""Broadcasts of parameters, optimizer state and objects from one rank to all, so that ranks start equal, and a check
whether they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ocomm import api
from ocomm import session as sessions
from ocomm.agreement import MADE_ALIKE, cause_of, first_difference
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.operations import ProcessSet, global_process_set
from ocomm_torch.memory.parameters import gradient_dtype
from ocomm_torch.mpi_ops import broadcast_async_
from ocomm_torch.optimizers.rank_states import HasRankState
from ocomm_torch.optimizers.replicas import written_in_forward


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites parameters and buffers on all ranks with those of ``root_rank``, in place. Collective.

    Args:
        params: A ``state_dict()``, ``model.named_parameters()``, or an iterable of tensors or of (name, tensor).
        root_rank: A rank of the whole job.
        process_set: The ranks that take part.

    Raises:
        InvalidRequestError: ``params`` has something else than tensors.
    """
    started = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in _named(params)]
    for handle in started:
        api.synchronize(handle)


def check_replicas(params: Any, process_set: ProcessSet = global_process_set) -> None:
    """Compares parameters and buffers of all ranks bit for bit. Collective; changes nothing.

    Args:
        params: A ``state_dict()``, ``model.named_parameters()``, or an iterable of tensors or of (name, tensor), in
            one order on all ranks. Tensors of a GPU are copied to the host.
        process_set: The ranks that are compared.

    Raises:
        MismatchError: On all ranks: the first tensor that differs, and which ranks have which.
        InvalidRequestError: ``params`` has something else than tensors.
    """
    session = sessions.current()
    number = process_set.number(session)
    assert session.kernels is not None
    pairs = _named(params)
    tensors = [tensor.detach().cpu().contiguous() for _, tensor in pairs]
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    sums = session.kernels.checksums(addresses, np.array([tensor.nbytes for tensor in tensors], np.int64))
    lines = [
        f"'{position if name is None else name}' {tuple(tensor.shape)} {tensor.dtype} with checksum {checksum:016x}"
        for position, ((name, tensor), checksum) in enumerate(zip(pairs, sums.tolist(), strict=True))
    ]
    difference = first_difference(session, number, session.automatic_name("check_replicas", number), lines, "hold")
    if difference:
        advice = (
            "Something has changed them on some ranks only, or they have never been alike: "
            f"{MADE_ALIKE['torch']} before the first step, and after anything that one rank does alone."
        )
        written = written_in_forward((name or str(number), tensor) for number, (name, tensor) in enumerate(pairs))
        raise MismatchError(f"the replicas differ: {difference}. {cause_of(difference, written) or advice}")


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    """Returns the tensors of ``params`` with their names, without those that are None."""
    if isinstance(params, torch.nn.Module):
        raise InvalidRequestError(
            f"invalid params: they are a {type(params).__name__}, a module; pass its state_dict(), which has its "
            "parameters and buffers."
        )
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise InvalidRequestError(f"invalid params of type: {type(params)}")
    for name, tensor in pairs:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise InvalidRequestError(
                f"invalid params: '{name}' is of type {type(tensor).__name__}, not a tensor; send it with "
                "broadcast_object."
            )
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


@dataclass(frozen=True)
class _Slot:
    """Takes the place of a tensor in a structure that is pickled."""

    position: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites the optimizer's state and hyperparameters on all ranks with those of ``root_rank``. Collective.

    The other ranks need not have any state yet. After steps of a 1-bit optimizer all ranks load the state, with
    ``root_rank``, and errors start at zero. As in Horovod, parameters without a gradient get one of zeros if an
    optimizer has no state; unlike there, the optimizer makes no step.

    Args:
        optimizer: Any Torch optimizer except LBFGS.
        root_rank: A rank of the whole job.
        model: Accepted as in Horovod, and ignored.
        process_set: The ranks that take part.

    Raises:
        InvalidRequestError: The optimizer is an LBFGS, whose state is not per parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError("cannot broadcast torch.optim.LBFGS state")
    is_root = sessions.current().require_topology().rank == root_rank
    if not isinstance(optimizer, HasRankState) and not optimizer.state:
        _make_gradients(optimizer)
    tensors: list[torch.Tensor] = []
    state: Any = optimizer.state_dict() if is_root else None
    structure = _take_out(state, tensors) if is_root else None
    structure = api.broadcast_object(structure, root_rank, process_set=process_set)
    if not is_root:
        state = _make_room(structure, tensors)
    started = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{position}", process_set)
        for position, tensor in enumerate(tensors)
    ]
    for handle in started:
        api.synchronize(handle)
    if not is_root or (isinstance(optimizer, HasRankState) and state["ocomm"]["steps"]):
        optimizer.load_state_dict(state)
        if not isinstance(optimizer, HasRankState):
            _keep_dtypes(optimizer, state)


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives what ``optimizer`` has loaded the dtypes of ``state``: Torch casts it to those of the parameters, and some
    optimizers have float32 for parameters of 16 bits.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        held = optimizer.state.get(p, {})
        for key, sent in state["state"].get(number, {}).items():
            own = held.get(key)
            if isinstance(sent, torch.Tensor) and isinstance(own, torch.Tensor) and own.dtype != sent.dtype:
                held[key] = sent.to(own.device)


def _make_gradients(optimizer: torch.optim.Optimizer) -> None:
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None):
        p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))
        if is_sparse:
            p.grad = p.grad.to_sparse(1)


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the structure with slots for its tensors, which are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1, value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _make_room(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the structure with new tensors for its slots, which are appended to ``tensors`` in the order of
    ``_take_out``.
    """
    if isinstance(value, _Slot):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device="cpu"))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _make_room(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_make_room(item, tensors) for item in value)
    return value


broadcast_object = api.broadcast_object
allgather_object = api.allgather_object
