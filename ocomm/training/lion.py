"""1-bit Lion on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocomm.compression.layout import TensorSpec
from ocomm.optim.lion import Lion
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Group, Host


class LionDriver(Driver):
    """See ``Driver``. ``options`` are those of the core."""

    core: Lion
    fixed_options = ("betas", "seed")

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        host: Host,
        common: Common,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(
            session,
            number,
            "Lion",
            specs,
            lambda layout, rank, kernels: Lion(layout, rank, kernels, **options),
            host,
            common,
            options,
        )

    def set_hyper(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.core.set_hyper(group.tensors, lr=group.lr, decoupled_decay=group.decoupled_decay)

    # State

    def report(self) -> dict[str, Any]:
        """Also the stage, which is the same from the first step to the last."""
        return {"stage": "compressed", **super().report()}
