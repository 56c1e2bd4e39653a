"""Jobs that drive compressed optimizers with chosen gradients, for the tests of the Torch frontend."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ocomm_torch.optimizers.onebit import DistributedOneBitAdam

#: A tensor larger than a block, one with a short last block, one smaller than a block, one of a single element.
SHAPES = ((70, 130), (4097,), (33,), (1,))


def initial(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 5) -> list[np.ndarray]:
    """Parameters, float32, the same for all ranks."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def gradients(step: int, rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray | None]:
    """Gradients of one rank and step: noise around a common direction, scales that differ between tensors."""
    return [array.copy() for array in _gradients(step, rank, tuple(shapes))]


@functools.lru_cache(maxsize=1000)  # ranks, simulations and tests ask for the same ones
def _gradients(step: int, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    shared = np.random.default_rng([11, step])
    own = np.random.default_rng([12, step, rank])
    result = []
    for number, shape in enumerate(shapes):
        common = shared.normal(size=shape)
        result.append(((common + own.normal(size=shape)) * 10.0 ** (-number)).astype(np.float32))
    return result


def backward(parameters: Sequence[torch.Tensor], grads: Sequence[np.ndarray | None], order: Sequence[int]) -> None:
    """Makes autograd produce exactly ``grads``, tensor by tensor in ``order``."""
    for index in order:
        grad = grads[index]
        if grad is not None:
            (parameters[index] * torch.from_numpy(grad)).sum().backward()


def digest(arrays: Sequence[np.ndarray]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def state_digest(parameters: Sequence[torch.Tensor], optimizer: DistributedOneBitAdam) -> str:
    """Hash of everything that a step may change on this rank: parameters, momentum, variance, errors, counts."""
    core = optimizer._driver.core
    arrays = [p.detach().numpy() for p in parameters]
    arrays += [core.error, core.server_error, core.preconditioner.denominator, core.preconditioner.mask, core.steps]
    arrays += [core.momentum(t) for t in np.flatnonzero(core.stage).tolist()]
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            arrays.append(value.numpy() if isinstance(value, torch.Tensor) else np.array(value))
    return digest(arrays)


Between = Callable[[int, int, list[torch.Tensor], Any], Any]


def train(
    rank: int,
    steps: int,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    grads: Callable[[int, int], list[np.ndarray | None]] = gradients,
    order: Callable[[int, int], Sequence[int]] | None = None,
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    wrap: Callable[..., Any] = DistributedOneBitAdam,
    hash_state: Callable[[list[torch.Tensor], Any], str] = state_digest,
    before_step: Between | None = None,
    watch: Callable[[Any], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains on one rank; returns parameters and their digest after every step, and the report."""
    parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial(shapes)]
    names = [f"tensor.{number}" for number in range(len(parameters))]
    optimizer = wrap(make(parameters), zip(names, parameters, strict=True), **options)
    history, digests = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(parameters, grads(step, rank), order(step, rank) if order else range(len(parameters) - 1, -1, -1))
        if before_step is not None:
            before_step(step, rank, parameters, optimizer)
        optimizer.step()
        if watch is not None:
            watch(optimizer)
        values = [p.detach().numpy().copy() for p in parameters]
        history.append(values)
        digests.append(digest(values))
    return {
        "parameters": history,
        "digests": digests,
        "report": optimizer.compression_report(),
        "state": hash_state(parameters, optimizer),
    }
