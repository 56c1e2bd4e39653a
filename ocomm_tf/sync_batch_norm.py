"""Batch normalization over the batches of all ranks.

Statistics are gathered as count, mean and variance per rank and combined as in ``ocomm_torch.sync_batch_norm``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ocomm import session as sessions
from ocomm.api import Sum
from ocomm.operations import global_process_set
from ocomm_tf import mpi_ops
from ocomm_tf.keras_version import IS_KERAS_2
from ocomm_tf.naming import shape_of


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """``tf.keras.layers.BatchNormalization`` with the mean and variance of all ranks' batches in training. Collective.

    Ranks may have batches of different sizes, even empty ones. Second derivatives, as of a gradient penalty, are those
    of the whole batch, too. The layer is that of Keras 3, or of Keras 2 if that is ``tf.keras``.

    Args:
        fused: False; a fused kernel of TensorFlow only knows the batch of its own rank.
        process_set: The ranks whose batches are used.
        options: The arguments of the Keras layer.

    Raises:
        ValueError: ``fused`` is True or None.
    """

    def __init__(self, fused: bool = False, process_set: Any = global_process_set, **options: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**options, **({"fused": False} if IS_KERAS_2 else {}))
        self._process_set = process_set

    # Keras calls it for the mean and variance of a batch, and updates the moving ones with the result. Keras 2 also
    # says which axes are reduced, and whether they are kept.
    def _moments(self, inputs: Any, *how: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
        if not IS_KERAS_2 and how:
            (mask,), how = how, ()
        mean, variance = super()._moments(inputs, *how, mask=mask, **options)
        if not self._process_set.included() or self._process_set.size() == 1:
            return mean, variance
        if mask is None:
            # TensorFlow takes the mean for a constant in the variance: for a part of the batch only the first
            # derivatives are right then. This term, which is 0, has the others.
            variance -= tf.square(mean - tf.stop_gradient(mean))
        shape = tf.shape(mean)
        numel = tf.size(inputs) // tf.size(mean) if mask is None else tf.math.count_nonzero(mask)
        count = tf.reshape(tf.cast(numel, inputs.dtype), [1])
        mine = tf.where(count > 0, tf.concat([tf.reshape(mean, [-1]), tf.reshape(variance, [-1])], 0), 0)
        rows = self._gathered(tf.concat([count, mine], 0)[None])
        half = shape_of(mine)[0] // 2
        counts, means, variances = tf.split(rows, [1, half, half], axis=1)
        weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
        mean = tf.reduce_sum(weights * means, 0)
        variance = tf.reduce_sum(weights * (variances + tf.square(means - mean)), 0)
        return tf.reshape(mean, shape), tf.reshape(variance, shape)

    def _gathered(self, row: Any) -> Any:
        """Returns the rows of all ranks. Gradients are summed, because all ranks' losses depend on this rank's row."""
        name, me = mpi_ops.name_in_graph(self._number), self._process_set.rank()

        @tf.custom_gradient
        def gather(row: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                back = mpi_ops.name_in_graph(f"{name}.gradient")
                return mpi_ops.allreduce(upstream, op=Sum, name=back, process_set=self._process_set)[me : me + 1]

            rows = mpi_ops.allgather(row, name=name, process_set=self._process_set)
            return tf.ensure_shape(rows, [self._process_set.size(), shape_of(row)[1]]), gradient

        return gather(row)

    def build(self, input_shape: Any) -> None:
        """Numbers the layer in its process set, in the order of building, because Keras' own names may differ between
        ranks.
        """
        session = sessions.current()
        self._number = session.automatic_name("SyncBatchNormalization", self._process_set.number(session))
        super().build(input_shape)
