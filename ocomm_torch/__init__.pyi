"""Made by tools/stubs.py."""

# mypy: disable-error-code="assignment, no-redef"

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from ocomm.api import barrier as barrier
from ocomm.api import build_info as build_info
from ocomm.api import join as join
from ocomm.api import poll as poll
from ocomm.api import synchronize as synchronize
from ocomm.basics import *
from ocomm.errors import HorovodInternalError as HorovodInternalError
from ocomm.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from ocomm.operations import ProcessSet as ProcessSet
from ocomm.operations import add_process_set as add_process_set
from ocomm.operations import global_process_set as global_process_set
from ocomm.operations import remove_process_set as remove_process_set
from ocomm_torch import distributed as distributed
from ocomm_torch import elastic as elastic
from ocomm_torch.auto import Auto as Auto
from ocomm_torch.auto import DistributedAuto as DistributedAuto
from ocomm_torch.compression import Compression as Compression
from ocomm_torch.ddp import optimizer_hook as optimizer_hook
from ocomm_torch.fsdp import across_hook as across_hook
from ocomm_torch.functions import allgather_object as allgather_object
from ocomm_torch.functions import broadcast_object as broadcast_object
from ocomm_torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from ocomm_torch.functions import broadcast_parameters as broadcast_parameters
from ocomm_torch.functions import check_replicas as check_replicas
from ocomm_torch.mesh import init_device_mesh as init_device_mesh
from ocomm_torch.mpi_ops import allgather as allgather
from ocomm_torch.mpi_ops import allgather_async as allgather_async
from ocomm_torch.mpi_ops import allreduce as allreduce
from ocomm_torch.mpi_ops import allreduce_ as allreduce_
from ocomm_torch.mpi_ops import allreduce_async as allreduce_async
from ocomm_torch.mpi_ops import allreduce_async_ as allreduce_async_
from ocomm_torch.mpi_ops import alltoall as alltoall
from ocomm_torch.mpi_ops import alltoall_async as alltoall_async
from ocomm_torch.mpi_ops import broadcast as broadcast
from ocomm_torch.mpi_ops import broadcast_ as broadcast_
from ocomm_torch.mpi_ops import broadcast_async as broadcast_async
from ocomm_torch.mpi_ops import broadcast_async_ as broadcast_async_
from ocomm_torch.mpi_ops import grouped_allgather as grouped_allgather
from ocomm_torch.mpi_ops import grouped_allgather_async as grouped_allgather_async
from ocomm_torch.mpi_ops import grouped_allreduce as grouped_allreduce
from ocomm_torch.mpi_ops import grouped_allreduce_ as grouped_allreduce_
from ocomm_torch.mpi_ops import grouped_allreduce_async as grouped_allreduce_async
from ocomm_torch.mpi_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from ocomm_torch.mpi_ops import grouped_reducescatter as grouped_reducescatter
from ocomm_torch.mpi_ops import grouped_reducescatter_async as grouped_reducescatter_async
from ocomm_torch.mpi_ops import reducescatter as reducescatter
from ocomm_torch.mpi_ops import reducescatter_async as reducescatter_async
from ocomm_torch.mpi_ops import sparse_allreduce_async as sparse_allreduce_async
from ocomm_torch.optimizer import DistributedOptimizer as DistributedOptimizer
from ocomm_torch.optimizers.birder import Birder as Birder
from ocomm_torch.optimizers.birder import SoftSignSGD as SoftSignSGD
from ocomm_torch.optimizers.compressed import report_metrics as report_metrics
from ocomm_torch.optimizers.diloco import DiLoCo as DiLoCo
from ocomm_torch.optimizers.ef_sgd import EFSGD as EFSGD
from ocomm_torch.optimizers.lamb import OneBitLamb as OneBitLamb
from ocomm_torch.optimizers.lion import Lion as Lion
from ocomm_torch.optimizers.onebit import OneBitAdam as OneBitAdam
from ocomm_torch.optimizers.zero_one import ZeroOneAdam as ZeroOneAdam
from ocomm_torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

def DistributedBirder(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    beta: float = 0.95,
    amsgrad_after: int | None = None,
    stochastic: bool = False,
    seed: int = 0,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> Birder: ...
def DistributedSoftSignSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    beta: float = 0.95,
    amsgrad_after: int | None = None,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> SoftSignSGD: ...
def DistributedDiLoCo(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    sync_every: int = 10,
    fragments: int = 1,
    outer_lr: float = 0.9,
    outer_momentum: float = 0.6,
    bits: Literal[32, 8, 4, 1] = 32,
    delay: int = 0,
    mix: float = 0.0,
    block_size: int | Literal['tensor'] = 4096,
    hierarchical: bool | Literal['auto'] = 'auto',
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> DiLoCo: ...
def DistributedEFSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> EFSGD: ...
def DistributedOneBitLamb(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    dense_bits: Literal[32, 16, 8, 4] = 32,
    scale: Literal['l1', 'rms'] = 'rms',
    variance_floor: float = 0.05,
    mask_refresh: int = 100,
    freeze_step: int | Literal['auto'] = 'auto',
    total_steps: int | None = None,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    offload: bool | str | os.PathLike[str] = False,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
    warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> OneBitLamb: ...
def DistributedLion(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    seed: int = 0,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> Lion: ...
def DistributedOneBitAdam(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    dense_bits: Literal[32, 16, 8, 4] = 32,
    scale: Literal['l1', 'rms'] = 'rms',
    variance_floor: float = 0.05,
    mask_refresh: int = 100,
    freeze_step: int | Literal['auto'] = 'auto',
    total_steps: int | None = None,
    shard_state: bool | Literal['auto'] = False,
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    offload: bool | str | os.PathLike[str] = False,
    free_gradients: bool = False,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
    warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> OneBitAdam: ...
def DistributedZeroOneAdam(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    dense_bits: Literal[32, 16, 8, 4] = 32,
    scale: Literal['l1', 'rms'] = 'rms',
    variance_floor: float = 0.2,
    mask_refresh: int = 100,
    var_update_scaler: int = 16,
    var_freeze_step: int | None = None,
    local_step_start: int | None = None,
    local_step_doubling: int | None = None,
    local_step_clip: int | None = None,
    total_steps: int | None = None,
    vote: Literal['step', 'sync'] = 'step',
    block_size: int | Literal['tensor'] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal['exact', 'previous'] = 'exact',
    verify: Literal['sampled', 'full', 'version'] = 'sampled',
    backward_passes_per_step: int = 1,
    hierarchical: bool | Literal['auto'] = 'auto',
    op: int = ...,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    offload: bool | str | os.PathLike[str] = False,
    process_set: Any = None,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
    warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> ZeroOneAdam: ...
