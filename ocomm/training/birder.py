"""Birder and SoftSignSGD on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocomm.compression.layout import TensorSpec
from ocomm.optim.birder import Birder
from ocomm.optim.soft_sign import SoftSignSGD
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Group, Host

#: The cores by the names of their optimizers.
_CORES: dict[str, type[SoftSignSGD]] = {"Birder": Birder, "SoftSignSGD": SoftSignSGD}


class BirderDriver(Driver):
    """See ``Driver``. ``kind`` is ``"Birder"`` or ``"SoftSignSGD"``, ``options`` are those of its core."""

    core: SoftSignSGD
    fixed_options = ("beta", "seed", "stochastic", "amsgrad_after")

    def __init__(
        self,
        session: Session,
        number: int,
        kind: str,
        specs: Sequence[TensorSpec],
        host: Host,
        common: Common,
        options: Mapping[str, Any],
    ) -> None:
        core = _CORES[kind]
        super().__init__(
            session,
            number,
            kind,
            specs,
            lambda layout, rank, kernels: core(layout, rank, kernels, **options),
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
        return {"stage": "compressed" if self.core.exchange().compressed.any() else "dense", **super().report()}
