"""0/1 Adam on one rank: its schedules, and waking what was masked."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ocomm.compression.layout import TensorSpec
from ocomm.optim.intervals import RefreshSchedule, SyncSchedule
from ocomm.optim.zero_one_adam import ZeroOneAdam as Core
from ocomm.session import Session
from ocomm.training.adam import AdamDriver, MomentsHost
from ocomm.training.driver import Common, Group
from ocomm.types import ReduceOp


class ZeroOneAdamDriver(AdamDriver):
    """See ``AdamDriver``. ``intervals`` are the options of ``SyncSchedule``, ``refreshes`` of ``RefreshSchedule``."""

    core: Core

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        host: MomentsHost,
        common: Common,
        *,
        optimizer: str,
        intervals: Mapping[str, int],
        refreshes: Mapping[str, int | None],
        scale: str,
        variance_floor: float,
        mask_refresh: int,
        warm_start: str | None = None,
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
            {"optimizer": optimizer, "warm_start": warm_start, **intervals, **refreshes, **core_options},
        )

    def set_hyper(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.core.set_hyper(
                group.tensors,
                lr=group.lr,
                beta1=group.betas[0],
                beta2=group.betas[1],
                eps=group.eps,
                coupled_decay=group.coupled_decay,
                decoupled_decay=group.decoupled_decay,
            )

    hyper_lasts = False  # a sync sends sums of what the learning rates have been

    def compress_hyper(self, groups: Sequence[Group]) -> Hashable:
        """The learning rate is in what a sync sends."""
        return tuple([(group.lr, group.betas[0], group.coupled_decay) for group in groups])

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

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """As the wrapped Adam would hold them: m of the last sync, and v."""
        core = self.core
        if not core.steps[tensor]:
            return None
        return {
            "step": int(core.steps[tensor]),
            "exp_avg": core.average_momentum(tensor),
            "exp_avg_sq": core.variance(tensor, beta2=self._beta2(tensor)),
        }

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        return np.flatnonzero(saved["core"]["steps"]).tolist()

    def continue_plain(self) -> None:
        """Goes on from a plain Adam's m, v and step counts, where it has any; the schedules begin anew."""
        self._restart(0)
        self._load(self._fresh)
        self._adopt({})
        self.resumed = {"step": 0, "ranks": None, "rank_state": "none"}

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """v counts as refreshed in each of the checkpoint's steps; the schedules are where they would be by then."""
        self._restart(self._host_steps())
        self._load(self._fresh)
        self._adopt(betas2)
        self.core.start_at(self.steps)
        self._say_warm(np.flatnonzero(self.core.steps == 0))

    def _adopt(self, betas2: Mapping[int, float]) -> None:
        for tensor in range(self.core.steps.size):
            moments = self.host.moments(tensor)
            if moments is not None:
                momentum, variance, step = moments
                beta2 = betas2.get(tensor, self._beta2(tensor))
                self.core.adopt(tensor, momentum, variance, step=step, beta2=beta2, eps=self._eps(tensor))
                self.host.release(tensor)
