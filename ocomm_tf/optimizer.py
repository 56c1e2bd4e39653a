"""DistributedGradientTape and DistributedOptimizer: gradients averaged over the ranks while backward goes on.

An optimizer that was never wrapped trains each rank by itself. Our callbacks refuse it before the first batch. Without
them, and in a loop with a plain tape, a warning comes only at the end of the process, and only if the fitted model or
the loop's optimizer is still in memory: one that was local to a function may be gone by then.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ocomm import session as sessions
from ocomm.api import Average
from ocomm.bootstrap import has_raised
from ocomm.docstrings import documented
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm_tf import keras_optimizer, mpi_ops
from ocomm_tf.averaging import ARGUMENTS, Averaging, groups_of, scaled, variables_of
from ocomm_tf.compression import Compression, Compressor
from ocomm_tf.errors import public

_log = logging.getLogger("ocomm")


class _DistributedGradientTape(tf.GradientTape):
    """The class of the result of ``DistributedGradientTape``.

    It has the attributes of the tape that it wraps, because both have one record, to which either may add.
    """

    __slots__ = ("_averaging",)

    def __init__(self, tape: tf.GradientTape, averaging: Averaging) -> None:
        object.__setattr__(self, "__dict__", vars(tape))
        self._averaging = averaging

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of ``source`` on this rank: it is not averaged."""
        self._averaging.keep_local(source)

    @public
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """Returns the gradients of ``tf.GradientTape.gradient``, averaged over the ranks; ``use_generic_names`` is
        ignored.
        """
        gradients = super().gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        averaged = self._averaging(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, averaged, expand_composites=False)

    @public
    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns the averages of ``tf.GradientTape.jacobian``; needs ``experimental_use_pfor=False``."""
        self._refuse_pfor("jacobian", experimental_use_pfor)
        return super().jacobian(target, sources, unconnected_gradients, parallel_iterations, experimental_use_pfor)

    @public
    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns the averages of ``tf.GradientTape.batch_jacobian``; needs ``experimental_use_pfor=False``."""
        self._refuse_pfor("batch_jacobian", experimental_use_pfor)
        return super().batch_jacobian(target, source, unconnected_gradients, parallel_iterations, experimental_use_pfor)

    def _refuse_pfor(self, method: str, is_used: bool) -> None:
        if is_used and not self._averaging.is_alone:
            raise InvalidRequestError(
                f"{method}() of a DistributedGradientTape would average in a vectorized loop, where collectives cannot "
                f"be. Pass experimental_use_pfor=False, with a persistent tape; or call {method}() of the plain "
                "tf.GradientTape, and hvd.allreduce its result."
            )

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns ``gradient`` as pairs (source, gradient): those of registered local sources, and the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(sources, gradients, strict=True):
            (local if self._averaging.is_local(source) else shared).append((source, gradient))
        return local, shared


@public
@documented(ARGUMENTS)
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes ``gradtape.gradient()`` average over the ranks of ``process_set``.

    Inside ``tf.function`` each exchange starts when its gradient is ready. ``gradient()`` is collective.

    Args:
        {arguments}
        scale_local_gradients: Whether a gradient that ``register_local_source(variable)`` keeps on this rank is divided
            by the number of ranks.

    Returns:
        A tape with the records of ``gradtape``.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError).
        MismatchError: In ``gradient()``: the ranks take gradients of different variables.
    """
    averaging = Averaging(
        "DistributedGradientTape",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups_of(groups, num_groups),
        process_set,
        scale_local_gradients,
    )
    return _DistributedGradientTape(gradtape, averaging)


@public
@documented(ARGUMENTS)
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes ``gradtape.gradient()`` average over the ranks of ``process_set``, except for what ``local_layers`` have.

    Inside ``tf.function`` each exchange starts when its gradient is ready. ``gradient()`` is collective.

    Args:
        {arguments}

    Returns:
        A tape with the records of ``gradtape``.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError).
        MismatchError: In ``gradient()``: the ranks take gradients of different variables.
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


class _Passes:
    """Sums gradients over several runs of a graph of ``tf.compat.v1``, and averages and applies them in the last one.

    Sums and the number of runs are local variables of the graph, as in Horovod.

    Args:
        count: The number of runs in which gradients are summed.
        divisor: Divides the averages over the ranks.
        averaging: Averages over the ranks.
    """

    def __init__(self, count: int, divisor: int, averaging: Averaging) -> None:
        self._count, self._divisor, self._averaging = count, divisor, averaging
        self._is_last: Any = None

    @public
    def average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the averages of the sums in the last run, ``gradients`` in the others; None stays None.

        Raises:
            InvalidRequestError: Outside of a graph of ``tf.compat.v1``, or for ``tf.IndexedSlices`` that are not made
                dense.
        """
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            raise InvalidRequestError(
                "backward_passes_per_step of an optimizer of tf.compat.v1 works in graphs of tf.compat.v1; use a Keras "
                "optimizer in eager mode and in tf.function."
            )
        given = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if not self._averaging.makes_dense and any(isinstance(gradients[k], tf.IndexedSlices) for k in given):
            raise InvalidRequestError("backward_passes_per_step needs sparse_as_dense=True for tf.IndexedSlices.")
        chosen = [variables[k] for k in given]
        own = [tf.convert_to_tensor(gradients[k]) for k in given]
        self._is_last = self._count_run()
        sums, stored = self._add(own, chosen)
        with tf.control_dependencies(stored):
            averaged = tf.cond(
                self._is_last,
                lambda: [scaled(average, 1.0 / self._divisor) for average in self._averaging(sums, chosen)],
                lambda: own,
            )
        result: list[Any] = [None] * len(gradients)
        # tf.cond takes one tensor out of its list.
        for k, average in zip(given, averaged if isinstance(averaged, (list, tuple)) else [averaged], strict=True):
            result[k] = average
        return result

    def _count_run(self) -> Any:
        """Counts a run. Returns whether it is the last one of a step, a tensor."""
        runs = _local(tf.zeros((), tf.int32))
        with tf.control_dependencies([runs.assign((runs + 1) % self._count, read_value=False)]):
            return tf.equal(runs.read_value(), 0)

    def _add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the sums with this run's gradients, and operations that keep them, or zeros after the last run."""
        kept = [_local(tf.zeros(v.shape, g.dtype)) for v, g in zip(variables, gradients, strict=True)]
        sums = [before + gradient for before, gradient in zip(kept, gradients, strict=True)]
        stored = [
            place.assign(tf.where(self._is_last, tf.zeros_like(total), total), read_value=False)
            for place, total in zip(kept, sums, strict=True)
        ]
        return sums, stored

    @public
    def apply(self, apply: Callable[[], Any], gradients: Sequence[Any], global_step: Any, name: str | None) -> Any:
        """Adds ``apply()`` to the last run, and one to ``global_step`` in each run. Returns the operation.

        Raises:
            InvalidRequestError: ``average`` was not called.
        """
        if self._is_last is None:
            raise InvalidRequestError("backward_passes_per_step needs compute_gradients() of this optimizer.")

        def applied() -> Any:
            with tf.control_dependencies([apply()]):
                return tf.constant(True)

        with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
            over = tf.cond(self._is_last, applied, lambda: tf.constant(False))
        with tf.control_dependencies([over]):
            if global_step is None:
                return tf.no_op(name=name)
            return global_step.assign_add(1, name=name, read_value=False)


def _local(value: Any) -> Any:
    """Returns a variable that starts as ``value`` and belongs to this process."""
    return tf.compat.v1.Variable(
        value, trainable=False, collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES], use_resource=True
    )


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Mixin placed before the class of a ``tf.compat.v1`` optimizer."""

    _averaging: Averaging
    _passes: _Passes | None

    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Returns the gradients of the wrapped optimizer, averaged over the ranks."""
        pairs = list(super().compute_gradients(*arguments, **options))
        average = self._averaging if self._passes is None else self._passes.average
        averaged = average([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return [(gradient, variable) for gradient, (_, variable) in zip(averaged, pairs, strict=True)]

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None, **options: Any
    ) -> Any:
        """Applies gradients of ``compute_gradients`` like the wrapped optimizer, which also gets ``options``."""
        pairs, apply = list(grads_and_vars), super().apply_gradients
        if self._passes is None:
            return apply(pairs, global_step=global_step, name=name, **options)
        gradients = [gradient for gradient, _ in pairs]
        return self._passes.apply(lambda: apply(pairs, **options), gradients, global_step, name)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on this rank: it is not averaged."""
        self._averaging.keep_local(var)


@documented(ARGUMENTS)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes ``optimizer`` step on gradients that are averaged over the ranks of ``process_set``. Steps are collective.

    Args:
        optimizer: A Keras optimizer, or one of ``tf.compat.v1.train``.
        {arguments}

    Returns:
        An optimizer of a subclass with the same name, which shares the optimizer's state.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError).
        MismatchError: At the first step: the ranks train different variables.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return keras_optimizer.DistributedOptimizer(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set,
            scale_local_gradients,
        )  # fmt: skip
    if backward_passes_per_step <= 0:
        raise InvalidRequestError("backward_passes_per_step must be > 0")
    base = type(optimizer)
    wrapper = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
    wrapped: Any = object.__new__(wrapper)
    wrapped.__dict__.update(vars(optimizer))
    wrapped._averaging = Averaging(
        "DistributedOptimizer",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups_of(groups, num_groups),
        process_set,
        scale_local_gradients,
    )
    wrapped._passes = None
    if backward_passes_per_step > 1:
        divisor = backward_passes_per_step if average_aggregated_gradients else 1
        wrapped._passes = _Passes(backward_passes_per_step, divisor, wrapped._averaging)
    return wrapped


def trained_alone(things: Iterable[Any]) -> list[str]:
    """Returns the Keras models among ``things`` that this process has trained by ``fit`` or ``train_on_batch``, and
    optimizers that have taken steps and belong to no model, as those of a loop with a tape. None if one of ours has
    exchanged anything.

    A model's optimizer proves nothing: it may have been loaded with its steps by a script that only reads the model.
    """
    keras: Any = sys.modules.get("keras")
    found: set[str] = set()
    stepped: dict[int, str] = {}
    for thing in things if keras is not None else ():
        if hasattr(type(thing), "ocomm_exchanges") and thing.ocomm_exchanges:
            return []
        if issubclass(type(thing), keras.optimizers.Optimizer) and thing.built and int(thing.iterations.numpy()):
            stepped.setdefault(id(thing), f"optimizer '{thing.name}'")
        elif issubclass(type(thing), keras.Model):
            optimizer = getattr(thing, "optimizer", None)
            stepped[id(optimizer)] = ""
            has_stepped = optimizer is None or (optimizer.built and int(optimizer.iterations.numpy()))
            if getattr(thing, "train_function", None) is not None and has_stepped:
                found.add(f"model '{thing.name}'")
    return sorted(found.union(filter(None, stepped.values())))


@atexit.register
def _say_alone() -> None:
    topology = sessions.current().topology
    if topology is None or topology.size == 1 or topology.rank != 0 or mpi_ops.has_reduced() or has_raised():
        return
    names = trained_alone(gc.get_objects())  # also those of functions that have returned: models are part of cycles
    if names:
        _log.warning(
            "%s: trained in a job of %d ranks without any exchange of gradients, so every rank has trained alone. "
            "Compile with hvd.DistributedOptimizer(optimizer), and fit with "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0), which refuses any other before the first batch; in a "
            "loop of your own take gradients of hvd.DistributedGradientTape(tape).",
            ", ".join(names),
            topology.size,
        )
