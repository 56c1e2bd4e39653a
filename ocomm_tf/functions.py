"""Broadcasts of variables and objects from one rank to all, so that ranks start equal."""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm import api, operations
from ocomm import session as sessions
from ocomm.docstrings import collective
from ocomm.errors import MismatchError
from ocomm.operations import NUMPY, ProcessSet, global_process_set
from ocomm_tf.errors import public
from ocomm_tf.mpi_ops import broadcast_, name_in_graph
from ocomm_tf.naming import name_of, shape_of
from ocomm_tf.order import wire_variables


@public
def agree_on(what: str, variables: Sequence[Any], process_set: ProcessSet) -> list[str]:
    """Compares variables between the ranks of the set, and returns the names that its first rank gives them.

    Collective; runs at once even while a graph is being built. Names may differ, because Keras numbers layers by
    process. Raises MismatchError if number, shapes or dtypes differ, or if the same names come in another order.
    """
    session = sessions.current()
    mine = [(name_of(v), shape_of(v), tf.as_dtype(v.dtype).base_dtype.name) for v in variables]
    number = process_set.number(session)
    name = session.automatic_name(f"agree_on.{what}", number)
    # A rank that has joined says nothing.
    everyone = dict(api.allgather_object((session.require_topology().rank, mine), name, process_set))
    first = everyone[min(everyone)]
    order = [name for name, _, _ in first]
    for position in range(max(len(said) for said in everyone.values())):
        values: dict[str, list[int]] = {}
        for rank, said in everyone.items():
            values.setdefault(_spell(said, position, order), []).append(rank)
        if len(values) > 1:
            each = "; ".join(f"rank(s) {who}: {value}" for value, who in values.items())
            raise MismatchError(
                f"{what}: variable {position} differs between ranks: {each}. Build the same model, with its layers in "
                "the same order, on every rank."
            )
    return [f"{position}.{name}" for position, name in enumerate(order)]


def _spell(said: Sequence[tuple[str, tuple[int, ...], str]], position: int, order: list[str]) -> str:
    """Returns a variable as it is compared and shown; its name is compared only if all names are the first rank's."""
    if position >= len(said):
        return "none"
    name, shape, dtype = said[position]
    matters = sorted(name for name, _, _ in said) == sorted(order)
    return f"'{name if matters else order[min(position, len(order) - 1)]}' {shape} {dtype}"


@public
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
    *,
    names: Mapping[str, Any] | None = None,
) -> Any:
    """Overwrites ``variables`` (``tf.Variable`` or Keras variables) with those of ``root_rank``, in place.

    Collective. May be called several times in one ``tf.function``, for instance for a model and its optimizer.

    Args:
        variables: The same ones in the same order on all ranks; names may differ.
        root_rank: The rank whose values all ranks get, a rank of the whole job.
        process_set: The ranks that take part.
        inplace: Accepted as in Horovod; it is always in place.
        names: If ranks of Torch train the same model, the map of variables to its parameters, as for the optimizers;
            those ranks call ``broadcast_parameters(model.named_parameters(), root_rank)``.

    Returns:
        In a graph the operation, which a session of ``tf.compat.v1`` must run; else None.

    Raises:
        MismatchError: Number, shapes, dtypes or order of the variables differ; it names the variable and the ranks.
        InvalidRequestError: ``root_rank`` is not in the process set.
    """
    variables = list(variables)
    if names is not None:
        _broadcast_in_wire_order(variables, root_rank, process_set, names)
        return None
    if not _agreed.has(variables, process_set):
        agree_on("broadcast_variables", variables, process_set)
        _agreed.add(variables, process_set)
    values = broadcast_(variables, root_rank, name_in_graph("broadcast_variables"), process_set)
    return None if tf.executing_eagerly() else tf.group(*values)


class _Agreed:
    """The lists of variables on which the ranks have agreed when a ``tf.function`` was built.

    It may be built once more on some ranks alone, as for a shorter batch, where nothing collective may happen.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}

    def has(self, variables: Sequence[Any], process_set: ProcessSet) -> bool:
        if not is_building_a_function():
            return False
        references = self._found.get(self._key(variables, process_set), [])
        return bool(references) and all(r() is v for r, v in zip(references, variables, strict=True))

    def add(self, variables: Sequence[Any], process_set: ProcessSet) -> None:
        if is_building_a_function():
            self._found = {key: refs for key, refs in self._found.items() if all(r() is not None for r in refs)}
            self._found[self._key(variables, process_set)] = [weakref.ref(v) for v in variables]

    def _key(self, variables: Sequence[Any], process_set: ProcessSet) -> tuple[Any, ...]:
        session = sessions.current()
        return (session.starts, process_set.number(session), *map(id, variables))


_agreed = _Agreed()


def is_building_a_function() -> bool:
    """Returns True inside of a ``tf.function`` that is being traced."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function


def _broadcast_in_wire_order(
    variables: list[Any], root_rank: int, process_set: ProcessSet, names: Mapping[str, Any]
) -> None:
    session = sessions.current()
    started = []
    for entry in wire_variables(variables, names, []):
        array = entry.to_wire(variables[entry.index].numpy()).reshape(entry.spec.shape).copy()
        operation = operations.broadcast(
            session, NUMPY, array, root_rank, entry.name, process_set, True, entry.spec.order
        )
        started.append((entry, operation))
    for entry, operation in started:
        variables[entry.index].assign(entry.from_wire(operation.wait()))


@public
@collective("The operation that a session must run.")
def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Overwrites all variables of a graph of ``tf.compat.v1`` with those of the rank ``root_rank``. Collective."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return _assign_all(tf.compat.v1.global_variables(), root_rank, process_set)


def _assign_all(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> Any:
    return tf.group(*broadcast_(variables, root_rank, name_in_graph("broadcast_global_variables"), process_set))


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Overwrites all variables with those of ``root_rank`` when a ``tf.compat.v1`` session is made. Collective.

    Args:
        root_rank: The rank whose values all ranks get, a rank of the whole job.
        device: Accepted as in Horovod, and ignored.
        process_set: The ranks that take part.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set
        self._operation: Any = None

    def begin(self) -> None:
        self._operation = _assign_all(tf.compat.v1.global_variables(), self.root_rank, self.process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._operation)


@public
@collective("The object of the root, on the root itself the same one.")
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends an object of the rank ``root_rank`` to all ranks. Collective; waits for the result."""
    return api.broadcast_object(obj, root_rank, name, process_set)


@collective("A function of an object, which is collective.")
def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Makes a function of ``broadcast_object`` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@public
@collective("The objects in rank order, without those of ranks that have joined.")
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Sends an object of each rank to all ranks. Collective; waits for the result."""
    return api.allgather_object(obj, name, process_set)


@public
def check_replicas(variables: Sequence[Any], process_set: ProcessSet = global_process_set) -> None:
    """Compares the variables of all ranks bit for bit. Collective.

    Args:
        variables: ``tf.Variable`` or Keras variables, in the same order on all ranks.
        process_set: The ranks that take part.

    Raises:
        MismatchError: A variable differs, the first of which is named with the ranks, or the number of variables does.
    """
    sums = [hashlib.blake2b(np.ascontiguousarray(v.numpy()).tobytes(), digest_size=8).hexdigest() for v in variables]
    everyone = api.allgather_object(sums, process_set=process_set)

    def differing(of: Callable[[list[str]], Any]) -> str:
        values: dict[Any, list[int]] = {}
        for rank, said in zip(process_set.ranks, everyone, strict=True):
            values.setdefault(of(said), []).append(rank)
        each = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
        return each if len(values) > 1 else ""

    if each := differing(len):
        raise MismatchError(
            f"the number of variables is not the same on all ranks: {each}. Build the same model on every rank."
        )
    for position, variable in enumerate(variables):
        if each := differing(operator.itemgetter(position)):
            raise MismatchError(
                f"variable '{name_of(variable)}' is not the same on all ranks: {each}. Broadcast the variables before "
                "training, and change them nowhere but in the distributed optimizer."
            )
