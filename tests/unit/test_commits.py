"""Which commit the ranks go back to, from what each of them sees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ocomm.elastic.commits import Choice, Held, Label, choose, without

FIVE, SIX = Label(1, 5, "aa"), Label(1, 6, "aa")


def held(*ranks: int, size: int = 2, replicated: bool = True) -> Held:
    return Held(replicated, {rank: rank for rank in ranks}, size)


def test_without_commits_there_is_nothing_to_go_back_to() -> None:
    assert choose([{}, {}]) is None
    assert choose([{FIVE: held(0, replicated=False)}, {}]) is None


def test_the_newest_commit_is_chosen_wherever_its_parts_lie() -> None:
    whole = [{FIVE: held(0), SIX: held(0)}, {FIVE: held(1), SIX: held(1, replicated=False)}]
    assert choose(whole) == Choice(SIX, (0,), 2, {0: (0,), 1: (1,)}, {0: 0, 1: 1})
    # A later generation counts more than a higher number: what came before it was given up.
    assert choose([{SIX: held(0), Label(2, 3, "bb"): held(0)}]).label == Label(2, 3, "bb")  # type: ignore[union-attr]


def test_a_rank_that_died_while_it_wrote_brings_all_back_to_the_commit_before() -> None:
    half = [{FIVE: held(0), SIX: held(0)}, {FIVE: held(1)}]
    assert choose(half) == Choice(FIVE, (0, 1), 2, {0: (0,), 1: (1,)}, {0: 0, 1: 1})
    # Nothing is won by that where the rank's part of that one is lost, too.
    lost = [{FIVE: held(0), SIX: held(0)}, {}]
    choice = choose(lost)
    assert choice is not None and (choice.label, choice.lost) == (SIX, [1])


def test_a_damaged_file_counts_as_one_that_is_not_there() -> None:
    seen = {FIVE: held(0, 1), SIX: held(0, 1)}
    assert without(seen, ()) == seen
    one_part, no_label = without(seen, {(SIX, 1)}), without(seen, {(SIX, None)})
    assert one_part == {FIVE: held(0, 1), SIX: held(0)}
    assert no_label == {FIVE: held(0, 1), SIX: held(0, 1, replicated=False)}
    for left in (one_part, no_label):
        choice = choose([left, left])
        assert choice is not None and (choice.label, choice.lost) == (FIVE, [])


labels = st.builds(Label, st.integers(0, 3), st.integers(0, 5), st.sampled_from(["aa", "bb"]))
parts = st.builds(Held, st.booleans(), st.dictionaries(st.integers(0, 3), st.just(0)), st.just(4))
listings = st.lists(st.dictionaries(labels, parts, max_size=4), min_size=1, max_size=4)


@given(listings)
def test_what_is_chosen_can_be_restored_and_is_at_most_one_commit_old(all_held: list[dict[Label, Held]]) -> None:
    choice = choose(all_held)
    restorable = {label for each in all_held for label, found in each.items() if found.replicated}
    if choice is None:
        assert not restorable
        return
    assert choice.replicated and all(all_held[who][choice.label].replicated for who in choice.replicated)
    assert all(
        rank in all_held[who][choice.label].places for rank, who_has in choice.sources.items() for who in who_has
    )
    newest = max(restorable)
    assert choice.label == newest or (choice.label.number == newest.number - 1 and not choice.lost)
