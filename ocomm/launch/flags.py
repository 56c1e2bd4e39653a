"""The flags of ``ocommrun``, and the variables of ranks that they stand for. Names and meanings are horovodrun's."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ocomm.errors import LaunchError, clause
from ocomm.telemetry.counters import parse_address
from ocomm.telemetry.log import LEVELS
from ocomm.version import __version__

#: Flags of horovodrun for machinery that ocomm does not have, and where their values go.
_WITHOUT_MEANING = {
    "--[no-]hierarchical-allgather": "hierarchical_allgather",
    "--[no-]torus-allreduce": "torus_allreduce",
    "--[no-]mpi-threads-disable": "mpi_threads_disable",
    "--num-nccl-streams": "num_nccl_streams",
    "--gloo-timeout-seconds": "gloo_timeout_seconds",
    "--log-with[out]-timestamp": "log_with_timestamp",
    "--disable-cache": "disable_cache",  # horovodrun's checks of hosts, which it makes once an hour
    "--gloo": "gloo",
    "--jsrun": "jsrun",
    "--[no-]log-hide-timestamp": "log_hide_timestamp",
}
ELASTIC_TIMEOUT_S = 600.0
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


def _switch(is_on: bool) -> str:
    return "1" if is_on else "0"


#: Where the values of flags go, the variables that they set, and how these are spelled. Paths are absolute, because
#: ranks on other hosts may have another working folder.
_VARIABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fusion_threshold_mb": ("OCOMM_FUSION_THRESHOLD", lambda mib: str(mib * 1024 * 1024)),
    "cycle_time_ms": ("OCOMM_CYCLE_TIME", "{:g}".format),
    "cache_capacity": ("OCOMM_CACHE_CAPACITY", str),
    "stall_check": ("OCOMM_STALL_CHECK_DISABLE", lambda is_on: _switch(not is_on)),
    "stall_check_warning_time_seconds": ("OCOMM_STALL_CHECK_TIME_SECONDS", str),
    "stall_check_shutdown_time_seconds": ("OCOMM_STALL_SHUTDOWN_TIME_SECONDS", str),
    "hierarchical_allreduce": ("OCOMM_HIERARCHICAL_ALLREDUCE", _switch),
    "autotune": ("OCOMM_AUTOTUNE", _switch),
    "autotune_log_file": ("OCOMM_AUTOTUNE_LOG", os.path.abspath),
    **{f"autotune_{name}": (f"OCOMM_AUTOTUNE_{name.upper()}", str) for name in _AUTOTUNE},
    "thread_affinity": ("OCOMM_THREAD_AFFINITY", str),
    "timeline_filename": ("OCOMM_TIMELINE", os.path.abspath),
    "timeline_mark_cycles": ("OCOMM_TIMELINE_MARK_CYCLES", _switch),
    "metrics_port": ("OCOMM_METRICS_PORT", str),
    "watch": ("OCOMM_WATCH", _switch),
    "log_level": ("OCOMM_LOG_LEVEL", str),
    "start_timeout": ("OCOMM_START_TIMEOUT", str),
}


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns True if the job is to be supervised, which horovodrun's --min-np or a discovery script ask for."""
    elastic = options.min_np is not None or options.host_discovery_script is not None
    for flag, name in _ELASTIC.items():
        if not elastic and getattr(options, name) is not None:
            raise LaunchError(f"{flag} is for elastic jobs; say with --min-np how many ranks are enough.")
    return elastic


def elastic_timeout_s(environ: Mapping[str, str]) -> float:
    """Returns the seconds that ``--elastic-timeout`` has if it is not given. Raises LaunchError if Horovod's variable
    is no number.
    """
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT")
    try:
        return ELASTIC_TIMEOUT_S if text is None else _positive(text)
    except argparse.ArgumentTypeError as error:
        raise LaunchError(f"HOROVOD_ELASTIC_TIMEOUT: {clause(error)}.") from None


def without_meaning(options: argparse.Namespace) -> list[str]:
    """Returns flags of horovodrun that were given and have no effect here."""
    return [flag for flag, name in _WITHOUT_MEANING.items() if getattr(options, name) is not None]


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the ``OCOMM_*`` variables that the flags stand for; a flag that was not given sets none."""
    given = {name: value for name in _VARIABLES if (value := getattr(options, name)) is not None}
    settings = {_VARIABLES[name][0]: _VARIABLES[name][1](value) for name, value in given.items()}
    return settings if options.torch_env else {**settings, "OCOMM_TORCH_ENV": "0"}


class _Parser(argparse.ArgumentParser):
    """Reads the words before the program only. By itself argparse would refuse a word after it that could be an
    abbreviation of several flags.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f". Did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        begin = self._begin_of_program(words)
        options, unknown = super().parse_known_args(words[:begin], namespace)
        options.command = words[begin:]
        return options, unknown

    def _begin_of_program(self, words: Sequence[str]) -> int:
        """Returns the index of the first word that is neither a flag nor the value of one."""
        flags = self._option_string_actions
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
            name, is_with_value, _ = words[index].partition("=")
            meant = [name] if name in flags else [flag for flag in flags if flag.startswith(name)]
            counts = [1 if flags[flag].nargs is None else int(flags[flag].nargs or 0) for flag in meant]
            index += 1 if is_with_value else 1 + max(counts, default=0)
        return min(index, len(words))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``ocommrun``. Names and meanings are horovodrun's; as there, flags can be abbreviated."""
    parser = _Parser(
        prog="ocommrun",
        usage="ocommrun -np N [-H host:ranks,...] [flags] program [arguments]",
        description="Start a training program on N ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", type=_positive, metavar="N", help="number of ranks")
    add("-cb", "--check-build", action="store_true", help="show what is installed; exit code 1 if it cannot train")
    add("--verbose", action="store_true", help="print the command line that is executed")
    add(
        "--watch",
        action="store_true",
        default=None,
        help="show ranks, steps per second, bytes, stragglers and stalls while the job runs; needs ocomm[watch]",
    )
    add("--config-file", metavar="FILE", help="flags in YAML, in horovodrun's form; the command line wins")
    add(
        "--as-horovod",
        action="store_true",
        help="the program's 'import horovod.torch' and 'horovod.tensorflow' mean ocomm",
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

    _add_hosts(parser)
    _add_elastic(parser)
    _add_network(parser)
    _add_tunables(parser)
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:RANKS,...", help="hosts, and how many ranks each takes")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="a file with a line 'host slots=ranks' for each")
    where.add_argument(
        "--host-discovery-script", metavar="FILE", help="prints the hosts that there are now, 'host:ranks' on each line"
    )


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    elastic = parser.add_argument_group("elastic jobs, which go on from their last commit when ranks or hosts are lost")
    elastic.add_argument("--min-np", "--min-num-proc", type=_positive, metavar="N", help="ranks that are enough")
    elastic.add_argument("--max-np", "--max-num-proc", type=_positive, metavar="N", help="ranks at most; default: any")
    elastic.add_argument("--slots-per-host", type=_positive, metavar="N", help="ranks of discovered hosts without ':N'")
    elastic.add_argument(
        "--elastic-timeout",
        type=_positive,
        metavar="S",
        help="seconds to wait for enough slots, and for ranks to come to init(); default: HOROVOD_ELASTIC_TIMEOUT, or "
        f"{ELASTIC_TIMEOUT_S:.0f}",
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


def _add_network(parser: argparse.ArgumentParser) -> None:
    ssh = parser.add_argument_group("ssh")
    ssh.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of sshd on all hosts")
    ssh.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")

    network = parser.add_argument_group("network and MPI")
    network.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="interfaces",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME,...",
        help="interfaces, or networks such as 10.0.0.0/24, through which several hosts reach each other; jobs on one "
        "host use none",
    )
    network.add_argument("--tcp", action="store_true", help="TCP only, under Open MPI also between ranks of one host")
    network.add_argument("--mpi", action="store_true", help="start through MPI, which is the only way there is")
    for other in ("--gloo", "--jsrun"):
        network.add_argument(other, action="store_true", default=None, help=argparse.SUPPRESS)
    network.add_argument(
        "--mpi-args", type=_shell_words, default="", metavar="'...'", help="further arguments for the MPI's launcher"
    )
    network.add_argument(
        "--binding-args",
        type=_shell_words,
        metavar="'...'",
        help="how ranks are bound to cores, in the launcher's words",
    )


def _add_tunables(parser: argparse.ArgumentParser) -> None:
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
    cycles.add_argument(
        "--no-timeline-mark-cycles", dest="timeline_mark_cycles", action="store_false", help="do not mark them"
    )
    auto = tune.add_mutually_exclusive_group()
    auto.add_argument(
        "--autotune", action="store_true", default=None, help="search for the fastest of these while the job runs"
    )
    auto.add_argument("--no-autotune", dest="autotune", action="store_false", help="do not search")
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
    nodes.add_argument(
        "--no-hierarchical-allreduce", dest="hierarchical_allreduce", action="store_false", help="flat dense sums"
    )
    for first, second in (
        ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        ("--torus-allreduce", "--no-torus-allreduce"),
        ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        ("--log-with-timestamp", "--log-without-timestamp"),
        ("--log-hide-timestamp", "--no-log-hide-timestamp"),
    ):
        name = first[2:].replace("-", "_")
        tune.add_argument(first, dest=name, action="store_true", default=None, help=argparse.SUPPRESS)
        tune.add_argument(second, dest=name, action="store_false", help=argparse.SUPPRESS)
    tune.add_argument("--thread-affinity", metavar="CORE,...", help="cores of the background threads, by local rank")
    for flag in ("--num-nccl-streams", "--gloo-timeout-seconds"):
        tune.add_argument(flag, help=argparse.SUPPRESS)
    tune.add_argument("--disable-cache", action="store_true", default=None, help=argparse.SUPPRESS)
    tune.add_argument(
        "--log-level",
        type=str.upper,
        choices=[level.upper() for level in LEVELS],
        help="the lowest level of the lines that reach stderr (default NOTICE)",
    )
