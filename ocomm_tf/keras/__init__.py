"""Horovod's API for Keras 3: ``import ocomm_tf.keras as hvd``. Nothing but re-exports."""

from ocomm_tf import *  # noqa: F403
from ocomm_tf import __all__ as _everything
from ocomm_tf.keras import callbacks
from ocomm_tf.keras.compressed import (
    DistributedBirder,
    DistributedOneBitAdam,
    DistributedSoftSignSGD,
    DistributedZeroOneAdam,
)
from ocomm_tf.keras.lamb import DistributedOneBitLamb
from ocomm_tf.keras.lion import DistributedLion
from ocomm_tf.keras.optimizer import DistributedOptimizer as DistributedOptimizer  # type: ignore[assignment]
from ocomm_tf.keras.optimizer import PartialDistributedOptimizer
from ocomm_tf.keras.saving import load_model

# The last: it takes the place of TensorFlow's.
import ocomm_tf.keras.elastic as elastic  # type: ignore[no-redef]  # noqa: F401  # isort: skip

__all__ = [
    *_everything,
    "DistributedBirder",
    "DistributedLion",
    "DistributedOneBitAdam",
    "DistributedOneBitLamb",
    "DistributedOptimizer",
    "DistributedSoftSignSGD",
    "DistributedZeroOneAdam",
    "PartialDistributedOptimizer",
    "callbacks",
    "load_model",
]
