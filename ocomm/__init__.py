"""Data-parallel training with 1-bit gradient exchange: Horovod's calls on NumPy arrays.

Torch and TensorFlow have their own frontends: ``import ocomm_torch as hvd``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ocomm.api import *  # noqa: F403
    from ocomm.errors import *  # noqa: F403
    from ocomm.launch.run import run as run
    from ocomm.operations import ProcessSet as ProcessSet
    from ocomm.operations import add_process_set as add_process_set
    from ocomm.operations import global_process_set as global_process_set
    from ocomm.operations import remove_process_set as remove_process_set
    from ocomm.version import __version__ as __version__

# The launcher and tools import this package too, so each name, and NumPy with it, is loaded when it is first used.
_HOMES = {
    "ocomm.api": (
        "Adasum Average Max Min Product Sum allgather allgather_async allgather_object allreduce allreduce_ "
        "allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async "
        "broadcast_async_ broadcast_object build_info ccl_built compressed_allreduce cross_rank cross_size cuda_built "
        "ddl_built gloo_built gloo_enabled grouped_allreduce grouped_allreduce_async init is_homogeneous "
        "is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank "
        "reducescatter reducescatter_async rocm_built shutdown size start_timeline stop_timeline synchronize"
    ),
    "ocomm.errors": (
        "HorovodInternalError HostsUpdatedInterrupt InvalidRequestError LaunchError MismatchError NonFiniteError "
        "NotInitializedError OcommError PeerError SettingsError StallError UnsupportedError"
    ),
    "ocomm.launch.run": "run",
    "ocomm.operations": "ProcessSet add_process_set global_process_set remove_process_set",
    "ocomm.version": "__version__",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ocomm' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
