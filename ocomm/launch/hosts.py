"""Host lists: ``-H a:2,b:2`` and host files, into one form."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ocomm.errors import LaunchError
from ocomm.mpi_settings import HOSTFILES

_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "PE_HOSTFILE")
#: Characters of a line of a discovery script: names of hosts have 253 at most.
_LONGEST_LINE = 300
_SCONTROL_S = 20.0
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_FORMAT = "write host:ranks, separated by commas, as in -H worker-0:2,worker-1:2"
_FILE_FORMAT = "write one 'worker-0 slots=2' or 'worker-0:2' on each line"


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Returns the hosts of ``-H a:2,b:2``, in order.

    The number of ranks is never guessed, because MPIs disagree on what its absence means (one rank, or one for each
    core). Raises LaunchError for a malformed entry, a host named twice, or no host at all.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return _collect((_parse_entry(entry, f"-H {text}: {entry!r}", _FORMAT) for entry in entries), f"-H {text}")


def named_hosts(text: str | None, path: str | None) -> tuple[Host, ...]:
    """Returns the hosts of ``-H``, or else of the host file at ``path``; none where the user has named none."""
    return parse_hosts(text) if text is not None else read_hostfile(path) if path is not None else ()


def is_in_allocation(environ: Mapping[str, str]) -> bool:
    """Returns True in a job of a batch system, which knows the hosts."""
    return any(name in environ for name in _ALLOCATIONS)


def allocated_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Returns the hosts of an allocation of Slurm, LSF or Grid Engine that has several; none in another one.

    Launchers ask PBS, and Slurm if it does not say here what its hosts are. The Open MPI that pip installs knows no
    other batch system, and would start all ranks on this host. Raises LaunchError if the variable of LSF or Grid
    Engine, or the file that it names, is malformed.
    """
    if "SLURM_JOB_ID" in environ:
        return _slurm_hosts(environ)
    if "PBS_NODEFILE" in environ:
        return ()
    if text := environ.get("LSB_MCPU_HOSTS"):
        words = text.split()
        pairs, where = list(zip(words[::2], words[1::2], strict=False)), f"LSB_MCPU_HOSTS={text!r}"
    elif path := environ.get("PE_HOSTFILE"):
        lines = [line.split() for line in _read(path, "PE_HOSTFILE=").splitlines() if line.strip()]
        pairs, where = [(line[0], "".join(line[1:2])) for line in lines], f"PE_HOSTFILE={path}"
    else:
        return ()
    slots: dict[str, int] = {}  # a host stands there once for each of its queues
    for name, count in pairs:
        host = _parse_entry(f"{name}:{count}", f"{where}: {name!r}", "name the hosts with -H a:2,b:2")
        slots[name] = slots.get(name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items()) if len(slots) > 1 else ()


def _slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    # An allocation of several parts (a heterogeneous job) has lists of each. In a step the numbers may be those of the
    # step, on fewer hosts than the job has.
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", environ.get("SLURM_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    if len(tasks) < 2 or "SLURM_HET_SIZE" in environ:
        return ()
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_SCONTROL_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    names = done.stdout.split()
    return tuple(map(Host, names, tasks)) if len(names) == len(tasks) else ()


def default_hostfile(environ: Mapping[str, str]) -> str | None:
    """Returns the host file that the environment names for MPI's launchers, as operators of Kubernetes do; None if it
    names none. Raises LaunchError if there is no such file.
    """
    name = next((name for name in HOSTFILES if environ.get(name)), None)
    if name is None:
        return None
    if not os.path.isfile(environ[name]):
        raise LaunchError(f"{name}={environ[name]}: there is no such file of hosts. Unset it, or name the hosts by -H.")
    return environ[name]


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Returns the hosts of the file at ``path``. Raises LaunchError if it cannot be read or is malformed."""
    return parse_hostfile(_read(path, "--hostfile "), path)


def _read(path: str, named_by: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors of Windows write a mark at its beginning
            return file.read()
    except OSError as error:
        raise LaunchError(f"{named_by}{path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{named_by}{path}: this is no text in UTF-8.") from None


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Returns the hosts of a host file's ``text``; ``path`` is for the messages.

    Lines of Open MPI (``a slots=2``) and of MPICH (``a:2``) are both understood; ``#`` starts a comment. Raises
    LaunchError.
    """

    def entries() -> Iterable[Host]:
        for number, line in enumerate(text.splitlines(), start=1):
            content = line.split("#", 1)[0].strip()
            if content:
                # Anything after the slots, such as Open MPI's max_slots, is refused below rather than dropped.
                normal = re.sub(r"\s+slots\s*=\s*", ":", content)
                yield _parse_entry(normal, f"{path}, line {number}: {content!r}", _FILE_FORMAT)

    return _collect(entries(), path)


def parse_discovered(text: str, slots: int | None) -> tuple[Host, ...]:
    """Returns the hosts of a discovery script's output, ``host`` or ``host:ranks`` on each line; none if there are none
    now.

    ``slots`` is used for hosts without a number. Raises LaunchError.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    where = "the output"
    if slots is not None:
        lines = [line if ":" in line else f"{line}:{slots}" for line in lines]
    expected = "write one 'worker-0:2' on each line, or 'worker-0' with --slots-per-host"
    if long := next((line for line in lines if len(line) > _LONGEST_LINE), None):
        raise LaunchError(f"{where}: a line of {len(long)} characters, {long[:40]!r}..., is not a host; {expected}.")
    return _collect((_parse_entry(line, f"{where}: {line!r}", expected) for line in lines), where) if lines else ()


def total_slots(hosts: Iterable[Host]) -> int:
    """Returns the number of ranks that the hosts take together."""
    return sum(host.slots for host in hosts)


def require_slots(hosts: Sequence[Host], ranks: int) -> None:
    """Raises LaunchError if ``hosts`` take fewer ranks; none are the batch system's, which knows what they take."""
    if hosts and total_slots(hosts) < ranks:
        raise LaunchError(
            f"-np asks for {ranks} ranks, but the hosts take {total_slots(hosts)}: {','.join(map(str, hosts))}. "
            "Raise the numbers behind the colons or lower -np."
        )


def place(hosts: Iterable[Host], num_proc: int) -> tuple[Host, ...]:
    """Returns the hosts that get a rank when ``num_proc`` ranks fill them in order, with the number of ranks on
    each.
    """
    placed = []
    left = num_proc
    for host in hosts:
        if left == 0:
            break
        count = min(host.slots, left)
        placed.append(Host(host.name, count))
        left -= count
    return tuple(placed)


def _parse_entry(entry: str, where: str, expected: str) -> Host:
    name, colon, slots = entry.partition(":")
    if not _NAME.fullmatch(name):
        raise LaunchError(f"{where} is not a host; {expected}.")
    if not colon:
        raise LaunchError(f"{where} does not say how many ranks run there; {expected}.")
    if not re.fullmatch("[0-9]+", slots) or int(slots) == 0:
        raise LaunchError(f"{where} has {slots!r} as its number of ranks, which must be 1 or more; {expected}.")
    return Host(name, int(slots))


def _collect(entries: Iterable[Host], where: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for host in entries:
        if host.name in hosts:
            raise LaunchError(f"{where} names the host {host.name!r} twice; give it once, with all its ranks.")
        hosts[host.name] = host
    if not hosts:
        raise LaunchError(f"{where} names no host.")
    return tuple(hosts.values())
