"""What ranks decide from the flags of a vote: against a table of all that matters."""

from __future__ import annotations

import itertools

import pytest

from ocomm.optim.verdict import FLAGS_OF, VERDICTS, StepOutcome
from ocomm.types import Flag


@pytest.mark.parametrize("size", range(len(Flag) + 1))
def test_every_set_of_flags_leads_to_one_outcome(size: int) -> None:
    for flags in itertools.combinations(Flag, size):
        said = set(flags)
        if said & {Flag.SKIP, Flag.RAISED}:
            expected = StepOutcome.OVERFLOW if Flag.NON_FINITE in said else StepOutcome.SKIP
        elif said & {Flag.CHANGED, Flag.UNPOSTED}:
            expected = StepOutcome.REFUSE if Flag.RELEASED in said else StepOutcome.AGAIN
        else:
            expected = StepOutcome.NON_FINITE if said & {Flag.NON_FINITE, Flag.AVERAGE} else StepOutcome.TAKE
        assert VERDICTS[sum(flags)] is expected


@pytest.mark.parametrize("outcome", StepOutcome)
def test_other_parts_hear_what_has_been_decided(outcome: StepOutcome) -> None:
    assert VERDICTS[FLAGS_OF[outcome]] is outcome


@pytest.mark.parametrize("outcomes", [*itertools.combinations(StepOutcome, 2)])
def test_parts_that_differ_take_no_step(outcomes: tuple[StepOutcome, StepOutcome]) -> None:
    assert VERDICTS[FLAGS_OF[outcomes[0]] | FLAGS_OF[outcomes[1]]] is not StepOutcome.TAKE
