"""Flags, the questions to the hosts, and the build report."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from ocomm.as_horovod import place_of
from ocomm.config import read_settings
from ocomm.errors import LaunchError
from ocomm.launch import cli
from ocomm.launch.check import Item, _gpu, render
from ocomm.launch.cli import main
from ocomm.launch.config_file import flags_of, read_config_file
from ocomm.launch.flags import elastic_timeout_s, make_parser, settings_of, without_meaning
from ocomm.launch.flavour import Flavour, Launcher, MpiLibrary
from ocomm.launch.horovodrun import install_horovodrun, installed_record
from ocomm.launch.hosts import _ALLOCATIONS
from ocomm.launch.programs import require_program, require_script, with_horovod_names
from ocomm.launch.reach import HostState, is_this_machine, require_reachable, ssh_command
from ocomm.launch.supervise import Supervisor
from ocomm.mpi_settings import HOSTFILES
from ocomm.runtime.supervisor_client import KEY
from ocomm.transport.cuda_probe import ProbeResult
from ocomm.version import __version__

#: Of two hosts, that a file ``scontrol`` knows.
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def scontrol_in(folder: Path) -> dict[str, str]:
    """Writes Slurm's program that knows the hosts; returns the variable with which it is found."""
    scontrol = folder / "scontrol"
    scontrol.write_text("#!/bin/sh\necho host1; echo host2\n")
    scontrol.chmod(0o755)
    return {"PATH": str(folder)}


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
    assert settings("--disable-cache", "--stall-check") == {"OCOMM_STALL_CHECK_DISABLE": "0"}
    flags = "--autotune --autotune-warmup-samples 0 --autotune-steps-per-sample 5 --autotune-bayes-opt-max-samples 9"
    assert settings(*flags.split(), "--autotune-gaussian-process-noise", "0.5", "--autotune-log-file", "a.csv") == {
        "OCOMM_AUTOTUNE": "1",
        "OCOMM_AUTOTUNE_WARMUP_SAMPLES": "0",
        "OCOMM_AUTOTUNE_STEPS_PER_SAMPLE": "5",
        "OCOMM_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
        "OCOMM_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        "OCOMM_AUTOTUNE_LOG": os.path.abspath("a.csv"),
    }
    assert settings("--no-hierarchical-allreduce") == {"OCOMM_HIERARCHICAL_ALLREDUCE": "0"}
    assert settings("--thread-affinity", "0,4") == {"OCOMM_THREAD_AFFINITY": "0,4"}
    assert settings("--timeline-filename", "t.json", "--timeline-mark-cycles") == {
        "OCOMM_TIMELINE": os.path.abspath("t.json"),
        "OCOMM_TIMELINE_MARK_CYCLES": "1",
    }


def test_a_large_number_reaches_the_ranks_as_they_read_it():
    flags = settings("--autotune-steps-per-sample", "1000000", "--autotune-gaussian-process-noise", "0.12345678")
    read = read_settings(flags)
    assert (read.autotune_steps_per_sample, read.autotune_noise) == (1_000_000, 0.12345678)


def test_flags_after_the_program_are_the_programs():
    options = make_parser().parse_args(["-np", "2", "python", "train.py", "-np", "9", "--verbose"])
    assert (options.num_proc, options.verbose) == (2, False)
    assert options.command == ["python", "train.py", "-np", "9", "--verbose"]


@pytest.mark.parametrize("word", ["--host", "--log", "--auto=1", "--no", "--h", "-h", "--version", "--nonsense", "-"])
@pytest.mark.parametrize(
    "flags",
    [
        ["-np", "2"],
        ["-n", "2", "--verb"],
        ["-np=2", "-p22", "--mpi-args", "-x A"],
        ["--num-proc=2", "--blacklist", "10", "20"],
        ["-np", "2", "--"],
    ],
)
def test_what_the_program_is_told_is_never_read_as_a_flag(flags, word):
    program = ["python", "train.py", word, "1.2.3.4"]
    options = make_parser().parse_args([*flags, *program])
    assert (options.num_proc, options.command[flags[-1:] == ["--"] :]) == (2, program)


def test_an_abbreviation_of_several_flags_is_refused_before_the_program(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["-np", "2", "--host", "a:2", "python", "train.py"])
    assert "ambiguous option: --host could match --hosts, --hostfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--autotuning", ". Did you mean --autotune?"),
        ("--np", ". Did you mean -np?"),
        ("--hostfiel", ". Did you mean --hostfile?"),
        ("--log_level=info", ". Did you mean --log-level?"),
        ("--zzz", ""),
    ],
)
def test_a_flag_that_is_not_there_is_an_error_and_never_ignored(flag, meant, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", flag, "x", "python", "train.py"])
    assert caught.value.code == 2
    assert f"unrecognized arguments: {flag}{meant}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
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


def test_flags_may_be_abbreviated_and_networks_added_up_as_with_horovodrun():
    options = make_parser().parse_args(
        ["--check", "--slots", "2", "--network-interface", "a,b", "--network-interfaces", "c"]
    )
    assert options.check_build and options.slots_per_host == 2 and options.interfaces == ["a", "b", "c"]
    assert make_parser().parse_args([]).interfaces == []


def test_a_program_that_is_none_is_explained_where_it_can_be():
    for word, hint in (
        ("A=1", " Variables stand before ocommrun, or behind env, as in env A=1 python train.py."),
        ("b:2", " If it is a host: the hosts of -H are one word, without spaces, as in -H worker-0:2,worker-1:2."),
        ("trian", ""),
    ):
        with pytest.raises(LaunchError) as raised:
            require_program((word, "python"), {"PATH": "/nosuch"})
        assert str(raised.value) == f"there is no program '{word}' on PATH to start.{hint}"


def test_the_patience_of_an_elastic_job_may_be_said_by_horovods_variable():
    assert elastic_timeout_s({}) == 600 and elastic_timeout_s({"HOROVOD_ELASTIC_TIMEOUT": "5"}) == 5
    with pytest.raises(LaunchError, match=r"^HOROVOD_ELASTIC_TIMEOUT: 'soon' is not a whole number of 1 or more\.$"):
        elastic_timeout_s({"HOROVOD_ELASTIC_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-np", "two"), "argument -np/--num-proc: 'two' is not a whole number of 1 or more"),
        (("-np", "0"), "'0' is not a whole number of 1 or more"),
        (("--cache-capacity", "-1"), "'-1' is not a whole number of 0 or more"),
        (("--cycle-time-ms", "soon"), "'soon' is not a number of 0 or more"),
        (("--mpi-args", "'x"), "cannot be cut into words: No closing quotation"),
        (("--log-level", "loud"), "invalid choice: 'LOUD' (choose from"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_with_what_is_expected(flags, message, capsys):
    with pytest.raises(SystemExit):
        main([*flags, "python", "train.py"])
    assert message in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for command in (
        *(
            ("python3.11", "-u", "train.py", "missing.py"),
            ("python", "-X", "dev", "train.py"),
            ("python", "--check-hash-based-pycs", "always", "train.py"),
            ("python", "-m", "train"),
        ),
        *(("python", "-c", "pass"), ("python",), ("python", "-u"), ("python", "-"), ("bash", "missing.sh"), ()),
        *(("python", "-um", "train"), ("python", "-uc", "pass"), ("python", "-mtrain")),
    ):
        require_script(command)
    with pytest.raises(LaunchError) as raised:
        require_script(("python", "-W", "error", "tarin.py", "train.py"))
    assert str(raised.value) == f"there is no file 'tarin.py' in {tmp_path} for python to run."
    with pytest.raises(LaunchError, match="no file 'm'"):
        require_script(("python", "-W", "m", "-X", "c", "m"))


@pytest.mark.parametrize("name", HOSTFILES)
def test_hosts_that_are_not_named_are_those_of_the_file_for_mpis_launchers(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "hostfile"
    monkeypatch.setenv(name, str(path))
    for variable in _ALLOCATIONS:
        monkeypatch.delenv(variable, raising=False)
    asked = ["-np", "3", sys.executable, "-c", "pass"]
    assert main(asked) == 1
    missing = f"{name}={path}: there is no such file of hosts. Unset it, or name the hosts by -H."
    assert capsys.readouterr().err == f"ocommrun: {missing}\n"
    path.write_text("localhost slots=2\n")
    assert main(asked) == 1
    assert "-np asks for 3 ranks, but the hosts take 2: localhost:2." in capsys.readouterr().err
    assert name not in os.environ  # the launcher would add its hosts


@pytest.mark.parametrize(
    ("flags", "variable", "hostfile", "stays"),
    [
        (["-H", "a:1"], {}, None, False),
        (["--hostfile", "mine"], {}, "mine", False),
        (["--host-discovery-script", "script"], {}, None, False),
        ([], {"SLURM_JOB_ID": "1"}, None, True),
        (["-H", "a:1"], {"SLURM_JOB_ID": "1"}, None, False),
    ],
)
def test_the_file_for_mpis_launchers_is_the_last_resort(flags, variable, hostfile, stays):
    environ = {"HYDRA_HOST_FILE": "/nosuch", **variable}
    options = make_parser().parse_args(["-np", "2", *flags, "python", "train.py"])
    cli._take_default_hosts(options, environ)
    assert (options.hostfile, "HYDRA_HOST_FILE" in environ) == (hostfile, stays)


@pytest.mark.parametrize(
    "flavour, flags, variables, is_supervised",
    [
        (Flavour.OPEN_MPI_5, [], {}, False),
        (Flavour.OPEN_MPI_5, ["-H", "localhost:2"], {}, False),
        (Flavour.OPEN_MPI_5, ["--watch"], {}, True),
        (Flavour.OPEN_MPI_5, ["-H", "a:1,b:1", "--mpi-args", "--prtemca plm_ssh_agent /x"], {}, True),
        (Flavour.MPICH, [], {}, True),
        (Flavour.INTEL_MPI, ["-H", "localhost:2"], {}, True),
        (Flavour.MPICH, [], {"SLURM_JOB_ID": "1"}, False),
        (Flavour.OPEN_MPI_5, [], SLURM, True),
        (Flavour.MPICH, [], SLURM, True),
        (Flavour.OPEN_MPI_5, ["-np", "4"], SLURM, False),  # as many as its launcher may be told to put there
        (Flavour.SRUN, [], SLURM, False),
        (Flavour.OPEN_MPI_5, [], {"LSB_MCPU_HOSTS": "localhost 2"}, False),
        (Flavour.OPEN_MPI_5, [], {"LSB_MCPU_HOSTS": "localhost 1 b 1"}, True),
        (Flavour.SRUN, ["-H", "a:1,b:1"], {"SLURM_JOB_ID": "1"}, False),
    ],
)
def test_ocommrun_supervises_where_the_launcher_would_not_name_who_has_died(
    flavour, flags, variables, is_supervised, monkeypatch, tmp_path
):
    variables = {**scontrol_in(tmp_path), **variables}
    library = MpiLibrary("Open MPI" if flavour.is_open_mpi else "MPICH", "5.0", "")
    monkeypatch.setattr(cli, "_find_mpi", lambda python, environ: (Launcher(flavour, "/bin/mpirun", "5.0"), library))
    monkeypatch.setattr(cli.signal, "getsignal", lambda number: signal.SIG_DFL)
    options = make_parser().parse_args(["-np", "2", *flags, sys.executable, "-c", "pass"])
    assert isinstance(cli.plan(options, variables), Supervisor) == is_supervised


@pytest.mark.parametrize(
    "flavour, flags, variables, is_supervised",
    [
        (Flavour.OPEN_MPI_5, [], {}, True),
        (Flavour.OPEN_MPI_5, [], {"SLURM_JOB_ID": "1"}, False),
        (Flavour.SRUN, ["-H", "localhost:2"], {"SLURM_JOB_ID": "1"}, False),
    ],
)
def test_ocommrun_supervises_a_launcher_that_would_not_obey_nohup(
    flavour, flags, variables, is_supervised, monkeypatch
):
    launcher = Launcher(flavour, "/bin/mpirun", "5.0")
    monkeypatch.setattr(cli, "_find_mpi", lambda python, environ: (launcher, MpiLibrary("Open MPI", "5.0", "")))
    monkeypatch.setattr(cli.signal, "getsignal", lambda number: signal.SIG_IGN)
    options = make_parser().parse_args(["-np", "2", *flags, sys.executable, "-c", "pass"])
    assert isinstance(cli.plan(options, variables), Supervisor) == is_supervised


@pytest.mark.parametrize("flavour", [Flavour.OPEN_MPI_5, Flavour.MPICH])  # the second is supervised
def test_hosts_that_take_too_few_ranks_are_refused_before_anything_starts(flavour, monkeypatch):
    library = MpiLibrary("Open MPI" if flavour.is_open_mpi else "MPICH", "5.0", "")
    monkeypatch.setattr(cli, "_find_mpi", lambda python, environ: (Launcher(flavour, "/bin/mpirun", "5.0"), library))
    monkeypatch.setattr(cli.signal, "getsignal", lambda number: signal.SIG_DFL)
    options = make_parser().parse_args(["-np", "3", "-H", "localhost:2", sys.executable, "-c", "pass"])
    with pytest.raises(LaunchError, match=r"^-np asks for 3 ranks, but the hosts take 2: localhost:2\. "):
        cli.plan(options, {})


def test_a_command_line_is_built_once_and_what_a_launcher_cannot_do_is_said_of_a_supervised_job_too(
    monkeypatch, capsys
):
    launcher, library = Launcher(Flavour.MPICH, "/bin/mpirun", "5.0"), MpiLibrary("MPICH", "5.0", "")
    monkeypatch.setattr(cli, "_find_mpi", lambda python, environ: (launcher, library))
    monkeypatch.setattr(cli, "build", lambda request, launcher: pytest.fail("the supervisor builds it"))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        assert main(["-np", "1", "-H", "localhost:1", "-prefix-timestamp", sys.executable, "-c", "pass"]) == 1
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert "-prefix-timestamp: MPICH 5.0 cannot print the time together with the rank" in capsys.readouterr().err


def test_an_elastic_job_in_an_allocation_is_told_how_to_name_its_hosts(monkeypatch, tmp_path):
    library = MpiLibrary("Open MPI", "5.0", "")
    launcher = Launcher(Flavour.OPEN_MPI_5, "/bin/mpirun", "5.0")
    monkeypatch.setattr(cli, "_find_mpi", lambda python, environ: (launcher, library))
    options = make_parser().parse_args(["-np", "2", "--min-np", "1", sys.executable, "-c", "pass"])
    needs = "an elastic job must know its hosts, also in an allocation: "
    for variables, how in (
        ({"PBS_NODEFILE": "/x"}, "name them with -H a:2,b:2."),
        (
            {"SLURM_JOB_ID": "1"},
            "for 2 ranks on each add -H \"$(scontrol show hostnames | sed 's/$/:2/' | paste -sd,)\".",
        ),
    ):
        with pytest.raises(LaunchError) as raised:
            cli.make_supervisor(options, variables)
        assert str(raised.value) == needs + how
    assert cli.make_supervisor(options, {**scontrol_in(tmp_path), **SLURM})


@pytest.mark.parametrize("starts", ["plan", "make_supervisor"])
def test_a_job_that_a_rank_starts_takes_nothing_over_from_that_ranks_supervisor(starts, monkeypatch, capsys):
    def refuse(options, environ):
        raise LaunchError(", ".join(name for name in environ if "OCOMM_ELASTIC" in name))

    monkeypatch.setattr(cli, starts, refuse)
    command = ["-np", "2", *(["--min-np", "1"] if starts == "make_supervisor" else []), "python", "train.py"]
    monkeypatch.setenv("OCOMM_ELASTIC_FOLDER", "/commits")
    assert main(command) == 1 and capsys.readouterr().err == "ocommrun: OCOMM_ELASTIC_FOLDER\n"
    monkeypatch.setenv("OCOMM_ELASTIC_SUPERVISOR", "127.0.0.1:9")
    monkeypatch.setenv("OCOMM_ELASTIC_GENERATION", "3")
    monkeypatch.setenv(KEY, "0a0b")
    assert main(command) == 1 and capsys.readouterr().err == "ocommrun: \n"


def test_a_working_folder_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for flags in (["python", "train.py"], ["--timeline-filename", "trace.json", "python"], ["--min-np", "1", "python"]):
        assert main(["-np", "2", *flags]) == 1
        assert capsys.readouterr().err.startswith("ocommrun: the working folder has been removed: ")


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


CONFIG = """
params: {fusion_threshold_mb: 32, cycle-time-ms: 2.5}
timeline:
  filename: /tmp/timeline.json
  mark_cycles: true
stall_check: {enabled: true, warning_time_seconds: 5}
logging: {level: debug}
"""


def test_the_build_report_says_which_way_messages_leave_a_gpu_and_why_none_do():
    driver, kernels = Item("CUDA driver", True, "1 device"), Item("CUDA kernels (numba-cuda)", True, "0.30")
    no, yes = (lambda: ProbeResult(False, "no NCCL")), (lambda: ProbeResult(True, "2.23.4 (libnccl.so.2)"))
    both = {item.name: item for item in _gpu(driver, kernels, lambda: ProbeResult(False, "MPI says no"), no)}
    assert both["1-bit optimizers on GPUs"].found
    assert both["1-bit optimizers on GPUs"].detail == "messages through pinned host memory: MPI says no"
    assert both["NCCL"].detail == "no NCCL: hierarchical='auto' is off where parameters are on GPUs"
    direct = _gpu(driver, kernels, lambda: ProbeResult(True, "tried"), no)
    assert direct[2].detail == "messages from device to device: tried"
    assert direct[3].detail == "no NCCL: ranks of a host add up through MPI"
    over = _gpu(driver, kernels, lambda: ProbeResult(False, "MPI says no"), yes)[3]
    assert over.found and over.detail.startswith("2.23.4 (libnccl.so.2): ranks of a host add up over it")
    missing = Item("CUDA driver", False), Item("CUDA kernels (numba-cuda)", False)
    neither = _gpu(*missing, *[lambda: pytest.fail("there is nothing to try")] * 2)
    assert neither[2].detail == "no: CUDA driver and CUDA kernels (numba-cuda) missing"


def test_a_config_file_says_what_flags_say_and_the_command_line_wins(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    parser = make_parser()
    options = parser.parse_args(
        ["-np", "2", "--cycle-time-ms", "7", "--no-stall-check", "python", "train.py"],
        parser.parse_args(read_config_file(str(file))),
    )
    assert options.command == ["python", "train.py"]
    assert settings_of(options) == {
        "OCOMM_FUSION_THRESHOLD": "33554432",
        "OCOMM_CYCLE_TIME": "7",
        "OCOMM_STALL_CHECK_DISABLE": "1",
        "OCOMM_STALL_CHECK_TIME_SECONDS": "5",
        "OCOMM_TIMELINE": "/tmp/timeline.json",
        "OCOMM_TIMELINE_MARK_CYCLES": "1",
        "OCOMM_LOG_LEVEL": "DEBUG",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"paramz": {}},
            "there is no section 'paramz'; there are controller, params, autotune, timeline, stall_check, "
            "library_options, logging.",
        ),
        ({"timeline": {"file": "x"}}, "timeline has no 'file'; it has filename, mark_cycles."),
        ({"stall_check": {"enabled": "yes"}}, "stall_check.enabled is true or false, not 'yes'."),
        ({"controller": "nccl"}, "controller 'nccl' is neither mpi nor gloo."),
        ({"controller": ["mpi"]}, "controller ['mpi'] is neither mpi nor gloo."),
        ({"params": [1]}, "params has lines such as 'name: value', not [1]."),
        ({"timeline": {1: "x"}}, "timeline has no 1; it has filename, mark_cycles."),
        ({"timeline": {"filename": {"a": 1}}}, "timeline.filename is one number or text, not {'a': 1}."),
        ({"params": {"cache_capacity": [0, 1]}}, "params.cache_capacity is one number or text, not [0, 1]."),
        ({"autotune": {"log_file": True}}, "autotune.log_file is one number or text, not True."),
    ],
)
def test_a_config_file_with_unknown_words_is_an_error_that_names_them(content, message):
    with pytest.raises(LaunchError) as caught:
        flags_of(content, "c.yaml")
    assert str(caught.value) == f"--config-file c.yaml: {message}"


def test_a_config_file_may_name_the_users_folder_as_a_shell_does(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert flags_of({"autotune": {"log_file": "~/x.csv"}}, "c.yaml") == ["--autotune-log-file=/home/ada/x.csv"]


def test_a_config_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match=r"config\.yaml: this is no text in UTF-8"):
        read_config_file(str(file))


def test_flags_for_what_ocomm_does_not_have_are_named_and_ignored():
    flags = [
        "-np",
        "2",
        "--no-hierarchical-allgather",
        "--num-nccl-streams",
        "2",
        "--disable-cache",
        "--gloo",
        "python",
        "train.py",
    ]
    options = make_parser().parse_args(flags)
    without = ["--[no-]hierarchical-allgather", "--num-nccl-streams", "--disable-cache", "--gloo"]
    assert without_meaning(options) == without
    assert without_meaning(make_parser().parse_args(["-np", "2", "python"])) == []


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("python train.py --epochs 5", "python -m ocomm.as_horovod python train.py --epochs 5"),
        ("python3 -um train -v", "python3 -m ocomm.as_horovod python3 -um train -v"),
        ("./train.sh --fast", f"{sys.executable} -m ocomm.as_horovod ./train.sh --fast"),
        ("", ""),
    ],
)
def test_a_program_runs_with_horovods_names(command, started):
    assert with_horovod_names(tuple(command.split())) == tuple(started.split())


def test_modules_of_horovod_have_their_places():
    assert place_of("horovod.torch.elastic") == "ocomm_torch.elastic"
    assert place_of("horovod.tensorflow.keras") == "ocomm_tf.keras"
    assert place_of("horovod.keras") == "ocomm_tf.keras"
    assert place_of("horovod.common.exceptions") == "ocomm.errors"
    assert place_of("horovod.torch.elastic.sampler") == "ocomm_torch.elastic"
    assert place_of("horovod") == "ocomm"
    assert place_of("horovodrun") is None


def test_a_horovodrun_is_installed_once_and_never_over_another(tmp_path):
    python = str(tmp_path / "python")
    script = tmp_path / "horovodrun"
    assert install_horovodrun(python) == f"{script} starts ocommrun. Remove it when you uninstall ocomm"
    assert os.access(script, os.X_OK)
    assert install_horovodrun(python) == f"{script} is there already"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(LaunchError) as caught:
        install_horovodrun(python)
    assert str(caught.value) == f"{script} is another program, of a Horovod for instance; it stays as it is."


def test_a_horovodrun_is_in_pips_list_so_that_uninstalling_removes_it(tmp_path):
    folder = tmp_path / "lib" / "site-packages" / "ocomm-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    record = folder / "RECORD"
    record.write_text("ocomm/__init__.py,,\n")
    python = str(tmp_path / "bin" / "python")
    said = install_horovodrun(python, record)
    assert said == f"{tmp_path}/bin/horovodrun starts ocommrun, until pip uninstalls ocomm"
    assert record.read_text().splitlines() == ["ocomm/__init__.py,,", "../../bin/horovodrun,,"]
    assert install_horovodrun(python, record).endswith("is there already") and record.read_text().count("horovod") == 1


def test_the_list_of_an_installed_ocomm_is_found_where_there_is_one():
    found = installed_record()
    assert found is None or (found.name == "RECORD" and found.exists())
