"""Horovod's API for TensorFlow: ``import ocomm_tf as hvd``. This module only re-exports names."""

from ocomm.api import build_info
from ocomm.basics import *  # noqa: F403
from ocomm.basics import __all__ as _basics
from ocomm.errors import HorovodInternalError, HostsUpdatedInterrupt
from ocomm.operations import ProcessSet, add_process_set, global_process_set, remove_process_set
from ocomm.version import __version__
from ocomm_tf import elastic
from ocomm_tf.compression import Compression
from ocomm_tf.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    check_replicas,
)
from ocomm_tf.mpi_ops import _allreduce as _allreduce  # Horovod's scripts use it
from ocomm_tf.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ocomm_tf.optimizer import DistributedGradientTape, DistributedOptimizer, PartialDistributedGradientTape
from ocomm_tf.sync_batch_norm import SyncBatchNormalization
from ocomm_tf.util import _executing_eagerly as _executing_eagerly  # Horovod's scripts use it

__all__ = [
    *_basics,
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "SyncBatchNormalization",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "build_info",
    "check_replicas",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "size_op",
]
