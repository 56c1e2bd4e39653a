"""Every compressed optimizer of the Torch frontend in every stage, for what they must all do alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ocomm_torch.optimizers.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_torch.optimizers.ef_sgd import DistributedEFSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.onebit_jobs import digest


@dataclass(frozen=True)
class Kind:
    """An optimizer, what it wraps, and options that bring it into one of its stages by step 6."""

    wrapper: Callable[..., Any]
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(
        self, parameters: Sequence[torch.nn.Parameter], inner: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        return self.wrapper(self.inner(parameters, **{"lr": 1e-2, **(inner or {})}), **{**self.options, **options})


KINDS = {
    "1-bit Adam, dense": Kind(DistributedOneBitAdam, options={"freeze_step": 100}),
    "1-bit Adam, compressed": Kind(DistributedOneBitAdam, options={"freeze_step": 3}),
    "1-bit LAMB, dense": Kind(DistributedOneBitLamb, options={"freeze_step": 100}),
    "1-bit LAMB, compressed": Kind(DistributedOneBitLamb, options={"freeze_step": 3}),
    "0/1 Adam": Kind(DistributedZeroOneAdam),
    "0/1 Adam, local steps": Kind(
        DistributedZeroOneAdam,
        options={"local_step_start": 2, "local_step_doubling": 2, "local_step_clip": 2},
    ),
    "Birder": Kind(DistributedBirder, torch.optim.SGD),
    "SoftSignSGD": Kind(DistributedSoftSignSGD, torch.optim.SGD),
    "Lion": Kind(DistributedLion, torch.optim.SGD),
    "EF-SGD": Kind(DistributedEFSGD, functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
}


def whole_state(parameters: Sequence[torch.Tensor], optimizer: Any) -> str:
    """Hash of everything that a step may change on this rank: parameters, replicated state, this rank's own."""
    saved = optimizer.state_dict()
    state = [saved["state"], saved["ocomm"]["core"], optimizer._driver.core.rank_state()]
    return digest([*arrays_in(state), *(p.detach().float().numpy() for p in parameters)])


#: In a state, but not of the algorithm: the order of buckets and whether they overlap with backward, and their hash.
_INCIDENTAL = ("stepper", "checksum")


def arrays_in(state: Any) -> Iterator[np.ndarray]:
    """Yields the arrays and numbers of a state that are of the algorithm."""
    return (array for _, array in named_arrays(state))


def named_arrays(state: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields what ``arrays_in`` yields, each with its place in the state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key not in _INCIDENTAL:
                yield from named_arrays(value, f"{name}/{key}")
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from named_arrays(value, f"{name}/{number}")
    elif isinstance(state, torch.Tensor):
        yield name, state.detach().float().numpy()
    elif isinstance(state, (np.ndarray, int, float)):
        yield name, np.asarray(state)
