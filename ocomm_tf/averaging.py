"""Gradients averaged over the ranks: what the tape and the optimizers share."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ocomm import session as sessions
from ocomm.api import Average
from ocomm.errors import InvalidRequestError, OcommError
from ocomm.operations import ProcessSet
from ocomm.training.notices import DenseNotices, follow_dense
from ocomm.types import ReduceOp
from ocomm_tf import engine, mpi_ops
from ocomm_tf.compression import CodesCompressor, Compressor
from ocomm_tf.errors import public
from ocomm_tf.functions import agree_on
from ocomm_tf.low_bit import CodedGradients, coded
from ocomm_tf.naming import key_of, name_of, shape_of
from ocomm_tf.replicas import comparison_of, kind_of, options_of, rate_line

#: The arguments that the tape and the optimizers share, by name.
ARGUMENTS = {
    "gradtape": "The tape.",
    "name": "Names a Keras optimizer in messages.",
    **dict.fromkeys(("device_dense", "device_sparse", "use_locking"), "Accepted as in Horovod, and ignored."),
    "compression": "A class of ``Compression``. ``int8`` and ``int4`` send whole numbers with a scale for every 128 "
    "elements, and keep what that loses for the next step (docs/algorithms.md): ``op`` is Average, ``groups`` is not "
    "given, variables are float32, bfloat16 or float16, ``tf.IndexedSlices`` are made dense, and building a Keras "
    "optimizer is collective.",
    "sparse_as_dense": "Makes ``tf.IndexedSlices`` dense instead of gathering them and adding up the rows of an index.",
    "backward_passes_per_step": "The number of passes whose gradients are summed before they are exchanged and "
    "applied. An optimizer of ``tf.compat.v1`` counts the runs of its graph.",
    "op": "Average or Sum.",
    "gradient_predivide_factor": "Divides gradients before the sum; the rest of the average is applied after it.",
    "average_aggregated_gradients": "Whether gradients of several passes are averaged instead of summed.",
    "num_groups": "Horovod's older name for a number of ``groups``.",
    "groups": "A number of groups, or lists of variables; a group is exchanged only when it is complete.",
    "process_set": "The ranks that train together.",
    "local_layers": "A Keras layer, or several, whose variables each rank has for itself: their gradients are not "
    "averaged.",
    "scale_local_gradients": "Whether gradients that stay on this rank are divided by the number of ranks.",
}
#: By runtime, because the ranks of another runtime must agree again.
_known: weakref.WeakKeyDictionary[Any, dict[Any, tuple[list[str], DenseNotices | None]]] = weakref.WeakKeyDictionary()


class Averaging:
    """Averages gradients; the arguments are those of ``DistributedOptimizer``.

    ``what`` names the user of this object in errors and on the wire. Raises InvalidRequestError for impossible options.
    """

    def __init__(
        self,
        what: str,
        compression: type[Compressor],
        sparse_as_dense: bool,
        op: int,
        predivide: float,
        groups: int | Sequence[Sequence[Any]] | None,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        if op == ReduceOp.ADASUM:
            raise InvalidRequestError("op=Adasum is not supported; use Average or Sum.")
        if predivide != 1.0 and op != Average:
            raise InvalidRequestError("gradient_predivide_factor not supported with op != Average")
        if (isinstance(groups, int) and groups < 0) or not (groups is None or isinstance(groups, (int, list, tuple))):
            raise InvalidRequestError("groups should be a non-negative integer or a list of list of tf.Variable.")
        #: The compression, if it is one of codes.
        self.codes = compression if issubclass(compression, CodesCompressor) else None
        if self.codes is not None:
            for option, is_given, instead in (
                ("op", op != Average, "codes are averaged, so leave op= out."),
                ("groups", bool(groups), "its buckets have a fixed order, so leave groups= out."),
            ):
                if is_given:
                    raise InvalidRequestError(f"{option} does not go with Compression.int{self.codes.bits}: {instead}")
        self.what = what
        self.process_set = process_set
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self._scales = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._groups = groups
        self._scale_local = scale_local_gradients
        self._local: set[int] = set()

    @property
    def is_alone(self) -> bool:
        """True if there is no other rank to average with; one rank sends itself codes, as several do."""
        return not self.process_set.included() or (self.process_set.size() == 1 and self.codes is None)

    @property
    def makes_dense(self) -> bool:
        """True if gradients that are ``tf.IndexedSlices`` are made dense."""
        return self._sparse_as_dense

    def keep_local(self, variable: Any) -> None:
        """Keeps gradients of ``variable`` on this rank, divided by the number of ranks if so configured."""
        self._local.add(key_of(variable))

    def is_local(self, variable: Any) -> bool:
        """Returns True if ``keep_local`` was called for it."""
        return key_of(variable) in self._local

    @public
    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any = None, raises: bool = False
    ) -> list[Any]:
        """Returns the averaged gradients; None stays None. Collective; not differentiable.

        Args:
            gradients: One for each variable.
            variables: Compared between the ranks if they are variables and not tensors.
            optimizer: The Keras optimizer that will make the step, whose hyperparameters are compared, too.
            raises: Whether a gradient that is not finite on some rank is an error on all, if gradients travel in codes.

        Raises:
            MismatchError: The ranks hold different variables or hyperparameters; in a graph, when it runs.
        """
        gradients = list(gradients)
        if self.is_alone:
            return gradients
        result = list(gradients)
        shared = []
        for position, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if self.is_local(variable):
                if self._scale_local:
                    result[position] = scaled(gradient, 1.0 / self.process_set.size())
            else:
                shared.append(position)
        if shared:
            chosen = [variables[position] for position in shared]
            own = [gradients[position] for position in shared]
            names, notices = self._names(chosen)
            compared, over = self._compare(own, chosen, names, notices, optimizer)
            try:
                if self.codes is not None:
                    compared()  # a step that is refused changes no errors
                averaged = self._average(own, chosen, names, raises, over)
            except Exception:
                with contextlib.suppress(OcommError):  # the first error is raised
                    compared()
                raise
            compared()
            for position, gradient in zip(shared, averaged, strict=True):
                result[position] = gradient
            # A step that is refused changes nothing, also what Keras computes without averages: weight decay, the count
            # of iterations, sums of gradients.
            after = [*over, *averaged] if self.codes is not None else over
            kept = [] if optimizer is None else optimizer.variables
            return engine.held(result, after, [*variables, *kept])
        return result

    def _names(self, variables: Sequence[Any]) -> tuple[list[str], DenseNotices | None]:
        """Returns names on the wire, and what counts the steps. The names are compared between the ranks the first time
        that these variables come.
        """
        session = sessions.current()
        key = (
            self.process_set.number(session),
            tuple((name_of(v), shape_of(v), str(v.dtype)) for v in variables),
        )
        known = _known.setdefault(session.runtime, {})
        if key not in known:
            codes = "none" if self.codes is None else f"int{self.codes.bits}"
            session.agree(
                key[0], session.automatic_name(f"{self.what}.compression", key[0]), f"codes of compression={codes}"
            )
            names = agree_on(self.what, variables, self.process_set)
            if self.codes is not None:  # a driver says what it sends
                known[key] = names, None
                return known[key]
            known[key] = names, follow_dense(session, key[0], self.what, *self._size_of(variables), False)
        return known[key]

    def _size_of(self, variables: Sequence[Any]) -> tuple[int, int]:
        """Returns the numbers of elements of ``variables``, and of bytes of their gradients on the wire."""
        numel = nbytes = 0
        wire = getattr(self._compression, "wire", None)
        for variable in variables:
            shape, dtype = shape_of(variable), tf.as_dtype(variable.dtype).base_dtype
            if None not in shape:
                numel += math.prod(shape)
                nbytes += math.prod(shape) * (wire if wire is not None and dtype.is_floating else dtype).size
        return numel, nbytes

    def _compare(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        names: Sequence[str],
        notices: DenseNotices | None,
        optimizer: Any,
    ) -> tuple[Callable[[], Any], list[tf.Tensor]]:
        """Begins to compare the variables. Returns a function that waits for the end and raises if they differ; in a
        graph it does nothing, and there is a tensor that is there when the comparison has ended well.

        ``notices`` count a step with each comparison, also in a graph.

        Variables with ``tf.IndexedSlices`` are left out: TensorFlow adds rows to a variable in the order in which its
        threads come, which differs between ranks. So are those in a session of ``tf.compat.v1``, which does not order
        the comparison.
        """
        is_eager = tf.executing_eagerly()
        if not is_eager and not engine.runs_in_order():
            return _nothing, []
        pairs = [
            (name, variable)
            for name, variable, gradient in zip(names, variables, gradients, strict=True)
            if self._sparse_as_dense or not isinstance(gradient, tf.IndexedSlices)
        ]
        kind = "" if optimizer is None else kind_of(optimizer)
        comparison = comparison_of(
            self.what, kind, [name for name, _ in pairs], [variable for _, variable in pairs], self.process_set
        )
        if comparison is None:
            return _nothing, []
        comparison.notices = notices
        lines = [] if optimizer is None else options_of(optimizer)
        rate = None if optimizer is None else _rate_of(optimizer)
        if not is_eager:
            return _nothing, [comparison.add_to_graph(lines, rate)]
        if rate is not None:
            lines.append(rate_line(float(rate.numpy() if hasattr(rate, "numpy") else rate)))
        return comparison.begin(lines).wait, []

    def coded(self, variables: Sequence[Any]) -> CodedGradients:
        """Returns what averages gradients of ``variables`` in codes. Collective the first time."""
        assert self.codes is not None
        return coded(self.what, variables, lambda: self._names(variables)[0], self.codes, self.process_set)

    def _average(
        self, gradients: list[Any], variables: list[Any], names: list[str], raises: bool, over: Sequence[tf.Tensor] = ()
    ) -> list[Any]:
        if not isinstance(gradients[0], (tf.Tensor, tf.IndexedSlices)):
            return self._average_foreign(gradients, variables, names, raises)
        if self.codes is not None:
            return list(self.coded(variables).averaged(gradients, variables, raises, over))
        prefix = mpi_ops.name_in_graph(self.what)
        result: list[Any] = [None] * len(gradients)
        dense: dict[int, tf.Tensor] = {}
        for position, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
                rows = mpi_ops.allreduce(
                    gradient, op=self._op, name=f"{prefix}.{names[position]}", process_set=self.process_set
                )
                result[position] = _summed(rows)
            else:
                dense[position] = tf.convert_to_tensor(gradient)
        groups = self._grouped(list(dense), variables)
        exchanges = [
            mpi_ops.Exchange(
                "allreduce",
                [dense[position] for position in group],
                f"{prefix}.{names[group[0]]}",
                mpi_ops.StartAllreduce(self._op, *self._scales, self.process_set, len(group) > 1),
                self.process_set,
            )
            for group in groups
        ]
        averages = mpi_ops.run_compressed(exchanges, self._compression)
        for group, outputs in zip(groups, averages, strict=True):
            for position, output in zip(group, outputs, strict=True):
                result[position] = output
        return result

    def _grouped(self, positions: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Returns which gradients become ready together."""
        groups = self._groups
        if not groups:
            return [[position] for position in positions]
        if isinstance(groups, int):
            bounds = [len(positions) * k // groups for k in range(groups + 1)]
            return [positions[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        where = {key_of(variables[position]): position for position in positions}
        chosen = [[where.pop(key_of(v)) for v in group if key_of(v) in where] for group in groups]
        return [group for group in chosen if group] + [[position] for position in where.values()]

    def _average_foreign(self, gradients: list[Any], variables: list[Any], names: list[str], raises: bool) -> list[Any]:
        """Averages gradients of Keras' other backends, and returns new tensors."""
        from keras import ops

        tensors = [tf.convert_to_tensor(ops.convert_to_numpy(gradient)) for gradient in gradients]
        averages = self._average(tensors, variables, names, raises)
        return [
            ops.convert_to_tensor(average.numpy(), dtype=ops.dtype(gradient))
            for average, gradient in zip(averages, gradients, strict=True)
        ]


def _summed(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns ``rows`` with one row for each index, the sum of those that ranks have for it. Keras' optimizers would
    square and clip each by itself.
    """
    indices, places = tf.unique(rows.indices)
    values = tf.math.unsorted_segment_sum(rows.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def _nothing() -> None:
    """Does nothing, if nothing is compared."""


def _rate_of(optimizer: Any) -> Any:
    """Returns the learning rate of the next step; None if it is a user's function, which may count its calls."""
    import keras

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    is_known = isinstance(inner._learning_rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule))
    return inner.learning_rate if is_known else None


def groups_of(groups: Any, num_groups: int) -> Any:
    """Returns ``groups``, or Horovod's older name for a number of them."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups


def variables_of(layers: Any) -> list[Any]:
    """Returns the trainable variables of a layer, or of several."""
    if layers is None:
        return []
    return [v for layer in (layers if isinstance(layers, (list, tuple)) else [layers]) for v in layer.trainable_weights]


def scaled(gradient: Any, factor: float) -> Any:
    """Returns ``gradient * factor``; ``tf.IndexedSlices`` stay ``tf.IndexedSlices``."""
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
