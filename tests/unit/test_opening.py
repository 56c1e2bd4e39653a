"""What follows from what the ranks say of themselves when an optimizer is made."""

from __future__ import annotations

import pytest

from ocomm.training.opening import ON_DEVICE, ON_HOST, AllFacts, RankFacts

TORCH = RankFacts(ON_HOST, "auto", "torch", "fused=False foreach=True")


def of(*facts: RankFacts) -> AllFacts:
    return AllFacts(range(4, 4 + len(facts)), facts)


def test_equal_ranks_differ_in_nothing() -> None:
    facts = of(TORCH, TORCH, TORCH)
    assert facts.places == {ON_HOST} and facts.forms_agree
    assert not facts.is_mixed and not facts.rounds_differently
    assert facts.by_implementation == {TORCH.implementation: [4, 5, 6]}


@pytest.mark.parametrize(
    ("other", "is_mixed", "rounds_differently"),
    [
        (TORCH._replace(place=ON_DEVICE), False, False),
        (TORCH._replace(implementation="fused=True"), False, True),
        (TORCH._replace(framework="keras"), True, True),
    ],
)
def test_another_framework_or_form_of_it_rounds_differently(
    other: RankFacts, is_mixed: bool, rounds_differently: bool
) -> None:
    facts = of(TORCH, other)
    assert (facts.is_mixed, facts.rounds_differently) == (is_mixed, rounds_differently)
    assert facts.places == {TORCH.place, other.place}


def test_forms_agree_if_all_ranks_have_asked_for_the_same() -> None:
    assert of(TORCH, TORCH).forms_agree
    assert not of(TORCH, TORCH._replace(hierarchical=True)).forms_agree
    assert of(TORCH._replace(hierarchical=False), TORCH._replace(hierarchical=False)).forms_agree
