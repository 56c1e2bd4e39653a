"""Settings of MPI libraries which ``init()`` makes, and which it leaves to the user."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ocomm import mpi_settings
from ocomm.bootstrap import _left_to_the_launcher
from ocomm.transport import mpi

OPEN_MPI = {f"OMPI_MCA_{name}": value for name, value in mpi_settings.OPEN_MPI.items()}


def library(tmp_path: Path, vendor: str = "Open MPI") -> Any:
    """mpi4py with a libmpi of nowhere."""
    return SimpleNamespace(get_vendor=lambda: (vendor, (5, 0, 0)), __file__=str(tmp_path / "lib" / "libmpi.so"))


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_MCA_", "OPAL_", "UCX_", "FI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("vendor", "one_host", "expected"),
    [
        ("Open MPI", False, OPEN_MPI),
        ("Open MPI", True, {**OPEN_MPI, "OMPI_MCA_btl": "^tcp"}),
        ("MPICH", False, {}),
        ("MPICH", True, {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("Intel MPI", True, {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("Another", True, {}),
    ],
)
def test_every_library_gets_its_settings(vendor: str, one_host: bool, expected: dict[str, str], tmp_path: Path) -> None:
    assert mpi._settings(library(tmp_path, vendor), one_host) == expected


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_links", "3")
    left = mpi._settings(library(tmp_path), True)
    assert left == {name: value for name, value in OPEN_MPI.items() if name != "OMPI_MCA_btl_tcp_links"}


def test_what_ompi_would_read_from_files_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return str(file)

    write(".openmpi/mca-params.conf", "# btl_tcp_links = 9\n  btl_tcp_eager_limit=4096\n")
    write("etc/openmpi-mca-params.conf", "mpi_yield_when_idle = 0\n")
    monkeypatch.setenv("OMPI_MCA_mca_base_envar_file_prefix", write("tune", "--mca btl_tcp_max_send_size 70000 -x A\n"))
    users = {"btl_tcp_eager_limit", "mpi_yield_when_idle", "btl_tcp_max_send_size"}
    left = mpi._settings(library(tmp_path), False)
    assert left == {f"OMPI_MCA_{name}": value for name, value in mpi_settings.OPEN_MPI.items() if name not in users}
    # Other files in place of these.
    monkeypatch.setenv("OMPI_MCA_mca_base_param_files", f"/nosuch,{write('mine', 'opal_abort_delay = 0')}")
    left = mpi._settings(library(tmp_path), False)
    assert left.keys() == OPEN_MPI.keys() - {"OMPI_MCA_btl_tcp_max_send_size", "OMPI_MCA_opal_abort_delay"}


@pytest.mark.parametrize(
    ("users", "installed", "expected"),
    [
        ("", "btl = ^uct,openib,ofi", "^uct,openib,ofi,tcp"),  # Debian's file
        ("", "btl = ^tcp,ofi  # mine", "^tcp,ofi"),
        ("", "btl=tcp,self", None),
        ("btl = self,tcp", "btl = ^uct", None),
        ("btl = ^ofi", "btl = self,tcp", "^ofi,tcp"),
    ],
)
def test_a_file_that_excludes_transports_excludes_tcp_too(
    users: str, installed: str, expected: str | None, tmp_path: Path
) -> None:
    for path, text in ((".openmpi/mca-params.conf", users), ("etc/openmpi-mca-params.conf", installed)):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    assert mpi._settings(library(tmp_path), True).get("OMPI_MCA_btl") == expected


def test_what_init_cannot_set_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {os.getpid(): {0}, os.getppid(): set(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or os.getpid()])
    late, bound = _left_to_the_launcher({"OMPI_MCA_btl_tcp_links": "2"}, 2)
    assert late == (
        "MPI was started before init(), which therefore could not set OMPI_MCA_btl_tcp_links=2: call init() first"
    )
    assert bound == (
        "the launcher has bound each rank to 1 of 8 cores, which the 2 ranks of this host could share: start "
        "with --bind-to none (mpirun) or --cpu-bind=none (srun)"
    )
    assert _left_to_the_launcher({}, 8) == [bound.replace("the 2 ranks", "the 8 ranks")]


@pytest.mark.parametrize(("own", "launchers", "local_size"), [(8, 8, 2), (4, 8, 2), (2, 8, 8), (1, 1, 4)])
def test_ranks_with_their_share_of_cores_are_told_nothing(
    own: int, launchers: int, local_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {os.getpid(): set(range(own)), os.getppid(): set(range(launchers))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or os.getpid()])
    assert _left_to_the_launcher({}, local_size) == []


def test_an_mpich_whose_library_has_debians_name_gets_a_link(tmp_path: Path) -> None:
    assert mpi_settings.mpich_remedy([str(tmp_path)]) == ""
    folder = tmp_path / "x86_64-linux-gnu"
    folder.mkdir()
    (folder / "libmpich.so.12").touch()
    path = f"{folder}/libmpich.so.12"
    assert mpi_settings.mpich_remedy([str(tmp_path)]) == (
        f"{path} is MPICH, but mpi4py looks for libmpi.so.12. Give it that name, and use it: mkdir -p ~/mpich; ln -s "
        f"{path} ~/mpich/libmpi.so.12; export LD_LIBRARY_PATH=~/mpich MPI4PY_MPIABI=mpich."
    )
