"""``ocomm.run`` calls a Python function on all ranks of a new job, and returns the results."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ocomm import as_horovod
from ocomm.errors import LaunchError, PeerError, clause, in_words
from ocomm.launch import reach
from ocomm.launch.hosts import default_hostfile, is_in_allocation, named_hosts
from ocomm.launch.server import Server
from ocomm.launch.task import KEY, MOST_BYTES
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError, wait
from ocomm.runtime.own_address import ALL_ADDRESSES
from ocomm.torch_variables import MASTER, OF_LAUNCHERS

#: Seconds for the launcher to end once all results have arrived, or a rank has failed.
_END_S = 10.0
#: Seconds for looking up the names of hosts.
_REACH_S = 15.0
#: Text in the traceback of a rank that failed because another rank did.
_CONSEQUENCE = f"{PeerError.__name__}: "


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    verbose: int | None = False,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    disable_cache: bool = False,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on ``num_proc`` ranks of a new job.

    The function initializes ocomm itself, as a script does. Functions that cannot be imported by name (lambdas, those
    of a notebook) need cloudpickle. Ranks on other hosts connect to this machine by its name, or by its address on the
    first of ``network_interfaces``; ranks on this machine connect over loopback. The other arguments are flags of
    ``ocommrun``.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its named arguments.
        num_proc: The number of ranks; ``np`` is the same.
        verbose: Whether to print the command line.
        use_gloo: Accepted as in Horovod, and ignored, like ``use_mpi``: ocomm always runs on MPI.
        network_interfaces: Names of interfaces, in a list or separated by commas.
        disable_cache: Accepted as in Horovod, and ignored: hosts are checked each time.
        executable: The Python interpreter of the ranks; None for this one.
        env: The environment of the ranks; None for this process's.

    Returns:
        The function's results, by rank.

    Raises:
        LaunchError: The job cannot be started, or a rank fails; the message has that rank's traceback. No rank is
            left running.
    """
    if network_interfaces is not None and not isinstance(network_interfaces, str):
        network_interfaces = ",".join(network_interfaces)
    ranks = np if np is not None else num_proc
    if ranks < 1:
        raise LaunchError(f"np={ranks}: a job has 1 rank or more.")
    task = _pickle((func, tuple(args), dict(kwargs or {})))
    if hosts is None and hostfile is None and not is_in_allocation(os.environ):
        hostfile = default_hostfile(os.environ if env is None else env)
    key = secrets.token_bytes(32)
    listens_at, address = _addresses(hosts, hostfile, network_interfaces)
    with Server(listens_at, key, ranks, most_bytes=MOST_BYTES) as server:
        command = [sys.executable, "-m", "ocomm.launch", "-np", str(ranks)]
        for flag, value in (
            ("--hosts", hosts),
            ("--hostfile", hostfile),
            ("--start-timeout", None if start_timeout is None else math.ceil(start_timeout)),
            ("--ssh-port", ssh_port),
            ("--ssh-identity-file", ssh_identity_file),
            ("--output-filename", output_filename),
            ("--network-interfaces", network_interfaces),
        ):
            command += [] if value is None else [flag, str(value)]
        command += [f"--mpi-args={mpi_args}"] if mpi_args else []
        command += ["--verbose"] if verbose else []
        # The function may refer to modules by the names that this process has for them.
        python = executable or sys.executable
        command += ["--as-horovod"] if as_horovod.is_installed() else []
        command += [python, "-m", "ocomm.launch.task", address, str(server.port)]
        environ = {**(_outside_of_a_job(os.environ) if env is None else env), KEY: key.hex()}
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)
        try:
            return _collect(job, server, task, ranks)
        finally:
            server.close()
            _end(job)
            for connection in server.connections:
                connection.close()


def _outside_of_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without this process's place in a job of its own, such as ``ocommrun -np 1`` starts."""
    places = {*OF_LAUNCHERS, *MASTER} if any(name in environ for name in OF_LAUNCHERS["RANK"]) else ()
    return {name: value for name, value in environ.items() if name not in places}


def _addresses(hosts: str | None, hostfile: str | None, interfaces: str | None) -> tuple[str, str]:
    """Returns the address at which this process listens, and the one to which ranks connect."""
    named = named_hosts(hosts, hostfile)
    states = reach.ask([host.name for host in named], None, None, _REACH_S, use_ssh=False)
    if all(state.is_local for state in states) and (named or not is_in_allocation(os.environ)):
        return "127.0.0.1", "127.0.0.1"
    if interfaces:
        address = reach.address_of([name.strip() for name in interfaces.split(",")])
        return address, address
    return ALL_ADDRESSES, socket.gethostname()


def _pickle(task: object) -> bytes:
    try:
        # It also takes functions by value; where it is missing, pickle takes those that the ranks can import.
        return importlib.import_module("cloudpickle").dumps(task)
    except ImportError:
        pass
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"the function or its arguments cannot be sent to the ranks: {clause(error)}. pip install cloudpickle, or "
            "put the function into a module."
        ) from None


def _collect(job: subprocess.Popen[bytes], server: Server, task: bytes, ranks: int) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    served: list[AuthenticatedSocket] = []
    begun = 0  # connections that have been given the task
    ended_at: float | None = None
    while len(results) < ranks:
        for connection in server.connections[begun:]:
            begun += 1
            served.append(connection)
            with contextlib.suppress(OSError):  # the rank has ended or takes nothing: that is heard below
                connection.send(task)
        for ready in wait(served, 0.05):
            try:
                message = ready.receive()
            except (TamperedError, TimeoutError) as error:
                raise LaunchError(f"the connection to a rank cannot be used any more: {clause(error)}.") from None
            except (EOFError, OSError):
                served.remove(ready)
                continue
            try:
                kind, rank, content = pickle.loads(message)
            except Exception as error:  # whatever the unpickled classes raise
                raise LaunchError(f"a rank's result cannot be read here: {in_words(error)}") from error
            if kind == "failed":
                failures[rank] = content
            if kind == "result":
                results[rank] = content
        if failures:
            # The news of a rank that failed because another did may arrive first.
            rank = min(failures, key=lambda rank: (_CONSEQUENCE in failures[rank], rank))
            raise LaunchError(f"rank {rank} failed:\n{failures[rank]}")
        status = job.poll()
        if status is not None and len(results) < ranks:
            # Messages that ranks have sent before they ended may still be on their way.
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > 1.0:
                missing = sorted(set(range(ranks)) - set(results))
                raise LaunchError(f"the job ended with status {status}; there is no result of rank(s) {missing}.")
    return [results[rank] for rank in range(ranks)]


def _end(job: subprocess.Popen[bytes]) -> None:
    for end in (job.terminate, job.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_END_S)
            return
        end()
    job.wait()
