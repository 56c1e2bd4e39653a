"""The fusion rule: which ready tensors share one exchange. It is Horovod's rule, as a pure function of an ordered
list.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ocomm.negotiation.request import Kind, Request
from ocomm.types import ReduceOp


def fuse(ready: Sequence[Request], threshold_nbytes: int, across_groups: bool = True) -> list[list[Request]]:
    """Groups ready tensors, in order, into exchanges.

    Only allreduces of equal dtype, operation, factors and memory fuse, up to the threshold. Adasum does not fuse,
    because its weights are those of a whole tensor. Unless ``across_groups``, the tensors of a group fuse with each
    other only.

    Look-ahead: a tensor that does not fit may be passed over, as long as the exchange and what was passed over stay
    within the threshold together. A tensor larger than the threshold goes alone. A threshold of 0 turns fusion off.
    """
    groups: list[list[Request]] = []
    waiting = list(ready)
    while waiting:
        first = waiting.pop(0)
        group, nbytes, skipped = [first], first.nbytes, 0
        if first.kind == Kind.ALLREDUCE and first.op != ReduceOp.ADASUM:
            left: list[Request] = []
            likeness = _likeness(first)
            for position, request in enumerate(waiting):
                if nbytes + skipped >= threshold_nbytes:
                    left += waiting[position:]
                    break
                is_alike = request.kind is Kind.ALLREDUCE and likeness == _likeness(request)
                is_alike = is_alike and (across_groups or first.group == request.group)
                if is_alike and nbytes + skipped + request.nbytes <= threshold_nbytes:
                    group.append(request)
                    nbytes += request.nbytes
                else:
                    left.append(request)
                    skipped += request.nbytes
            waiting = left
        groups.append(group)
    return groups


_likeness = operator.attrgetter("dtype", "op", "prescale", "postscale", "memory")
