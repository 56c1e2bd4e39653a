"""``-H`` and host files."""

from __future__ import annotations

import re
import sys

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.hosts import Host, allocated_hosts, parse_hostfile, parse_hosts, place, read_hostfile

FORMAT = "write host:ranks, separated by commas, as in -H worker-0:2,worker-1:2."


def test_hosts_keep_their_order_and_their_numbers():
    assert parse_hosts("b:2, a.example-1.org:16") == (Host("b", 2), Host("a.example-1.org", 16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", f"-H a: 'a' does not say how many ranks run there; {FORMAT}"),
        ("a:2,", f"-H a:2,: '' is not a host; {FORMAT}"),
        ("a:x", f"-H a:x: 'a:x' has 'x' as its number of ranks, which must be 1 or more; {FORMAT}"),
        ("a:0", f"-H a:0: 'a:0' has '0' as its number of ranks, which must be 1 or more; {FORMAT}"),
        ("-oProxyCommand=x:1", f"-H -oProxyCommand=x:1: '-oProxyCommand=x:1' is not a host; {FORMAT}"),
        ("a:1,b:1,a:1", "-H a:1,b:1,a:1 names the host 'a' twice; give it once, with all its ranks."),
    ],
)
def test_a_host_list_that_is_wrong_is_refused_with_its_entry_and_the_right_form(text, message):
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text)
    assert str(caught.value) == message


def test_a_host_file_may_be_written_for_open_mpi_or_for_mpich():
    text = "# our cluster\na slots=2\n\nb slots = 4  # the big one\nc:1\n"
    assert parse_hostfile(text, "hosts") == (Host("a", 2), Host("b", 4), Host("c", 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "hosts names no host."),
        (
            "a slots=2 max_slots=4",
            "hosts, line 1: 'a slots=2 max_slots=4' has '2 max_slots=4' as its number of ranks, which must be 1 or "
            "more; write one 'worker-0 slots=2' or 'worker-0:2' on each line.",
        ),
        (
            "a:1\nb\n",
            "hosts, line 2: 'b' does not say how many ranks run there; "
            "write one 'worker-0 slots=2' or 'worker-0:2' on each line.",
        ),
    ],
)
def test_a_host_file_that_is_wrong_is_refused_with_its_line(text, message):
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, "hosts")
    assert str(caught.value) == message


def test_ranks_fill_the_hosts_in_order():
    hosts = parse_hosts("a:2,b:2,c:2")
    assert place(hosts, 3) == (Host("a", 2), Host("b", 1))
    assert place(hosts, 6) == hosts


def test_a_host_file_may_begin_with_a_mark_and_must_be_text(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\n")
    assert read_hostfile(str(path)) == (Host("a", 2),)
    path.write_bytes(b"\xff\xfea\0")  # UTF-16
    with pytest.raises(LaunchError) as caught:
        read_hostfile(str(path))
    assert str(caught.value) == f"--hostfile {path}: this is no text in UTF-8."


def test_the_hosts_of_slurm_are_those_that_its_variables_name(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[3].split('+'), sep='\\n')\n")
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a+b.x+c", "PATH": str(tmp_path)}

    def hosts(tasks, **more):
        return allocated_hosts({**slurm, "SLURM_TASKS_PER_NODE": tasks, **more})

    assert hosts("2(x2),1") == (Host("a", 2), Host("b.x", 2), Host("c", 1))
    assert hosts("1,2(x2)") == (Host("a", 1), Host("b.x", 2), Host("c", 2))
    # One host, the numbers of a step, no number, several parts, no scontrol, one that fails: the launcher asks.
    assert hosts("4") == hosts("4,1") == hosts("") == hosts("2(x3)", SLURM_HET_SIZE="2") == ()
    assert hosts("2(x3)", PATH="/nowhere") == ()
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert hosts("2(x3)") == ()


def test_the_hosts_of_batch_systems_that_launchers_may_not_know(tmp_path):
    two = (Host("a", 4), Host("b.x", 2))
    file = tmp_path / "pe_hostfile"
    file.write_text("a 3 all.q@a UNDEFINED\nb.x 2 all.q@b UNDEFINED\na 1 long.q@a UNDEFINED\n")
    assert allocated_hosts({"LSB_MCPU_HOSTS": "a 4 b.x 2 "}) == two
    assert allocated_hosts({"PE_HOSTFILE": str(file)}) == two
    for other in ({}, {"LSB_MCPU_HOSTS": "a 4"}, {"LSB_MCPU_HOSTS": "a 4 b 2", "SLURM_JOB_ID": "1"}):
        assert allocated_hosts(other) == ()
    for wrong, message in (
        ({"LSB_MCPU_HOSTS": "a b c d"}, "LSB_MCPU_HOSTS='a b c d': 'a' has 'b' as its number of ranks"),
        ({"PE_HOSTFILE": str(tmp_path / "none")}, f"PE_HOSTFILE={tmp_path}/none: No such file or directory."),
    ):
        with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
            allocated_hosts(wrong)
