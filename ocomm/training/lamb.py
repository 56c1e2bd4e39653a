"""1-bit LAMB on one rank: as 1-bit Adam, but for the steps of its warm-up, which are LAMB's."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ocomm.kernels.base import Floats
from ocomm.optim.core import address
from ocomm.optim.lamb import Lamb
from ocomm.training.adam import MomentsHost
from ocomm.training.onebit_adam import OneBitAdamDriver


class LambHost(MomentsHost, Protocol):
    """A frontend that keeps m and v of the tensors in warm-up where its Adam would."""

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor; its m, v, which begin as zeros, and the number of that step."""
        ...


class LambDriver(OneBitAdamDriver):
    """See ``OneBitAdamDriver``; ``host`` is a ``LambHost``."""

    core: Lamb
    label = "OneBitLamb"
    core_class = Lamb

    def set_hyper(self) -> None:
        for group in self.groups():
            self.core.set_hyper(
                group.tensors,
                lr=group.lr,
                beta1=group.betas[0],
                decoupled_decay=group.decoupled_decay,
                beta2=group.betas[1],
                eps=group.eps,
            )

    def _dense_step(self, tensors: list[int], max_norm: float | None) -> None:
        if max_norm is not None:
            self._clip_averages(tensors, max_norm)
        for tensor in tensors:
            self.core.dense_step(tensor, self.stepper.average(tensor), *self.host.advance(tensor))

    def _clip_averages(self, tensors: list[int], max_norm: float) -> None:
        averages = [self.stepper.average(tensor) for tensor in tensors]
        addresses = np.array([address(average) for average in averages], np.uint64)
        squares = self.kernels.squares(addresses, np.array([average.size for average in averages], np.int64))
        scale = min(1.0, max_norm / (math.sqrt(sum(squares.tolist())) + 1e-6))
        for average in averages if scale < 1.0 else ():
            average *= np.float32(scale)

    # State

    def report(self) -> dict[str, Any]:
        """Also, by tensor, ``trust_ratios``, by which the last step multiplied lr, and ``factors``, the part of it that
        follows the variance since the freeze."""
        names = [spec.name for spec in self.core.layout.tensors]
        return {
            **super().report(),
            "trust_ratios": dict(zip(names, self.core.trust_ratio.tolist(), strict=True)),
            "factors": dict(zip(names, self.core.factor.tolist(), strict=True)),
        }
