"""Finds out whose gradients were not finite, after a step that no rank takes because of them."""

from __future__ import annotations

from collections.abc import Sequence

from ocomm.optim.core import Core
from ocomm.optim.flows import Flow
from ocomm.optim.step_channel import StepChannel
from ocomm.optim.vote import Round
from ocomm.types import Flag

#: The ``attempt`` of the round in which ranks say whose gradients were not finite.
_ROUND = 2


def non_finite_ranks(
    core: Core, wire: StepChannel, held: Round, flows: Sequence[Flow], step: int, is_known: bool
) -> list[int]:
    """Returns the world ranks whose gradients have NaN or Inf; none if only the average overflowed. Collective.

    A rank that compressed has said so in a header, unless the header spoke for a node. For other ranks, which only
    add to a sum, all ranks look at their gradients and tell each other in one more round. All ranks do so or none,
    since all have heard the same.

    ``held`` is the vote of the step, whose messages travel once more then. ``is_known``: this rank has seen a gradient
    of its own that is not finite, which may be released.
    """
    header = held.segment_header
    if core.layout.nodes.is_flat:
        heard = [header, *(h for flow in flows if flow.says_whose for h in flow.segment_headers)]
        found = {rank for each in heard for rank in each.ranks_with(Flag.NON_FINITE)}
        if found:
            return [wire.ranks[rank] for rank in sorted(found)]
    # Not what the rank has said in its vote, which may have been of its node's sum.
    is_finite = all(core.kernels.finite(s.blocks, core.gradients) for flow in flows for s in flow.segments)
    header.header["flags"] = Flag.NON_FINITE if is_known or not is_finite else 0
    header.header["attempt"] = _ROUND
    wire.run(held.prepared, f"{wire.name}: step {step}")
    return [wire.ranks[rank] for rank in header.ranks_with(Flag.NON_FINITE)]
