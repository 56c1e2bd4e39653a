"""Horovod's API for Keras 3: ``import ocomm_tf.keras as hvd``. This module only re-exports names."""

from ocomm_tf import *  # noqa: F403
from ocomm_tf import __all__ as _everything
from ocomm_tf.keras import callbacks
from ocomm_tf.keras.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_tf.keras.collectives import allgather as allgather  # type: ignore[assignment]
from ocomm_tf.keras.collectives import allreduce as allreduce  # type: ignore[assignment]
from ocomm_tf.keras.collectives import broadcast as broadcast  # type: ignore[assignment]
from ocomm_tf.keras.collectives import broadcast_global_variables as broadcast_global_variables
from ocomm_tf.keras.collectives import reducescatter as reducescatter  # type: ignore[assignment]
from ocomm_tf.keras.diloco import DistributedDiLoCo
from ocomm_tf.keras.ef_sgd import DistributedEFSGD
from ocomm_tf.keras.lamb import DistributedOneBitLamb
from ocomm_tf.keras.lion import DistributedLion
from ocomm_tf.keras.onebit import DistributedOneBitAdam
from ocomm_tf.keras.saving import load_model
from ocomm_tf.keras.zero_one import DistributedZeroOneAdam
from ocomm_tf.keras_optimizer import DistributedOptimizer as DistributedOptimizer  # type: ignore[assignment]
from ocomm_tf.keras_optimizer import PartialDistributedOptimizer

# Imported last, because it replaces the module of TensorFlow.
import ocomm_tf.keras.elastic as elastic  # type: ignore[no-redef]  # noqa: F401  # isort: skip

__all__ = [
    *_everything,
    "DistributedBirder",
    "DistributedDiLoCo",
    "DistributedEFSGD",
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
