"""What all ranks do with a step. Pure: all ranks have heard the same in its vote, so all decide the same."""

from __future__ import annotations

import enum

from ocomm.types import Flag


class StepOutcome(enum.Enum):
    """What all ranks do with a step."""

    TAKE = "take"
    SKIP = "skip"
    #: All ranks skip it because a loss scale was too large: a gradient is not finite on some rank that skips.
    OVERFLOW = "overflow"
    #: They raise NonFiniteError.
    NON_FINITE = "non finite"
    #: They exchange it once more.
    AGAIN = "again"
    #: They raise InvalidRequestError, because a rank has released the gradients that would be exchanged again.
    REFUSE = "refuse"


#: For each outcome the flags that lead to it, which the ranks of a part say to other parts of a grid.
FLAGS_OF = {
    StepOutcome.TAKE: Flag(0),
    StepOutcome.SKIP: Flag.SKIP,
    StepOutcome.OVERFLOW: Flag.SKIP | Flag.NON_FINITE,
    StepOutcome.NON_FINITE: Flag.NON_FINITE,
    StepOutcome.AGAIN: Flag.CHANGED,
    StepOutcome.REFUSE: Flag.CHANGED | Flag.RELEASED,
}


def _verdict(flags: int) -> StepOutcome:
    """Returns what the flags lead to, of which each was set by some rank.

    A step that some rank skips is over, whatever else was said. What was compressed before it changed may be NaN for
    that reason alone.
    """
    if flags & (Flag.SKIP | Flag.RAISED):
        return StepOutcome.OVERFLOW if flags & Flag.NON_FINITE else StepOutcome.SKIP
    if flags & (Flag.CHANGED | Flag.UNPOSTED):
        return StepOutcome.REFUSE if flags & Flag.RELEASED else StepOutcome.AGAIN
    return StepOutcome.NON_FINITE if flags & (Flag.NON_FINITE | Flag.AVERAGE) else StepOutcome.TAKE


#: For all flags that some rank has set what they lead to.
VERDICTS = [_verdict(flags) for flags in range(1 << len(Flag))]
