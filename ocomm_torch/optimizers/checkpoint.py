"""Saved states as Torch stores them: tensors instead of arrays, files of ``torch.save``, checks of a plain state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.training.resume import Source, all_states, one_state


def to_torch(state: Any) -> Any:
    """Returns the state with tensors instead of arrays, which share their memory."""
    if isinstance(state, dict):
        return {key: to_torch(value) for key, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def to_numpy(state: Any) -> Any:
    """Returns the state with arrays instead of tensors, which share their memory."""
    if isinstance(state, Mapping):
        return {key: to_numpy(value) for key, value in state.items()}
    return state.detach().cpu().contiguous().numpy() if isinstance(state, torch.Tensor) else state


def step_count(steps: float) -> torch.Tensor:
    """Returns a number of steps as Torch's Adams keep it, whatever dtype and device are the default: a bfloat16 counts
    to 256.
    """
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def read(path: str | os.PathLike[str]) -> Any:
    """Reads a file of ``torch.save`` to the CPU: tensors and plain values only. Raises CheckpointError if it cannot be
    read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise unreadable(os.fspath(path), error) from error


def unreadable(name: str, error: Exception) -> CheckpointError:
    """Returns the error for a file that cannot be read. Torch's readers raise RuntimeError, EOFError, UnpicklingError,
    OSError and others, most of which do not name the file.
    """
    reason = str(error).strip().split("\n")[0]
    return CheckpointError(f"{name} cannot be read: {type(error).__name__}: {reason}")


def rank_source(given: Any, ranks: int) -> Source:
    """Returns the source of the rank states that ``load_rank_state_dict`` was given. Raises InvalidRequestError for
    other types.
    """
    if isinstance(given, Source):
        return given
    if given is None:
        return Source(lambda rank: None, (), lambda rank: f"the state of rank {rank}")
    if isinstance(given, Mapping):
        return one_state(to_numpy(given))
    if isinstance(given, (str, os.PathLike)):
        return _files(os.fspath(given), ranks)
    if isinstance(given, Iterable):
        return all_states([None if state is None else to_numpy(state) for state in given])
    raise InvalidRequestError(
        "load_rank_state_dict takes a rank state, a list of all ranks' states, a path or None, got "
        f"{type(given).__name__}."
    )


def _files(pattern: str, ranks: int) -> Source:
    last: dict[str, Any] = {}

    def name(rank: int) -> str:
        return pattern.replace("{rank}", str(rank))

    def read_rank(rank: int) -> Any:
        path = name(rank)
        if path not in last:
            last.clear()  # states of another number of ranks are read one after the other, not all kept at once
            state = to_numpy(read(path)) if os.path.exists(path) else None
            if not isinstance(state, dict | None):
                raise CheckpointError(f"{path} holds a {type(state).__name__}, not a rank state.")
            last[path] = state
        return last[path]

    return Source(read_rank, range(ranks), name, alone="{rank}" not in pattern)


def check_plain(plain: Mapping[str, Any], counts: Sequence[int], where: str) -> dict[int, Any]:
    """Returns the entries of an optimizer's ``state_dict`` by number, if its groups have ``counts`` parameters.

    Raises CheckpointError, whose message begins with ``where``, if not.
    """
    try:
        found = [len(group["params"]) for group in plain["param_groups"]]
    except (KeyError, TypeError):
        raise CheckpointError(f"{where} is no optimizer's state_dict: it has no 'param_groups'.") from None
    if found != list(counts):
        raise CheckpointError(
            f"{where} has groups of {found} parameters, the optimizer has {list(counts)}. Wrap the same parameters, in "
            "the same order."
        )
    numbers = {name: number for number, name in enumerate(_members(plain))}
    entries = {}
    for name, entry in plain.get("state", {}).items():
        # torch.distributed.checkpoint turns numbers into strings, and leaves out empty entries.
        number = numbers.get(name, numbers.get(int(name) if str(name).isdecimal() else None))
        if number is None:
            raise CheckpointError(f"{where} has an entry of {name!r}, which is in none of its groups.")
        entries[number] = entry
    return entries


def numbered_groups(plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer's ``state_dict`` with numbers for parameters, from 0 on.

    ``get_state_dict`` of torch.distributed.checkpoint has names in their place.
    """
    numbers = iter(range(len(_members(plain))))
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in plain["param_groups"]]


def _members(plain: Mapping[str, Any]) -> list[Any]:
    return [name for group in plain["param_groups"] for name in group["params"]]
