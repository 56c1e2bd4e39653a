"""What follows from what ranks report and the launcher prints: decided without processes, connections and clocks."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

import pytest

from ocomm.launch.failures import Failure, blame, failed_ranks
from ocomm.launch.generations import Start
from ocomm.launch.hosts import Host
from ocomm.launch.reports import END_S, Deadline, Heard, Reports


def reports_of(*hosts: Host, number: int = 1, kept: dict[str, int] | None = None) -> Reports:
    """Of a generation whose ranks come until 10 s."""
    return Reports(Start(number, hosts), {} if kept is None else kept, 10.0)


def come(reports: Reports, rank: int, host: str) -> None:
    message = {"word": "here", "rank": rank, "host": host, "generation": reports.step.number}
    assert reports.hear(-1, message) == Heard(rank)


def reach_none(names: Sequence[str]) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def test_a_rank_that_says_that_it_ends_fails_no_more_and_one_may_make_way() -> None:
    reports = reports_of(Host("a", 2))
    come(reports, 1, "a")
    assert reports.hear(1, {"word": "bye"}) == Heard(-1) and not reports.has_left
    assert reports.hear(0, {"word": "leave"}) == Heard(-1) and reports.has_left


def test_a_rank_of_a_generation_that_is_over_is_not_heard() -> None:
    with pytest.raises(EOFError):
        reports_of(Host("a", 1), number=2).hear(-1, {"word": "here", "rank": 0, "host": "a", "generation": 1})


def test_a_generation_that_finds_no_commit_is_told_of_if_one_of_that_state_was_kept() -> None:
    reports = reports_of(Host("a", 1), Host("b", 1), number=2, kept={"set0.1": 12})
    first, second, again = (
        reports.hear(0, {"word": "anew", "state": state, "folder": "/tmp/kept"})
        for state in ("set0.2", "set0.1", "set0.1")
    )
    assert first == again == Heard(0)
    assert second.notice == ("commit 12 is gone: generation 2 has found none in /tmp/kept on a, b, and begins anew")


def test_the_launcher_has_time_to_end_by_itself_after_a_failure_and_none_after_a_signal() -> None:
    reports = reports_of(Host("a", 2))
    assert reports.deadline(Deadline(), 10.0, 0, False) == Deadline()
    failed = reports.deadline(Deadline(), 5.0, 0, True)
    assert failed == Deadline(5.0 + END_S)
    assert reports.deadline(failed, 6.0, 0, True) == failed
    for asked, passed_on in ((signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGTERM)):
        assert reports.deadline(failed, 7.0, asked, True) == Deadline(7.0, passed_on)
        assert reports.deadline(Deadline(1.0), 7.0, asked, True) == Deadline(1.0, passed_on)


def test_ranks_that_do_not_come_in_time_end_the_generation_by_name() -> None:
    reports = reports_of(Host("a", 1), Host("b", 2))
    come(reports, 1, "b")
    late = reports.deadline(Deadline(), 10.1, 0, False)
    assert late == Deadline(10.1, why="ranks [0, 2] have not come to init() in time")
    why = "has not answered: it never came to init()"
    assert reports.failures("", [], 10.1, reach_none) == [Failure("a", 0, why, True), Failure("b", 2, why, True)]
    assert reports.failures("", [], 9.9, reach_none) == []
    come(reports, 0, "a")
    come(reports, 2, "b")
    assert math.isinf(reports.deadline(Deadline(), 10.1, 0, False).at_s)


def test_a_host_is_known_by_the_supervisors_name_or_by_the_order_of_ranks() -> None:
    reports = reports_of(Host("a.net", 1), Host("10.0.0.2", 2))
    come(reports, 0, "a")
    come(reports, 2, "b.net")
    found = reports.hear(0, {"word": "lost", "ranks": {"2": "raised ValueError: no", "0": "raised KeyError: x"}})
    assert found == Heard(0)
    assert [failure.host for failure in reports.failures("", [], 0.0, reach_none)] == ["a.net", "10.0.0.2"]


def test_of_a_host_that_the_launcher_has_lost_no_rank_of_another_is_blamed() -> None:
    reports = reports_of(Host("a", 1), Host("b", 1))
    come(reports, 0, "a")
    words = "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun-a-38@0,1] on node b\n"
    assert reports.failures(words, [0], 0.0, reach_none) == [Failure("b", None, "has lost the launcher's daemon", True)]


def test_the_cause_is_whom_the_launcher_or_others_name_before_who_fell_with_it() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    silent = {1: "has not answered for 7 s"}
    assert blame({2: "was ended by signal 9"}, silent, {0: "x"}, [0], [], hosts, {}) == [
        Failure("b", 2, "was ended by signal 9")
    ]
    assert blame({}, silent, {0: "ended with status 1"}, [0], [], hosts, {"a": True}) == [
        Failure("a", 1, "has not answered for 7 s", True)
    ]
    # A rank that had been stopped is woken when the launcher ends it, and hears only then why another has ended.
    told = {**silent, 2: "raised PeerError: rank 1 has not answered for 7 s."}
    assert blame({}, told, {}, [], [], hosts, {}) == [Failure("a", 1, "has not answered for 7 s")]
    assert [failure.rank for failure in blame({}, {2: told[2]}, {0: "ended with status 1"}, [0], [], hosts, {})] == [2]
    assert blame({}, {}, {}, [2, 0, 1], [], hosts, {}) == [Failure("b", 2, "died")]
    assert blame({}, {}, {}, [], [], hosts, {}) == []
    (either,) = blame({}, {}, {}, [0], [1, 2], hosts, {})
    assert str(either) == "rank 0 on a died, or before it one of the rank(s) 1, 2, which had not come to init()"
    (either,) = blame({}, {}, {}, [0], range(1, 20), hosts, {})
    assert "one of the rank(s) 1, 2, 3, 4, 5, 6, 7, 8, ..., which" in str(either)


def test_open_mpis_words_are_understood_also_where_it_breaks_its_lines() -> None:
    killed = "prterun noticed that process rank 1 with PID 25234 on node vm exited on\nsignal 9 (Killed).\n"
    assert failed_ranks(killed) == ({1: "was ended by signal 9"}, {})
    failed = "   Process name: [prterun-vm-20062@1,12]\n   Exit code:    3\n"
    assert failed_ranks(failed) == ({}, {12: "ended with status 3"})
