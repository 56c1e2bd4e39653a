"""Connects a rank to the PMI service (``ocomm.launch.pmi``), by which MPICH starts without a launcher.

A rank opens two connections. The first message of each says which rank it is, and what the connection is for:

    {"word": "pmi", "rank": 3}      MPICH speaks PMI on it from then on
    {"word": "watch", "rank": 3}    the rank sends {"word": "up"} when it has come out of MPI_Init, and ends when it
                                    receives {"word": "end", "why": ...}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ocomm import json_values
from ocomm.errors import LaunchError, clause
from ocomm.runtime.authenticated_socket import AuthenticatedSocket
from ocomm.runtime.supervisor_client import connect_to_any

#: Variables that would make MPICH start in another way, if they are inherited, from srun for instance.
_OTHERS = ("PMI_PORT", "PMI_ID", "PMI_SPAWNED", "PMIX_NAMESPACE", "PMIX_RANK")
#: How the names of MPICH's files of shared memory begin.
_SHARED = "/dev/shm/mpich_shm_"
#: Seconds for the service to write the number of its port.
_PORT_S = 60.0


class PmiService:
    """The process of the service, a child of rank 0. It ends by itself if rank 0 ends without a call of ``start``."""

    def __init__(self) -> None:
        # The folder of ocomm is added at the end of sys.path. PYTHONPATH would put it before the standard library.
        run = "runpy.run_module('ocomm.launch.pmi', run_name='__main__')"
        # The current folder, which Python puts first, is removed.
        code = f"import sys; sys.path[:] = filter(None, sys.path); import runpy; sys.path.append(sys.argv.pop()); {run}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The service must outlive the ranks, and torchrun or a terminal sends signals to rank 0's process group.
            start_new_session=True,
        )

    def start(self, **asked: Any) -> int:
        """Describes the job to the service, and returns the number of the port on which the service listens.

        Args:
            asked: name, key, hosts, address, init_s and grace_s, as ``ocomm.launch.pmi`` reads them.

        Raises:
            LaunchError: The service has not started.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with self._process.stdin as out:
                out.write(json.dumps(asked).encode() + b"\n")
            with self._process.stdout as answer:
                poll = select.poll()
                poll.register(answer, select.POLLIN)
                return int(answer.readline() if poll.poll(1000 * _PORT_S) else b"")
        except (OSError, ValueError):
            self.close()
            raise LaunchError(
                f"the PMI service of the job, {sys.executable} -m ocomm.launch.pmi, has not started; what it says is "
                "in the standard error output of rank 0."
            ) from None

    def leave(self) -> None:
        """Lets the service go on without this process. It ends by itself after the last rank. Does not wait."""
        self._process.returncode = 0  # keeps Popen from warning of a child that still runs

    def close(self) -> None:
        """Ends the service at once. Called if the job does not start."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()


class PmiClient:
    """Connects this rank to the PMI service. If the service tells the rank to end, or is gone, this process exits.

    Args:
        addresses: Addresses of the service as HOST:PORT, in the order in which they are tried.
        key: The key that both ends must know.
        rank: This rank's number.
        size: The number of ranks.

    Raises:
        LaunchError: The job's service answers at none of the addresses.
    """

    def __init__(self, addresses: Sequence[str], key: bytes, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._is_leaving = False
        self._watch = self._connect(addresses, key, "watch")
        connection = self._connect(addresses, key, "pmi").detach()
        connection.setblocking(True)
        self._descriptor = connection.detach()  # MPICH closes it
        # A forked process, such as a worker of a data loader, must not keep the connection open when this one ends.
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._listen, name="ocomm-pmi", daemon=True).start()

    def _connect(self, addresses: Sequence[str], key: bytes, word: str) -> AuthenticatedSocket:
        try:
            line = connect_to_any(addresses, key)
            line.send(json.dumps({"word": word, "rank": self.rank}).encode())
            return line
        except (OSError, EOFError, LaunchError) as error:
            raise LaunchError(
                f"rank {self.rank} cannot reach the PMI service of the job, which rank 0 has started: {clause(error)}. "
                "Ranks connect to a port of rank 0's host; is there a firewall?"
            ) from None

    def enter(self) -> None:
        """Sets the environment variables with which MPICH finds the service. Called before MPI_Init."""
        for name in _OTHERS:
            os.environ.pop(name, None)
        os.environ.update(self._environment())

    def entered(self) -> None:
        """Tells the service that this rank has come out of MPI_Init. Called after it.

        Removes the variables of ``enter``, which children of this process must not inherit.
        """
        for name in self._environment():
            os.environ.pop(name, None)
        self._watch.send(b'{"word": "up"}')

    def leave(self) -> None:
        """Notes that the connections are about to end in order. Called before MPI_Finalize."""
        self._is_leaving = True
        self._descriptor = -1

    def _environment(self) -> dict[str, str]:
        place = {"PMI_FD": str(self._descriptor), "PMI_RANK": str(self.rank), "PMI_SIZE": str(self.size)}
        return {**place, "MPIR_CVAR_PMI_VERSION": "1"}

    def _close_in_child(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._watch.close()

    def _listen(self) -> None:
        try:
            (why,) = json_values.fields(json_values.parse(self._watch.receive()), "why")
        except (OSError, EOFError) as error:
            if self._is_leaving and not isinstance(error, TimeoutError):
                return
            why = f"the PMI service of the job, which rank 0 has started, has gone: {error}"
        except ValueError as error:
            why = f"the PMI service of the job, which rank 0 has started, has sent {error}"
        sys.stderr.write(f"ocomm: rank {self.rank} ends: {why}.\n")
        sys.stderr.flush()
        for path in shared_memory():
            with contextlib.suppress(OSError):  # another rank of this host has removed it
                os.unlink(path)
        os._exit(1)


def shared_memory() -> set[str]:
    """Returns the files of the memory that MPICH in this process shares with other ranks of its host.

    Only MPI_Finalize removes them, so a rank that ends without it must do so.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line.split()[5] for line in maps if f" {_SHARED}" in line}
    except OSError:
        return set()
