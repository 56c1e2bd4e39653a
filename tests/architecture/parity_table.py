"""What a Horovod script may use: names, parameters and defaults of Horovod 0.28.1 for Torch, as its source has them.

A default is spelled as in Python, classes and numbers by their Horovod name. ``ps`` is
``process_set=global_process_set``.
"""

from __future__ import annotations

_REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, ps"
_REDUCE_COMPRESSED = _REDUCE.replace("name=None, ", "name=None, compression=Compression.none, ")
_GROUPED_COMPRESSED = _REDUCE.replace("op=None", "compression=Compression.none, op=None")
_SCATTER = "name=None, op=Average, ps, prescale_factor=1.0, postscale_factor=1.0"
_SCATTER_COMPRESSED = _SCATTER.replace("op=", "compression=Compression.none, op=")

#: common/basics.py, common/process_sets.py
PROCESS = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "rank": "",
    "local_size": "",
    "local_rank": "",
    "cross_size": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet.size": "self",
    "ProcessSet.rank": "self",
    "ProcessSet.included": "self",
}

#: torch/mpi_ops.py, torch/functions.py, torch/optimizer.py, torch/sync_batch_norm.py, torch/compression.py
TORCH = {
    "allreduce": "tensor, " + _REDUCE_COMPRESSED,
    "allreduce_": "tensor, " + _REDUCE,
    "allreduce_async": "tensor, " + _REDUCE,
    "allreduce_async_": "tensor, " + _REDUCE,
    "grouped_allreduce": "tensors, " + _GROUPED_COMPRESSED,
    "grouped_allreduce_": "tensors, " + _REDUCE,
    "grouped_allreduce_async": "tensors, " + _REDUCE,
    "grouped_allreduce_async_": "tensors, " + _REDUCE,
    "sparse_allreduce_async": "tensor, name, op, ps",
    "allgather": "tensor, name=None, ps",
    "allgather_async": "tensor, name=None, ps",
    "grouped_allgather": "tensors, name=None, ps",
    "grouped_allgather_async": "tensors, name=None, ps",
    "broadcast": "tensor, root_rank, name=None, ps",
    "broadcast_": "tensor, root_rank, name=None, ps",
    "broadcast_async": "tensor, root_rank, name=None, ps",
    "broadcast_async_": "tensor, root_rank, name=None, ps",
    "alltoall": "tensor, splits=None, name=None, ps",
    "alltoall_async": "tensor, splits=None, name=None, ps",
    "reducescatter": "tensor, " + _SCATTER_COMPRESSED,
    "reducescatter_async": "tensor, " + _SCATTER,
    "grouped_reducescatter": "tensors, " + _SCATTER_COMPRESSED,
    "grouped_reducescatter_async": "tensors, " + _SCATTER,
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "ps",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, ps",
    "allgather_object": "obj, name=None",
    "Compression.none.compress": "tensor",
    "Compression.none.decompress": "tensor, ctx",
    "Compression.fp16.compress": "tensor",
    "Compression.fp16.decompress": "tensor, ctx",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, ps"
    ),
}

#: What the object of DistributedOptimizer has beyond the wrapped optimizer's.
OPTIMIZER = {
    "step": "self, closure=None",
    "synchronize": "self",
    "skip_synchronize": "self",
    "zero_grad": "self",
    "set_backward_passes_per_step": "self, passes",
    "load_state_dict": "self, state_dict",
}

#: common/elastic.py, torch/elastic/state.py, torch/elastic/sampler.py
ELASTIC = {
    "elastic.run": "func",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.TorchState.save": "self",
    "elastic.TorchState.restore": "self",
    "elastic.TorchState.sync": "self",
    "elastic.TorchState.commit": "self",
    "elastic.TorchState.check_host_updates": "self",
    "elastic.TorchState.register_reset_callbacks": "self, callbacks",
    "elastic.TorchState.on_reset": "self",
    "elastic.TorchState.reset": "self",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.ElasticSampler.set_epoch": "self, epoch",
    "elastic.ElasticSampler.record_batch": "self, batch_idx, batch_size",
    "elastic.ElasticSampler.record_indices": "self, indices",
    "elastic.ElasticSampler.get_indices": "self, batch_idx, batch_size",
    "elastic.ElasticSampler.state_dict": "self",
    "elastic.ElasticSampler.load_state_dict": "self, state_dict",
    "elastic.ElasticSampler.reset": "self",
}

_BASICS = (
    "init shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous "
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built "
    "rocm_built start_timeline stop_timeline Average Sum Adasum Min Max Product"
)

_KERAS = (
    " DistributedOptimizer Compression allreduce allgather broadcast reducescatter broadcast_global_variables "
    "load_model"
)

#: keras/__init__.py, tensorflow/keras/__init__.py
KERAS = {
    "allreduce": "value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, "
    "compression=Compression.none",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=Average",
    "broadcast_global_variables": "root_rank",
}

#: Names that scripts and other packages import from Horovod's submodules.
SUBMODULES = {
    "torch.mpi_ops": _BASICS + " allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce "
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather "
    "allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_ "
    "alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join "
    "barrier poll synchronize add_process_set remove_process_set HorovodInternalError",
    "torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "torch.optimizer": "DistributedOptimizer _DistributedOptimizer",
    "torch.sync_batch_norm": "SyncBatchNorm",
    "torch.elastic": "run ObjectState State TorchState ElasticSampler",
    "torch.elastic.sampler": "ElasticSampler",
    "torch.elastic.state": "TorchState",
    "tensorflow.mpi_ops": _BASICS
    + " _allreduce allgather grouped_allgather broadcast broadcast_ alltoall reducescatter "
    "grouped_reducescatter join barrier size_op local_size_op rank_op local_rank_op process_set_included_op",
    "tensorflow.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "tensorflow.functions": "allgather_object broadcast_object broadcast_object_fn broadcast_variables",
    "tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "tensorflow.util": "_executing_eagerly",
    "tensorflow.elastic": "run ObjectState TensorFlowState TensorFlowKerasState",
    "tensorflow.keras": _BASICS + _KERAS,
    "tensorflow.keras.callbacks": "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback "
    "LearningRateWarmupCallback",
    "tensorflow.keras.elastic": "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback",
    "keras": _BASICS + _KERAS,
    "keras.callbacks": "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback "
    "LearningRateWarmupCallback",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
    "common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "common.util": "mpi_built gloo_built nccl_built ddl_built ccl_built",
    "runner": "run",
}

#: Things that are no functions.
VALUES = [
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Compression",
    "ProcessSet",
    "global_process_set",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
]

#: common/common.h, common/utils/env_parser.cc: Horovod's variables that have a meaning here.
VARIABLES = [
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_LOG_LEVEL",
    "HOROVOD_START_TIMEOUT",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
]

#: Those that have none: there is no Gloo, and nothing to switch on or off.
IGNORED = [
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_ENABLE_XLA_OPS",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_CCL_CACHE",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CONTROLLER",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_LOG_HIDE_TIME",
    "HOROVOD_ELASTIC",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
]

#: Calls of the NumPy frontend, which has Horovod's names where it has the call.
NUMPY = [
    *PROCESS,
    *VALUES,
    "build_info",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "join",
    "barrier",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]
NUMPY.remove("Compression")
