"""DiLoCo for Keras 3: the user's optimizer steps on each rank's own gradients, and once in many steps the ranks sync.

In a graph most steps call Python for a number alone, the count of steps. Variables pass through Python in the steps
that begin or end a sync, and in the first, whose variables are the first anchors.
"""

from __future__ import annotations

import contextlib
import functools
import io
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ocomm import session as sessions
from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.faces import face
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.core import Group
from ocomm.optim.diloco import BUFFERS, DiLoCoOptions
from ocomm.optim.grid import Grid
from ocomm.session import Session
from ocomm.training.common import Common
from ocomm.training.diloco import LACKING, DiLoCoDriver
from ocomm.training.resume import Source
from ocomm_tf import engine, mpi_ops
from ocomm_tf.errors import of_tensorflow
from ocomm_tf.functions import agree_on
from ocomm_tf.keras.compressed import ARGUMENTS
from ocomm_tf.keras.driven import (
    FLOATS,
    WITHOUT_LOSS_SCALE,
    Driven,
    State,
    check_unused,
    refuse_averages,
    refuse_loss_scaling,
    refuse_replicas,
)
from ocomm_tf.keras_optimizer import check_wrappable, not_compiled, refuse_loss_scaling_outside, subclass_of
from ocomm_tf.order import WireVariable, wire_variables


class LocalVariables:
    """The ``training.diloco.LocalFrontend`` of Keras: variables, and the wrapped optimizer's state.

    In a graph TensorFlow passes the values of variables to Python, and assigns what it returns: then they are ``held``.
    Traced graphs refer to this object; ``connect`` gives it a driver.
    """

    framework = "keras"
    kernels: Kernels | None = None
    grid: Grid | None = None
    driver: DiLoCoDriver

    def __init__(
        self, optimizer: Any, buffers: Sequence[Any], process_set: ProcessSet, options: DiLoCoOptions, common: Common
    ) -> None:
        self._reference = weakref.ref(optimizer)  # the optimizer owns this object
        self._buffers = list(buffers)
        self.process_set, self._options, self._common = process_set, options, common
        agreed = agree_on("DistributedDiLoCo", self.variables, process_set)
        self._entries = wire_variables(self.variables, None, agreed)
        self._held: list[Floats] | None = None
        self.rate = 0.0
        #: The wrapped optimizer's state as it was when it was wrapped; None for zeros.
        self._first_state = [value if value.any() else None for value in self._inner_values()]
        self._numbers = _numbers(optimizer.get_config())

    def connect(self, session: Session) -> None:
        """Makes a driver that has taken no step, among the current ranks. Collective."""
        self.runtime = session.runtime
        specs: list[TensorSpec] = [entry.spec for entry in self._entries]
        number, buffers = self.process_set.number(session), len(self._buffers)
        constraints = {
            index: functools.partial(_constrained, self._entries[index], variable.constraint)
            for index, variable in enumerate(self._owner._trainable_variables)
            if variable.constraint is not None
        }
        self.driver = DiLoCoDriver(session, number, specs, buffers, self, self._options, self._common, constraints)

    @property
    def _owner(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    @property
    def variables(self) -> list[Any]:
        """What is synced: the optimizer's variables, and after them buffers."""
        return [*self._owner._trainable_variables, *self._buffers]

    @contextlib.contextmanager
    def held(self, values: Sequence[Any]) -> Iterator[list[Floats]]:
        """Within this context ``read`` and ``write`` use ``values``, float32 arrays in the order of ``variables``."""
        self._held = [entry.to_wire(np.asarray(v)) for entry, v in zip(self._entries, values, strict=True)]
        try:
            yield self._held
        finally:
            self._held = None

    def in_keras_order(self, values: Sequence[Floats]) -> list[np.ndarray]:
        """Returns flat values as arrays of the variables' shapes."""
        return [entry.from_wire(value) for entry, value in zip(self._entries, values, strict=True)]

    # For the driver

    def implementation(self) -> str:
        """Returns words that say how dense steps round; ours, because there are none of the wrapped optimizer's."""
        return "ocomm"

    def written_in_forward(self) -> dict[str, str]:
        """Returns what writes to variables in forward on this rank alone: nothing in Keras does."""
        return {}

    def groups(self) -> list[Group]:
        """Returns one group, with the learning rate, for messages."""
        return [Group(np.arange(len(self._entries)), self.rate)]

    def hyper(self) -> Hashable:
        """Returns the learning rate of the last step, and the other numbers of the optimizer's configuration."""
        return (self.rate, *self._numbers)

    def locate(self, tensors: list[int], final: bool) -> list[int]:
        """Returns the addresses of what is sent of ``tensors``."""
        return self.driver.core.delta_addresses(tensors)

    def read(self, tensor: int) -> Floats:
        """Returns a variable's value on this rank: flat, float32, in the host's memory."""
        if self._held is not None:
            return self._held[tensor]
        found = keras.ops.convert_to_numpy(self.variables[tensor])
        return self._entries[tensor].to_wire(np.asarray(found, np.float32)).copy()

    def write(self, tensor: int, values: Floats) -> None:
        """Overwrites a variable, rounded to its own type."""
        if self._held is not None:
            self._held[tensor] = values.copy()
            return
        self.variables[tensor].assign(self._entries[tensor].from_wire(values))

    def _inner_values(self) -> list[np.ndarray]:
        return [np.asarray(keras.ops.convert_to_numpy(v)) for v in self._owner.variables]

    def inner_state(self) -> Bytes:
        """Returns the wrapped optimizer's variables on this rank, as ``numpy.savez`` writes them."""
        file = io.BytesIO()
        np.savez(file, *self._inner_values())
        return np.frombuffer(file.getvalue(), np.uint8).copy()

    def load_inner_state(self, saved: Bytes) -> None:
        """Loads the result of ``inner_state``."""
        with np.load(io.BytesIO(saved.tobytes()), allow_pickle=False) as found:
            for number, variable in enumerate(self._owner.variables):
                variable.assign(found[f"arr_{number}"])

    def reset_inner_state(self) -> bool:
        """Sets the wrapped optimizer's state back to what it was when it was wrapped, if it is not finite."""
        values = self._inner_values()
        if all(np.isfinite(value).all() for value in values if np.issubdtype(value.dtype, np.floating)):
            return False
        for variable, first, now in zip(self._owner.variables, self._first_state, values, strict=True):
            if variable is not self._owner.iterations:
                variable.assign(np.zeros_like(now) if first is None else first)
        return True


def _constrained(entry: WireVariable, constraint: Any, values: Floats) -> Floats:
    """Returns flat values of a variable as its constraint leaves them."""
    found = keras.ops.convert_to_numpy(constraint(keras.ops.convert_to_tensor(entry.from_wire(values))))
    return entry.to_wire(np.asarray(found, np.float32))


def _numbers(config: Any) -> tuple[float, ...]:
    """Returns the numbers in a configuration, without the learning rate, which each step brings."""
    found = {key: value for key, value in config.items() if key != "learning_rate"}
    return tuple(float(v) for _, v in sorted(found.items()) if isinstance(v, (bool, int, float)))


class _DiLoCo(Driven):
    """Mixin placed before the class of the user's optimizer."""

    steps_alone = True
    _frontend: LocalVariables | None = None
    _setup: tuple[ProcessSet, list[Any], DiLoCoOptions, Common]
    _evaluates = False

    def build(self: Any, variables: Any) -> None:
        """Builds the wrapped optimizer; then the ranks agree on what they sync. Collective."""
        if self.built:
            return
        super().build(variables)  # type: ignore[misc]
        process_set, buffers, options, common = self._setup
        self._check_dtypes("DistributedDiLoCo")
        with tf.init_scope():  # a graph may be under construction, in which variables have no values
            local = LocalVariables(self, buffers, process_set, options, common)
        self.__dict__["_frontend"] = local  # set without Keras, which would look for variables in it
        local.connect(sessions.current())

    # The step

    @not_compiled
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Applies this rank's gradients like the wrapped optimizer, and syncs if a sync is due.

        Gradients that are not finite change nothing but the number of the step. Collective at the first step and where
        a sync is due.
        """
        refuse_loss_scaling_outside(instead=WITHOUT_LOSS_SCALE)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        self.ocomm_exchanges += 1
        self._require_own("apply()")
        plain = super().apply  # type: ignore[misc]
        grads = list(grads)
        if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
            self._apply_now(plain, grads, variables)
        else:
            with of_tensorflow():
                self._apply_in_graph(plain, grads, variables)

    def _apply_now(self: Any, plain: Any, grads: list[Any], variables: list[Any]) -> None:
        local: LocalVariables = self._frontend
        local.driver.start()
        local.rate = float(keras.ops.convert_to_numpy(self.learning_rate))
        is_finite = all(bool(keras.ops.all(keras.ops.isfinite(_values(g)))) for g in grads if g is not None)
        if is_finite:
            plain(grads, variables)
        else:
            self._iterations.assign_add(1)
        local.driver.advance(is_finite)

    def _apply_in_graph(self: Any, plain: Any, grads: list[Any], variables: list[Any]) -> None:
        mpi_ops.refuse_xla()
        if not engine.runs_in_order():
            raise InvalidRequestError(
                "DistributedDiLoCo steps in tf.function or eagerly, not in a graph of tf.compat.v1, which does not say "
                "when a variable is read."
            )
        local: LocalVariables = self._frontend
        engine.steppers.add(local)
        every = local.variables

        def values() -> list[tf.Tensor]:
            return [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in every]

        def is_at_start() -> list[Any]:
            return [np.bool_(local.driver.is_at_start)]

        def start(*arrays: Any) -> list[Any]:
            with local.held(arrays):
                local.driver.start()
            return [np.True_]

        def count(finite: Any, rate: Any) -> list[Any]:
            local.rate = float(rate)
            local.driver.start()
            is_due = local.driver.is_due()
            if not is_due:
                local.driver.advance(bool(finite))
            return [np.bool_(is_due)]

        def sync(finite: Any, *arrays: Any) -> list[Any]:
            with local.held(arrays) as found:
                local.driver.advance(bool(finite))
                return local.in_keras_order(found)

        def scalar(body: Any, inputs: list[Any]) -> tf.Tensor:
            (found,) = engine.in_python(tf.numpy_function, body, inputs, [tf.bool])
            found.set_shape(())
            return found

        def synced(finite: tf.Tensor) -> tf.Tensor:
            results = engine.in_python(tf.numpy_function, sync, [finite, *values()], [tf.float32] * len(every))
            for variable, result in zip(every, results, strict=True):
                result.set_shape(variable.shape)
                variable.assign(tf.cast(result, variable.dtype))
            return tf.constant(True)

        def moved() -> tf.Tensor:
            plain(grads, variables)
            return tf.constant(True)

        def counted() -> tf.Tensor:
            self._iterations.assign_add(1)
            return tf.constant(False)

        rate = tf.cast(self.learning_rate, tf.float32)
        started = tf.cond(scalar(is_at_start, []), lambda: scalar(start, values()), lambda: tf.constant(True))
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(g))) for g in grads if g is not None])
        with tf.control_dependencies([started]):
            taken = tf.cond(finite, moved, counted)
        with tf.control_dependencies([taken]):
            is_due = scalar(count, [finite, rate])
        tf.cond(is_due, lambda: synced(finite), lambda: tf.constant(True))

    def finish(self: Any) -> None:
        """Syncs what has changed since the last syncs; all ranks have the anchors as variables then. Collective, not in
        a graph.

        Call it on all ranks after the last step, before the model is saved or evaluated. Training may go on after it.

        Raises:
            NonFiniteError: A variable is not finite on some rank; all ranks have returned to the anchors.
            HorovodInternalError: The sync failed: MismatchError, StallError or PeerError.
        """
        self._require_own("finish()")
        if self._frontend is None:
            raise InvalidRequestError("finish() was called before the first step: there is nothing to sync.")
        self._frontend.driver.finish()

    @contextlib.contextmanager
    def evaluation_parameters(self: Any) -> Iterator[None]:
        """Within this context the variables, and buffers that are averaged, are those of the last syncs, the same on
        all ranks; after it they are this rank's own again. Not collective, not in a graph.
        """
        self._require_own("evaluation_parameters()")
        local: LocalVariables | None = self._frontend
        core = None if local is None else local.driver.core
        if local is None or core is None or not core.step:
            yield
            return
        kept = {tensor: local.read(tensor) for tensor in core.anchored}
        self.__dict__["_evaluates"] = True
        try:
            for tensor in kept:
                local.write(tensor, core.anchor[core.flat_span(tensor)])
            yield
        finally:
            for tensor, value in kept.items():
                local.write(tensor, value)
            self.__dict__["_evaluates"] = False

    def _require_own(self, call: str) -> None:
        if self._evaluates:
            raise InvalidRequestError(
                f"{call} was called inside evaluation_parameters(), where the variables are not this rank's own; call "
                "it outside."
            )

    # The complete state, for elastic jobs

    def ocomm_state(self: Any) -> State:
        """Returns the wrapped optimizer's variables on this rank, and anchors and outer momentum, those of all
        ranks.
        """
        return [v.numpy() for v in self.variables], self._frontend.driver.state(), {}, []

    def ocomm_load_state(self: Any, state: State) -> None:
        """Loads the result of ``ocomm_state``; the variables become the anchors. Collective after ``init``."""
        for variable, value in zip(self.variables, state[0], strict=True):
            variable.assign(value)
        self.ocomm_reconnect(keep=False)
        self._frontend.driver.load_state(state[1])

    def ocomm_rank_state(self: Any) -> dict[str, Any]:
        """Returns what only this rank has: its variables, the wrapped optimizer's, and errors."""
        return self._frontend.driver.rank_state()

    def ocomm_load_rank_state(self: Any, source: Source) -> dict[str, Any]:
        """Loads rank states after ``ocomm_load_state``, as ``DiLoCoDriver.load_rank_state`` does. Collective."""
        return self._frontend.driver.load_rank_state(source)

    def load_own_variables(self: Any, store: Any) -> None:
        """Loads the variables of a saved optimizer; the run begins anew, with the model's variables as anchors."""
        super().load_own_variables(store)  # type: ignore[misc]
        if self._frontend is not None:
            self._frontend.driver.forget()


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


_SECTIONS = """\
Args:
    {arguments}

Returns:
    An optimizer of a subclass with the same name, with ``finish()`` and ``evaluation_parameters()``. A model that
    is saved with it loads without ocomm.

Raises:
    InvalidRequestError: The optimizer or a variable cannot be wrapped.
    SettingsError: An option has an impossible value.
    MismatchError: The ranks wrap different things, at the first step if ``variables`` is None; in the first step,
        their variables differ; at a sync, their settings do.
    NonFiniteError: At a sync, on all ranks: a variable of a rank is not finite. All have returned to the anchors."""


@face(
    (DiLoCoOptions, Common),
    _SECTIONS,
    LACKING,
    variables=ARGUMENTS["variables"],
    process_set=ARGUMENTS["process_set"],
    optimizer="Any optimizer of Keras that was not used yet; its own step is made, on this rank's gradients.",
    buffers="Variables that are not trained, such as ``model.non_trainable_variables``: "
    + BUFFERS.format(example="a BatchNormalization's moving means"),
)
def DistributedDiLoCo(
    optimizer: Any,
    variables: Any = None,
    *,
    buffers: Any = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps an optimizer for local steps that send nothing, and a sync of the ranks once in ``sync_every`` steps
    (DiLoCo, arXiv 2311.08105).

    Between syncs the ranks have different variables, and exchange neither data nor votes. ``callbacks.DiLoCoCallback``
    evaluates the anchors, which are equal on all ranks, and calls ``finish()`` at the end of ``fit``. The first step
    and every step with a sync are collective.
    """
    chosen = DiLoCoOptions.of(arguments), Common.of(arguments)
    check_wrappable(optimizer)
    refuse_replicas(optimizer, "DistributedDiLoCo")
    refuse_loss_scaling(
        optimizer,
        "DistributedDiLoCo does not count the steps that a LossScaleOptimizer skips, so ranks would sync at different "
        "steps.",
    )
    check_unused(optimizer, optimizer.built)
    if optimizer.gradient_accumulation_steps:
        raise InvalidRequestError(
            f"the {type(optimizer).__name__} has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}: with DistributedDiLoCo every batch is a step. Leave it out, and "
            "multiply sync_every by it, or take larger batches."
        )
    refuse_averages(optimizer, "DistributedDiLoCo", "Leave it out; the anchors are equal on all ranks.")
    floats = [v for v in buffers or () if keras.backend.standardize_dtype(v.dtype) in FLOATS]
    wrapped = subclass_of(_DiLoCo, optimizer)
    wrapped.__dict__["_setup"] = (process_set, floats, *chosen)
    if variables is not None:
        wrapped.build(getattr(variables, "trainable_variables", variables))
    return wrapped
