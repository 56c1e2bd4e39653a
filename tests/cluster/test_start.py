"""However a job is started: with the same settings of MPI, and without a port that others can reach."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm import mpi_settings
from ocomm.bench._lab import why_not
from ocomm.launch.flavour import Flavour, find_launcher
from tests.cluster.jobs import MPIRUN, ROOT, launchers, run_by
from tests.cluster.listeners import on_network

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun beside this Python"),
]
LISTENING = str(Path(__file__).with_name("rank_listening.py"))
PARAMETERS = str(Path(__file__).with_name("rank_parameters.py"))
PLAIN = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", "2"]
TCP = {name: int(value) for name, value in mpi_settings.OPEN_MPI.items()}


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # The shell becomes the first process of the job, which is how ranks know that one's number.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    done = run_by((["sh", "-c", 'TEST_TOP=$$ exec "$@"', "sh", *command], {**os.environ, **root, **environment}))
    assert done.returncode == 0, done.stderr
    return done


def seen(folder: Path) -> list[dict[str, list[str]]]:
    """By process, what it listened on: after init() and after an exchange, of each rank."""
    ranks = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    assert all(len(rank) == 2 for rank in ranks)
    return [look for rank in ranks for look in rank]


@pytest.mark.parametrize("flags", [[], ["--min-np", "2"]], ids=["", "elastic"])
def test_no_process_of_a_job_of_ocommrun_on_one_host_listens_but_on_loopback(flags: list[str], tmp_path: Path) -> None:
    start([sys.executable, "-m", "ocomm.launch", "-np", "2", *flags, sys.executable, LISTENING, str(tmp_path)])
    for look in seen(tmp_path):
        assert len(look) >= 3, "the launcher and two ranks"
        assert any(look.values()), "the launcher's own port"
        assert not {pid: on_network(addresses) for pid, addresses in look.items() if on_network(addresses)}


def test_no_rank_of_a_bare_mpirun_on_one_host_listens_at_all(tmp_path: Path) -> None:
    start([*PLAIN, sys.executable, LISTENING, str(tmp_path)])
    for look in seen(tmp_path):
        launcher, *ranks = look.values()
        assert ranks == [[], []]
        assert on_network(launcher), "prterun's own, which docs/security.md is about"


def test_under_a_bare_mpirun_open_mpi_runs_with_the_settings_of_ocommrun(tmp_path: Path) -> None:
    # tcp is asked for, so that its parameters are there to be read.
    start([*PLAIN, "--mca", "btl", "tcp,self", sys.executable, PARAMETERS, str(tmp_path / "values"), *TCP, "btl"])
    assert json.loads((tmp_path / "values").read_text()) == {**TCP, "btl": "tcp,self"}


def test_what_the_user_has_set_for_open_mpi_stays(tmp_path: Path) -> None:
    file = tmp_path / ".openmpi" / "mca-params.conf"
    file.parent.mkdir()
    file.write_text("# mine\nbtl_tcp_max_send_size = 65536\n")
    given = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_links", "3"]
    start(
        [*PLAIN, *given, sys.executable, PARAMETERS, str(tmp_path / "values"), *TCP],
        OMPI_MCA_btl_tcp_eager_limit="32768",
        HOME=str(tmp_path),
    )
    users = {"btl_tcp_max_send_size": 65536, "btl_tcp_links": 3, "btl_tcp_eager_limit": 32768}
    assert json.loads((tmp_path / "values").read_text()) == {**TCP, **users}


@pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
@pytest.mark.parametrize("launcher", ["mpirun", "ocommrun"])
def test_ranks_run_where_there_is_little_shared_memory(launcher: str, tmp_path: Path) -> None:
    """A container has 64 MB for all ranks. Open MPI reserves 16 MB for each, and does not start if it has less."""
    little = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
    command, environ = launchers(2)[launcher]
    is_four = find_launcher(sys.executable, environ).flavour is Flavour.OPEN_MPI_4
    name = "btl_vader_segment_size" if is_four else "btl_sm_segment_size"
    start([*little, *command, PARAMETERS, str(tmp_path / "values"), name])
    # Half of what is free is left; another rank may have taken some.
    assert (256 << 10) <= json.loads((tmp_path / "values").read_text())[name] <= (2 << 20)


def test_rank_0_says_once_what_came_too_late(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from mpi4py import MPI\nimport ocomm\nocomm.init()\nocomm.barrier()\n")
    done = start([*PLAIN, "--mca", "btl_tcp_links", "3", sys.executable, str(script)])
    (line,) = [line for line in done.stderr.splitlines() if "init()" in line]
    assert "MPI was started before init()" in line and re.search(r"OMPI_MCA_btl=\^(\w+,)*tcp", line)
    assert "btl_tcp_links" not in line
