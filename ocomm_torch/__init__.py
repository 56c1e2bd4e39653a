"""Horovod's API for Torch: ``import ocomm_torch as hvd``. This module re-exports names, and prepares Torch."""

import torch as _torch

from ocomm.api import barrier, build_info, join, poll, synchronize
from ocomm.basics import *  # noqa: F403
from ocomm.basics import __all__ as _basics
from ocomm.errors import HorovodInternalError, HostsUpdatedInterrupt
from ocomm.operations import ProcessSet, add_process_set, global_process_set, remove_process_set
from ocomm.version import __version__
from ocomm_torch import distributed, elastic
from ocomm_torch.auto import Auto, DistributedAuto
from ocomm_torch.compression import Compression
from ocomm_torch.ddp import optimizer_hook
from ocomm_torch.fsdp import across_hook
from ocomm_torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_replicas,
)
from ocomm_torch.mesh import init_device_mesh
from ocomm_torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.birder import Birder, DistributedBirder, DistributedSoftSignSGD, SoftSignSGD
from ocomm_torch.optimizers.compressed import report_metrics
from ocomm_torch.optimizers.diloco import DiLoCo, DistributedDiLoCo
from ocomm_torch.optimizers.ef_sgd import EFSGD, DistributedEFSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb, OneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion, Lion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam, OneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam, ZeroOneAdam
from ocomm_torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *_basics,
    "Auto",
    "Birder",
    "Compression",
    "DiLoCo",
    "DistributedAuto",
    "DistributedBirder",
    "DistributedDiLoCo",
    "DistributedEFSGD",
    "DistributedLion",
    "DistributedOneBitAdam",
    "DistributedOneBitLamb",
    "DistributedOptimizer",
    "DistributedSoftSignSGD",
    "DistributedZeroOneAdam",
    "EFSGD",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Lion",
    "OneBitAdam",
    "OneBitLamb",
    "ProcessSet",
    "SoftSignSGD",
    "SyncBatchNorm",
    "ZeroOneAdam",
    "__version__",
    "across_hook",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "build_info",
    "check_replicas",
    "distributed",
    "global_process_set",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init_device_mesh",
    "join",
    "optimizer_hook",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "report_metrics",
    "sparse_allreduce_async",
    "synchronize",
]

# Where threads are the first to call MKL at the same time, some of them get square roots of 12 bits (Torch 2.13). The
# steps of Adam on that rank would differ from those on all others.
_torch.ones(1, device="cpu").sqrt()
