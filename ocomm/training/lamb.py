"""1-bit LAMB on one rank: as 1-bit Adam, but for the steps of its warm-up, which are LAMB's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ocomm.kernels.base import Floats
from ocomm.optim.lamb import Lamb
from ocomm.training.adam import MomentsHost
from ocomm.training.driver import Group
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

    def set_hyper(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.core.set_hyper(
                group.tensors,
                lr=group.lr,
                beta1=group.betas[0],
                decoupled_decay=group.decoupled_decay,
                beta2=group.betas[1],
                eps=group.eps,
            )

    def _dense_step(self, tensors: list[int], max_norm: float | None) -> None:
        averages = [self.stepper.average(tensor) for tensor in tensors]
        self.clip_averages(averages, max_norm)
        for tensor, average in zip(tensors, averages, strict=True):
            self.core.dense_step(tensor, average, *self.host.advance(tensor))

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
