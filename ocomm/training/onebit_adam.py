"""1-bit Adam on one rank: the wrapped optimizer's warm-up, when it ends, and waking what was masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Floats
from ocomm.optim.freeze import FreezeSchedule, LateTensors
from ocomm.optim.onebit_adam import OneBitAdam as Core
from ocomm.optim.onebit_adam import Stage
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Host
from ocomm.types import ReduceOp


class AdamHost(Host, Protocol):
    """A frontend that wraps an Adam."""

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats]) -> None:
        """The wrapped optimizer's own step of ``tensors``, on their averaged gradients, and of no others."""
        ...

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """The wrapped optimizer's m, v (flat float32, its own memory) and step count of a tensor, None without any."""
        ...

    def release(self, tensor: int) -> None:
        """The tensor's m and v are no longer needed."""
        ...


class OneBitAdamDriver(Driver):
    """See ``Driver``. ``freeze_step`` is the number of dense steps T_w, or ``"auto"``."""

    core: Core

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        host: AdamHost,
        common: Common,
        *,
        optimizer: str,
        freeze_step: int | Literal["auto"],
        scale: str,
        variance_floor: float,
        mask_refresh: int,
    ) -> None:
        self.schedule = FreezeSchedule(freeze_step, host.groups()[0].betas[1])
        #: T_w, once it is known.
        self.freeze_at = self.schedule.decided
        self._late = LateTensors()
        self._group_of = {int(t): number for number, group in enumerate(host.groups()) for t in group.tensors}
        core_options = {"variance_floor": variance_floor, "scale": scale, "mask_refresh": mask_refresh}
        super().__init__(
            session,
            number,
            "OneBitAdam",
            specs,
            lambda layout, rank, kernels: Core(layout, rank, kernels, **core_options),  # type: ignore[arg-type]
            host,
            common,
            {"optimizer": optimizer, "freeze_step": freeze_step, **core_options},
        )

    def set_hyper(self) -> None:
        for group in self.host.groups():
            self.core.set_hyper(
                group.tensors,
                lr=group.lr,
                beta1=group.betas[0],
                coupled_decay=group.coupled_decay,
                decoupled_decay=group.decoupled_decay,
            )

    def clip(self, max_norm: float) -> None:
        if (self.core.stage == Stage.COMPRESSED).any():
            super().clip(max_norm)  # in warm-up the averaged gradient is clipped, by the host

    def take(self) -> None:
        core = self.core
        warming = [int(t) for t in np.flatnonzero(core.stage == Stage.WARMUP)]
        present = self.stepper.present_anywhere
        self.stepper.commit()
        if warming:
            self.host.dense_step([t for t in warming if present[t]], self.stepper.average)
            self._end_warmup(warming)
        if core.refresh_due:
            touched = core.touched()
            self.session.reduce(self.number, f"{self.name}.touched", touched, ReduceOp.BITWISE_OR)
            core.wake(touched)

    # The end of the warm-up

    def _end_warmup(self, warming: list[int]) -> None:
        """Freezes what is due: all tensors at T_w, later ones after a warm-up of their own."""
        if self.freeze_at is None:
            heard = self.stepper.heard_announcement
            if heard:
                self.freeze_at = heard
            elif self.core.rank == 0:
                norm = self.variance_norm(warming)
                decided = self.schedule.observe(self.steps, norm, [group.lr for group in self.host.groups()])
                self._announcement = decided or 0
        if self.freeze_at is None or self.steps < self.freeze_at:
            return
        for tensor in warming:
            self._freeze_if_due(tensor)

    def _freeze_if_due(self, tensor: int) -> None:
        moments = self.host.moments(tensor)
        if moments is None:
            return
        momentum, variance, step = moments
        assert self.freeze_at is not None
        due = self.steps == self.freeze_at or self._late.observe(tensor, step, bool(variance.any()), self.freeze_at)
        if due:
            group = self.host.groups()[self._group_of[tensor]]
            if self.core.freeze(tensor, momentum, variance, step=step, beta2=group.betas[1], eps=group.eps):
                self.host.release(tensor)

    def variance_norm(self, tensors: Sequence[int]) -> float:
        """|v_hat|_1 over ``tensors``, in float64."""
        total = 0.0
        groups = self.host.groups()
        for tensor in tensors:
            moments = self.host.moments(tensor)
            if moments is not None:
                beta2 = groups[self._group_of[tensor]].betas[1]
                total += float(moments[1].sum(dtype=np.float64)) / (1 - beta2 ** moments[2])
        return total

    # State

    def report(self) -> dict[str, Any]:
        """Also ``freeze_step`` (None until it is known), the stage, and how many elements are masked and were woken."""
        core = self.core
        stages = {int(stage) for stage in core.stage[core.layout.numels > 0]}
        return {
            "stage": "warm-up" if stages == {0} else "compressed" if stages == {1} else "mixed",
            "freeze_step": self.freeze_at,
            **super().report(),
            "masked_elements": int(core.preconditioner.masked.sum()),
            "woken_elements": core.preconditioner.woken,
        }

    def state(self) -> dict[str, Any]:
        """The replicated state besides the moments, by names of tensors; arrays are copies."""
        names = [spec.name for spec in self.core.layout.tensors]
        compressed = np.flatnonzero(self.core.stage == Stage.COMPRESSED).tolist()
        return {
            "version": 1,
            "steps": self.steps,
            "freeze_at": self.freeze_at,
            "tensors": {names[tensor]: self.core.tensor_state(tensor) for tensor in compressed},
            "progress": self.core.progress(),
        }

    def load_state(self, state: Mapping[str, Any], momentum: Callable[[int], Floats]) -> list[int]:
        """The inverse; ``momentum(tensor)`` is borrowed. Returns the tensors that are compressed from now on."""
        numbers = {spec.name: number for number, spec in enumerate(self.core.layout.tensors)}
        self.steps, self.freeze_at = state["steps"], state["freeze_at"]
        for name, tensor_state in state["tensors"].items():
            self.core.load_tensor_state(numbers[name], tensor_state, momentum(numbers[name]))
        self.core.load_progress(state["progress"])
        return [numbers[name] for name in state["tensors"]]
