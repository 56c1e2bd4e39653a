"""Gradients averaged over the ranks: what the tape and the optimizers have in common."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ocomm import session as sessions
from ocomm.api import Average
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet
from ocomm.types import ReduceOp
from ocomm_tf import mpi_ops
from ocomm_tf.compression import Compressor
from ocomm_tf.functions import agree_on, name_of

#: Of each runtime: the ranks of another one agree anew.
_known: weakref.WeakKeyDictionary[Any, dict[Any, list[str]]] = weakref.WeakKeyDictionary()


class Averaging:
    """How gradients are averaged; the arguments are those of ``DistributedOptimizer``.

    ``what`` names the user in errors and on the wire. Raises InvalidRequestError for options that cannot be right.
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
        """Whether there is nobody to average with."""
        return not self.process_set.included() or self.process_set.size() == 1

    def keep_local(self, variable: Any) -> None:
        """Gradients of ``variable`` are this rank's own, divided by the number of ranks if so configured."""
        self._local.add(_key(variable))

    def is_local(self, variable: Any) -> bool:
        """Whether ``keep_local`` was called for it."""
        return _key(variable) in self._local

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients averaged; None stays None. Not differentiable."""
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
            averaged = self._average([gradients[position] for position in shared], chosen, self._names(chosen))
            for position, gradient in zip(shared, averaged, strict=True):
                result[position] = gradient
        return result

    def _names(self, variables: Sequence[Any]) -> list[str]:
        """Names on the wire. Compared between the ranks the first time that these variables come."""
        session = sessions.current()
        key = (
            self.process_set.number(session),
            tuple((name_of(v), tuple(v.shape), str(v.dtype)) for v in variables),
        )
        known = _known.setdefault(session.runtime, {})
        if key not in known:
            known[key] = agree_on(self.what, variables, self.process_set)
        return known[key]

    def _average(self, gradients: list[Any], variables: list[Any], names: list[str]) -> list[Any]:
        if not isinstance(gradients[0], (tf.Tensor, tf.IndexedSlices)):
            return self._average_foreign(gradients, variables, names)
        prefix = mpi_ops.name_in_graph(self.what)
        result: list[Any] = [None] * len(gradients)
        dense: dict[int, tuple[tf.Tensor, Any]] = {}
        for position, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
                result[position] = mpi_ops.allreduce(
                    gradient, op=self._op, name=f"{prefix}.{names[position]}", process_set=self.process_set
                )
            else:
                dense[position] = self._compression.compress(tf.convert_to_tensor(gradient))
        groups = self._grouped(list(dense), variables)
        exchanges = [
            mpi_ops.Exchange(
                "allreduce",
                [dense[position][0] for position in group],
                f"{prefix}.{names[group[0]]}",
                mpi_ops.StartAllreduce(self._op, *self._scales, self.process_set, len(group) > 1),
            )
            for group in groups
        ]
        for group, outputs in zip(groups, mpi_ops.run(exchanges), strict=True):
            for position, output in zip(group, outputs, strict=True):
                result[position] = self._compression.decompress(output, dense[position][1])
        return result

    def _grouped(self, positions: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """What becomes ready together."""
        groups = self._groups
        if not groups:
            return [[position] for position in positions]
        if isinstance(groups, int):
            bounds = [len(positions) * k // groups for k in range(groups + 1)]
            return [positions[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        where = {_key(variables[position]): position for position in positions}
        chosen = [[where.pop(_key(v)) for v in group if _key(v) in where] for group in groups]
        return [group for group in chosen if group] + [[position] for position in where.values()]

    def _average_foreign(self, gradients: list[Any], variables: list[Any], names: list[str]) -> list[Any]:
        """Gradients of Keras' other backends, as new tensors."""
        from keras import ops

        tensors = [tf.convert_to_tensor(ops.convert_to_numpy(gradient)) for gradient in gradients]
        averages = self._average(tensors, variables, names)
        return [
            ops.convert_to_tensor(average.numpy(), dtype=ops.dtype(gradient))
            for average, gradient in zip(averages, gradients, strict=True)
        ]


def scaled(gradient: Any, factor: float) -> Any:
    """``gradient * factor``, also of ``tf.IndexedSlices``, which stay that."""
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _key(variable: Any) -> int:
    return id(variable.value if hasattr(variable, "path") else variable)
