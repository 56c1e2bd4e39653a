"""Where a step is cut into buckets: against all ways of cutting it."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.optim.buckets import _POST_S, Stopwatch, even, timed


def over(numels: list[int], moments: list[float], cost: float, ends: list[int]) -> float:
    """When the exchange of buckets with these ends is over, each after the one before."""
    now = 0.0
    for start, end in pairwise([0, *ends]):
        now = max(now, moments[end - 1]) + cost * sum(numels[start:end]) + _POST_S
    return now


steps = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 0.1)), min_size=1, max_size=7)


@given(steps, st.floats(0, 1e-3), st.integers(1, 4))
def test_no_other_cut_is_over_sooner(step: list[tuple[int, float]], cost: float, count: int) -> None:
    numels, moments = [n for n, _ in step], np.cumsum([gap for _, gap in step]).tolist()
    ends = timed(numels, moments, cost, count)
    assert ends[-1] == len(numels) and ends == sorted(set(ends)) and ends[0] > 0 and len(ends) <= count
    ways = [[*inner, len(numels)] for k in range(count) for inner in combinations(range(1, len(numels)), k)]
    best = min(over(numels, moments, cost, way) for way in ways)
    assert over(numels, moments, cost, ends) == pytest.approx(best, abs=1e-9)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 5))
def test_even_runs_have_no_more_than_their_share_and_a_tensor(numels: list[int], count: int) -> None:
    ends = even(numels, count)
    assert ends[-1] == len(numels) and ends == sorted(set(ends)) and len(ends) <= count
    for start, end in pairwise([0, *ends]):
        assert sum(numels[start:end]) <= sum(numels) / count + max(numels)


def test_what_comes_last_travels_in_a_bucket_of_its_own_if_the_network_is_fast() -> None:
    numels, moments = [100] * 10, [0.01 * k for k in range(10)]
    assert timed(numels, moments, 1e-6, 3)[-2:] == [9, 10]
    assert timed(numels, moments, 1e-3, 3)[0] == 1  # else it waits too long for the first


def test_the_stopwatch_has_mean_moments_and_the_least_cost() -> None:
    watch = Stopwatch(4)
    watch.saw([2, 0, 1], [5.0, 5.1, 5.4], [(100, 0.2), (300, 0.3)])
    watch.saw([2, 1], [7.0, 7.2], [(100, 0.05), (0, 0.0)])
    assert watch.cost == pytest.approx(5e-4)
    np.testing.assert_allclose(watch.moments(), [0.1, 0.3, 0, 0])
