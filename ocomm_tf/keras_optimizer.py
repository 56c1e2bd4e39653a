"""DistributedOptimizer for Keras: the user's optimizer, on gradients averaged over the ranks.

With Keras 3 every update of a variable goes through ``update_step``, whatever called it, which refuses gradients that
have not been averaged. So a path through Keras that this module does not know cannot silently train the ranks apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from ocomm import session as sessions
from ocomm.api import Average
from ocomm.docstrings import documented
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.operations import ProcessSet, global_process_set
from ocomm.training import report
from ocomm.training.resume import Source
from ocomm_tf.averaging import ARGUMENTS, Averaging, groups_of, scaled, variables_of
from ocomm_tf.compression import Compression, Compressor
from ocomm_tf.errors import public
from ocomm_tf.keras_version import is_of_keras_2
from ocomm_tf.low_bit import CodedGradients
from ocomm_tf.naming import name_of

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
#: Gives each variable to one of several optimizers; not in older versions of Keras 3.
MultiOptimizer = getattr(keras.optimizers, "MultiOptimizer", ())
_EXCLUDE = "exclude_from_weight_decay"


def not_compiled(method: Any) -> Any:
    """Returns ``method`` so that torch.compile does not compile it, if Keras' backend is Torch."""
    if keras.backend.backend() != "torch":
        return method
    import torch

    return torch.compiler.disable(method)


class Distributed:
    """What all optimizers of this package share. ``ocomm_exchanges`` counts the steps that were exchanged; in a graph,
    those that were traced.
    """

    ocomm_exchanges = 0
    #: True if the ranks' variables differ after most steps.
    steps_alone = False

    @property
    def ocomm_process_set(self) -> ProcessSet:
        """The ranks that train together."""
        raise NotImplementedError

    @property
    def ocomm_names(self) -> Mapping[str, Any] | None:
        """The map of variables to Torch's parameters, if ranks of both frameworks train one model."""
        return None

    def ocomm_begin_alike(self, root_rank: int) -> None:
        """Loads the state of ``root_rank``, a rank of the whole job, if the ranks are not at the same step. Collective.

        Called when the model's variables are equal. Without it the first step could not be made.
        """

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns a new optimizer of the wrapped class, which is not distributed, as from a saved model: wrap it."""
        return cls.__bases__[1].from_config(config, custom_objects)  # type: ignore[attr-defined]


class _AveragesGradients(Distributed):
    """Mixin placed before the class of the user's optimizer."""

    _averaging: Averaging
    #: Number of passes over which gradients are summed and Keras averages.
    _summed_passes = 1

    @property
    def ocomm_process_set(self) -> ProcessSet:
        return self._averaging.process_set

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on this rank: it is not averaged."""
        self._averaging.keep_local(var)

    @public
    def _averaged(self: Any, grads: list[Any], variables: Sequence[Any], *options: Any) -> list[Any]:
        """Returns the averages of gradients. Collective. ``options`` are further arguments of ``Averaging``.

        Raises InvalidRequestError where the wrapped optimizer would clip averages by a norm that is this rank's own.
        """
        optimizer = getattr(self, "inner_optimizer", self)
        given = [variable for gradient, variable in zip(grads, variables, strict=True) if gradient is not None]
        local = [variable for variable in given if self._averaging.is_local(variable)]
        limit = getattr(optimizer, "global_clipnorm", None)
        if limit and local and len(local) < len(given) and not self._averaging.is_alone:
            raise InvalidRequestError(
                f"{type(optimizer).__name__}: global_clipnorm={limit} clips averages by a norm that includes the "
                f"gradient of the local variable '{name_of(local[0])}', which differs between ranks, so variables that "
                "are not local would differ, too. Use clipnorm, which clips each gradient by its own norm, or give "
                "local layers an optimizer of their own."
            )
        self.ocomm_exchanges += 1
        return self._averaging(grads, variables, *options)


class _Averaged(_AveragesGradients):
    """Mixin of ``DistributedOptimizer``."""

    _is_averaged = False

    @not_compiled
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Applies gradients like the wrapped optimizer, after averaging them."""
        refuse_loss_scaling_outside()
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        self._is_averaged = False  # a call that raised may have left it
        if self.gradient_accumulation_steps:
            if not self._averaging.is_alone:
                refuse_overwritten(
                    variables,
                    f"accumulates gradients over {self.gradient_accumulation_steps} passes",
                    "Leave gradient_accumulation_steps and backward_passes_per_step out.",
                )
            # _clip_gradients averages them, once they are summed.
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        self._is_averaged = True
        try:
            return super().apply(self._averaged(grads, variables, self, True), trainable_variables)  # type: ignore[misc]
        finally:
            self._is_averaged = False

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        self.__dict__["_stepped"] = list(trainable_variables)  # set without Keras, which would look for variables in it
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    # Keras calls it on accumulated gradients, before it clips them and applies the weight decay.
    def _clip_gradients(self: Any, grads: list[Any]) -> list[Any]:
        if self.gradient_accumulation_steps and not self._is_averaged:
            summed = [scaled(gradient, self._summed_passes) for gradient in grads]
            grads = self._averaged(summed, self._stepped, self, True)
            self._is_averaged = True
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        if not self._is_averaged and not self._averaging.is_alone:
            raise InvalidRequestError(
                f"{type(self).__name__}: variables are about to be updated with gradients that were not averaged over "
                f"the ranks. This version of Keras ({keras.__version__}) takes a way that ocomm does not know; average "
                "them with hvd.DistributedGradientTape instead."
            )
        try:
            return super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        finally:
            if self.gradient_accumulation_steps:
                self._is_averaged = False


class _AveragedLossScale(_AveragesGradients):
    """Mixin before ``LossScaleOptimizer``: averages first, so that all ranks see the same infinities."""

    @not_compiled
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Applies averages like the wrapped optimizer: an inf on one rank is one on all, which skip the step
        together.
        """
        refuse_loss_scaling_outside(Distributed, SCALES_ALREADY)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        averages = self._averaged(list(grads), variables, self)
        summed = [None if average is None else scaled(average, self._summed_passes) for average in averages]
        return super().apply(summed, trainable_variables)  # type: ignore[misc]


class _AveragedInKeras2(_AveragesGradients):
    """Mixin of ``DistributedOptimizer`` for Keras 2, which adds up the gradients of several devices in a method of its
    own: before they are clipped, and before a LossScaleOptimizer around the optimizer asks whether they are finite.
    """

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        """Averages gradients over the ranks."""
        return super().aggregate_gradients(self._average(grads_and_vars))  # type: ignore[misc]

    # The same of tf.keras.optimizers.legacy.
    def _aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return super()._aggregate_gradients(self._average(grads_and_vars))  # type: ignore[misc]

    def _average(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        return list(zip(self._averaged([gradient for gradient, _ in pairs], variables), variables, strict=True))


class _KeepsErrors(Distributed):
    """Mixin placed before ``_Averaged`` or ``_AveragedLossScale`` if gradients travel in codes: the errors are part of
    what training continues from.
    """

    _averaging: Averaging
    _coded: CodedGradients

    def build(self: Any, variables: Any) -> None:
        """Builds the wrapped optimizer; then the ranks agree on what they average. Collective."""
        if self.built:
            return
        super().build(variables)  # type: ignore[misc]
        self.ocomm_begin_codes()

    def ocomm_begin_codes(self: Any) -> None:
        """Agrees on what is averaged, once the wrapped optimizer is built. Collective."""
        shared = [v for v in self._trainable_variables if not self._averaging.is_local(v)]
        self.__dict__["_coded"] = self._averaging.coded(shared)  # set without Keras, which would look for variables

    @report.documented
    def compression_report(self: Any) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank, compared with dense averages, and the stage of the run.

        Bytes, and steps by kind, are counted from the start of this process. Not collective after ``build``.

        Returns:
            {entries}
        """
        return self._coded.driver.report()

    def ocomm_state(self: Any) -> tuple[list[np.ndarray], dict[str, Any], dict[int, Floats]]:
        """Returns the state that is equal on all ranks: the optimizer's variables, and ocomm's own state."""
        return [v.numpy() for v in self.variables], self._coded.driver.state(), {}

    def ocomm_load_state(self: Any, state: tuple[list[np.ndarray], dict[str, Any], dict[int, Floats]]) -> None:
        """Loads the result of ``ocomm_state``. Collective after ``init``."""
        for variable, value in zip(self.variables, state[0], strict=True):
            variable.assign(value)
        self.ocomm_reconnect(keep=False)
        self._coded.driver.load_state(state[1])

    def ocomm_rank_state(self: Any) -> dict[str, Any]:
        """Returns what only this rank has: the errors."""
        return self._coded.driver.rank_state()

    def ocomm_load_rank_state(self: Any, source: Source) -> dict[str, Any]:
        """Loads rank states after ``ocomm_load_state``, as ``ocomm.training.driver.Driver.load_rank_state`` does.
        Collective.
        """
        return self._coded.driver.load_rank_state(source)

    def ocomm_reconnect(self: Any, keep: bool = True) -> None:
        """Joins the current ranks after ``shutdown`` and ``init``. Collective. ``keep``: errors are kept."""
        self._coded.reconnect(sessions.current(), keep)


SCALES_ALREADY = "Leave it out: the distributed optimizer scales the loss already."


def refuse_loss_scaling_outside(agreeing: Any = (), instead: str = "") -> None:
    """Raises InvalidRequestError for a LossScaleOptimizer around a distributed optimizer, except for ``agreeing`` ones:
    it would ask this rank alone whether gradients are finite. Called by ``apply``. ``instead`` says what to do.
    """
    # A Keras optimizer is not told what is around it: only who calls ``apply`` shows it.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "tensorflow.")):
        frame = frame.f_back  # of the decorators of ``apply``
    caller = frame.f_locals.get("self")
    if (
        isinstance(caller, LossScaleOptimizer)
        and not isinstance(caller, agreeing)
        and sessions.current().require_topology().size > 1
    ):
        instead = instead or (
            "Wrap it the other way: DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)); or set "
            "keras.config.set_dtype_policy('mixed_float16') before you call DistributedOptimizer."
        )
        raise InvalidRequestError(
            "a LossScaleOptimizer around a distributed optimizer lets every rank decide by itself whether to step. "
            + instead
        )


def refuse_overwritten(variables: Sequence[Any], why: str, instead: str) -> None:
    """Raises InvalidRequestError for a variable that Keras overwrites with its gradient, such as a scale of float8."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise InvalidRequestError(
                f"Keras overwrites variable '{name_of(variable)}' with its gradient, as in float8, where the optimizer "
                f"does not see it. This one {why}, so each rank would have a value of its own. {instead}"
            )


def subclass_of(mixin: type, optimizer: Any) -> Any:
    """Returns ``optimizer`` as an object of a subclass with the same name, which shares its state."""
    base = type(optimizer)
    # Saved under the name by which plain Keras finds the base class.
    module = "keras.optimizers" if getattr(keras.optimizers, base.__name__, None) is base else base.__module__
    wrapper = type(base.__name__, (mixin, base), {"__module__": module, "__doc__": base.__doc__})
    wrapped: Any = object.__new__(wrapper)
    wrapped.__dict__.update(vars(optimizer))
    wrapped.__dict__.pop(_EXCLUDE, None)  # that of a wrapper before this one
    if hasattr(optimizer, _EXCLUDE):  # not in Keras 2
        optimizer.__dict__[_EXCLUDE] = partial(_exclude_from_each, [weakref.ref(optimizer), weakref.ref(wrapped)])
    return wrapped


def _exclude_from_each(optimizers: Sequence[weakref.ref[Any]], *variables: Any, **named: Any) -> None:
    """Calls ``exclude_from_weight_decay`` of the class of each optimizer. A wrapper has no part of what it changes, so
    a call for the wrapped optimizer would not count.
    """
    for optimizer in filter(None, (reference() for reference in optimizers)):
        getattr(type(optimizer), _EXCLUDE)(optimizer, *variables, **named)


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which a Keras optimizer sums the gradients of several batches, each rank its own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_accumulated_gradients", None) or []


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns the optimizers that make the steps of a MultiOptimizer, or of a wrapper of Keras 2 that is no
    LossScaleOptimizer, such as ExponentialMovingAverage of tf-models-official; none for another optimizer.
    """
    if isinstance(optimizer, MultiOptimizer):
        return list(optimizer.optimizers)
    is_wrapper = is_of_keras_2(optimizer) and hasattr(optimizer, "_optimizer")
    return [optimizer._optimizer] if is_wrapper and not hasattr(optimizer, "inner_optimizer") else []


def refuse_keras_2(thing: Any) -> None:
    """Raises InvalidRequestError for an optimizer of Keras 2."""
    if is_of_keras_2(thing):
        raise InvalidRequestError(
            f"this {type(thing).__name__} is of Keras 2 (tf_keras, which TF_USE_LEGACY_KERAS=1 makes tf.keras), where "
            "ocomm_tf averages gradients and no more: DistributedOptimizer and DistributedGradientTape. For the others "
            "unset TF_USE_LEGACY_KERAS, and take models and optimizers of keras."
        )


def check_wrappable(optimizer: Any) -> None:
    """Raises InvalidRequestError if it is no Keras optimizer, or wrapped already, or if Keras has another backend."""
    if keras.backend.backend() not in ("tensorflow", "torch"):
        raise InvalidRequestError(
            f"ocomm_tf trains on Keras' TensorFlow and Torch backends, not on '{keras.backend.backend()}'; set "
            "KERAS_BACKEND=tensorflow or torch before keras is imported."
        )
    refuse_keras_2(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidRequestError(f"expected an optimizer of Keras or of tf.compat.v1.train, got {optimizer!r}.")
    _refuse_distributed(optimizer)
    if isinstance(optimizer, MultiOptimizer):
        raise InvalidRequestError(
            f"this {type(optimizer).__name__} lets other optimizers make its steps: wrap each of them, as in "
            "MultiOptimizer(OptimizerMap(hvd.DistributedOptimizer(one), {pattern: hvd.DistributedOptimizer(other)}))."
        )


def _refuse_distributed(optimizer: Any) -> None:
    if isinstance(optimizer, Distributed) or isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
        raise InvalidRequestError(f"this {type(optimizer).__name__} is distributed already; wrap it once.")


@documented({**ARGUMENTS, "optimizer": "A Keras optimizer."})
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer step on gradients that are averaged over the ranks of ``process_set``.

    Gradients are averaged before they are clipped, and after Keras has accumulated them if
    ``gradient_accumulation_steps`` is set. Steps are collective, and so is this call for an optimizer that is built if
    ``compression`` keeps errors.

    An optimizer may be of Keras 2 (tf_keras), too, also of ``tf.keras.optimizers.legacy``: without codes and passes,
    and inside a LossScaleOptimizer.

    Args:
        {arguments}

    Returns:
        An optimizer of a subclass with the same name, which shares the optimizer's state; models saved with it load
        without ocomm. With Keras 3's dtype policy ``mixed_float16`` it is a LossScaleOptimizer: all ranks skip a step
        together, for which gradients are averaged in every pass.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError).
        MismatchError: At the first step: the ranks train different variables.
    """
    return PartialDistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set, None,
        scale_local_gradients,
    )  # fmt: skip


def _wrap(
    optimizer: Any, averaging: Averaging, backward_passes_per_step: int, average_aggregated_gradients: bool
) -> Any:
    """Returns ``optimizer`` as an object that averages its gradients by ``averaging``."""
    if is_of_keras_2(optimizer):
        return _wrap_in_keras_2(optimizer, averaging, backward_passes_per_step)
    check_wrappable(optimizer)
    if backward_passes_per_step <= 0:
        raise InvalidRequestError("backward_passes_per_step must be > 0")
    if backward_passes_per_step > 1:
        accumulating = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
        if accumulating.gradient_accumulation_steps or accumulating.built:
            raise InvalidRequestError(
                "backward_passes_per_step needs an optimizer that is not built and has no gradient_accumulation_steps; "
                "set one of the two, before the optimizer is used."
            )
        accumulating.gradient_accumulation_steps = backward_passes_per_step
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, LossScaleOptimizer):
        optimizer = LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    mixin: type = _AveragedLossScale if isinstance(optimizer, LossScaleOptimizer) else _Averaged
    keeps_errors = averaging.codes is not None and averaging.process_set.included()
    if keeps_errors:
        mixin = type(mixin.__name__, (_KeepsErrors, mixin), {})
    wrapped = subclass_of(mixin, optimizer)
    wrapped.__dict__["_averaging"] = averaging
    wrapped.__dict__["_summed_passes"] = 1 if average_aggregated_gradients else backward_passes_per_step
    if keeps_errors and wrapped.built:  # as from a saved model
        wrapped.ocomm_begin_codes()
    return wrapped


def _wrap_in_keras_2(optimizer: Any, averaging: Averaging, backward_passes_per_step: int) -> Any:
    for what, is_given, instead in (
        ("codes (int8, int4)", averaging.codes is not None, "Take Compression.bf16 or fp16"),
        ("backward_passes_per_step", backward_passes_per_step != 1, "Take larger batches"),
    ):
        if is_given:
            raise InvalidRequestError(
                f"this {type(optimizer).__name__} is of Keras 2, for which there are no {what}. {instead}, or unset "
                "TF_USE_LEGACY_KERAS and take the optimizer from keras."
            )
    _refuse_distributed(optimizer)
    scales = hasattr(optimizer, "inner_optimizer")
    if scales or optimizers_inside(optimizer):
        why = "so that all ranks skip a step together" if scales else "because the optimizer inside makes its steps"
        raise InvalidRequestError(
            f"this {type(optimizer).__name__} is of Keras 2: wrap it the other way, {type(optimizer).__name__}("
            f"hvd.DistributedOptimizer(optimizer)), {why}."
        )
    wrapped = subclass_of(_AveragedInKeras2, optimizer)
    wrapped.__dict__["_averaging"] = averaging
    return wrapped


@documented({**ARGUMENTS, "optimizer": "A Keras optimizer."})
def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer step on gradients that are averaged over the ranks of ``process_set``, but those of
    ``local_layers``, which stay on their rank. Steps are collective.

    Args:
        {arguments}

    Returns:
        An optimizer, as ``DistributedOptimizer`` returns it.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError).
        MismatchError: At the first step: the ranks train different variables.
    """
    averaging = Averaging(
        name or "DistributedOptimizer",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups_of(groups, num_groups),
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of(local_layers):
        averaging.keep_local(variable)
    return _wrap(optimizer, averaging, backward_passes_per_step, average_aggregated_gradients)
