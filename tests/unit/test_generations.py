"""What an elastic job does next, from the hosts that there are and the failures that there were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ocomm.launch.failures import Failure
from ocomm.launch.generations import End, Generations, Limits, Start, Wait
from ocomm.launch.hosts import Host, parse_discovered, total_slots

A, B, C = Host("a", 2), Host("b", 2), Host("c", 2)


def job(limits: Limits, *hosts: Host) -> Generations:
    generations = Generations(limits, 0.0)
    generations.found(hosts)
    return generations


def test_a_host_that_fails_is_left_out_where_the_others_are_enough() -> None:
    generations = job(Limits(6, 4), A, B, C)
    assert generations.next(0.0) == Start(1, (A, B, C))
    generations.ended(1.0, [Failure("b", 2, "died")])
    assert generations.next(1.0) == Start(2, (A, C))
    generations.committed(7)
    # Now both are needed: where a rank has only died its host is used again.
    generations.ended(2.0, [Failure("a", 0, "died")])
    assert generations.next(2.0) == Start(3, (A, B, C))


def test_too_few_slots_are_a_clear_end() -> None:
    generations = job(Limits(6, 4), A, B, C)
    generations.next(0.0)
    generations.ended(1.0, [Failure("b", 2, "has not answered", True), Failure("c", 4, "has not answered", True)])
    assert generations.next(1.0) == End(
        "2 slots are left, and at least 4 are needed; rank 2 on b has not answered; rank 4 on c has not answered"
    )


def test_three_failures_without_a_commit_are_the_end_and_a_commit_makes_up_for_them() -> None:
    generations = job(Limits(2, 2), A)
    for now_s in range(5):
        assert isinstance(generations.next(now_s), Start)
        if now_s < 3:
            generations.committed(now_s + 1)
        generations.ended(now_s, [Failure("a", 1, "died")])
    assert isinstance(generations.next(5.0), Start)
    generations.ended(6.0, [], "the launcher ended with status 3")
    assert generations.next(6.0) == End(
        "3 generations in a row failed without a new commit; the last: the launcher ended with status 3"
    )


def test_a_commit_counts_also_if_a_generation_before_had_one_with_a_greater_number() -> None:
    generations = job(Limits(2, 2), A)
    for now_s, number in enumerate([6, 1, 2, 3]):  # a second state, say, which counts its commits anew
        assert generations.next(now_s) == Start(now_s + 1, (A,))
        generations.committed(0)
        generations.committed(number)
        generations.ended(now_s, [Failure("a", 1, "died")])
        assert generations.commit == number
    assert isinstance(generations.next(4.0), Start)


def test_a_commit_that_the_generation_before_had_made_too_is_no_progress() -> None:
    generations = job(Limits(2, 2), A)
    for now_s in range(4):  # a rank dies in commit 5 each time, so that all go back to commit 4
        assert generations.next(now_s) == Start(now_s + 1, (A,))
        generations.committed(5)
        generations.ended(now_s, [Failure("a", 1, "was ended by signal 9")])
    assert generations.next(4.0) == End(
        "3 generations in a row failed without a new commit; the last: rank 1 on a was ended by signal 9"
    )


def test_a_cooldown_lets_a_host_come_back_later_each_time() -> None:
    generations = job(Limits(4, 2, cooldown_s=(10.0, 30.0)), A, B)
    for number, (now_s, out_s) in enumerate([(0.0, 10.0), (100.0, 20.0), (200.0, 30.0), (300.0, 30.0)]):
        generations.next(now_s)
        generations.committed(number + 1)
        generations.ended(now_s, [Failure("b", 2, "died")])
        assert generations.outlook(now_s + out_s - 1) == (A,)
        assert generations.outlook(now_s + out_s) == (A, B)


def test_new_hosts_are_wanted_up_to_the_limit_and_old_ones_keep_their_ranks() -> None:
    generations = job(Limits(2, 2, max_ranks=5, discovers=True), B)
    assert generations.next(0.0) == Start(1, (B,))
    assert not generations.wants_others(0.0)
    generations.found([A, B, C])
    assert generations.wants_others(1.0)
    generations.left(2.0)
    assert generations.next(2.0) == Start(2, (B, A, Host("c", 1)))
    generations.found([A])  # enough to go on, but for those who are to go
    assert generations.wants_others(3.0)
    generations.found([])
    assert not generations.wants_others(3.0)


def test_a_generation_makes_way_for_more_ranks_and_not_for_as_many_elsewhere() -> None:
    generations = job(Limits(4, 2, max_ranks=4, cooldown_s=(10.0, 10.0), discovers=True), A, B, C)
    assert generations.next(0.0) == Start(1, (A, B))
    generations.ended(1.0, [Failure("a", 0, "died")])
    assert generations.next(1.0) == Start(2, (B, C))
    assert not generations.wants_others(12.0)  # the host that had failed may be used again, but is not needed
    generations.found([Host("b", 3), C])
    assert not generations.wants_others(12.0)
    generations.found([Host("b", 1), C])  # fewer slots where it runs
    assert generations.wants_others(12.0)
    generations.found([Host("b", 1), A, C])
    assert generations.wants_others(12.0)


def test_a_generation_stays_on_hosts_that_have_failed_while_it_needs_them() -> None:
    generations = job(Limits(4, 4, discovers=True), A, B)
    generations.next(0.0)
    generations.committed(1)
    generations.ended(1.0, [Failure("a", 0, "died")])
    assert generations.next(1.0) == Start(2, (A, B))
    assert not generations.wants_others(2.0)
    generations.found([A, B, C])
    assert generations.wants_others(2.0)


def test_a_job_waits_for_the_hosts_that_it_wants_but_not_for_ever() -> None:
    generations = job(Limits(4, 2, patience_s=60.0, discovers=True))
    assert generations.next(0.0) == Wait(60.0, "0 slots are left, and at least 4 are needed")
    generations.found([A])
    assert isinstance(generations.next(59.0), Wait)
    assert generations.next(60.0) == Start(1, (A,))
    generations.found([])
    generations.ended(100.0, [Failure("a", 0, "died")])
    assert isinstance(generations.next(159.0), Wait)
    assert generations.next(160.0) == End("0 slots are left, and at least 2 are needed; rank 0 on a died")


def test_the_reset_limit_counts_every_generation_after_the_first() -> None:
    generations = job(Limits(2, 1, resets=1, discovers=True), A)
    generations.next(0.0)
    generations.left(1.0)
    assert isinstance(generations.next(1.0), Start)
    generations.ended(2.0, [Failure("a", 1, "died")])
    assert generations.next(2.0) == End("the reset limit of 1 is used up; the last generation: rank 1 on a died")


events = st.lists(
    st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans(), st.lists(st.sampled_from("abcd"), unique=True)),
    max_size=12,
)


@given(events, st.booleans(), st.booleans())
def test_every_course_of_failures_ends_within_the_limits(course: list, cools: bool, discovers: bool) -> None:
    limits = Limits(4, 3, 6, resets=8, patience_s=50.0, cooldown_s=(5.0, 20.0) if cools else None, discovers=discovers)
    generations, now_s, starts = job(limits, A, B, C), 0.0, 0
    course = list(course)
    for _ in range(200):
        step = generations.next(now_s)
        if isinstance(step, End):
            assert starts <= 9
            return
        if isinstance(step, Wait):
            assert now_s < step.until_s <= now_s + 50.0
            now_s += 1.0
            continue
        starts += 1
        assert 3 <= total_slots(step.hosts) <= 6
        host, is_lost, commits, found = course.pop() if course else ("a", True, False, [])
        if discovers:
            generations.found([Host(name, 2) for name in found])
        if commits:
            generations.committed(starts)
        generations.ended(now_s, [Failure(host, 0, "died", is_lost)])
    raise AssertionError("the job does not end")


def test_discovered_hosts_have_their_slots_or_the_default() -> None:
    assert parse_discovered("a:2\n\nb\n", 4) == (Host("a", 2), Host("b", 4))
    assert parse_discovered("\n", None) == ()
