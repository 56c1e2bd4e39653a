"""0/1 Adam on one rank: its schedules, and waking what was masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Floats
from ocomm.optim.intervals import RefreshSchedule, SyncSchedule
from ocomm.optim.zero_one_adam import ZeroOneAdam as Core
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Group, Host, digest
from ocomm.types import ReduceOp


class ZeroOneAdamDriver(Driver):
    """See ``Driver``. ``intervals`` are the options of ``SyncSchedule``, ``refreshes`` those of ``RefreshSchedule``."""

    core: Core

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        host: Host,
        common: Common,
        *,
        optimizer: str,
        intervals: Mapping[str, int],
        refreshes: Mapping[str, int | None],
        scale: str,
        variance_floor: float,
        mask_refresh: int,
    ) -> None:
        syncs = SyncSchedule(**intervals)
        schedules = {"syncs": syncs, "refreshes": RefreshSchedule(syncs, **refreshes)}  # type: ignore[arg-type]
        core_options = {"variance_floor": variance_floor, "scale": scale, "mask_refresh": mask_refresh}
        super().__init__(
            session,
            number,
            "ZeroOneAdam",
            specs,
            lambda layout, rank, kernels: Core(layout, rank, kernels, **schedules, **core_options),  # type: ignore[arg-type]
            host,
            common,
            {"optimizer": optimizer, **intervals, **refreshes, **core_options},
        )

    def set_hyper(self) -> None:
        for group in self.host.groups():
            self.core.set_hyper(
                group.tensors,
                lr=group.lr,
                beta1=group.betas[0],
                beta2=group.betas[1],
                eps=group.eps,
                coupled_decay=group.coupled_decay,
                decoupled_decay=group.decoupled_decay,
            )

    def compress_hyper(self) -> int:
        """The learning rate is in what a sync sends."""
        return digest([(group.lr, group.betas[0], group.coupled_decay) for group in self.host.groups()])

    def take(self) -> None:
        core = self.core
        super().take()
        if core.wake_due:
            touched = core.touched()
            self.session.reduce(self.number, f"{self.name}.touched", touched, ReduceOp.BITWISE_OR)
            core.wake(touched)

    # State

    def report(self) -> dict[str, Any]:
        """Also the ``stage`` (``"warm-up"`` before the first step, ``"refreshing"`` while v changes, ``"frozen"``), the
        ``interval`` between syncs as it is now, ``synced``: all ranks hold the same parameters, the steps of each kind,
        and how many elements are masked and were woken."""
        core = self.core
        stage = "warm-up" if core.step == 0 else "refreshing" if core.dense_again else "frozen"
        return {
            "stage": stage,
            "interval": core.syncs.interval(core.step + 1),
            **super().report(),
            "synced": core.is_synced,
            "syncs": core.sync_steps,
            "local_steps": core.local_steps,
            "refreshes": core.refreshes.count,
            "masked_elements": int(core.preconditioner.masked.sum()),
            "woken_elements": core.preconditioner.woken,
        }

    def state(self) -> dict[str, Any]:
        """The replicated state besides the moments, by names of tensors; arrays are copies."""
        core = self.core
        tensors = {spec.name: core.tensor_state(tensor) for tensor, spec in enumerate(core.layout.tensors)}
        return {"version": 1, "tensors": tensors, "progress": core.progress()}

    def load_state(self, state: Mapping[str, Any], momentum: Callable[[int], Floats]) -> None:
        """The inverse, with ``momentum(tensor)`` that of the last sync: the run is where it was then.

        A parameter that has moved since is set back, so that all ranks have the same.
        """
        core = self.core
        for tensor, spec in enumerate(core.layout.tensors):
            core.load_tensor_state(tensor, state["tensors"][spec.name], momentum(tensor))
        core.load_progress(state["progress"])
        self.steps = core.step

    def adopt(self, group: Group, moments: Callable[[int], tuple[Floats, Floats, int] | None]) -> None:
        """Goes on from a plain Adam's m, v and step count of the tensors of ``group``, where it has any."""
        for tensor in group.tensors.tolist():
            found = moments(tensor)
            if found is not None:
                momentum, variance, step = found
                self.core.adopt(tensor, momentum, variance, step=step, beta2=group.betas[1], eps=group.eps)
