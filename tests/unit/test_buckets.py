"""Where a step is cut into buckets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ocomm.optim.buckets import even


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 5))
def test_even_runs_have_no_more_than_their_share_and_a_tensor(numels: list[int], count: int) -> None:
    ends = even(numels, count)
    assert ends[-1] == len(numels) and ends == sorted(set(ends)) and len(ends) <= count
    for start, end in pairwise([0, *ends]):
        assert sum(numels[start:end]) <= sum(numels) / count + max(numels)
