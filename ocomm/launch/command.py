"""Builds the command line that starts a job, as a pure function of a request and of the launcher that was found.

Nothing here reads the environment, the disk or the network. The request says what has to be known of them, so that
every command line can be tested without the MPI that it is for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from ocomm.errors import LaunchError
from ocomm.launch.flavour import Flavour, Launcher
from ocomm.launch.hosts import Host, is_in_allocation, place, require_slots
from ocomm.mpi_settings import MPICH, MPICH_ON_ONE_HOST, OPEN_MPI
from ocomm.torch_variables import exports

# The number of hosts, Horovod's, from which on a tree of ssh connections costs more than it saves, because of host keys
# and of hops between hosts.
_MANY_HOSTS = 64

# The variables that do not travel to other hosts in Horovod.
_HOROVOD_KEEPS = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES")
# The variables that describe the host or the process of ocommrun, and would be wrong on another host.
_DESCRIBES_THIS_PROCESS = re.compile(
    r"HOSTNAME|PWD|SHLVL|_|XDG_RUNTIME_DIR|SSH_.*|SLURM_.*|PMI_.*|PMIX_.*|PRTE_.*|OMPI_(?!MCA_).*"
)
# Hydra never closes the standard input of ranks other than 0, so a rank that reads from it hangs (seen with MPICH 5.0
# and Intel MPI 2021.18). Only Intel MPI has a flag against that.
_WITHOUT_INPUT = "</dev/null"
#: A variable for the last place of the environment: Hydra (5.0.2) loses what is there on its way to other hosts.
_LAST = "_OCOMM_LAST"
#: The begin of names under which variables travel that no shell can hold, such as ``A.B``: dash drops them.
_RENAMED = "_OCOMM_RENAMED_"
#: Flags of Open MPI's for hosts that ocommrun does not know of.
_NAMES_HOSTS = re.compile(r"-H|--?(host|hostfile|machinefile)|--default-hostfile")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Options that Horovod's documentation, and Open MPI 4, write with one dash. Open MPI 5 knows them with two only.
_TWO_DASHES = re.compile(r"-(bind-to|map-by|rank-by)")
#: Words that give each rank several cores, and make Open MPI bind it to them.
_CORES_PER_RANK = re.compile(r".*:pe=[0-9]+.*|--?cpus-per-(proc|rank)", re.IGNORECASE)
#: Options of Open MPI's that other launchers refuse in words that name neither.
_OPEN_MPIS_OWN = re.compile(r"-x|--?(mca|oversubscribe|tag-output|report-bindings|allow-run-as-root)")

#: Arguments of the program that launchers take for their own. A colon announces another program. Open MPI 5 (5.0.11)
#: rewrites the options (--mapby), or refuses one that ocommrun has given already.
_READ_BY_LAUNCHERS = re.compile(r":|--(bind-?to|map-?by|rank-?by|runtime-options)")


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The program to start, the hosts and flags, and what is known of this machine.

    Args:
        num_proc: The number of ranks.
        command: The program and its arguments.
        hosts: The hosts of the job; empty for those of the batch system's allocation.
        own_names: The names in ``hosts`` that are this machine's.
        spans_hosts: False only if every rank runs on this machine.
        hostname: The name of this machine.
        num_cores: The number of this machine's cores.
        is_root: True if ocommrun runs as root.
        environ: The environment of ocommrun.
        settings: The ``OCOMM_*`` variables that the flags stand for.
        interfaces: Interfaces, or networks, through which the hosts reach each other; empty for any.
        ssh_port: The port of sshd on all hosts; None for ssh's default.
        ssh_identity_file: The private key for ssh; None for ssh's default.
        tcp_only: True if all messages of ranks go over TCP.
        output_directory: The folder for files with the ranks' output; None for the terminal.
        prefix_timestamp: True if lines of output begin with the time.
        mpi_args: Further arguments for the launcher.
        binding_args: Arguments for the launcher that bind ranks to cores; None for no binding.
        library_family: The family of the MPI library that mpi4py loads; "" if it is unknown.
        loopback: The variables that keep the launcher's own connections on loopback, for jobs on this machine alone.
        torch_environ: Those of torchrun's variables that all ranks have in common (``torch_variables.MASTER``), as far
            as they are known before the job starts. None if the ranks get none of torchrun's variables.
    """

    num_proc: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    own_names: frozenset[str] = frozenset()
    spans_hosts: bool = False
    hostname: str = "localhost"
    num_cores: int = 1
    is_root: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    tcp_only: bool = False
    output_directory: str | None = None
    prefix_timestamp: bool = False
    mpi_args: tuple[str, ...] = ()
    binding_args: tuple[str, ...] | None = None
    library_family: str = ""
    loopback: Mapping[str, str] = field(default_factory=dict)
    torch_environ: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A program to execute, with its arguments and variables.

    Args:
        argv: The path of the program, and all of its arguments.
        added_environ: The variables to set on top of the caller's environment.
        make_directory: A folder that must be made first; None if there is none.
        may_hang: Whether it is to be ended if it hangs behind its ranks, which are processes of this machine.
    """

    argv: tuple[str, ...]
    added_environ: Mapping[str, str]
    make_directory: str | None = None
    may_hang: bool = False

    def __str__(self) -> str:
        """Returns the line as it can be pasted into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.added_environ.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def build(request: LaunchRequest, launcher: Launcher) -> CommandLine:
    """Returns the command line that starts ``request``.

    Raises LaunchError if ``launcher`` cannot do what is requested, there is no program, or the hosts take fewer ranks.
    """
    if not request.command:
        raise LaunchError("no program to start; write it after the flags, as in ocommrun -np 2 python train.py.")
    require_slots(request.hosts, request.num_proc)
    if request.prefix_timestamp and not launcher.flavour.is_open_mpi:
        raise LaunchError(
            f"-prefix-timestamp: {launcher} cannot print the time together with the rank; leave the flag out, "
            f"or use Open MPI."
        )
    return _BUILDERS[launcher.flavour](request, launcher)


def exported_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the variables that travel to ranks on other hosts, sorted.

    As in Horovod these are all variables except ``BASH_FUNC_*``, ``OLDPWD`` and ``*CUDA_VISIBLE_DEVICES``. Variables
    that describe this host or process do not travel either (``HOSTNAME``, ``SSH_*``, ``SLURM_*``, the launchers' own).
    """
    return tuple(
        sorted(
            name
            for name in environ
            if _VARIABLE.fullmatch(name)
            and not _HOROVOD_KEEPS.fullmatch(name)
            and not _DESCRIBES_THIS_PROCESS.fullmatch(name)
        )
    )


def _renamed(request: LaunchRequest) -> dict[str, str]:
    """Returns the variables of ocommrun that the shell of a rank would drop, by the names under which they travel."""
    if "=" in request.command[0]:  # env would take it for a variable
        return {}
    lost = sorted(name for name in request.environ if not _VARIABLE.fullmatch(name))
    if request.spans_hosts:
        lost = [name for name in lost if not _HOROVOD_KEEPS.fullmatch(name)]
    return {f"{_RENAMED}{number}": name for number, name in enumerate(lost)}


def _command(request: LaunchRequest, launchers_rank: str, redirection: str = "") -> tuple[str, ...]:
    """Returns the command of a rank: a shell that sets torchrun's variables and becomes the program.

    If no variable is to be set, nothing redirected and nothing hidden from the launcher, it is the program itself.
    """
    steps = [] if request.torch_environ is None else [exports(launchers_rank)]
    is_hidden = any(map(_READ_BY_LAUNCHERS.fullmatch, request.command))
    renamed = _renamed(request)
    if not steps and not redirection and not is_hidden and not renamed:
        return request.command
    # A launcher does not read the shell's text. That is not always used, because it must not exceed 128 KiB.
    program, words = (shlex.join(request.command), ()) if is_hidden else ('"$0" "$@"', request.command)
    if renamed:
        assigned = [f'{shlex.quote(f"{name}=")}"${variable}"' for variable, name in renamed.items()]
        steps += [f"set -- {' '.join(assigned)} {program}", f"unset {' '.join(renamed)}"]
        program = 'env -- "$@"'
    return ("sh", "-c", "; ".join([*steps, f"exec {program} {redirection}".rstrip()]), *words)


def _open_mpi(request: LaunchRequest, launcher: Launcher) -> CommandLine:
    five = launcher.flavour is Flavour.OPEN_MPI_5
    added = _common(request)
    if request.is_root:
        # Containers run as root. The launcher refuses to do so unless both variables are set.
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if "SLURM_EXPORT_ENV" in request.environ:
        # What sbatch --export=NONE sets. The launcher starts its daemons by srun, which would not find their libraries.
        added["SLURM_EXPORT_ENV"] = "ALL"
    if not request.spans_hosts:
        added |= request.loopback

    argv = [launcher.path, "-np", str(request.num_proc)]
    if request.hosts:
        argv += ["-H", ",".join(map(str, _named_as_here(request)))]
    argv += _unless_given(request, ("--bind-to", "none"), ("--map-by", "slot"))
    # One machine may be asked for more ranks than it has cores (a laptop, a test). Several hosts have numbers of slots.
    if request.num_proc > request.num_cores and not request.spans_hosts:
        argv += ["--oversubscribe"]
    # Open MPI 5 never closes the pipe that is rank 0's standard input, so a script that reads from it would hang.
    argv += ["--stdin", "none", *_open_mpi_output(request, five)]

    library = [*_transport(request, five), *OPEN_MPI.items(), *_tcp_interfaces(request)]
    # In 5 the launcher has parameters of its own, apart from the library's.
    own = _launcher_parameters(request, five)
    for flag, parameters in (("--mca", library), ("--prtemca" if five else "--mca", own)):
        for name, value in parameters:
            if not _chosen_by_user(request, name):
                argv += [flag, name, value]

    if request.spans_hosts:
        argv += [word for name in exported_names({**request.environ, **added}) for word in ("-x", name)]
    # Where the folder cannot be made the launcher starts nothing, and ends with status 0 (seen with 5.0.11). Over hosts
    # each has its own.
    folder = None if request.spans_hosts else request.output_directory
    may_hang = five and not request.spans_hosts and not any(map(_NAMES_HOSTS.fullmatch, request.mpi_args))
    argv += request.mpi_args
    if five:
        argv = [f"-{word}" if _TWO_DASHES.fullmatch(word) else word for word in argv]
    return CommandLine((*argv, *_command(request, "OMPI_COMM_WORLD_RANK")), added, folder, may_hang)


def _launcher_parameters(request: LaunchRequest, five: bool) -> list[tuple[str, str]]:
    """Returns the parameters by which Open MPI's launcher reaches its daemons on other hosts."""
    ssh = "plm_ssh" if five else "plm_rsh"
    parameters = []
    if request.interfaces and request.spans_hosts:
        parameters.append(("prte_if_include" if five else "oob_tcp_if_include", ",".join(request.interfaces)))
    if ssh_args := _ssh_args(request):
        parameters.append((f"{ssh}_args", shlex.join(ssh_args)))
    if len(request.hosts) >= _MANY_HOSTS:
        parameters += [(f"{ssh}_no_tree_spawn", "1"), (f"{ssh}_num_concurrent", str(len(request.hosts)))]
    return parameters


def _named_as_here(request: LaunchRequest) -> tuple[Host, ...]:
    # Open MPI 5 does not resolve names: it would start a daemon by ssh on this machine under any other name. A batch
    # system has names of its own, which stay.
    slots: dict[str, int] = {}
    for host in request.hosts:
        is_alias = host.name in request.own_names - {"localhost"} and not is_in_allocation(request.environ)
        name = request.hostname if is_alias else host.name
        slots[name] = slots.get(name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _common(request: LaunchRequest) -> dict[str, str]:
    """Returns the variables that all ranks get, under every launcher."""
    # NCCL takes names of interfaces, but no networks.
    names = ",".join(name for name in request.interfaces if "/" not in name)
    nccl = {"NCCL_SOCKET_IFNAME": names} if names else {}
    renamed = {variable: request.environ[name] for variable, name in _renamed(request).items()}
    return {**request.settings, **(request.torch_environ or {}), **nccl, **renamed}


def _open_mpi_output(request: LaunchRequest, five: bool) -> list[str]:
    if five:
        directives = ["tag"] + ["timestamp"] * request.prefix_timestamp
        if request.output_directory is not None:
            if marks := sorted({",", ":"} & {*request.output_directory}):
                raise LaunchError(
                    f"--output-filename {request.output_directory}: Open MPI 5 takes {' and '.join(map(repr, marks))} "
                    "for the end of a name; choose another folder."
                )
            directives.append(f"dir={request.output_directory}")
        return ["--output", ",".join(directives)]
    argv = ["--tag-output"] + ["--timestamp-output"] * request.prefix_timestamp
    if request.output_directory is not None:
        argv += ["--output-filename", request.output_directory]
    return argv


def _transport(request: LaunchRequest, five: bool) -> list[tuple[str, str]]:
    if _chosen_by_user(request, "pml"):
        return []  # the list of TCP transports would not fit another network (--mpi-args '--mca pml ucx')
    shared_memory = "sm" if five else "vader"
    if not request.spans_hosts and not request.tcp_only:
        return [("pml", "ob1"), ("btl", f"self,{shared_memory}")]  # tcp would listen on all interfaces
    return [("pml", "ob1"), ("btl", "tcp,self" if request.tcp_only else f"tcp,self,{shared_memory}")]


def _tcp_interfaces(request: LaunchRequest) -> list[tuple[str, str]]:
    interfaces = request.interfaces if request.spans_hosts else ("lo",) if request.tcp_only else ()
    return [("btl_tcp_if_include", ",".join(interfaces))] if interfaces else []


def _chosen_by_user(request: LaunchRequest, parameter: str) -> bool:
    # Open MPI 5 ends with an error if a parameter is given twice with different values, so ours is left out.
    words = request.mpi_args + (request.binding_args or ())
    return parameter in words or any(f"{family}_MCA_{parameter}" in request.environ for family in ("OMPI", "PRTE"))


def _unless_given(request: LaunchRequest, *options: tuple[str, str]) -> list[str]:
    """Returns the arguments for binding: ``--binding-args`` instead of the defaults, without defaults that
    ``--mpi-args`` repeats or contradicts.
    """
    if request.binding_args is not None:
        return list(request.binding_args)
    given = {word.lstrip("-") for word in request.mpi_args}
    if any(map(_CORES_PER_RANK.fullmatch, request.mpi_args)):
        given.add("bind-to")
    return [word for option in options if option[0].lstrip("-") not in given for word in option]


def _hydra(request: LaunchRequest, launcher: Launcher) -> CommandLine:
    intel = launcher.flavour is Flavour.INTEL_MPI
    if strange := next(filter(_OPEN_MPIS_OWN.fullmatch, request.mpi_args), None):
        raise LaunchError(
            f"--mpi-args: {strange} is an option of Open MPI's launcher, and {launcher} starts this job. Leave it out: "
            "ranks may be more than cores, and have ocommrun's environment, on other hosts too."
        )
    added = _hydra_environ(request, intel)
    options = ["-prepend-rank"]
    if request.output_directory is not None:
        options += [
            *("-outfile-pattern", f"{request.output_directory}/rank.%r.out"),
            *("-errfile-pattern", f"{request.output_directory}/rank.%r.err"),
        ]
    if request.interfaces:
        if len(request.interfaces) > 1:
            raise LaunchError(
                f"--network-interfaces {','.join(request.interfaces)}: {launcher} takes one interface; name one."
            )
        options += ["-iface", request.interfaces[0]] if request.spans_hosts else []
    if ssh_args := _ssh_args(request):
        if intel:
            options += ["-bootstrap-exec-args", shlex.join(ssh_args)]
        else:
            added["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(ssh_args)
    if request.spans_hosts:
        options += ["-genvlist", ",".join(exported_names({**request.environ, **added}))]
        added[_LAST] = ""
    options += [*(request.binding_args or ()), *request.mpi_args]

    command = _command(request, "PMI_RANK", _WITHOUT_INPUT)
    hosts = place(_named_for_others(request), request.num_proc)
    if intel and len(hosts) > 0:
        # Intel's -hosts cannot say how many ranks a host takes. A set of arguments for each host can.
        sets = [("-host", host.name, "-n", str(host.slots), *command) for host in hosts]
        argv = [word for number, words in enumerate(sets) for word in ((":",) if number else ()) + words]
        return CommandLine((launcher.path, *options, *argv), added, request.output_directory)
    where = ["-hosts", ",".join(map(str, hosts))] if hosts else []
    argv = ["-n", str(request.num_proc), *where, *options, *command]
    return CommandLine((launcher.path, *argv), added, request.output_directory)


def _hydra_environ(request: LaunchRequest, intel: bool) -> dict[str, str]:
    added = _common(request)
    if not intel:
        added |= _unset(request, MPICH)
    if request.tcp_only:
        added["FI_PROVIDER"] = "tcp"
        if intel:
            added["I_MPI_FABRICS"] = "ofi"
        elif request.spans_hosts:
            added["UCX_TLS"] = "tcp,self"  # not on one host, whose ranks UCX does not reach over loopback
    if not request.spans_hosts:
        added |= _unset(request, MPICH_ON_ONE_HOST)
        added |= request.loopback
    # -genv sets variables, too, but I_MPI_PIN=0 would win over an I_MPI_PIN_DOMAIN.
    asked = [*request.environ, *request.mpi_args]
    if intel and request.binding_args is None and not any(word.startswith("I_MPI_PIN") for word in asked):
        added["I_MPI_PIN"] = "0"
    return added


def _unset(request: LaunchRequest, variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in request.environ}


def _named_for_others(request: LaunchRequest) -> tuple[Host, ...]:
    # Hydra tells the other hosts to connect to the first one by its name, which therefore must not be "localhost".
    if not request.spans_hosts:
        return request.hosts
    return tuple(Host(request.hostname, h.slots) if h.name == "localhost" else h for h in request.hosts)


def _srun(request: LaunchRequest, launcher: Launcher) -> CommandLine:
    if request.ssh_port is not None or request.ssh_identity_file is not None:
        raise LaunchError("--ssh-port and --ssh-identity-file: srun starts ranks without ssh; leave them out.")
    added = _common(request)
    open_mpi = request.library_family == "Open MPI"
    if open_mpi:
        # srun can set Open MPI's parameters by variables only, which it passes on. In Open MPI 5 vader is an alias of
        # sm.
        parameters = [*_transport(request, five=False), *OPEN_MPI.items(), *_tcp_interfaces(request)]
        added |= {f"OMPI_MCA_{name}": value for name, value in parameters if not _chosen_by_user(request, name)}
        # A script may start MPI by itself: with Slurm's default Open MPI leaves MPI_Init before all ranks are ready.
        added |= _unset(request, {"SLURM_PMIX_FENCE": "ring"})
    elif request.library_family == "MPICH":
        added |= _unset(request, MPICH)
    if request.tcp_only and not open_mpi:
        added |= {"FI_PROVIDER": "tcp"}

    argv = [launcher.path, f"--ntasks={request.num_proc}", *_srun_hosts(request)]
    # Without these flags the other ranks wait for a rank that has died, and Ctrl-C only prints their state.
    argv += [f"--mpi={'pmix' if open_mpi else 'pmi2'}", "--kill-on-bad-exit=1", "--quit-on-interrupt", "--input=none"]
    argv += ["--export=ALL", "--label"]
    argv += list(request.binding_args) if request.binding_args is not None else ["--cpu-bind=none"]
    if request.output_directory is not None:
        argv += [
            f"--output={request.output_directory}/rank.%t.out",
            f"--error={request.output_directory}/rank.%t.err",
        ]
    command = _command(request, "SLURM_PROCID")
    return CommandLine((*argv, *request.mpi_args, *command), added, request.output_directory)


def _srun_hosts(request: LaunchRequest) -> list[str]:
    if not request.hosts:
        return []
    placed = place(request.hosts, request.num_proc)
    if len({host.slots for host in placed}) != 1:
        raise LaunchError(
            f"-H {','.join(map(str, request.hosts))}: srun puts the same number of ranks on each host; give "
            f"each the same number, or leave -H out and let the allocation decide."
        )
    names = ",".join(host.name for host in placed)
    return [f"--nodelist={names}", f"--nodes={len(placed)}", f"--ntasks-per-node={placed[0].slots}"]


def _ssh_args(request: LaunchRequest) -> list[str]:
    args = []
    if request.ssh_port is not None:
        args += ["-p", str(request.ssh_port)]
    if request.ssh_identity_file is not None:
        args += ["-i", request.ssh_identity_file]
    return args


_BUILDERS = {
    Flavour.OPEN_MPI_4: _open_mpi,
    Flavour.OPEN_MPI_5: _open_mpi,
    Flavour.MPICH: _hydra,
    Flavour.INTEL_MPI: _hydra,
    Flavour.SRUN: _srun,
}
