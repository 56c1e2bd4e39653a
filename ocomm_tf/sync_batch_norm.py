"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ocomm import session as sessions
from ocomm.api import Average
from ocomm.operations import global_process_set
from ocomm_tf import mpi_ops


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` whose mean and variance in training are those of all ranks' batches together.

    Ranks weigh alike, whatever their batches' sizes. Takes the arguments of the Keras layer; ValueError for ``fused``.
    """

    def __init__(self, fused: bool = False, process_set: Any = global_process_set, **options: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**options)
        self._process_set = process_set

    # Keras calls it for the mean and variance of a batch, and updates the moving ones with what it returns.
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if not self._process_set.included() or self._process_set.size() == 1:
            return mean, variance
        stacked = tf.stack([mean, variance + mean * mean])
        name = mpi_ops.name_in_graph(self._number)
        both = mpi_ops.allreduce(stacked, op=Average, name=name, process_set=self._process_set)
        total, squares = tf.unstack(both)
        return total, squares - total * total

    def build(self, input_shape: Any) -> None:
        """Numbers the layer in its set, in the order of building: Keras' own names may differ between ranks."""
        session = sessions.current()
        self._number = session.automatic_name("SyncBatchNormalization", self._process_set.number(session))
        super().build(input_shape)
