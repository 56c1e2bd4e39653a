"""Settings of MPI libraries which ``init()`` makes, and which it leaves to the user."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ocomm import mpi_settings
from ocomm.diagnosis import left_to_the_launcher, unread_hosts
from ocomm.transport import mpi

OPEN_MPI = {f"OMPI_MCA_{name}": value for name, value in mpi_settings.OPEN_MPI.items()}


def library(tmp_path: Path, vendor: str = "Open MPI") -> Any:
    """mpi4py with a libmpi of nowhere."""
    return SimpleNamespace(get_vendor=lambda: (vendor, (5, 0, 0)), __file__=str(tmp_path / "lib" / "libmpi.so"))


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_MCA_", "OPAL_", "PMIX_", "UCX_", "FI_", "MPIR_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 40, f_frsize=1))


@pytest.mark.parametrize(
    ("vendor", "one_host", "expected"),
    [
        ("Open MPI", False, OPEN_MPI),
        ("Open MPI", True, {**OPEN_MPI, "OMPI_MCA_btl": "^tcp"}),
        ("MPICH", False, {"UCX_TLS": "^posix"}),
        ("MPICH", True, {"UCX_TLS": "^posix", "UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("Intel MPI", True, {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("Another", True, {}),
    ],
)
def test_every_library_gets_its_settings(vendor: str, one_host: bool, expected: dict[str, str], tmp_path: Path) -> None:
    assert mpi._settings(library(tmp_path, vendor), one_host, 1) == expected


@pytest.mark.parametrize(
    ("vendor", "namespace", "mapped", "calls"),
    [
        ("Open MPI", "slurm.pmix.10.0", ["/x/libpmix.so.2"], [b"pmix.collect", 1]),
        ("Open MPI", "slurm.pmix.10.0", [], []),
        ("Open MPI", "prterun-node1-64@1", ["/x/libpmix.so.2"], []),  # mpirun inside an allocation
        ("Open MPI", "", ["/x/libpmix.so.2"], []),
        ("MPICH", "slurm.pmix.10.0", ["/x/libpmix.so.2"], []),
    ],
)
def test_ranks_of_open_mpi_leave_mpi_init_together_under_srun(
    vendor: str, namespace: str, mapped: list[str], calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def load(info: Any, key: bytes, value: Any, kind: Any) -> None:
        done.append(key)

    def fence(ranks: None, number: Any, info: Any, infos: Any) -> int:
        done.append(infos.value)
        return 0

    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("PMIX_NAMESPACE", namespace)
    monkeypatch.setattr(mpi, "_mapped", lambda name: mapped)
    monkeypatch.setattr("ctypes.CDLL", lambda path: SimpleNamespace(PMIx_Info_load=load, PMIx_Fence=fence))
    mpi._leave_together(library(tmp_path, vendor))
    assert done == calls


def test_a_pmix_without_a_fence_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "slurm.pmix.10.0")
    monkeypatch.setattr(mpi, "_mapped", lambda name: ["/x/libpmix.so.2"])
    monkeypatch.setattr("ctypes.CDLL", lambda path: SimpleNamespace())
    mpi._leave_together(library(tmp_path))


@pytest.mark.parametrize(
    ("namespace", "offered", "chosen"),
    [
        ("slurm.pmix.10.0", "munge,native", "native"),
        ("slurm.pmix.10.0", "munge", None),
        ("slurm.pmix.10.0", "native", None),
        ("prterun-node1-64@1", "munge,native", None),
    ],
)
def test_pmix_under_srun_looks_for_no_munge(
    namespace: str, offered: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", namespace)
    monkeypatch.setenv("PMIX_SECURITY_MODE", offered)
    assert mpi._settings(library(tmp_path), False, 1).get("PMIX_MCA_psec") == chosen
    monkeypatch.setenv("PMIX_MCA_psec", "munge")
    assert "PMIX_MCA_psec" not in mpi._settings(library(tmp_path), False, 1)


def test_mpich_reads_no_memory_where_a_container_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi.may_read_memory()
    monkeypatch.setattr(mpi, "may_read_memory", lambda: False)
    left = mpi._settings(library(tmp_path, "MPICH"), False, 1)
    assert left == {"UCX_TLS": "^posix", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_links", "3")
    left = mpi._settings(library(tmp_path), True, 1)
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
    left = mpi._settings(library(tmp_path), False, 1)
    assert left == {f"OMPI_MCA_{name}": value for name, value in mpi_settings.OPEN_MPI.items() if name not in users}
    # Other files in place of these.
    monkeypatch.setenv("OMPI_MCA_mca_base_param_files", f"/nosuch,{write('mine', 'opal_abort_delay = 0')}")
    left = mpi._settings(library(tmp_path), False, 1)
    assert left.keys() == OPEN_MPI.keys() - {"OMPI_MCA_btl_tcp_max_send_size", "OMPI_MCA_opal_abort_delay"}


@pytest.mark.parametrize(
    ("major", "ranks", "free_nbytes", "expected"),
    [
        (5, 2, 64 << 20, {}),
        (5, 8, 64 << 20, {"OMPI_MCA_btl_sm_segment_size": str(4 << 20)}),
        (4, 8, 64 << 20, {"OMPI_MCA_btl_vader_segment_size": str(4 << 20)}),
        (5, 3, 10_000_000, {"OMPI_MCA_btl_sm_segment_size": "1662976"}),  # whole pages
        (5, 8, 0, {"OMPI_MCA_btl_sm_segment_size": str(256 << 10)}),
        (5, 64, 12 << 30, {}),
    ],
)
def test_ranks_share_what_shared_memory_there_is(
    major: int, ranks: int, free_nbytes: int, expected: dict[str, str]
) -> None:
    assert mpi_settings.segment(major, ranks, free_nbytes) == expected


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
    assert mpi._settings(library(tmp_path), True, 1).get("OMPI_MCA_btl") == expected


def test_what_init_cannot_set_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {os.getpid(): {0}, os.getppid(): set(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or os.getpid()])
    late, bound = left_to_the_launcher({"OMPI_MCA_btl_tcp_links": "2"}, 2)
    assert late == (
        "MPI was started before init(), which therefore could not set OMPI_MCA_btl_tcp_links=2: call init() first"
    )
    assert bound == (
        "the launcher has bound each rank to 1 of 8 cores, which the 2 ranks of this host could share: start "
        "with --bind-to none (mpirun), I_MPI_PIN=0 (Intel MPI) or --cpu-bind=none (srun)"
    )
    assert left_to_the_launcher({}, 8) == [bound.replace("the 2 ranks", "the 8 ranks")]


@pytest.mark.parametrize(("own", "launchers", "local_size"), [(8, 8, 2), (4, 8, 2), (2, 8, 8), (1, 1, 4)])
def test_ranks_with_their_share_of_cores_are_told_nothing(
    own: int, launchers: int, local_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {os.getpid(): set(range(own)), os.getppid(): set(range(launchers))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or os.getpid()])
    assert left_to_the_launcher({}, local_size) == []


def test_a_single_rank_is_told_what_it_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {os.getpid(): {0}, os.getppid(): {0, 1}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or os.getpid()])
    (bound,) = left_to_the_launcher({}, 1)
    assert bound.startswith("the launcher has bound each rank to 1 of 2 cores, which this host's one rank could use: ")


@pytest.mark.parametrize(
    ("library", "hosts", "unread"),
    [
        ("Open MPI 5.0.11", "# the workers\nw-0.w.ns.svc slots=1\nw-1.w.ns.svc slots=1\n", "w-0.w.ns.svc"),
        ("Open MPI 10.1", "w-0:2", "w-0"),
        ("Open MPI 4.1.4", "w-0 slots=2", ""),  # has read it
        ("MPICH 5.0.2", "w-0:2", ""),
        ("Open MPI 5.0.11", "localhost slots=2\nme.of.here slots=2\n", ""),
        ("Open MPI 5.0.11", "", ""),
        ("Open MPI 5.0.11", None, ""),
    ],
)
def test_a_job_whose_launcher_has_not_read_its_hosts_is_told(
    library: str, hosts: str | None, unread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    path = tmp_path / "hostfile"
    if hosts is not None:
        path.write_text(hosts)
    expected = (
        f"all ranks are on me, and none on {unread}, because {library} does not read "
        f"OMPI_MCA_orte_default_hostfile={path}: start with mpirun --hostfile {path}"
    )
    environ = {"OMPI_MCA_orte_default_hostfile": str(path)}
    assert unread_hosts(library, environ) == ([expected] if unread else [])
    assert unread_hosts(library, {}) == []
    assert unread_hosts(library, {**environ, "PRTE_MCA_prte_default_hostfile": str(path)}) == []


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
