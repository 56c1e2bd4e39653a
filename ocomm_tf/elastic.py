"""``hvd.elastic`` for TensorFlow and Keras: models, optimizers and variables that are committed and synchronized.

See ``ocomm.elastic`` for the loop, and docs/elastic.md for jobs whose hosts change.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm import api, elastic, errors
from ocomm.elastic import ObjectState, Part, State
from ocomm.errors import HorovodInternalError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.training.resume import NO_STATE, Source, one_state

__all__ = ["KerasState", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

_FAILURES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HorovodInternalError)
}
_FAILURE = re.compile(rf"\b({'|'.join(_FAILURES)}): ([^\n]*)")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """See ``ocomm.elastic.run``. What fails inside a graph comes out of it as TensorFlow's error and counts, too."""

    @elastic.run
    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError:
            raise
        except tf.errors.OpError as error:
            found = _FAILURE.search(error.message)
            if found is None:
                raise
            raise _FAILURES[found[1]](found[2]) from error

    return wrapper


class TensorFlowState(ObjectState):
    """``TensorFlowState(variables, epoch=0)``: variables of TensorFlow or Keras, changed in place, and other values.

    ``session`` is accepted as in Horovod and not needed.
    """

    def __init__(
        self,
        variables: Sequence[Any] | None = None,
        session: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        self.variables = list(variables or ())
        super().__init__(process_set, **kwargs)

    def replicated(self) -> dict[str, Any]:
        """The variables' values, and the others."""
        return {"variables": [v.numpy() for v in self.variables], "values": super().replicated()}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """The inverse."""
        for variable, saved in zip(self.variables, value["variables"], strict=True):
            variable.assign(saved)
        super().load_replicated(value["values"])


class TensorFlowKerasState(ObjectState):
    """``TensorFlowKerasState(model, optimizer, epoch=0, batch=0)``: everything that training goes on from.

    ``optimizer``: None for the model's. Both keep their identity; other values are attributes that are copied. 1-bit
    optimizers go on with their errors. ``process_set``: by default the optimizer's. ``backend`` is accepted as in
    Horovod and not needed. The model is built; an optimizer that is not is built here, which is collective.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        *,
        process_set: ProcessSet | None = None,
        **kwargs: Any,
    ) -> None:
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        # As 1-bit optimizers have it, also inside a LossScaleOptimizer.
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        self._onebit = inner if hasattr(inner, "ocomm_state") else None
        if process_set is None:
            process_set = getattr(self.optimizer, "ocomm_process_set", global_process_set)
        super().__init__(process_set, **kwargs)

    def replicated(self) -> dict[str, Any]:
        """Values of all variables, what 1-bit optimizers know beyond them, and the other values."""
        onebit = None if self._onebit is None else self._onebit.ocomm_state()
        return {
            "model": [v.numpy() for v in self.model.variables],
            "onebit": onebit,
            "optimizer": [v.numpy() for v in self.optimizer.variables],
            "values": super().replicated(),
        }

    def load_replicated(self, value: dict[str, Any]) -> None:
        """The inverse; model and optimizer are changed in place."""
        for target in ("model", "optimizer"):
            for variable, saved in zip(getattr(self, target).variables, value[target], strict=True):
                variable.assign(saved)
        if self._onebit is not None:
            self._onebit.ocomm_load_state(value["onebit"])
        super().load_replicated(value["values"])

    def own(self) -> Any:
        """What a 1-bit optimizer has of this rank alone."""
        return None if self._onebit is None else self._onebit.ocomm_rank_state()

    def load_own(self, part: Part) -> None:
        """The inverse. Errors of ranks that are lost start at zero; ``resumed`` has what was done."""
        if self._onebit is None:
            return
        if part.alone:
            source = one_state(part.read(part.rank))
        else:
            source = Source(part.read, part.ranks, lambda rank: f"the part of rank {rank} of the commit", partial=True)
        part.reports["optimizer"] = self._onebit.ocomm_load_rank_state(source)

    def sync(self) -> None:
        """Takes over the first rank's values where the ranks differ, and saves. Collective."""
        mine = self.replicated()
        if len(set(api.allgather_object(_digest(mine), "elastic.digest", self.process_set))) > 1:
            self.load_replicated(self.from_first(mine))
            if self._onebit is not None:
                self._onebit.ocomm_load_rank_state(NO_STATE)
        self.save()

    def reset(self) -> None:
        """1-bit optimizers exchange with the ranks that there are now."""
        if self._onebit is not None:
            self._onebit.ocomm_reconnect()


#: Horovod's name for it in ``horovod.keras``.
KerasState = TensorFlowKerasState


def _digest(value: Any) -> str:
    """The same for equal values; where the order of a dict differs, another."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(item: Any) -> None:
        if isinstance(item, dict):
            for key, entry in item.items():
                hasher.update(repr(key).encode())
                add(entry)
        elif isinstance(item, (list, tuple)):
            for entry in item:
                add(entry)
        elif isinstance(item, np.ndarray):
            hasher.update(repr((item.shape, item.dtype)).encode() + item.tobytes())
        else:
            hasher.update(pickle.dumps(item))

    add(value)
    return hasher.hexdigest()
