"""What a rank has done so far: a digest after every step, and the state that the next step would change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """Returns a hash of numbers, texts, arrays and tensors, and of lists, tuples and dicts of these."""
    hasher = hashlib.blake2b(digest_size=8)
    _add(hasher, value)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            _add(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(hasher, item)
    elif isinstance(value, torch.Tensor):
        _add(hasher, value.detach().numpy())
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    else:
        hasher.update(repr(value).encode())


class Trail:
    """The steps of one rank.

    Args:
        tell: Called with each step's number and digest, and with -1 and that of the state when the rank has ended.
    """

    def __init__(self, tell: Callable[[int, str], None] = lambda number, found: None) -> None:
        self.steps: list[str] = []
        #: Returns the digest of what ``step`` was told to look at; None where nothing is changed in place.
        self.state: Callable[[], str] | None = None
        self._tell = tell

    def did(self, what: str, value: Any = None) -> None:
        """Notes a step that has returned ``value``, or that has changed the state."""
        found = digest(value) if self.state is None or value is not None else self.state()
        self.steps.append(f"{what} {found}")
        self._tell(len(self.steps) - 1, self.steps[-1])

    def look_at(self, what: str, state: Callable[[], Any] | None) -> None:
        """From here on steps change what ``state`` returns; its first digest is a step, too."""
        self.state = None if state is None else lambda: digest(state())
        if state is not None:
            self.did(what)

    def end(self) -> str | None:
        """Returns the digest of the state as it is, however the last step has ended; None for no state."""
        found = None if self.state is None else self.state()
        self._tell(-1, found or "")
        return found


def differences(rank: int, clean: list[str], steps: list[str], state: str | None, has_ended_well: bool) -> list[str]:
    """Returns what is wrong with a rank's steps: they must be a beginning of the ``clean`` ones, all of them if the
    rank has ended well, and its state must be that before or after the step under way.
    """
    found = []
    if steps != clean[: len(steps)]:
        number = next((i for i, (a, b) in enumerate(zip(steps, clean, strict=False)) if a != b), len(clean))
        was = steps[number] if number < len(steps) else "-"
        found.append(f"rank {rank}: step {number} is {was}, and {clean[number : number + 1]} without a fault")
    elif has_ended_well and len(steps) < len(clean):
        found.append(f"rank {rank} has ended well after {len(steps)} of {len(clean)} steps")
    elif state is not None and steps:
        whole = [step.split()[-1] for step in clean[len(steps) - 1 : len(steps) + 1]]
        if state not in whole:
            found.append(f"rank {rank}: after {len(steps)} steps its state is {state}, neither of {whole}")
    return found
