"""The Keras frontend of the 1-bit optimizers: Keras clips and accumulates gradients, ocomm makes the step.

All variables are updated at once, in ``_backend_update_step``. Inside ``tf.function`` that is one ``tf.numpy_function``
that takes gradients and variables and returns the variables' new values; on Keras' Torch backend it is a plain call.
The algorithms are in ``ocomm.optim``; they use Torch's formula, while Keras' Adam adds epsilon in another place.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ocomm import docstrings
from ocomm import session as sessions
from ocomm.api import Min
from ocomm.errors import InvalidRequestError
from ocomm.faces import face
from ocomm.kernels.base import Floats
from ocomm.operations import ProcessSet
from ocomm.optim.core import Core
from ocomm.optim.options import Options
from ocomm.session import Session
from ocomm.training.adam import refuse_other
from ocomm.training.common import Common
from ocomm.training.driver import Driver
from ocomm.training.resume import Source
from ocomm_tf import engine, mpi_ops
from ocomm_tf.averaging import scaled
from ocomm_tf.errors import of_tensorflow
from ocomm_tf.functions import agree_on
from ocomm_tf.keras.driven import Driven, State, check_unused, refuse_replicas
from ocomm_tf.keras.frontend import KerasFrontend
from ocomm_tf.keras.gpu import GpuFrontend, device_of
from ocomm_tf.keras.masters import LOW_PRECISION
from ocomm_tf.keras_optimizer import (
    SCALES_ALREADY,
    Distributed,
    LossScaleOptimizer,
    check_wrappable,
    not_compiled,
    refuse_keras_2,
    refuse_loss_scaling_outside,
    refuse_overwritten,
    subclass_of,
)
from ocomm_tf.naming import name_of
from ocomm_tf.order import WireVariable, wire_variables

_log = logging.getLogger("ocomm")
#: The documentation of arguments that all compressed optimizers have.
ARGUMENTS = {
    "optimizer": (
        "Any optimizer of Keras that was not used yet, ``keras.optimizers.SGD(lr)`` for instance, or a "
        "LossScaleOptimizer around one. Learning rate (or schedule) and weight decay are read from it at every step, "
        "also in a graph; it does clipping, gradient accumulation and averages of variables; its own step is never "
        "called."
    ),
    "variables": "A model or its variables, which the ranks compare now; None to compare them at the first step.",
    "names": (
        "If ranks of Torch train the same model, the map of variables to its parameters, as in "
        "``ocomm_tf.order.wire_variables``; else None."
    ),
    "process_set": "The ranks that train together.",
    "warm_start": (
        "True: training continues from the m, v and step count of an Adam in a saved model, which "
        "``model.load_weights`` loads after ``build``; only variables without moments in it take dense steps first. "
        "False: the dense steps of a loaded Adam count, and those that are missing come first."
    ),
}

#: The documentation of the argument ``optimizer`` if it is an Adam.
ADAM = (
    "A ``keras.optimizers.Adam`` or ``AdamW`` that was not used yet, or a LossScaleOptimizer around one. Learning "
    "rate (or schedule), betas, epsilon and weight decay are read from it at every step, also in a graph; it does "
    "clipping, gradient accumulation and averages of variables."
)

#: What to do where the state of a run was to be replaced after its first step.
_INSTEAD = (
    "Restore into a new optimizer, before its first step, on all ranks; or call model.load_weights(file) with a saved "
    "model."
)


_SECTIONS = """\
Steps are collective.

Args:
    {{arguments}}

Returns:
{returns}

Raises:
    InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
    MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
    NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
    SettingsError: An option of the algorithm has an impossible value."""
_RETURNS = "An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm"
#: What follows where a plain Adam can go on.
GOES_ON = (
    ", and a plain Adam can continue from it. To continue with 1 bit, compile with a new one, ``build`` it on the "
    "model's variables, and call ``model.load_weights(file)``; errors start at zero"
)


def optimizer_face(core: type[Core], *, goes_on: str = "", **texts: str) -> Callable[[Any], Any]:
    """Returns ``face`` for a function that wraps an optimizer of Keras.

    Args:
        core: The algorithm.
        goes_on: What its docstring says of models that are saved with it.
        texts: The documentation of arguments by name.
    """
    sections = _SECTIONS.format(returns=docstrings.entry(f"{_RETURNS}{goes_on}."))
    return face((core.options_class, Common), sections, core.fixed_options, **{**ARGUMENTS, **texts})


def _warn_of_clipping(optimizer: Any, wrapper: str) -> None:
    """Warns on rank 0 that Keras clips each rank's gradients by themselves, if it clips them one by one."""
    session = sessions.current()
    found = [name for name in ("clipnorm", "clipvalue") if getattr(optimizer, name, None)]
    if found and session.is_initialized and session.require_topology().size > 1 and not session.require_topology().rank:
        _log.warning(
            "%s: %s=%s clips each rank's gradients by themselves, before they are averaged. Use global_clipnorm= "
            "instead, or max_grad_norm= of the 1-bit optimizer: both clip by the norm of the averaged gradient.",
            wrapper,
            found[0],
            getattr(optimizer, found[0]),
        )


def _widened(gradients: Sequence[Any]) -> list[Any]:
    """Returns low-precision gradients in float32, and the others unchanged."""

    def wide(gradient: Any) -> Any:
        if gradient is None or keras.backend.standardize_dtype(gradient.dtype) not in LOW_PRECISION:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(tf.cast(gradient.values, tf.float32), gradient.indices, gradient.dense_shape)
        return keras.ops.cast(gradient, "float32")

    return [wide(gradient) for gradient in gradients]


class Compressed(Driven):
    """Mixin placed before the class of the user's optimizer."""

    _frontend: KerasFrontend | None = None
    _setup: tuple[ProcessSet, Mapping[str, Any] | None, Options, Common]
    #: The variables of the LossScaleOptimizer around it.
    _variables_around: Sequence[Any] = ()

    #: The algorithm, and the driver of its steps.
    ocomm_core: type[Core]
    ocomm_driver: type[Driver] = Driver
    trains_on_devices = True

    #: beta1 and beta2, and epsilon, if the step is Adam's.
    ocomm_moments: tuple[tuple[float, float], float] = (0.0, 0.0), 0.0

    @property
    def ocomm_names(self) -> Mapping[str, Any] | None:
        return self._setup[1]

    def build(self: Any, variables: Any) -> None:
        """Builds the wrapped optimizer; then the ranks agree on what they train. Collective."""
        if self.built:
            return
        wrapper = f"Distributed{self.ocomm_core.kind}"
        refuse_overwritten(variables, "makes the steps of ocomm", "Use DistributedOptimizer.")
        super().build(variables)  # type: ignore[misc]
        self._check_dtypes(wrapper)
        _warn_of_clipping(self, wrapper)
        process_set, names, *chosen = self._setup
        variables = self._trainable_variables
        agreed = agree_on(wrapper, variables, process_set) if names is None else []
        entries = wire_variables(variables, names, agreed)
        device = None
        if keras.backend.backend() == "tensorflow":
            device = device_of(self.ocomm_core.kind, variables, sessions.current(), self.trains_on_devices)
        driver, core = self.ocomm_driver, self.ocomm_core

        def make(session: Session, number: int, frontend: KerasFrontend) -> Driver:
            return driver(session, number, frontend.specs, frontend, core, *chosen)

        frontend = (
            KerasFrontend(self, entries, process_set, make)
            if device is None
            else GpuFrontend(self, entries, process_set, make, device)
        )
        self.__dict__["_frontend"] = frontend  # set without Keras, which would look for variables in it
        frontend.connect(sessions.current())
        with tf.init_scope():  # a graph may be under construction, in which variables have no values
            self._go_on_from_variables(int(self.iterations.numpy()))

    def add_variable_from_reference(
        self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        """Adds a variable like the wrapped optimizer, but float32 for moments and accumulated gradients of
        low-precision variables.
        """
        dtype = keras.backend.standardize_dtype(reference_variable.dtype)
        if name == "average" or dtype not in LOW_PRECISION:
            return super().add_variable_from_reference(reference_variable, name, initializer)  # type: ignore[misc]
        path = name_of(reference_variable).replace("/", "_").replace(":", "_")
        return self.add_variable(reference_variable.shape, initializer, "float32", name=f"{path}_{name}")

    @not_compiled
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Applies gradients like the wrapped optimizer; all ranks make the step together."""
        refuse_loss_scaling_outside(_AgreedLossScale)
        with of_tensorflow():
            return super().apply(_widened(grads), trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self: Any, grads: list[Any]) -> list[Any]:
        """Clips like the wrapped optimizer, but sums: Keras has averaged over ``backward_passes_per_step``. The
        exchange clips by the norm of the average, which ``global_clipnorm`` limits.
        """
        passes = self._setup[3].backward_passes_per_step
        sums = [scaled(gradient, passes) for gradient in grads] if passes > 1 else grads
        return sums if self.global_clipnorm else super()._clip_gradients(sums)  # type: ignore[misc]

    def exclude_from_weight_decay(self: Any, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables like the wrapped optimizer. Raises InvalidRequestError once it is built: the step's weight
        decay is fixed then.
        """
        if self.built:
            raise InvalidRequestError(
                f"exclude_from_weight_decay() comes too late for Distributed{self.ocomm_core.kind}, which is built. "
                "Call it before build(), or before the first step."
            )
        super().exclude_from_weight_decay(var_list, var_names)  # type: ignore[misc]

    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing, because the weight decay is part of the step."""

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        self.ocomm_exchanges += 1
        frontend: KerasFrontend = self._frontend
        count = len(self._trainable_variables)
        given = [self._get_variable_index(v) for v in trainable_variables]
        # A step may move a variable without a gradient: a sync of 0/1 Adam does.
        indices = [*given, *(index for index in range(count) if index not in given)]
        variables = [self._trainable_variables[index] for index in indices]
        if keras.backend.backend() != "tensorflow":
            values = [v.value.detach().float().cpu() for v in variables]
            self.ocomm_follow(int(self.iterations.numpy()))
            results = frontend.step(float(learning_rate), indices, [g.detach().cpu() for g in grads], values)
        else:
            mpi_ops.refuse_xla()
            counts = tf.cast(learning_rate, tf.float32), tf.convert_to_tensor(self.iterations)
            results = frontend.updated(*counts, indices, grads, variables)
            # A step that is refused changes nothing: neither the counts nor the sums of gradients.
            results = engine.held(results, results, [*self._variables, *self._variables_around])
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)  # a value that a low-precision variable can hold

    # The complete state, for elastic jobs

    def ocomm_state(self: Any) -> State:
        """Returns the state that is equal on all ranks: the optimizer's variables, ocomm's own state, masters by
        tensor, and the tensors' step counts.
        """
        frontend: KerasFrontend = self._frontend
        self._export_moments()
        frontend.read(self._trainable_variables)
        variables = super().variables  # type: ignore[misc]
        return [v.numpy() for v in variables], frontend.driver.state(), frontend.masters(), frontend.step_counts()

    def ocomm_load_state(self: Any, state: State) -> None:
        """Loads the result of ``ocomm_state``, after the model's variables have been loaded. Collective after
        ``init``.
        """
        for variable, value in zip(super().variables, state[0], strict=True):  # type: ignore[misc]
            variable.assign(value)
        frontend: KerasFrontend = self._frontend
        self.ocomm_reconnect(keep=False)
        frontend.read(self._trainable_variables, state[2])
        self._restore_moments(state[1], state[3])
        frontend.driver.load_state(state[1])
        self._note_moments(int(self.iterations.numpy()))
        frontend.write(self._trainable_variables)  # between syncs they are set to those of the last sync

    def ocomm_rank_state(self: Any) -> dict[str, Any]:
        """Returns what only this rank has."""
        self._frontend.read(self._trainable_variables)
        return self._frontend.driver.rank_state()

    def ocomm_load_rank_state(self: Any, source: Source) -> dict[str, Any]:
        """Loads rank states after ``ocomm_load_state``, as ``ocomm.training.driver.Driver.load_rank_state`` does.
        Collective.
        """
        frontend: KerasFrontend = self._frontend
        frontend.read(self._trainable_variables)
        done = frontend.driver.load_rank_state(source)
        frontend.write(self._trainable_variables)
        return done

    def _restore_moments(self: Any, saved: Mapping[str, Any], counts: Sequence[int]) -> None:
        """Takes Adam's m and v from the optimizer's variables, each tensor's after as many steps as ``counts`` has,
        before a ``saved`` state without any is loaded.
        """

    # The state as variables of plain Keras, so that a saved model loads without ocomm

    #: The optimizer's ``iterations`` before ``tf.train.Checkpoint`` restored it after the last step; else 0.
    _before_restore = 0

    def ocomm_follow(self: Any, iterations: int) -> None:
        """Called at every step with the optimizer's ``iterations`` before it: goes on from what was written to the
        optimizer's variables since the last one. Raises InvalidRequestError if that cannot be.
        """
        driver = self._frontend.driver
        if iterations < self._before_restore and not driver.is_at_start:
            raise InvalidRequestError(
                f"{driver.name}: restore() of tf.train.Checkpoint went back from iteration {self._before_restore} to "
                f"{iterations}, and the momentum and errors of the 1-bit optimizer, which are not in the checkpoint, "
                f"did not. {_INSTEAD}"
            )
        self.__dict__["_before_restore"] = 0

    def _adopt_moments(self: Any, iterations: int) -> None:
        """Continues from the moments in the wrapped optimizer's variables, if it has made ``iterations``."""

    def _note_moments(self: Any, iterations: int) -> None:
        """Notes that the wrapped optimizer's variables hold what ocomm has read from them or written to them."""

    def _go_on_from_variables(self: Any, iterations: int) -> None:
        self._adopt_moments(iterations)
        self._note_moments(iterations)

    def _export_moments(self: Any) -> None:
        """Writes m and v into the wrapped optimizer's variables."""

    def _prepare_save(self: Any) -> None:
        """Writes into the wrapped optimizer's variables what is to be saved. Raises InvalidRequestError if this rank
        does not have it.
        """
        if self._frontend is not None:
            self._export_moments()

    def _prepare_restore(self: Any) -> None:
        """Called before ``tf.train.Checkpoint`` writes to the wrapped optimizer's variables."""
        self.__dict__["_before_restore"] = max(self._before_restore, int(self.iterations.numpy()))

    @property
    def variables(self: Any) -> list[Any]:
        """The wrapped optimizer's variables; m and v are those from which a plain Adam would continue."""
        if self._frontend is not None and tf.executing_eagerly():
            self._export_moments()
        found: list[Any] = super().variables  # type: ignore[misc]
        return found

    def _trackable_children(self: Any, save_type: str | None = None, **kwargs: Any) -> Any:
        # tf.train.Checkpoint calls it before it saves, and without a type before it restores.
        if tf.executing_eagerly() and self._frontend is not None:
            if save_type is None:
                self._prepare_restore()
            elif save_type == "checkpoint":
                self._prepare_save()
        return super()._trackable_children(save_type or "checkpoint", **kwargs)  # type: ignore[misc]

    def save_own_variables(self: Any, store: Any) -> None:
        """Saves the variables like plain Keras; m and v are those from which a plain Adam would continue."""
        self._prepare_save()
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self: Any, store: Any) -> None:
        """Loads the result of ``save_own_variables``; errors start at zero.

        All ranks load the same, or one rank does before a fit with ``BroadcastGlobalVariablesCallback``.
        """
        if self._frontend is not None:
            try:
                self._export_moments()
            except InvalidRequestError:  # others have written to the variables, which are replaced now
                self._frontend.forget()
        super().load_own_variables(store)  # type: ignore[misc]
        if self._frontend is not None:
            self._frontend.forget()
            self._go_on_from_variables(int(self.iterations.numpy()))


class CompressedAdam(Compressed):
    """``Compressed`` with Adam's moments."""

    #: Whether training continues from the moments of a saved model without dense steps.
    ocomm_warm_start = False
    #: Checksum of m and v in the wrapped optimizer's variables as ocomm last wrote or read them, and its ``iterations``
    #: and the driver's steps then.
    _noted = 0, 0, 0

    @property
    def ocomm_moments(self: Any) -> tuple[tuple[float, float], float]:  # type: ignore[override]
        return (float(self.beta_1), float(self.beta_2)), float(self.epsilon)

    @property
    def _is_partial(self) -> bool:
        """True if ``_export_moments`` cannot write, because each rank has its part of m and v."""
        return False

    def ocomm_follow(self: Any, iterations: int) -> None:
        _, noted_at, noted_steps = self._noted
        made = self._frontend.driver.steps - noted_steps
        # Whoever asks for the variables gets m and v of that moment; if a step was made since then, nobody has asked.
        if not made or iterations != noted_at + made:  # reading m and v takes time
            self._follow_moments(iterations)

    def _follow_moments(self: Any, iterations: int) -> None:
        """Continues from moments that others have written to the wrapped optimizer's variables, as
        ``tf.train.Checkpoint`` does. Raises InvalidRequestError after the first step.
        """
        driver = self._frontend.driver
        known, noted_at, noted_steps = self._noted
        made = driver.steps - noted_steps
        # Whoever goes back to a step whose m and v are still in the variables does not change the checksum. But a
        # schedule may set ``iterations`` to 0.
        is_back = 0 < iterations == noted_at if made else self._is_partial and iterations < noted_at
        if not is_back and self._sum_of_moments() == known:
            self.__dict__["_noted"] = known, iterations - made, noted_steps  # a script has set ``iterations``
            return
        if not driver.is_at_start:
            raise InvalidRequestError(
                f"{driver.name}: after step {driver.steps} something has written to Adam's m and v, as restore() of "
                f"tf.train.Checkpoint and set_state_tree() do, and the 1-bit optimizer keeps them elsewhere. {_INSTEAD}"
            )
        self._frontend.forget()
        self._go_on_from_variables(iterations)

    def _sum_of_moments(self: Any) -> int:
        found = 0
        for variable in (*self._momentums, *self._velocities):
            found = zlib.crc32(np.ascontiguousarray(variable.numpy()).data, found)
        return found

    def _note_moments(self: Any, iterations: int) -> None:
        self.__dict__["_noted"] = self._sum_of_moments(), iterations, self._frontend.driver.steps

    def _prepare_restore(self: Any) -> None:
        self._export_moments()

    def _export_moments(self: Any) -> None:
        frontend: KerasFrontend = self._frontend
        iterations = int(self.iterations.numpy())
        self._follow_moments(iterations)
        if self._noted[1:] != (iterations, frontend.driver.steps):  # compression would not give back the same bits
            self._write_moments(iterations)

    def _write_moments(self: Any, iterations: int) -> None:
        """Writes m and v into the wrapped optimizer's variables, after it has made ``iterations``."""
        frontend: KerasFrontend = self._frontend
        to_host = frontend.driver.core.param_memory.host
        for number, entry in enumerate(frontend.entries):
            saved, warming = frontend.driver.saved_moments(number), frontend.moments(number)
            if saved is not None and "exp_avg" in saved:  # not where ranks have parts
                momentum, variance = saved["exp_avg"], saved["exp_avg_sq"]
            elif warming is not None:
                momentum, variance = warming[:2]
            else:
                continue
            self._momentums[entry.index].assign(entry.from_wire(to_host(momentum)))
            self._velocities[entry.index].assign(entry.from_wire(to_host(variance)))
        self._note_moments(iterations)

    def _restore_moments(self: Any, saved: Mapping[str, Any], counts: Sequence[int]) -> None:
        frontend: KerasFrontend = self._frontend
        in_parts = saved.get("core", {}).get("sharded", {})
        for number, (entry, count) in enumerate(zip(frontend.entries, counts, strict=True)):
            if not count or entry.spec.name in in_parts:
                frontend.release(number)
            else:
                momentum, variance = self._saved(entry)
                frontend.adopt(number, momentum, variance, count)

    def _adopt_moments(self: Any, iterations: int) -> None:
        if not iterations:
            return
        frontend: KerasFrontend = self._frontend
        self._restore_moments({}, [iterations] * len(frontend.entries))
        driver: Any = frontend.driver
        if not self.ocomm_warm_start:
            driver.continue_plain()
            return
        betas2 = {}
        for number, entry in enumerate(frontend.entries):
            if self._velocities[entry.index].numpy().any():
                betas2[number] = self.ocomm_moments[0][1]
            else:
                frontend.release(number)
        driver.start_warm(betas2)

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        if self.ocomm_warm_start and self._frontend.driver.warm_start is None:
            with tf.init_scope():
                self._follow_moments(int(self.iterations.numpy()))
        if self.ocomm_warm_start and self._frontend.driver.warm_start is None:
            raise InvalidRequestError(
                "warm_start=True, but no Adam's moments were loaded. After compile and optimizer.build("
                "model.trainable_variables), call model.load_weights(FILE) with a model that was saved with its "
                "optimizer; or leave warm_start out."
            )
        super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _saved(self: Any, entry: WireVariable) -> tuple[Floats, Floats]:
        arrays = (self._momentums[entry.index].numpy(), self._velocities[entry.index].numpy())
        momentum, variance = (entry.to_wire(array).copy() for array in arrays)
        return momentum, variance


class _AgreedLossScale(Distributed):
    """Mixin placed before ``LossScaleOptimizer``: the ranks agree whether all gradients are finite."""

    @property
    def ocomm_process_set(self: Any) -> ProcessSet:
        return self.inner_optimizer.ocomm_process_set

    @property
    def ocomm_names(self: Any) -> Mapping[str, Any] | None:
        return self.inner_optimizer.ocomm_names

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        """Returns whether the gradients are finite on every rank. Collective."""
        finite = tf.cast(super().check_finite(grads), tf.int32)  # type: ignore[misc]
        name = mpi_ops.name_in_graph(f"{self._agreement}.finite")
        return tf.cast(mpi_ops.allreduce(finite, op=Min, name=name, process_set=self.ocomm_process_set), tf.bool)

    @not_compiled
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Applies gradients like the wrapped optimizer. They are divided in float32, because many quotients are too
        small for float16.
        """
        refuse_loss_scaling_outside(Distributed, SCALES_ALREADY)
        self.ocomm_exchanges += 1
        return super().apply(_widened(grads), trainable_variables)  # type: ignore[misc]

    def ocomm_begin_alike(self: Any, root_rank: int) -> None:
        """Makes the ranks' states equal, as the inner optimizer does."""
        self.inner_optimizer.ocomm_begin_alike(root_rank)

    def gather_moments(self: Any) -> None:
        """Does what the inner optimizer's ``gather_moments`` does."""
        self.inner_optimizer.gather_moments()

    def finish(self: Any) -> None:
        """Does what the inner optimizer's ``finish`` does."""
        self.inner_optimizer.finish()

    def compression_report(self: Any) -> dict[str, Any]:
        """Returns the report of the inner optimizer."""
        return self.inner_optimizer.compression_report()


def wrap(
    mixin: type[Compressed],
    optimizer: Any,
    variables: Any,
    names: Mapping[str, Any] | None,
    process_set: ProcessSet,
    arguments: Mapping[str, Any],
    warm_start: bool = False,
) -> Any:
    """Returns ``optimizer`` as an object of ``mixin`` and its class, inside its LossScaleOptimizer if there is one.

    ``arguments`` are the options by name; ``warm_start`` needs a ``CompressedAdam``.
    """
    core = mixin.ocomm_core
    arguments = {**arguments, **core.fixed_options}
    options, common = core.options_class.of(arguments), Common.of(arguments)
    scaled = optimizer if isinstance(optimizer, LossScaleOptimizer) else None
    inner = scaled.inner_optimizer if scaled is not None else optimizer
    check_wrappable(inner)
    refuse_replicas(inner, f"Distributed{core.kind}")
    check_unused(inner, inner.built or (scaled is not None and scaled.built))
    if getattr(inner, "amsgrad", False):
        raise InvalidRequestError("amsgrad=True is not supported; leave it out.")
    if common.backward_passes_per_step > 1:
        if inner.gradient_accumulation_steps:
            raise InvalidRequestError(
                f"backward_passes_per_step={common.backward_passes_per_step}, and the {type(inner).__name__} has "
                f"gradient_accumulation_steps={inner.gradient_accumulation_steps}; set one of the two."
            )
        inner.gradient_accumulation_steps = int(common.backward_passes_per_step)
    if limit := inner.global_clipnorm:
        if common.max_grad_norm is not None:
            raise InvalidRequestError(
                f"max_grad_norm={common.max_grad_norm}, and the {type(inner).__name__} has global_clipnorm={limit}; "
                "set one of the two."
            )
        common = replace(common, max_grad_norm=float(limit))
    wrapped = subclass_of(mixin, inner)
    wrapped.__dict__["_setup"] = (process_set, names, options, common)
    wrapped.__dict__["ocomm_warm_start"] = bool(warm_start)
    if scaled is None and keras.config.dtype_policy().name == "mixed_float16":
        scaled = LossScaleOptimizer(wrapped, name="loss_scale_optimizer")
    if scaled is not None:
        scaled.inner_optimizer = wrapped
        wrapped.__dict__["_variables_around"] = scaled._variables  # which its build adds to
        wrapped = subclass_of(_AgreedLossScale, scaled)
        session = sessions.current()
        wrapped.__dict__["_agreement"] = session.automatic_name("loss_scale", process_set.number(session))
    if variables is not None:
        wrapped.build(getattr(variables, "trainable_variables", variables))
    return wrapped


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer inside a LossScaleOptimizer; any other optimizer itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def check_own_step(optimizer: Any, wrapper: str, *known: type) -> None:
    """Raises InvalidRequestError if ``optimizer`` has another ``update_step`` than the Keras optimizers ``known``."""
    if type(optimizer).update_step not in [kind.update_step for kind in known]:  # type: ignore[attr-defined]
        raise InvalidRequestError(
            f"{wrapper} makes steps in the place of the optimizer that it wraps, and this {type(optimizer).__name__} "
            "has an update_step() of its own, which would not be made; use DistributedOptimizer, which makes it."
        )


def require_adam(optimizer: Any, wrapper: str) -> None:
    """Raises InvalidRequestError unless ``optimizer`` is a ``keras.optimizers.Adam`` or AdamW with Keras' own step."""
    inner = inner_of(optimizer)
    refuse_keras_2(inner)
    if not isinstance(inner, keras.optimizers.Adam):
        refuse_other(type(inner).__name__, isinstance(inner, keras.optimizers.SGD), wrapper, "keras.optimizers")
    check_own_step(inner, wrapper, keras.optimizers.Adam)
