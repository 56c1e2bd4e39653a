"""When gradients are complete: against a count of passes by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ocomm_torch.backward.passes import Passes, Verdict


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=12))
def test_the_last_pass_that_does_not_hold_makes_a_gradient_complete(
    per_step: int, drawn: list[tuple[str, bool]]
) -> None:
    passes, complete = Passes(per_step, "ab"), set()
    counts = dict.fromkeys("ab", 0)
    for parameter, holds in drawn:
        passes.holds = holds
        verdict = passes.count(parameter)
        if parameter in complete:
            assert verdict is Verdict.EXTRA
            continue
        # Those that hold count as passes, but never as the last one.
        counts[parameter] = min(counts[parameter] + 1, per_step - 1) if holds else counts[parameter] + 1
        expected = Verdict.POST if counts[parameter] == per_step else Verdict.KEEP
        assert verdict is expected
        if verdict is Verdict.POST:
            complete.add(parameter)
        assert passes.are_over("ab") == (complete == {*"ab"})
    passes.restart()
    assert not passes.are_over("a") and passes.are_over("")


def test_inside_held_every_pass_holds() -> None:
    passes = Passes(1, "a")
    with passes.held(), passes.held():
        assert passes.count("a") is Verdict.KEEP
    assert passes.count("a") is Verdict.POST


def test_another_number_of_passes_begins_the_step_again() -> None:
    passes = Passes(2, "a")
    passes.count("a")
    passes.per_step = 1
    passes.add("b")
    assert passes.count("a") is Verdict.POST and passes.count("b") is Verdict.POST


def test_a_parameter_may_be_complete_without_a_pass() -> None:
    passes = Passes(3, "a")
    passes.complete("a")
    passes.add("a")
    assert passes.are_over("a") and passes.count("a") is Verdict.EXTRA
