"""FSDP2 with replicas: averages the gradients of equal shards over the ranks that have them, without compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ocomm.api import Average
from ocomm.errors import InvalidRequestError
from ocomm_torch.mesh import chosen_ranks
from ocomm_torch.mpi_ops import allreduce_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def across_hook(
    process_set: Any = None, name: str = "fsdp", *, mesh: DeviceMesh | None = None, data: str | None = None
) -> Callable[[Tensor], None]:
    """Returns a hook for ``FSDPModule.set_all_reduce_hook``, which averages gradients over replicas of a shard.

    ``fully_shard`` then has the inner ranks alone, and any optimizer of torch takes the steps. The hook averages the
    reduced gradients of a module in place, in their own dtype, with 4 bytes per element in float32, and backward waits
    for it. Each call is collective over the ranks that are averaged, which run the same backward. Making the hook is
    collective if ``mesh`` is given.

    Args:
        process_set: The ranks that have this rank's shard: an ``ocomm_torch.ProcessSet``.
        name: The name of the averages in messages; models that train at the same time have different ones.
        mesh: Instead of ``process_set``: a torch ``DeviceMesh`` of all ranks (``init_device_mesh``), of which
            ``fully_shard`` has another axis.
        data: The name of the mesh's axis whose ranks are averaged.

    Returns:
        A function of one tensor, which may serve all modules of a model.

    Raises:
        InvalidRequestError: Neither or both of ``process_set`` and ``mesh`` are given, or the mesh lacks the axis.
        MismatchError: In the hook: the ranks have shards of different sizes.
    """
    ranks = chosen_ranks(process_set, mesh, data)
    if ranks is None:
        raise InvalidRequestError(
            "across_hook averages over the ranks that have the same shard: pass process_set=, or mesh=mesh, data='dp', "
            "for instance. All ranks together have different shards."
        )

    def average(gradients: Tensor) -> None:
        # Equal sizes may share a name: the next call begins when this one is over.
        allreduce_(gradients, op=Average, name=f"{name}.{gradients.numel()}", process_set=ranks)

    return average
