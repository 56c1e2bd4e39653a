"""How many segments are in flight."""

from __future__ import annotations

import pytest

from ocomm.collectives.pipeline import LEAST_WINDOW, MESSAGES, SEGMENTS, window
from ocomm.types import Settings
from tests.worlds import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_whole_exchange_of_few_ranks_is_in_flight(ranks: int) -> None:
    assert window(ranks, 2) >= 2 * SEGMENTS


@pytest.mark.parametrize("ranks", [16, 32, 64, 65, 1000])
def test_many_ranks_have_few_messages_in_flight(ranks: int) -> None:
    found = window(ranks, ranks)
    assert found == LEAST_WINDOW or 2 * (ranks - 1) * found <= MESSAGES


def test_one_host_has_no_delay() -> None:
    assert window(4, 1) == LEAST_WINDOW


@pytest.mark.parametrize(("asked", "expected"), [(0, 32), (7, 7)])
def test_the_channels_of_a_job_on_two_hosts_have_it_unless_the_user_says_another(asked: int, expected: int) -> None:
    found = run_ranks(
        2, lambda session: session.member_set(0).settings.window, Settings(window=asked), hosts=["a", "b"]
    )
    assert found == [expected, expected]
