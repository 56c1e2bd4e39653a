"""Averages that arrive while a script goes through its gradients, of parameters of which this rank has none.

A parameter that a rank's batch does not need has no gradient after backward, and an average once the step is averaged,
which the first use of another gradient does. A list of gradients that was made before does not have that average:
``clip_grad_norm_`` makes one for the norm, so this rank clips by another norm than the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torch import Tensor

_log = logging.getLogger("ocomm")


class LateAverages:
    """The averages that the script of one optimizer may have missed in a step. It warns once."""

    def __init__(self) -> None:
        self._missing: list[Tensor] = []
        self._averages: dict[Tensor, tuple[Tensor, int]] = {}
        self._has_warned = False

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Notes which of ``parameters`` have no gradient, before a use of another gradient waits for averages."""
        self._missing = [] if self._has_warned else [p for p in parameters if p.requires_grad and p.grad is None]

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Notes the averages of ``parameters`` for which this use has waited."""
        if self._missing:
            self._averages = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def look(self, name_of: Callable[[Tensor], str]) -> None:
        """Warns if all averages, at least but the late ones, have changed since. Called at the end of the step."""
        missing, averages = self._missing, self._averages
        if not missing:
            return
        self._missing, self._averages = [], {}
        late = {p for p in missing if p in averages and averages[p][0].any()}
        others = averages.keys() - set(missing)
        if late and all(p.grad is not averages[p][0] or p.grad._version != averages[p][1] for p in others):
            self._has_warned = True
            _log.warning(
                "DistributedOptimizer: gradients were changed before step(), and first used while this rank had none "
                "of '%s', whose average came with that use. A list that was made before, as clip_grad_norm_ makes one "
                "for the norm, does not have it: then ranks change gradients differently, and replicas come apart. "
                "Call optimizer.synchronize() after backward, and step() inside optimizer.skip_synchronize().",
                name_of(next(p for p in missing if p in late)),
            )
