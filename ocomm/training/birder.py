"""Birder and SoftSignSGD on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.optim.birder import Birder
from ocomm.optim.soft_sign import SoftSignSGD
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Host

#: The cores by the names of their optimizers.
_CORES: dict[str, type[SoftSignSGD]] = {"Birder": Birder, "SoftSignSGD": SoftSignSGD}


class BirderDriver(Driver):
    """See ``Driver``. ``kind`` is ``"Birder"`` or ``"SoftSignSGD"``, ``options`` are those of its core."""

    core: SoftSignSGD

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
        self._core_options = dict(options)
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

    def set_hyper(self) -> None:
        for group in self.host.groups():
            self.core.set_hyper(group.tensors, lr=group.lr, decoupled_decay=group.decoupled_decay)

    # State

    def report(self) -> dict[str, Any]:
        """Also the stage, which is the same from the first step to the last."""
        return {"stage": "compressed" if self.core.exchange().compressed.any() else "dense", **super().report()}

    def state(self) -> dict[str, Any]:
        """The replicated state: counters and options."""
        return {"version": 1, "progress": self.core.progress(), "options": dict(self._core_options)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse. Raises InvalidRequestError, and changes nothing, if options or tensors are not these."""
        for option, mine in self._core_options.items():
            saved = state["options"].get(option)
            if saved != mine:
                raise InvalidRequestError(
                    f"the state was saved with {option}={saved!r}, this optimizer has {option}={mine!r}; "
                    "give it the option that the run began with."
                )
        count, mine = len(state["progress"]["steps"]), len(self.core.steps)
        if count != mine:
            raise InvalidRequestError(f"the state is of {count} tensors, this optimizer has {mine}.")
        self.core.load_progress(state["progress"])
        self.steps = self.core.committed
