"""Finds out which hosts are this machine, and which others answer to ssh. All are asked at once, with one deadline."""

from __future__ import annotations

import ipaddress
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ocomm.errors import LaunchError, clause
from ocomm.launch.command import LaunchRequest
from ocomm.launch.hosts import Host, is_in_allocation
from ocomm.runtime.own_address import free_port, interface_addresses, own_address
from ocomm.torch_variables import MASTER, missing

# The limit of ssh, as a part of the deadline. It is below 1, so that ssh says its reason before the deadline.
_CONNECT_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class HostState:
    """What was found out about a host.

    ``is_local``: it is this machine. ``has_answered``: it has answered to ssh. ``problem`` says why it has not. None of
    the three holds for another machine that was not asked.
    """

    name: str
    is_local: bool
    problem: str | None = None
    has_answered: bool = False


def ssh_command(name: str, port: int | None, identity_file: str | None, connect_timeout_s: int) -> tuple[str, ...]:
    """Returns a command that succeeds if and only if the launcher will be able to start something on host ``name``."""
    argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout_s}"]
    if port is not None:
        argv += ["-p", str(port)]
    if identity_file is not None:
        argv += ["-i", identity_file]
    return (*argv, name, "true")


def is_this_machine(name: str) -> bool:
    """Returns True if ``name`` is this machine: one of its own names, or a name with an address that can be bound
    here.
    """
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def address_of(interfaces: Sequence[str]) -> str:
    """Returns this machine's IPv4 address on the first of ``interfaces`` that has one.

    Args:
        interfaces: Names of interfaces, or networks such as ``10.0.0.0/24``, as in ``--network-interfaces``.

    Raises:
        LaunchError: There is no such address.
    """
    found = interface_addresses()
    for interface in interfaces:
        for name, address in found:
            if name == interface or ("/" in interface and address in _network(interface)):
                return str(address)
    there = ", ".join(f"{name} ({address})" for name, address in found) or "none"
    raise LaunchError(
        f"--network-interfaces {','.join(interfaces)}: this machine, on which ocommrun itself listens, has no such "
        f"interface with an IPv4 address; it has {there}. Name one that all machines have, or a network such as "
        "10.0.0.0/24."
    )


def own_addresses(states: Sequence[HostState]) -> list[str]:
    """Returns the addresses at which hosts reach this machine, 127.0.0.1 last."""
    found: list[str] = []
    for state in states:
        address = "127.0.0.1" if state.is_local else own_address(state.name) or socket.gethostname()
        if address not in found:
            found.append(address)
    # On other hosts 127.0.0.1 is not this machine, so they must not try it first.
    return sorted(found, key=lambda address: address == "127.0.0.1")


def spans_hosts(states: Sequence[HostState], environ: Mapping[str, str]) -> bool:
    """Returns False if every rank runs on this machine. Without states, only the batch system knows the hosts."""
    return not all(state.is_local for state in states) if states else is_in_allocation(environ)


def placed(request: LaunchRequest, hosts: Sequence[Host], states: Sequence[HostState]) -> LaunchRequest:
    """Returns ``request`` on ``hosts``, of which ``states`` have been found out; none of both in an allocation that is
    left to the launcher. Raises LaunchError if this machine has no address on the interfaces of the request.
    """
    return replace(
        request,
        hosts=tuple(hosts),
        own_names=own_names(states),
        spans_hosts=spans_hosts(states, request.environ),
        torch_environ=None if request.torch_environ is None else _torch_environ(request, hosts, states),
    )


def _torch_environ(request: LaunchRequest, hosts: Sequence[Host], states: Sequence[HostState]) -> dict[str, str]:
    """Returns MASTER_ADDR and MASTER_PORT, with a free port of rank 0's host, except those that the user has set; none
    if that host is not this machine, because ``init()`` chooses them then.
    """
    if not hosts or hosts[0].name not in own_names(states):
        return {}
    address = "127.0.0.1"
    if others := [state for state in states if not state.is_local]:
        address = address_of(request.interfaces) if request.interfaces else own_addresses(others)[0]
    return missing(request.environ, dict(zip(MASTER, (address, str(free_port())), strict=True)))


def _network(text: str) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        raise LaunchError(f"--network-interfaces {text}: {clause(error)}.") from None


def ask(
    names: Sequence[str], port: int | None, identity_file: str | None, deadline_s: float, use_ssh: bool = True
) -> tuple[HostState, ...]:
    """Returns the state of every host in ``names``, after at most ``deadline_s`` seconds.

    If ranks are not started through ssh (inside a batch system, or with a launch agent), ``use_ssh`` False only finds
    out which hosts are this machine.
    """
    end = time.monotonic() + deadline_s
    answers: queue.SimpleQueue[HostState] = queue.SimpleQueue()

    def one(name: str) -> None:
        answers.put(_ask_one(name, port, identity_file, end, deadline_s, use_ssh))

    for name in names:
        # A thread that waits for a name server cannot be interrupted. It is left behind, and ends with the process.
        threading.Thread(target=one, args=(name,), daemon=True).start()
    states: dict[str, HostState] = {}
    while len(states) < len(names):
        try:
            state = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        states[state.name] = state
    silent = f"no answer within {deadline_s:g} s"
    return tuple(states.get(name, HostState(name, False, silent)) for name in names)


def own_names(states: Iterable[HostState]) -> frozenset[str]:
    """Returns the names that are this machine's."""
    return frozenset(state.name for state in states if state.is_local)


def require_reachable(states: Sequence[HostState]) -> None:
    """Raises LaunchError that names every host with a problem, the reason, and how to try it by hand."""
    lost = [state for state in states if state.problem is not None]
    if not lost:
        return
    lines = "\n".join(f"    {state.name}: {state.problem}" for state in lost)
    raise LaunchError(
        f"{len(lost)} of {len(states)} hosts cannot be reached, nothing was started:\n{lines}\n"
        f"This must work without a password or a question: ssh -o BatchMode=yes {lost[0].name} true "
        f"(see --ssh-port, --ssh-identity-file and ssh-copy-id)."
    )


def _ask_one(
    name: str, port: int | None, identity_file: str | None, end: float, deadline_s: float, use_ssh: bool
) -> HostState:
    if is_this_machine(name):
        return HostState(name, True)
    if not use_ssh:
        return HostState(name, False)
    left = end - time.monotonic()
    argv = ssh_command(name, port, identity_file, max(1, int(left * _CONNECT_SHARE)))
    try:
        # ssh is ended a little before the deadline, so that its answer arrives within it.
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=max(0.1, left - 0.2)
        )
    except subprocess.TimeoutExpired:
        return HostState(name, False, f"no answer within {deadline_s:g} s")
    except OSError as error:
        return HostState(name, False, f"ssh cannot be executed: {error.strerror}")
    if done.returncode == 0:
        return HostState(name, False, has_answered=True)
    said = [line for line in done.stderr.strip().splitlines() if line]
    return HostState(name, False, said[-1].strip() if said else f"ssh ended with exit code {done.returncode}")
