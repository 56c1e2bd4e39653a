"""1-bit Adam on NumPy arrays: a frontend of the driver without a framework, for jobs of many ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from ocomm.collectives.scratch import aligned
from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Floats
from ocomm.optim.adam import DenseAdam
from ocomm.optim.core import Group, address
from ocomm.optim.onebit_adam import OneBitAdam, OneBitAdamOptions
from ocomm.session import Session
from ocomm.training.adam import dense_step
from ocomm.training.driver import Common
from ocomm.training.onebit_adam import OneBitAdamDriver


class NumpyOneBitAdam:
    """1-bit Adam of ``parameters``, flat float32, which begin as zeros. Making one is collective.

    Args:
        session: The job's session, which has started.
        sizes: The number of elements of each parameter.
        freeze_step: The number of dense steps.
        lr: The learning rate.
    """

    framework = "keras"  # whose dense steps are ocomm's, too
    kernels = None
    grid = None
    shard_state = None

    def __init__(self, session: Session, sizes: Sequence[int], freeze_step: int, lr: float = 1e-3) -> None:
        self.parameters = [aligned(4 * size).view(np.float32) for size in sizes]
        for parameter in self.parameters:
            parameter[:] = 0.0
        self._gradients: list[Floats] = []
        self._adam: list[DenseAdam | None] = [None] * len(sizes)
        self._group = Group(np.arange(len(sizes)), lr, (0.9, 0.999), 1e-8)
        specs = [TensorSpec(f"parameter {number}", (size,)) for number, size in enumerate(sizes)]
        options = OneBitAdamOptions(freeze_step=freeze_step)
        self.driver = OneBitAdamDriver(session, 0, specs, self, OneBitAdam, options, Common())
        self.driver.core.tensors["param"] = [address(parameter) for parameter in self.parameters]

    def step(self, gradients: Sequence[Floats]) -> None:
        """Makes one step on all ranks, of one flat float32 gradient per parameter. Collective."""
        self._gradients = [np.ascontiguousarray(gradient, np.float32) for gradient in gradients]
        self.driver.step(lambda: False)

    def checksum(self) -> str:
        """Returns a hash of the parameters' bits."""
        hashed = hashlib.sha256()
        for parameter in self.parameters:
            hashed.update(parameter)
        return hashed.hexdigest()

    # For the driver: see AdamFrontend

    def implementation(self) -> str:
        return "ocomm"

    def locate(self, tensors: list[int], final: bool) -> list[int] | None:
        return [address(self._gradients[tensor]) for tensor in tensors]

    def groups(self) -> list[Group]:
        return [self._group]

    def wrapped_adam(self) -> str:
        return "Adam"

    def read_warm_start(self) -> str | None:
        return None

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        averages = {tensor: average(tensor) for tensor in tensors}
        dense_step(self.groups(), averages, self.parameters.__getitem__, self._state)

    def _state(self, tensor: int) -> DenseAdam:
        state = self._adam[tensor] = self._adam[tensor] or DenseAdam.fresh(self.parameters[tensor].size)
        return state

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        state = self._adam[tensor]
        return None if state is None else (state.momentum, state.variance, state.step)

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        self._adam[tensor] = DenseAdam(momentum, variance, step)

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        state = self._state(tensor)
        state.step += 1
        return state.momentum, state.variance, state.step

    def release(self, tensor: int) -> None:
        self._adam[tensor] = None
