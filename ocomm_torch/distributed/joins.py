"""What ``DistributedDataParallel.join`` needs of works in Python."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.algorithms.join import Join

from ocomm_torch.distributed.work import GroupWork

_notify = Join.notify_join_context
_works: WeakKeyDictionary[Any, GroupWork] = WeakKeyDictionary()


def _notify_and_keep(joinable: Any) -> Any:
    """Torch's ``Join.notify_join_context``, whose work lives until the next call for ``joinable``.

    DistributedDataParallel hands it to its C++, which asks it in the backward pass how many ranks take part, and keeps
    no reference to the Python object. Without that C++ calls the methods of Torch's base class, which wait for ever or
    raise an error.
    """
    work = _notify(joinable)
    if isinstance(work, GroupWork):
        _works[joinable] = work
    return work


Join.notify_join_context = staticmethod(_notify_and_keep)
