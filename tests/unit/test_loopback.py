"""Where ocommrun and the launcher listen: on loopback where the job is on this machine, else where the user says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm.errors import LaunchError
from ocomm.launch import loopback, run
from ocomm.launch.flavour import Flavour, Launcher
from ocomm.launch.reach import address_of
from ocomm.runtime.own_address import ALL_ADDRESSES, interface_addresses, own_address

OPEN_MPI_5 = Launcher(Flavour.OPEN_MPI_5, "/x/mpirun", "5.0.11")
ALLOCATION = "SLURM_JOB_ID"
needs_library = pytest.mark.skipif(not loopback.environment(OPEN_MPI_5, {}), reason="native/loopback.c is not built")


@needs_library
@pytest.mark.parametrize("name", ["prterun", "prte"])
@pytest.mark.parametrize("others", ["", "libm.so.6"])
def test_the_launcher_hides_the_library_from_ranks_and_leaves_what_else_is_preloaded(
    tmp_path: Path, others: str, name: str
) -> None:
    program = shutil.copy(shutil.which("env") or "env", tmp_path / name)
    added = loopback.environment(OPEN_MPI_5, {"LD_PRELOAD": others})
    seen = subprocess.run([program], env=added, capture_output=True, text=True, check=True).stdout.splitlines()
    assert seen == ([f"LD_PRELOAD={others}"] if others else [])


@needs_library
@pytest.mark.parametrize("name", ["mpirun", "prt", "prterun2"])
def test_a_program_that_becomes_the_launcher_hands_the_library_on(tmp_path: Path, name: str) -> None:
    program = shutil.copy(shutil.which("env") or "env", tmp_path / name)
    added = loopback.environment(OPEN_MPI_5, {})
    seen = subprocess.run([program], env={**os.environ, **added}, capture_output=True, text=True, check=True).stdout
    assert {f"{name}={value}" for name, value in added.items()} <= set(seen.splitlines())


@needs_library
def test_wherever_the_launcher_binds_it_is_on_loopback(tmp_path: Path) -> None:
    """To all addresses, as prterun of Open MPI 5 does, or to an interface's, as that of 6."""
    python = shutil.copy(os.path.realpath(sys.executable), tmp_path / "prterun")
    script = """
import socket, sys
for address in sys.argv[1:]:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        print(one.getsockname()[0])
"""
    of_ipv4 = ["0.0.0.0", "127.0.0.1", "127.0.0.2", *(str(address) for _, address in interface_addresses())]
    of_ipv6 = ["::", "::1"] if own_address("::1") else []
    environ = {**os.environ, "PYTHONHOME": sys.base_prefix, **loopback.environment(OPEN_MPI_5, os.environ)}
    done = subprocess.run([python, "-c", script, *of_ipv4, *of_ipv6], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bound = done.stdout.splitlines()
    assert bound[:3] == ["127.0.0.1", "127.0.0.1", "127.0.0.2"] and set(bound[3:]) <= {"127.0.0.1", "::1"}


@needs_library
def test_the_launcher_is_known_by_what_its_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "orterun").touch()
    (tmp_path / "mpirun").symlink_to("orterun")
    launcher = Launcher(Flavour.OPEN_MPI_4, str(tmp_path / "mpirun"), "4.1.4")
    assert loopback.environment(launcher, {})["_OCOMM_LOOPBACK"] == "orterun"


@needs_library
@pytest.mark.parametrize(
    ("flavour", "program"),
    [(Flavour.OPEN_MPI_4, "orterun"), (Flavour.MPICH, "mpiexec.hydra"), (Flavour.INTEL_MPI, "mpiexec.hydra")],
)
def test_the_launcher_is_known_behind_a_script_of_the_clusters_own(
    flavour: Flavour, program: str, tmp_path: Path
) -> None:
    (tmp_path / "mpirun").touch()
    programs = loopback.environment(Launcher(flavour, str(tmp_path / "mpirun"), "4"), {})["_OCOMM_LOOPBACK"]
    assert sorted(programs.split(":")) == sorted(["mpirun", program])


@pytest.mark.parametrize("interface", ["lo", "127.0.0.0/8"])
def test_an_interface_has_a_name_or_a_network(interface: str) -> None:
    assert address_of(["nosuch0", interface]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("nosuch0", r"--network-interfaces nosuch0: this machine, .* it has .*lo \(127\.0\.0\.1\)"),
        ("10.0.0.0/99", r"--network-interfaces 10\.0\.0\.0/99: "),
    ],
)
def test_an_interface_that_is_not_there_is_an_error(interface: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        address_of([interface])


def test_ocomm_run_listens_on_loopback_where_all_hosts_are_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOCATION, raising=False)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    here = ("127.0.0.1", "127.0.0.1")
    assert run._addresses(None, None, None) == here
    assert run._addresses("localhost:2", None, None) == here
    assert run._addresses(None, str(hostfile), "nosuch0") == here


def test_ocomm_run_listens_where_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = "nosuchhost.invalid:1"
    assert run._addresses(there, None, None)[0] == ALL_ADDRESSES
    assert run._addresses(there, None, "lo") == ("127.0.0.1", "127.0.0.1")  # the interface's own address
    monkeypatch.setenv(ALLOCATION, "7")
    assert run._addresses(None, None, None)[0] == ALL_ADDRESSES
