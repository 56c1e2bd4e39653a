"""What the PMI service answers, and when a job has to end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.launch.pmi_job import Limits, PmiJob, parse, process_mapping


def job(*hosts: str) -> PmiJob:
    """Of ranks on these hosts, at the time 0; every rank is connected."""
    made = PmiJob("space", hosts, Limits(init_s=100.0, grace_s=5.0), 0.0)
    for rank in range(len(hosts)):
        made.connected(rank)
    return made


def expanded(mapping: str) -> list[int]:
    """The node of each rank, as MPICH reads a mapping."""
    assert mapping.startswith("(vector,(") and mapping.endswith("))")
    blocks = [tuple(map(int, block.split(","))) for block in mapping[len("(vector,(") : -2].split("),(")]
    return [node for first, nodes, ranks in blocks for node in range(first, first + nodes) for _ in range(ranks)]


@pytest.mark.parametrize(
    ("hosts", "mapping"),
    [
        ("a", "(vector,(0,1,1))"),
        ("aa", "(vector,(0,1,2))"),
        ("aabb", "(vector,(0,2,2))"),
        ("aab", "(vector,(0,1,2),(1,1,1))"),
        ("abab", "(vector,(0,2,1),(0,2,1))"),
        ("abba", "(vector,(0,1,1),(1,1,2),(0,1,1))"),
    ],
)
def test_the_mapping_says_which_ranks_share_a_host(hosts: str, mapping: str) -> None:
    assert process_mapping(hosts) == mapping


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40))
def test_the_mapping_holds_for_any_order_of_hosts(hosts: list[str]) -> None:
    first_seen = list(dict.fromkeys(hosts))
    assert expanded(process_mapping(hosts)) == [first_seen.index(host) for host in hosts]


def test_a_line_is_a_command_and_values_which_may_have_equals_signs() -> None:
    assert parse("cmd=put kvsname=k key=P0-bc value=a=b==") == (
        "put",
        {"kvsname": "k", "key": "P0-bc", "value": "a=b=="},
    )
    with pytest.raises(ValueError, match="without a command"):
        parse("hello")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"),
        ("cmd=init pmi_version=2 pmi_subversion=0", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=-1\n"),
        ("cmd=get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n"),
        ("cmd=get_appnum", "cmd=appnum appnum=0\n"),
        ("cmd=get_universe_size", "cmd=universe_size size=2\n"),
        ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=space\n"),
        (
            "cmd=get kvsname=space key=PMI_process_mapping",
            "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))\n",
        ),
        ("cmd=get kvsname=space key=other", "cmd=get_result rc=-1 msg=key_not_found value=unknown\n"),
        ("cmd=lookup_name service=x", "cmd=lookup_result rc=-1 msg=not_supported\n"),
        ("cmd=finalize", "cmd=finalize_ack rc=0\n"),
    ],
)
def test_every_question_has_an_answer(line: str, answer: str) -> None:
    assert job("a", "a").heard(1, line, 1.0) == [(1, answer)]


def test_what_one_rank_puts_another_gets() -> None:
    both = job("a", "a")
    assert both.heard(0, "cmd=put kvsname=space key=bc value=xyz", 1.0) == [(0, "cmd=put_result rc=0 msg=success\n")]
    assert both.heard(1, "cmd=get kvsname=space key=bc", 1.0) == [(1, "cmd=get_result rc=0 msg=success value=xyz\n")]


def test_a_mapping_that_is_too_long_is_not_there() -> None:
    many = job(*["a", "b", "c"] * 400)
    ((_, answer),) = many.heard(0, "cmd=get kvsname=space key=PMI_process_mapping", 1.0)
    assert "rc=-1" in answer


def test_a_barrier_opens_when_all_have_come_and_again() -> None:
    three = job("a", "a", "a")
    for _ in range(2):
        assert three.heard(1, "cmd=barrier_in", 1.0) == []
        assert three.heard(0, "cmd=barrier_in", 2.0) == []
        out = "cmd=barrier_out rc=0\n"
        assert three.heard(2, "cmd=barrier_in", 3.0) == [(0, out), (1, out), (2, out)]


def test_a_job_is_over_when_all_ranks_have_left() -> None:
    both = job("a", "b")
    both.heard(0, "cmd=finalize", 1.0)
    both.closed(0, 2.0)
    assert not both.is_over
    both.heard(1, "cmd=finalize", 3.0)
    assert both.is_over and both.must_end(1e9) == ""


def test_a_rank_that_is_gone_ends_the_others_after_their_grace() -> None:
    both = job("a", "b")
    both.up(0)
    both.up(1)
    both.closed(1, 10.0)
    assert both.must_end(14.9) == ""
    assert both.must_end(15.1) == "rank 1 has ended without MPI_Finalize"
    both.closed(0, 15.2)
    assert both.is_over
    assert both.failure.startswith("rank 1 ")  # the first one is the cause


def test_a_rank_that_is_gone_in_mpi_init_is_said_to_be() -> None:
    both = job("a", "b")
    both.closed(1, 10.0)
    assert both.must_end(16.0) == "rank 1 has ended without MPI_Finalize, in MPI_Init"


def test_a_command_of_several_lines_is_refused_and_ends_nothing() -> None:
    both = job("a", "b")
    for line in ("mcmd=spawn", "nprocs=1", "execname=a"):
        assert both.heard(0, line, 1.0) == []
    assert both.heard(0, "endcmd", 1.0) == [(0, "cmd=spawn_result rc=-1 msg=not_supported\n")]
    assert both.must_end(1e9) == ""


def test_an_abort_ends_the_others_at_once() -> None:
    both = job("a", "b")
    assert both.heard(1, "cmd=abort exitcode=13", 10.0) == []
    assert both.must_end(10.0) == "rank 1 has called MPI_Abort(13)"


def test_who_does_not_speak_pmi_ends_the_job() -> None:
    both = job("a", "b")
    assert both.heard(1, "GET / HTTP/1.1", 10.0) == []
    assert both.must_end(10.0).startswith("rank 1 has sent a line of PMI without a command")


def test_ranks_that_do_not_connect_are_named() -> None:
    three = PmiJob("space", "abc", Limits(100.0, 5.0), 0.0)
    three.connected(1)
    assert three.must_end(99.0) == ""
    assert three.must_end(101.0) == "after 100 s ranks [0, 2] have not connected to the PMI service of the job"


def test_ranks_that_do_not_come_to_a_barrier_are_named() -> None:
    three = job("a", "a", "a")
    three.heard(1, "cmd=barrier_in", 50.0)
    assert three.must_end(149.0) == ""
    assert three.must_end(151.0) == "after 100 s ranks [0, 2] have not come to a barrier of MPI_Init"


def test_a_rank_may_work_alone_while_the_others_wait_in_mpi_finalize() -> None:
    both = job("a", "a")
    both.up(0)
    both.up(1)
    both.heard(1, "cmd=barrier_in", 50.0)
    assert both.must_end(1e6) == ""
    both.closed(0, 1e6)
    assert both.must_end(1e6 + 6.0) == "rank 0 has ended without MPI_Finalize"
