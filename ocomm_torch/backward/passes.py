"""When the gradient of a parameter is complete. Pure: no tensor and no autograd here."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Hashable, Iterable, Iterator


class Verdict(enum.Enum):
    """What becomes of a gradient that a backward pass has added to."""

    #: A later pass adds to it.
    KEEP = enum.auto()
    #: It is complete.
    POST = enum.auto()
    #: It had been complete before this pass.
    EXTRA = enum.auto()


class Passes:
    """Counts the backward passes of a step by parameter, of which ``per_step`` make a gradient complete.

    After a pass that *holds* another is yet to come, however many there have been.
    """

    def __init__(self, per_step: int, parameters: Iterable[Hashable]) -> None:
        #: The passes to come by parameter, now and where a step begins.
        self.left = dict.fromkeys(parameters, per_step)
        self.first = dict(self.left)
        #: True if every pass holds.
        self.holds = False
        #: What a pass makes of the passes to come, and the verdict: ``moves[whether it holds][passes to come]``. A hook
        #: looks here, because it has no time for a call of ``count``.
        self.moves: tuple[list[tuple[int, Verdict]], ...] = ()
        self.per_step = per_step

    @property
    def per_step(self) -> int:
        """The number of passes of a step. To set it begins the step again."""
        return self._per_step

    @per_step.setter
    def per_step(self, count: int) -> None:
        self._per_step = count
        last = [(0, Verdict.EXTRA), (0, Verdict.POST), *((left - 1, Verdict.KEEP) for left in range(2, count + 1))]
        holding = [(0, Verdict.EXTRA), *((max(left - 1, 1), Verdict.KEEP) for left in range(1, count + 1))]
        self.moves = last, holding
        self.first = dict.fromkeys(self.left, count)
        self.restart()

    def add(self, parameter: Hashable) -> None:
        """Counts the passes of a further parameter."""
        self.first[parameter] = self.per_step
        self.left.setdefault(parameter, self.per_step)

    def count(self, parameter: Hashable) -> Verdict:
        """Counts a pass that has reached ``parameter``."""
        self.left[parameter], verdict = self.moves[self.holds][self.left[parameter]]
        return verdict

    def complete(self, parameter: Hashable) -> None:
        """Says that no pass is to come."""
        self.left[parameter] = 0

    def are_over(self, parameters: Iterable[Hashable]) -> bool:
        """Returns True if the gradients of all ``parameters`` are complete."""
        return not any(self.left[parameter] for parameter in parameters)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Makes every pass inside this context hold."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    def restart(self) -> None:
        """Begins the next step, or this one again."""
        self.left.update(self.first)


class CountsPasses:
    """Mixin of optimizers whose steps have several backward passes. ``_passes`` counts them."""

    _passes: Passes

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are summed in a step. To set it begins the step again."""
        return self._passes.per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, count: int) -> None:
        self._passes.per_step = count

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside this context add to gradients, and exchange nothing; the next one outside it does.

        It says which passes of a step are not its last where their number differs from step to step, as
        DistributedDataParallel's ``no_sync`` does, which these optimizers do not need. Not collective.
        """
        return self._passes.held()
