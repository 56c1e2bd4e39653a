"""Which tensors have their elements at an address: only those can be exchanged, and stepped in place.

A subclass of ``Tensor`` may keep its elements in other tensors: a DTensor in its local shard, quantized types in
several. Such a tensor has a shape and a dtype, and its ``data_ptr()`` is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ocomm_torch.backward.watched import WatchedGradient

#: Classes whose objects have their elements at ``data_ptr()``. To look at a ``WatchedGradient`` would use it.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, WatchedGradient})
#: Counts the owners of a storage; None in builds of Torch before 2.6 without CUDA.
_owners = getattr(torch._C, "_storage_Use_Count", None)


def why_unreadable(tensor: Tensor) -> str:
    """Returns why the elements of a strided tensor are not at its address, as the end of a sentence; "" if they are."""
    if type(tensor) in _PLAIN or tensor.layout is not torch.strided or not tensor.numel():
        return ""
    try:
        if tensor.data_ptr() or tensor.is_meta:
            return ""
    except RuntimeError:  # a subclass without storage
        pass
    kind = type(tensor).__name__
    if is_dtensor(tensor):
        return (
            f"is a {kind}, whose elements are in a local tensor of each rank, not at its own address: "
            "fully_shard or parallelize_module has made it"
        )
    return f"is a {kind}, whose elements are not at an address of its own, so ocomm cannot read them"


def why_untrainable(parameter: Tensor) -> str:
    """Returns why a parameter cannot be one of a replica's, as the end of a sentence; "" if it can."""
    if getattr(parameter, "_is_flat_param", False):
        return (
            "is a flat parameter of FullyShardedDataParallel, of which each rank has another part: use fully_shard "
            "(FSDP2) and a 1-bit optimizer with mesh="
        )
    return why_unreadable(parameter)


def is_part(tensor: Tensor) -> bool:
    """Returns True if a strided tensor's memory is a part of a larger one, as that of a view of one buffer of all
    gradients: its version counts changes of the other parts, too.
    """
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def is_shared(tensor: Tensor) -> bool:
    """Returns True if another tensor may be in the same memory or a part of it, even one that only autograd holds."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # a subclass without storage
        return False
    return _owners is None or _owners(storage._cdata) > 2  # which are the tensor and ``storage``


def is_dtensor(tensor: Tensor) -> bool:
    """Returns True if the tensor is a ``torch.distributed.tensor.DTensor``, whose module may not be imported."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)
