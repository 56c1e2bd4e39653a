"""Drives 0/1 Adam on one rank: what it takes over of Adam's moments, and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ocomm.optim.zero_one_adam import ZeroOneAdam
from ocomm.telemetry.units import amount
from ocomm.training.adam import AdamDriver


class ZeroOneAdamDriver(AdamDriver):
    """The ``AdamDriver`` of 0/1 Adam."""

    core: ZeroOneAdam

    def plan(self) -> str:
        """Returns what this rank will send per step, in words."""
        return (
            f"a sync sends about {amount(self.compressed_nbytes)} per rank instead of {amount(self.dense_nbytes)}, and "
            f"{amount(self.uncompressed_nbytes)} besides where it refreshes the variance."
        )

    # State

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """Returns the moments as the wrapped Adam would have them: m of the last sync, and v."""
        core = self.core
        if not core.steps[tensor]:
            return None
        return {
            "step": int(core.steps[tensor]),
            "exp_avg": core.average_momentum(tensor),
            "exp_avg_sq": core.variance(tensor, beta2=self.beta2(tensor)),
        }

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        return np.flatnonzero(saved["core"]["steps"]).tolist()

    def continue_plain(self) -> None:
        """Continues from a plain Adam's m, v and step counts, if it has any; the schedules start again."""
        self._restart(0)
        self._load(self._fresh)
        self._adopt({})
        self.resumed = {"step": 0, "ranks": None, "rank_state": "none"}

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """Continues from a checkpoint: v counts as refreshed in each of its steps, and the schedules are set to its
        last step.
        """
        self._restart(self._host_steps())
        self._load(self._fresh)
        self._adopt(betas2)
        self.core.start_at(self.steps)
        self._say_warm(np.flatnonzero(self.core.steps == 0))

    def _adopt(self, betas2: Mapping[int, float]) -> None:
        for tensor in range(self.core.steps.size):
            moments = self.frontend.moments(tensor)
            if moments is not None:
                momentum, variance, step = moments
                beta2 = betas2.get(tensor, self.beta2(tensor))
                self.core.adopt(tensor, momentum, variance, step=step, beta2=beta2, eps=self._eps(tensor))
                self.frontend.release(tensor)
