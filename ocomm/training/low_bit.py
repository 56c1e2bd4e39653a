"""Drives exchanges of gradients in 8 or 4 bits for an optimizer that makes its steps itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from ocomm.compression.layout import TensorSpec
from ocomm.errors import MismatchError
from ocomm.optim.core import Core, Group
from ocomm.optim.low_bit import LowBitOptions
from ocomm.optim.options import Options
from ocomm.session import Session
from ocomm.telemetry.units import amount
from ocomm.training.common import Common
from ocomm.training.driver import Driver, Frontend


class GradientFrontend(Frontend, Protocol):
    """A framework's side of an optimizer that makes its steps itself, on averages of gradients."""

    def hyper(self) -> Hashable:
        """Returns the numbers in the optimizer's settings in the step before, as nested tuples; () for none."""
        ...


class LowBitDriver(Driver):
    """One rank's part of exchanges of gradients over process set ``number``. Making one is collective.

    A step of the driver is an exchange: its averages are valid until the next one begins.

    Raises:
        MismatchError: A tensor, the compression or another option differs between the ranks.
    """

    unlike_text = (
        "the ranks' optimizers round differently ({}), so their parameters will differ in the last digits, and are not "
        "compared. Broadcast them now and then."
    )

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: GradientFrontend,
        core_class: type[Core],
        options: Options,
        common: Common,
    ) -> None:
        assert isinstance(options, LowBitOptions)
        self._format = f"int{options.dense_bits}"
        super().__init__(session, number, specs, frontend, core_class, options, common)
        self.stepper.compares_replicas &= not self.has_unlike_hosts

    def arrange_core(self, frontend: Frontend) -> dict[str, Any]:
        return {"compression": self._format}

    def greet(self, session: Session, number: int, name: str) -> None:
        """Raises MismatchError if another rank averages the same gradients without this compression: its first step
        submits something else under this name.
        """
        try:
            session.agree(number, name, "gradients in codes")
        except MismatchError as error:
            raise MismatchError(
                f"{name}: this rank has compression=Compression.{self._format}, and not all ranks send codes. Pass the "
                f"same compression on all ranks. ({error})"
            ) from None

    def plan(self) -> str:
        return (
            f"a step sends {amount(self.uncompressed_nbytes)} per rank, in {self.core.dense_bits} bits per element, "
            f"instead of {amount(self.dense_nbytes)}."
        )

    def compress_hyper(self, groups: Sequence[Group]) -> Hashable:
        """Returns nothing: gradients travel as they are."""
        return ()

    def full_hyper(self, groups: Sequence[Group]) -> Hashable:
        return (self.frontend.hyper(),)


class LateLowBitDriver(LowBitDriver):
    """A ``LowBitDriver`` whose exchanges may end in backward, where a script may have other values in parameters, such
    as noise of each rank. The ranks compare parameters in ``compare``, and in the vote of the exchange that follows.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stepper.noted_replica = 0

    def _start(self) -> None:
        """Does nothing: ``compare`` does it."""

    def compare(self) -> None:
        """Called in ``step()`` of all ranks that take it, before parameters change. Collective in the first step.

        Raises:
            MismatchError: The ranks have different parameters, or states of different runs.
        """
        if self._at_start:
            super()._start()
        self.stepper.note_replicas()
