"""Which stalls are told, whom the coordinator asks for lines of code, and which stalls end, by a clock of the test."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from ocomm.negotiation.cache import RankCache
from ocomm.negotiation.coordinator import Coordinator
from ocomm.negotiation.request import Fault, Kind, Request
from ocomm.runtime.control import MessageType
from ocomm.runtime.stalls import StallWatch
from ocomm.types import DType, Settings

RANKS = (4, 5, 7)  # a process set: people read world ranks
SETTINGS = Settings(stall_check_s=60.0, stall_shutdown_s=300.0)


class Asked:
    """A link that notes who is asked for a line of code."""

    ranks = RANKS

    def __init__(self) -> None:
        self.places: list[int] = []

    def send(self, place: int, word: MessageType) -> None:
        assert word is MessageType.WHERE
        self.places.append(place)


def watched(ready: tuple[int, ...] = (0,), **changes: Any) -> tuple[StallWatch, Asked, Coordinator]:
    """A watch of a set in which the ranks at the places ``ready`` have asked for tensor 'a' at time 0."""
    coordinator = Coordinator(RANKS, 1 << 20, 16)
    for place in ready:
        message = RankCache().announcement([Request(Kind.ALLREDUCE, "a", DType.FLOAT32, (4,))])
        coordinator.receive((place,), message, 0.0)
    link: Any = Asked()
    return StallWatch(coordinator, link, lambda: "here.py:1", replace(SETTINGS, **changes)), link, coordinator


def test_a_stall_is_told_once_a_minute_when_the_late_ranks_have_said_where_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, asked, _ = watched((0, 1))
    with caplog.at_level(logging.WARNING, "ocomm"):
        assert watch.inspect(59.0) == [] and asked.places == []
        assert watch.inspect(60.0) == [] and asked.places == [2] and not caplog.messages
        watch.hear(7, "train.py:12")
        for now in (60.5, 61.0, 119.0):
            assert watch.inspect(now) == []
        assert caplog.messages == [
            "tensor 'a': ranks 4, 5 submitted it 60 s ago, rank 7 did not. rank 7 is at train.py:12."
        ]
        watch.inspect(121.0)
    assert len(caplog.messages) == 2 and asked.places == [2]


def test_tensors_that_wait_for_the_same_ranks_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    watch, _, coordinator = watched((0, 1))
    for place, names in (0, "bcde"), (2, "f"):
        requests = [Request(Kind.ALLREDUCE, name, DType.FLOAT32, (4,)) for name in names]
        coordinator.receive((place,), RankCache().announcement(requests), 10.0)
    watch.hear(5, "train.py:10")
    watch.hear(7, "train.py:12")
    with caplog.at_level(logging.WARNING, "ocomm"):
        watch.inspect(70.0)
    assert caplog.messages == [
        "tensor 'a': ranks 4, 5 submitted it 70 s ago, rank 7 did not. rank 7 waits for 'f' instead, at train.py:12.",
        "tensors 'b', 'c', 'd' and 1 more: rank 4 submitted them 60 s ago, ranks 5, 7 did not. rank 5 waits for 'a' "
        "instead, at train.py:10; rank 7 waits for 'f' instead, at train.py:12.",
        "tensor 'f': rank 7 submitted it 60 s ago, ranks 4, 5 did not. rank 4 waits for 'a', 'b', 'c' and 2 more "
        "instead, at here.py:1; rank 5 waits for 'a' instead, at train.py:10.",
    ]


def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_two_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, asked, _ = watched()
    with caplog.at_level(logging.WARNING, "ocomm"):
        watch.inspect(60.0)
        watch.hear(5, "train.py:12")
        watch.inspect(61.0)
        assert asked.places == [1, 2] and not caplog.messages
        watch.inspect(62.0)
    assert "rank 5 is at train.py:12." in caplog.text


def test_the_coordinator_knows_its_own_line() -> None:
    watch, asked, _ = watched((1, 2), stall_raise=True)
    (response,) = watch.inspect(60.0)
    assert asked.places == [] and "rank 4 is at here.py:1" in response.error


def test_a_stall_ends_after_the_limit_with_what_is_known_by_then(caplog: pytest.LogCaptureFixture) -> None:
    watch, _, coordinator = watched()
    assert watch.inspect(60.0) == []
    (response,) = watch.inspect(300.0)
    assert (response.fault, response.names) == (Fault.STALL, ("a",))
    assert coordinator.stalled(400.0, 0.0) == [] and watch.inspect(400.0) == []


def test_without_a_limit_no_stall_ends() -> None:
    watch, _, _ = watched(stall_shutdown_s=0.0)
    assert watch.inspect(60.0) == [] and watch.inspect(1e6) == []


def test_what_is_short_is_shown_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    watch, asked, _ = watched()
    assert watch.inspect(1.0) == [] and watch.stalls == []
    assert watch.inspect(3.0) == [] and [stall.name for stall in watch.stalls] == ["a"]
    assert asked.places == [] and not caplog.messages


def test_a_later_stall_asks_again() -> None:
    watch, asked, coordinator = watched((0, 1))
    watch.inspect(60.0)
    coordinator.receive((2,), RankCache().announcement([Request(Kind.ALLREDUCE, "a", DType.FLOAT32, (4,))]), 61.0)
    coordinator.decide()
    watch.inspect(62.0)
    coordinator.receive((0,), RankCache().announcement([Request(Kind.ALLREDUCE, "b", DType.FLOAT32, (4,))]), 63.0)
    watch.inspect(123.0)
    assert asked.places == [2, 1, 2]


@pytest.mark.parametrize("why", ["", " No rank can go on."])
def test_where_no_rank_can_go_on_that_is_told_at_once_or_everything_fails(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _, _ = watched((0, 1))
    with caplog.at_level(logging.WARNING, "ocomm"):
        responses = watch.report_stuck({7: "train.py:12"}, why, 1.0)
    said = caplog.messages if not why else [response.error for response in responses]
    assert said == [
        f"tensor 'a': ranks 4, 5 submitted it 1 s ago, rank 7 did not. rank 7 is at train.py:12.{why}"
    ] and len(responses) == bool(why)
