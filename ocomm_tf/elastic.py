"""``hvd.elastic`` for TensorFlow and Keras: models, optimizers and variables that are committed and synchronized.

``ocomm.elastic`` has the loop; docs/elastic.md describes jobs whose hosts change.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ocomm import api, elastic, errors
from ocomm.elastic import ObjectState, Part, State
from ocomm.errors import HorovodInternalError, InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.training.resume import NO_STATE, Source, one_state
from ocomm_tf.keras_optimizer import accumulators
from ocomm_tf.keras_version import all_variables, build_optimizer

__all__ = ["KerasState", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

_FAILURES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HorovodInternalError)
}
_FAILURE = re.compile(rf"\b({'|'.join(_FAILURES)}): ([^\n]*)")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func(state, ...)`` so that it is called again, from the last commit, after a collective failed.

    It is ``ocomm.elastic.run``, and also recognises failures inside a graph, which TensorFlow raises as its own errors.
    """

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
    """State of variables of TensorFlow or Keras, which are changed in place, and other values:
    ``TensorFlowState(variables, epoch=0)``.

    Args:
        variables: The variables; None for all of the graph, where there is one of ``tf.compat.v1``.
        session: The session that holds their values; None for the default session. Ignored in eager mode.
        process_set: The ranks that share the state.
        **kwargs: Further values, by attribute name.
    """

    def __init__(
        self,
        variables: Sequence[Any] | None = None,
        session: Any = None,
        *,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self._session: Any = None if tf.executing_eagerly() else session or tf.compat.v1.get_default_session()
        if self._session is None and not tf.executing_eagerly():
            raise InvalidRequestError(
                "TensorFlowState without eager execution: pass session=, the session that holds the variables' values, "
                "or make the state inside of it"
            )
        super().__init__(process_set, **kwargs)

    def replicated(self) -> dict[str, Any]:
        """Returns the variables' values, and the other values."""
        if self._session is None:
            values = [v.numpy() for v in self.variables]
        else:
            values = self._session.run(self.variables)
        return {"variables": values, "values": super().replicated()}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """Loads the result of ``replicated``; variables are changed in place."""
        for variable, saved in zip(self.variables, value["variables"], strict=True):
            if self._session is None:
                variable.assign(saved)
            else:
                variable.load(saved, self._session)
        super().load_replicated(value["values"])


class TensorFlowKerasState(ObjectState):
    """Everything that training continues from: ``TensorFlowKerasState(model, optimizer, epoch=0, batch=0)``.

    Model and optimizer are changed in place; other values are attributes that are copied. 1-bit optimizers keep their
    errors, and random layers of Keras 3, such as Dropout, the seeds of their ranks. The model must be built; an
    optimizer that is not is built here, which is collective.

    Args:
        model: A built Keras model.
        optimizer: The optimizer; None for the model's.
        backend: Accepted as in Horovod, and ignored.
        process_set: The ranks that share the state; None for the optimizer's.
        **kwargs: Further values, by attribute name.
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
        build_optimizer(self.optimizer, model.trainable_variables)
        # 1-bit optimizers have it, also inside a LossScaleOptimizer, and optimizers that average in codes.
        found = [self.optimizer, getattr(self.optimizer, "inner_optimizer", None)]
        self._onebit = next((each for each in found if hasattr(each, "ocomm_state")), None)
        weights = {id(v) for v in model.weights}
        #: The seeds of random layers, each rank's own. Keras 2 has no such variables.
        self._seeds = [v for v in model.variables if id(v) not in weights]
        if process_set is None:
            process_set = getattr(self.optimizer, "ocomm_process_set", global_process_set)
        super().__init__(process_set, **kwargs)

    def replicated(self) -> dict[str, Any]:
        """Returns the values of all variables but the seeds of random layers, the state that 1-bit optimizers have
        beyond them, and the other values.
        """
        onebit = None if self._onebit is None else self._onebit.ocomm_state()
        variables = {target: [v.numpy() for v in found] for target, found in self._variables.items()}
        return {**variables, "onebit": onebit, "values": super().replicated()}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """Loads the result of ``replicated``; model and optimizer are changed in place."""
        for target, variables in self._variables.items():
            for variable, saved in zip(variables, value[target], strict=True):
                variable.assign(saved)
        if self._onebit is not None:
            self._onebit.ocomm_load_state(value["onebit"])
        super().load_replicated(value["values"])

    def own(self) -> Any:
        """Returns the rank state of a 1-bit optimizer, and the seeds of random layers; None if there are neither."""
        if self._onebit is None and not self._seeds:
            return None
        optimizer = None if self._onebit is None else self._onebit.ocomm_rank_state()
        return {"optimizer": optimizer, "seeds": [v.numpy() for v in self._seeds]}

    def load_own(self, part: Part) -> None:
        """Loads results of ``own``. Errors of ranks that are lost start at zero; ``resumed`` reports what was done."""
        if part.own is not None:
            for variable, saved in zip(self._seeds, part.own["seeds"], strict=True):
                variable.assign(saved)
        if self._onebit is None:
            return

        def read(rank: int) -> Any:
            found = part.read(rank)
            return None if found is None else found["optimizer"]

        if part.alone:
            source = one_state(read(part.rank))
        else:
            source = Source(read, part.ranks, lambda rank: f"the part of rank {rank} of the commit", partial=True)
        part.reports["optimizer"] = self._onebit.ocomm_load_rank_state(source)

    def sync(self) -> None:
        """Replaces the values by the first rank's if the ranks differ, and saves. Collective.

        What only a rank has stays its own: seeds of random layers, accumulated gradients, and what a 1-bit optimizer
        keeps, unless the ranks' optimizers differ in what they should have in common.
        """
        mine = self.replicated()
        said = api.allgather_object((_digest(mine), self._common(mine)), "elastic.digest", self.process_set)
        digests, common = map(set, zip(*said, strict=True))
        if len(digests) > 1:
            if self._onebit is None or len(common) == 1:
                self._sync_around(mine)
            else:
                self.load_replicated(self.from_first(mine))
                self._onebit.ocomm_load_rank_state(NO_STATE)
        self.save()

    def _common(self, mine: dict[str, Any]) -> Any:
        """Returns what must be equal on all ranks of a 1-bit optimizer; its variables need not be, between syncs."""
        if self._onebit is None:
            return None
        rate = float(keras.ops.convert_to_numpy(self._onebit.learning_rate))
        return mine["onebit"][1]["checksum"], int(self._onebit.iterations.numpy()), rate

    def _sync_around(self, mine: dict[str, Any]) -> None:
        """Replaces all values by the first rank's except for what only a rank has. Collective."""
        onebit, local = self._onebit, None
        if onebit is not None and (onebit.steps_alone or not onebit.compression_report().get("synced", True)):
            local = onebit.ocomm_rank_state()  # with this rank's parameters
        first = self.from_first({name: value for name, value in mine.items() if name != "onebit"})
        own = {id(v) for v in accumulators(self.optimizer)}
        for target, variables in self._variables.items():
            for variable, value in zip(variables, first[target], strict=True):
                if id(variable) not in own:
                    variable.assign(value)
        super().load_replicated(first["values"])
        if onebit is not None and local is not None:
            onebit.ocomm_load_rank_state(one_state(local))

    @property
    def _variables(self) -> dict[str, list[Any]]:
        return {"model": list(self.model.weights), "optimizer": all_variables(self.optimizer)}

    def reset(self) -> None:
        """Connects 1-bit optimizers with the current ranks."""
        if self._onebit is not None:
            self._onebit.ocomm_reconnect()


#: Horovod's name for this state in ``horovod.keras``.
KerasState = TensorFlowKerasState


def _digest(value: Any) -> str:
    """Returns a hash that is equal for equal values; dicts with another order have another hash."""
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
