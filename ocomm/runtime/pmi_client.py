"""A rank's side of the PMI service (``ocomm.launch.pmi``), by which MPICH starts without a launcher.

Two connections, whose first message says whose they are: ``{"word": "pmi", "rank": 3}``, after which MPICH speaks PMI
on it, and ``{"word": "watch", "rank": 3}``. On the second the rank says ``{"word": "up"}`` when it has come out of
MPI_Init, and hears ``{"word": "end", "why": ...}``, upon which it ends.
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

from ocomm.errors import LaunchError
from ocomm.runtime.authenticated_socket import AuthenticatedSocket
from ocomm.runtime.supervisor_client import connect_to_any

#: Variables that would tell MPICH of another start than this one, inherited from srun for instance.
_OTHERS = ("PMI_PORT", "PMI_ID", "PMI_SPAWNED", "PMIX_NAMESPACE", "PMIX_RANK")
#: How MPICH names the files of shared memory.
_SHARED = "/dev/shm/mpich_shm_"
#: For the service to say its port.
_PORT_S = 60.0


class PmiService:
    """The process of the service, as rank 0 has it. It ends by itself if it hears of no job."""

    def __init__(self) -> None:
        # Not found by PYTHONPATH: the folder would then come before the standard library.
        run = "runpy.run_module('ocomm.launch.pmi', run_name='__main__')"
        # Nor are modules taken from the current folder, which Python puts first.
        code = f"import sys; sys.path[:] = filter(None, sys.path); import runpy; sys.path.append(sys.argv.pop()); {run}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What is sent to rank 0's group, by torchrun or a terminal, is for ranks: the service outlives them.
            start_new_session=True,
        )

    def start(self, **asked: Any) -> int:
        """Tells the service of its job (see ``ocomm.launch.pmi``); the port that it listens on."""
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
        """Leaves the service to itself: it ends after the last process of the job, this one included."""
        self._process.returncode = 0  # else Python warns of a process that is not waited for

    def close(self) -> None:
        """Ends the service, where it has no job."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()


class PmiClient:
    """This rank's connections. LaunchError if none of ``addresses``, given as HOST:PORT, is the job's service."""

    def __init__(self, addresses: Sequence[str], key: bytes, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._is_leaving = False
        self._watch = self._connect(addresses, key, "watch")
        connection = self._connect(addresses, key, "pmi").detach()
        connection.setblocking(True)
        self._descriptor = connection.detach()  # MPICH closes it
        # A process that this one forks, a loader of data for instance, must not keep the connection open after its end.
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._listen, name="ocomm-pmi", daemon=True).start()

    def _connect(self, addresses: Sequence[str], key: bytes, word: str) -> AuthenticatedSocket:
        try:
            line = connect_to_any(addresses, key)
            line.send(json.dumps({"word": word, "rank": self.rank}).encode())
            return line
        except (OSError, EOFError, LaunchError) as error:
            raise LaunchError(
                f"rank {self.rank} cannot reach the PMI service of the job, which rank 0 has started: {error}. Ranks "
                "connect to a port of rank 0's host; is there a firewall?"
            ) from None

    def enter(self) -> None:
        """Before MPI_Init: tells MPICH, by the environment, where it is."""
        for name in _OTHERS:
            os.environ.pop(name, None)
        os.environ.update(self._environment())

    def entered(self) -> None:
        """After MPI_Init: tells the service, and takes back what a child of this process must not inherit."""
        for name in self._environment():
            os.environ.pop(name, None)
        self._watch.send(b'{"word": "up"}')

    def leave(self) -> None:
        """Before MPI_Finalize, after which the connections end."""
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
            why = json.loads(self._watch.receive())["why"]
        except (OSError, EOFError) as error:
            if self._is_leaving and not isinstance(error, TimeoutError):
                return
            why = f"the PMI service of the job, which rank 0 has started, has gone: {error}"
        sys.stderr.write(f"ocomm: rank {self.rank} ends: {why}.\n")
        sys.stderr.flush()
        for path in shared_memory():
            with contextlib.suppress(OSError):  # another rank of this host was faster
                os.unlink(path)
        os._exit(1)


def shared_memory() -> set[str]:
    """Files of the memory that MPICH in this process shares with ranks of its host. MPI_Finalize alone removes them."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line.split()[5] for line in maps if f" {_SHARED}" in line}
    except OSError:
        return set()
