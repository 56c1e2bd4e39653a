"""What optimizers have in common of which each rank has a state of its own, for all that saves, restores and broadcasts
optimizers.
"""

from __future__ import annotations

from typing import Any

from ocomm.operations import ProcessSet
from ocomm_torch.loss_scaling import CollectiveStep


class HasRankState(CollectiveStep):
    """An optimizer that saves ``state_dict()``, the same on all ranks, and ``rank_state_dict()``, what only this rank
    has. ``state_dict()["ocomm"]`` is a saved state of ``ocomm.training.resume``.
    """

    #: The ranks that train together.
    process_set: ProcessSet
    #: True while this optimizer calls the ``step`` of the one that it wraps; others may not.
    _inner_steps = False

    def reconnect(self, keep: bool = True) -> None:
        """Joins the current ranks after ``shutdown`` and ``init``. Collective; does nothing if it is connected.

        ``keep``: the optimizer keeps its state. If not, a state must be loaded.
        """
        raise NotImplementedError

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns what only this rank has."""
        raise NotImplementedError

    def load_rank_state_dict(self, state: Any) -> dict[str, Any]:
        """Loads results of ``rank_state_dict``, after ``load_state_dict``. Collective."""
        raise NotImplementedError

    @property
    def awaits_rank_state(self) -> bool:
        """True between ``load_state_dict`` of a run's state and ``load_rank_state_dict``, which belongs to it."""
        raise NotImplementedError

    def compression_report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank."""
        raise NotImplementedError
