"""``hvd.elastic`` for Keras: TensorFlow's, and the callbacks that count and commit. This module only re-exports
names.
"""

from ocomm_tf.elastic import KerasState, ObjectState, State, TensorFlowKerasState, TensorFlowState, run
from ocomm_tf.keras.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
