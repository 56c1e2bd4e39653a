"""What optimizers have in common of which each rank has a state of its own: they wrap one of Torch's, and what saves,
restores and broadcasts optimizers knows them by this class.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ocomm import session as sessions
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet
from ocomm.runtime.background import Runtime
from ocomm.training.driver import Driver
from ocomm_torch.mesh import inside, refuse_mesh
from ocomm_torch.optimizers.checkpoint import rank_source
from ocomm_torch.optimizers.loss_scaling import CollectiveStep
from ocomm_torch.optimizers.replicas import written_in_forward

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("ocomm")


class OwnState(defaultdict[Any, Any]):
    """The state of a wrapped optimizer, which holds nothing while ocomm keeps the moments, and still is not empty.

    ``get_state_dict`` of torch.distributed.checkpoint makes a step of zero gradients with an optimizer whose state is
    empty. That would be a step of all ranks, with all their errors.
    """

    _has_warned = False
    #: The optimizer that wraps the one whose state this is; None in a copy.
    owner: weakref.ref[HasRankState] | None = None

    def clear(self) -> None:
        """Removes all entries. Raises InvalidRequestError if the moments are not among them."""
        if self.owner is not None and (owner := self.owner()) is not None:
            owner.refuse_reset()
        super().clear()

    def __bool__(self) -> bool:
        if not len(self) and not OwnState._has_warned:
            OwnState._has_warned = True
            _log.warning(
                "get_state_dict() of torch.distributed.checkpoint, or something like it, asks for an optimizer's "
                "moments. It saves 'state' and 'param_groups' alone, without the errors of compression and the stage "
                "of the run: save optimizer.state_dict() and optimizer.rank_state_dict() instead."
            )
        return True


def require_optimizer(optimizer: Any, wrapper: str) -> None:
    """Raises InvalidRequestError if ``optimizer``, which ``wrapper`` is to wrap, is none."""
    if not hasattr(optimizer, "param_groups"):
        raise InvalidRequestError(
            f"{wrapper} wraps an optimizer, and its first argument is a {type(optimizer).__name__}. Make an optimizer "
            "with lr and its other options, such as inner = torch.optim.AdamW(model.parameters(), lr=1e-3), and pass "
            f"that: {wrapper}(inner, model.named_parameters())."
        )


class HasRankState(CollectiveStep):
    """An optimizer that saves ``state_dict()``, the same on all ranks, and ``rank_state_dict()``, what only this rank
    has. ``state_dict()["ocomm"]`` is a saved state of ``ocomm.training.resume``.

    It wraps ``optimizer``, whose param groups and state are its own, and whose set of parameters is fixed.
    """

    #: The ranks that train together.
    process_set: ProcessSet
    _driver: Driver
    #: The runtime of the job to which the driver belongs.
    _runtime: Runtime | None
    #: The parameters, in group order, and their names, which those of other tensors may follow.
    _parameters: list[torch.Tensor]
    _names: list[str]
    #: True while Torch adds the groups of the wrapped optimizer; no others may be added.
    _wrapping = False

    def __new__(cls, optimizer: Any = None, *_: Any, **__: Any) -> Self:
        # Before the options are looked at: who passes parameters here passes lr= and others, too.
        require_optimizer(optimizer, f"Distributed{cls.__name__}")
        return super().__new__(cls)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        self._wrapping = True
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapping = False
        # The same object, so that changes by a scheduler or user of one optimizer change both.
        self.param_groups = optimizer.param_groups
        optimizer.state = self._own(optimizer.state)
        self._group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self._group_counts = [len(group["params"]) for group in self.param_groups]

    @property
    def state(self) -> OwnState:
        """The wrapped optimizer's state, by parameter, which it uses in steps of its own."""
        found = self._inner.state
        if type(found) is not OwnState:  # torch replaces it when it loads a state
            found = self._inner.state = self._own(found)
        return found

    @state.setter
    def state(self, state: Any) -> None:
        if self._wrapping or state is self.state:  # torch begins with an empty one
            return
        self.refuse_reset()
        self._inner.state = self._own(state)

    def _own(self, state: Any) -> OwnState:
        own = OwnState(dict, state)
        own.owner = weakref.ref(self)
        return own

    def refuse_reset(self) -> None:
        """Raises InvalidRequestError if moments are elsewhere than in ``state``, whose removal would not reset them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the groups and the state that torch has made from a loaded ``state_dict``."""
        rest = dict(state)
        self._inner.state = rest.pop("state")
        super().__setstate__(rest)

    @property
    def _fixed(self) -> str:
        kind = type(self).__name__
        return (
            f"Distributed{kind} exchanges the tensors that it was made with: to change them, take state_dict(), wrap a "
            f"new {type(self._inner).__name__} over all parameters, and load it there; or, where their number or "
            'shapes change, make its "state" and "param_groups" fit, and load these before you wrap.'
        )

    def _check_groups(self) -> None:
        """Raises InvalidRequestError if the groups do not have the parameters that they had when they were wrapped."""
        now = [p for group in self.param_groups for p in group["params"]]
        counts = [len(group["params"]) for group in self.param_groups]
        # A comparison of lists would ask tensors that differ whether their elements are equal.
        if counts == self._group_counts and all(map(operator.is_, now, self._parameters)):
            return
        if len(now) != len(self._parameters):
            raise InvalidRequestError(
                f"the param groups of {self._driver.name} have {len(now)} parameters, not the {len(self._parameters)} "
                "that were wrapped. " + self._fixed
            )
        group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        for name, parameter, before in zip(self._names, self._parameters, self._group_of, strict=False):
            if id(parameter) not in group_of:
                raise InvalidRequestError(
                    f"parameter '{name}' was replaced by another one in its param group. " + self._fixed
                )
            if group_of[id(parameter)] != before:
                raise InvalidRequestError(
                    f"parameter '{name}' is in param group {group_of[id(parameter)]} now, and was in group {before} "
                    "when it was wrapped. Put it back: a parameter that is to get options of its own later needs a "
                    "group of its own when the optimizer is wrapped."
                )
        for name, parameter, found in zip(self._names, self._parameters, now, strict=False):
            if parameter is not found:
                raise InvalidRequestError(
                    f"parameter '{name}' has another place in its param group than when it was wrapped. Put it back."
                )

    def written_in_forward(self) -> dict[str, str]:
        """Returns what writes to parameters in forward on this rank alone, in words, by the parameters' names."""
        return written_in_forward((name, inside(p)) for name, p in zip(self._names, self._parameters, strict=False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InvalidRequestError, because the parameters are fixed."""
        if not self._wrapping:
            raise InvalidRequestError(
                "a parameter group cannot be added. Give the optimizer all parameters when it is made, also those that "
                "train later, and freeze these until then (requires_grad_(False)): then Lightning's BackboneFinetuning "
                "adds no group. " + self._fixed
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidRequestError(
            f"Distributed{type(self).__name__} cannot be copied or pickled: it holds connections to the other ranks. "
            "Save or send its state_dict(), and load it into a new one; of a scheduler that holds it, the scheduler's."
        )

    def reconnect(self, keep: bool = True) -> None:
        """Joins the current ranks after ``shutdown`` and ``init``. Collective; does nothing if it is connected.

        ``keep``: the optimizer keeps its state. If not, a state must be loaded.
        """
        session = sessions.current()
        if session.runtime is self._runtime:
            return
        refuse_mesh(self.process_set, type(self).__name__)
        kept = (self.state_dict(), self.rank_state_dict()) if keep else None
        self._forget()
        self._connect(session)
        if kept is not None:
            self.load_state_dict(kept[0])
            self.load_rank_state_dict(kept[1])

    def _connect(self, session: sessions.Session) -> None:
        """Makes a new driver, which has taken no step, in the current job."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forgets the gradients of a step under way."""

    def disconnect(self) -> None:
        """Leaves the wrapped optimizer and the parameters to another optimizer: removes all hooks. Not collective."""
        raise NotImplementedError

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns what only this rank has."""
        raise NotImplementedError

    def load_rank_state_dict(self, state: Any) -> dict[str, Any]:
        """Loads results of ``rank_state_dict``, after ``load_state_dict``. Collective: all ranks call it.

        On the same number of ranks the run continues as if it had never stopped, with the same bits. On another, the
        errors of servers move with their blocks, and every rank gets the mean of the worker errors; with DiLoCo also
        the mean of the parameters, and the wrapped optimizer's state of the rank that saved ``state_dict``. If a state
        is missing on any rank, the errors of all ranks start at zero, and with DiLoCo all ranks go on from the anchors.

        Args:
            state: The result of this rank's ``rank_state_dict``; or a list of those of all ranks, which may be another
                number of ranks; or a path to what ``torch.save`` wrote of them, with ``{rank}`` in the place of the
                rank, ``process_set.rank()`` where the optimizer has a process set; or None if it is lost; or, for an
                elastic state, a ``resume.Source``.

        Returns:
            What was done, which ``compression_report()["resumed"]`` reports, too: ``rank_state`` is ``"loaded"``,
            ``"re-sharded"`` or ``"reset"``; ``why`` gives the reason.

        Raises:
            CheckpointError: A state is damaged or of another run on some rank; raised on all ranks, nothing was
                changed.
            InvalidRequestError: ``state`` is of another type, or this is not a moment for loading.
            MismatchError: The ranks have states of different runs.
        """
        with self._borrowed():
            return self._driver.load_rank_state(rank_source(state, self._driver.core.layout.ranks))

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Prepares parameters for the loading of a rank state, and takes them back afterwards unless that has
        raised.
        """
        yield

    @property
    def awaits_rank_state(self) -> bool:
        """True between ``load_state_dict`` of a run's state and ``load_rank_state_dict``, which belongs to it."""
        return self._driver.rank_state_due

    def compression_report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank."""
        raise NotImplementedError
