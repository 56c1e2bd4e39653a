"""The program ``ocommrun``: reads the flags, examines this machine, and becomes MPI's launcher or supervises it."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from ocomm.errors import LaunchError
from ocomm.launch import check, guard, loopback, reach, session_directory
from ocomm.launch.command import CommandLine, LaunchRequest, build
from ocomm.launch.config_file import read_config_file
from ocomm.launch.discovery import Discovery
from ocomm.launch.flags import elastic_timeout_s, is_elastic, make_parser, settings_of, without_meaning
from ocomm.launch.flavour import Flavour, Launcher, MpiLibrary, check_match, find_launcher, find_library
from ocomm.launch.generations import Limits
from ocomm.launch.horovodrun import install_horovodrun, installed_record
from ocomm.launch.hosts import (
    Host,
    allocated_hosts,
    default_hostfile,
    is_in_allocation,
    named_hosts,
    require_slots,
    total_slots,
)
from ocomm.launch.output import make_folder, say
from ocomm.launch.programs import is_python, require_program, require_script, with_horovod_names
from ocomm.launch.supervise import Supervisor, leave_supervised_job
from ocomm.launch.watch import open_view
from ocomm.mpi_settings import HOSTFILES
from ocomm.torch_variables import inherited

_REACH_DEADLINE_S = 15.0


def main(args: Sequence[str] | None = None) -> int:
    """Runs ``ocommrun``. If the job needs no supervisor, this process becomes the launcher, and nothing is returned.

    Args:
        args: The arguments after the program's name; None for those of this process.

    Returns:
        The exit status of a supervised job, or of a call that starts none: 0 if it did what it was asked for, else 1.
    """
    _open_standard_files()
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
            say(f"{flag} has no meaning for ocomm and is ignored")
        if options.check_build:
            text, complete = check.report(sys.executable, os.environ)
            print(text)
            return 0 if complete else 1
        leave_supervised_job(os.environ)
        _take_default_hosts(options, os.environ)
        job = make_supervisor(options, os.environ) if is_elastic(options) else plan(options, os.environ)
        if isinstance(job, Supervisor):
            return job.run()
        if options.verbose:
            say(str(job))
        _become(job)
    except LaunchError as error:
        say(str(error))
        return 1


def _open_standard_files() -> None:
    """Opens those of standard input, output and error that are closed on the null device.

    A file or connection that is opened later would get the number of a closed one, and with it what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def plan(options: argparse.Namespace, environ: Mapping[str, str]) -> CommandLine | Supervisor:
    """Returns what is to run for a job that is not elastic, after asking this machine and the hosts: a command line, or
    the supervisor of that job.

    Raises LaunchError.
    """
    named = named_hosts(options.hosts, options.hostfile)
    request, launcher = _request(options, environ)
    hosts = _hosts(named, options, environ, launcher)
    is_srun = launcher.flavour is Flavour.SRUN
    if options.watch and not hosts:
        raise LaunchError(f"--watch must know the hosts, also in an allocation: {_how_to_name_hosts(environ)}.")
    if options.watch and is_srun:
        raise LaunchError("--watch: ocommrun does not supervise what srun starts; use --metrics-port 9100 there.")
    ask = _asker(options, launcher, environ)
    states = ask([host.name for host in hosts])
    reach.require_reachable(states)
    spans_hosts = reach.spans_hosts(states, environ)
    if not spans_hosts:
        require_program(_command(options), environ)
        require_script(_command(options))
    # Open MPI's launcher says by itself which rank of this machine has died, Hydra which process.
    names_the_dead = launcher.flavour.is_open_mpi and not spans_hosts
    # Open MPI's launcher ends at a SIGHUP though nohup has switched that off.
    is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if not hosts or is_srun or (names_the_dead and not options.watch and not is_under_nohup):
        return build(reach.placed(request, hosts, states), launcher)
    ranks = request.num_proc
    require_slots(hosts, ranks)
    limits = Limits(ranks, ranks, ranks, resets=0, patience_s=math.inf)
    view = open_view() if options.watch else None
    return Supervisor(
        request, launcher, limits, ask, hosts, states, verbose=options.verbose, is_elastic=False, view=view
    )


def make_supervisor(options: argparse.Namespace, environ: Mapping[str, str]) -> Supervisor:
    """Returns the supervisor of the elastic job that ``options`` ask for, after asking this machine. Raises
    LaunchError.
    """
    wanted = options.num_proc = options.num_proc or options.min_np
    named = named_hosts(options.hosts, options.hostfile)
    request, launcher = _request(options, environ)
    least, most = options.min_np or wanted, options.max_np
    if not least <= wanted or (most is not None and wanted > most):
        raise LaunchError(f"--min-np {least}, -np {wanted} and --max-np {most} must not become smaller in this order.")
    script = options.host_discovery_script
    fixed = _hosts(named, options, environ, launcher) if script is None else ()
    if script is None:
        if not fixed:
            raise LaunchError(
                f"an elastic job must know its hosts, also in an allocation: {_how_to_name_hosts(environ)}."
            )
        if options.hosts is None and options.hostfile is None and not is_in_allocation(environ):
            require_program(_command(options), environ)
            require_script(_command(options))
    limits = Limits(
        wanted_ranks=wanted,
        min_ranks=least,
        max_ranks=most,
        resets=options.reset_limit,
        patience_s=options.elastic_timeout or elastic_timeout_s(environ),
        cooldown_s=options.cooldown_range and tuple(options.cooldown_range),
        discovers=script is not None,
    )
    ask = _asker(options, launcher, environ)
    states = ask([host.name for host in fixed])
    view = open_view() if options.watch else None
    discovery = None if script is None else Discovery(script, options.slots_per_host)
    return Supervisor(request, launcher, limits, ask, fixed, states, discovery, options.verbose, view=view)


def _how_to_name_hosts(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" not in environ:
        return "name them with -H a:2,b:2"
    return """for 2 ranks on each add -H "$(scontrol show hostnames | sed 's/$/:2/' | paste -sd,)\""""


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the program that each rank is to run, as it was given, and its arguments."""
    return tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)


def _request(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[LaunchRequest, Launcher]:
    """Returns what to start, without the hosts, and the launcher."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the working folder has been removed: change into another one, such as cd ~.") from None
    if options.num_proc is None:
        raise LaunchError("how many ranks? Say so with -np, as in ocommrun -np 2 python train.py.")
    _require_no_place(options, environ)
    command = with_horovod_names(_command(options)) if options.as_horovod else _command(options)
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
        interfaces=tuple(options.interfaces),
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


def _require_no_place(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raises LaunchError if ranks would inherit a place in another job."""
    is_fixed = options.min_np is None and options.host_discovery_script is None
    if options.torch_env and (names := inherited(environ, options.num_proc if is_fixed else None)):
        raise LaunchError(
            f"{', '.join(f'{name}={environ[name]}' for name in names)} is set where ocommrun starts {options.num_proc} "
            "ranks, which would all inherit it, and believe that it is their place in the job: unset it, or add "
            "--no-torch-env to pass it on as it is."
        )


def _take_default_hosts(options: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Lets ``options`` have the environment's host file if they name no hosts. Takes the file away from the launcher,
    which would mix its hosts with those that are named.
    """
    if options.hosts is None and options.hostfile is None and options.host_discovery_script is None:
        if is_in_allocation(environ):
            return
        options.hostfile = default_hostfile(environ)
    for name in HOSTFILES:
        environ.pop(name, None)


def _hosts(
    named: tuple[Host, ...], options: argparse.Namespace, environ: Mapping[str, str], launcher: Launcher
) -> tuple[Host, ...]:
    """Returns the hosts of the job, the ``named`` ones if there are any; none if the launcher is to ask the batch
    system for them.
    """
    if named:
        return named
    if not is_in_allocation(environ):
        return (Host("localhost", options.num_proc),)  # as in Horovod
    if launcher.flavour is Flavour.SRUN:
        return ()
    hosts = allocated_hosts(environ)
    # Slurm's launchers may be told to put more ranks on a host than it has tasks.
    return () if "SLURM_JOB_ID" in environ and total_slots(hosts) < options.num_proc else hosts


def _python_of(command: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Returns the interpreter that the ranks run: the command's if it is a Python, else this one."""
    if is_python(command):
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
        if line.may_hang:
            guard.start(line.argv[0])
        environ = {**os.environ, **line.added_environ}
        os.execve(line.argv[0], line.argv, {**environ, **session_directory.added_environ(os.getpid(), environ)})
    except OSError as error:
        raise LaunchError(f"{error.filename or line.argv[0]}: {error.strerror}; nothing was started.") from None
