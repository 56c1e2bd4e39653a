"""The parameters and param groups of an optimizer that is to be wrapped: names, types, checks and settings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ocomm.errors import InvalidRequestError
from ocomm_torch.memory.masters import LOW_PRECISION
from ocomm_torch.memory.naming import pairs_of
from ocomm_torch.memory.order import is_dense
from ocomm_torch.memory.tensor_memory import why_untrainable


def by_position(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, parameter) of the optimizer's parameters in group order, named by their group and place in it."""
    return [
        (_position(g, k), parameter)
        for g, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
    ]


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Returns the optimizer's parameters in group order, with their names."""
    names = {id(p): name for name, p in reversed(pairs_of(named_parameters or ()))}
    parameters, result = [], []
    seen: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            if id(parameter) in seen:
                raise InvalidRequestError(
                    f"number {k} of group {g}, of shape {tuple(parameter.shape)}, is there twice; give the optimizer "
                    "every parameter once."
                )
            seen.add(id(parameter))
            if names and id(parameter) not in names:
                raise InvalidRequestError(
                    "named_parameters was specified, but one or more model parameters were not named. "
                    f"The first is number {k} of group {g}, of shape {tuple(parameter.shape)}."
                )
            parameters.append(parameter)
            result.append(names.get(id(parameter), _position(g, k)))
    return parameters, result


def _position(group: int, place: int) -> str:
    return f"parameter.{group}.{place}"


def dtype_name(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the type that a gradient of the parameter must have: its own, unless ``grad_dtype`` says another one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype  # torch before 2.10 has no grad_dtype


def check_parameter(wrapper: str, name: str, parameter: torch.Tensor) -> None:
    if reason := why_untrainable(parameter):
        raise InvalidRequestError(
            f"parameter '{name}' {reason}. Distributed{wrapper} steps parameters in place: give it plain tensors, or, "
            "for DTensors, the mesh whose data axis it is to use (mesh=, data=)."
        )
    if parameter.dtype not in (torch.float32, *LOW_PRECISION):
        raise InvalidRequestError(
            f"parameter '{name}' is {parameter.dtype}; Distributed{wrapper} needs torch.float32, bfloat16 or float16."
        )
    if parameter.is_neg():
        raise InvalidRequestError(
            f"parameter '{name}' is a view whose memory holds its negatives; call parameter.data = "
            "parameter.data.resolve_neg() before wrapping."
        )
    if not is_dense(parameter):
        raise InvalidRequestError(
            f"parameter '{name}' has gaps (shape {tuple(parameter.shape)}, strides {parameter.stride()}); call "
            "parameter.data = parameter.data.contiguous() before wrapping."
        )


def check_storage(names: list[str], parameters: list[torch.Tensor]) -> None:
    """Raises InvalidRequestError if two parameters share memory, because each would be moved by its own state."""
    end, last = 0, ""
    for first, nbytes, name in sorted((p.data_ptr(), p.nbytes, n) for n, p in zip(names, parameters, strict=True)):
        if nbytes and first < end:
            raise InvalidRequestError(
                f"parameters '{last}' and '{name}' share memory; make one parameter of them, or copy one."
            )
        if nbytes:
            end, last = first + nbytes, name


def copied(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state of one parameter, or a param group of a state, which later steps and schedulers do
    not change.
    """
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}


def settings_of(groups: Iterable[Mapping[str, Any]]) -> Hashable:
    """Returns the numbers in param groups, as nested tuples."""
    return tuple(tuple(_numbers(value) for key, value in sorted(group.items()) if key != "params") for group in groups)


def _numbers(value: Any) -> Hashable:
    """Returns a setting as a number, or nested tuples of numbers; 0 for what is neither."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_numbers, value))
    is_number = isinstance(value, (bool, int, float, np.number)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
    return float(value) if is_number else 0.0
