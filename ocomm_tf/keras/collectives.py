"""The collectives of ``ocomm_tf.keras``, with Horovod's parameters for Keras, which differ from those for TensorFlow.

Where Keras 2 runs in a session of ``tf.compat.v1``, they run there and return values, as Horovod's do; what they are
given may be a symbolic tensor, then the result is one, too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ocomm.api import Average
from ocomm.docstrings import AVERAGE_OR_SUM, GATHERED, SHARE, collective
from ocomm.operations import ProcessSet, global_process_set
from ocomm_tf import functions, mpi_ops
from ocomm_tf.compression import Compression, Compressor
from ocomm_tf.keras_version import run_in_session

_VALUE = "The input: a tensor, an array or a number. Its shape and dtype are the same on all ranks."


@collective("The reduced value.", value=_VALUE)
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces a value over the ranks, as ``ocomm_tf.allreduce`` does. Collective."""
    factors = prescale_factor, postscale_factor
    result = mpi_ops.allreduce(value, average, "", "", compression, op, *factors, _free(name), process_set)
    return _evaluated(result, value)


@collective("The values of all ranks.", value=GATHERED)
def allgather(value: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the values of all ranks along the first dimension, in rank order. Collective."""
    return _evaluated(mpi_ops.allgather(value, _free(name), process_set=process_set), value)


@collective("The value of the root.", value=_VALUE)
def broadcast(
    value: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends a value of the rank ``root_rank`` to all ranks. Collective."""
    return _evaluated(mpi_ops.broadcast(value, root_rank, _free(name), process_set=process_set), value)


@collective(SHARE, value=_VALUE, op=AVERAGE_OR_SUM)
def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    *,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces a value over the ranks and gives each rank a part of the rows of the result. Collective."""
    factors = prescale_factor, postscale_factor
    result = mpi_ops.reducescatter(value, "", compression, op, _free(name), process_set, False, *factors)
    return _evaluated(result, value)


@collective()
def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites all variables of Keras 2's session with those of the rank ``root_rank``. Collective."""
    run_in_session(functions.broadcast_global_variables(root_rank, process_set))


def _free(name: str | None) -> str | None:
    return None if name is None else mpi_ops.name_in_graph(name)


def _evaluated(result: Any, value: Any) -> Any:
    is_symbolic = functions.is_building_a_function() or tf.is_symbolic_tensor(value)
    return result if tf.executing_eagerly() or is_symbolic else run_in_session(result)
