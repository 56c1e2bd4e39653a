"""The PMI-1 service of a job that no MPI launcher has started: ``python -m ocomm.launch.pmi``, a child of rank 0.

It reads one line of JSON from its standard input and writes the port that it listens on:

    {"key": ..., "name": ..., "hosts": [...], "address": ..., "init_s": ..., "grace_s": ...}

with the key in hexadecimal, the node of every rank, the address to listen on, and ``pmi_job.Limits``. Every rank opens
two connections and proves that it knows the key: on one its MPI speaks PMI from then on (``pmi_job``), on the other the
rank hears why it has to end (``ocomm.runtime.pmi_client``).

It is a process of its own because rank 0 may be anywhere in MPI when another rank needs an answer, or has gone when the
others have to be ended. It ends when every rank has left MPI_Finalize, or has ended: nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time

from ocomm.launch.pmi_job import Limits, PmiJob
from ocomm.launch.server import Server
from ocomm.runtime.authenticated_socket import AuthenticatedSocket

_POLL_S = 0.05
#: For a rank to take an answer, and for ranks to end that were told to.
_SEND_S = 10.0
_END_S = 10.0


class Service:
    """The connections of a job's ranks; ``job`` decides."""

    def __init__(self, job: PmiJob, server: Server) -> None:
        self._job = job
        self._server = server
        self._unknown: list[AuthenticatedSocket] = []
        self._pmi: dict[int, socket.socket] = {}
        self._halves: dict[int, bytes] = {}  # what has come of lines that are not whole
        self._watchers: dict[int, AuthenticatedSocket] = {}

    def run(self) -> int:
        """Until the job is over; 1 if its ranks had to be ended."""
        while not self._job.is_over:
            self._listen()
            if why := self._job.must_end(time.monotonic()):
                self._end(why)
                return 1
        return 0

    def _listen(self) -> None:
        while self._server.lines:
            self._unknown.append(self._server.lines.pop())
        poll = select.poll()
        waiting: dict[int, tuple[str, int]] = {}
        unknown = dict(enumerate(self._unknown))
        for kind, connections in (("unknown", unknown), ("pmi", self._pmi), ("watch", self._watchers)):
            for number, each in connections.items():
                poll.register(each, select.POLLIN)
                waiting[each.fileno()] = kind, number
        ready = [waiting[descriptor] for descriptor, _ in poll.poll(1000 * _POLL_S)]
        for kind, number in ready:
            if kind == "pmi":
                self._hear(number)
            elif kind == "watch":
                self._hear_watcher(number)
        newcomers = [self._unknown[number] for kind, number in ready if kind == "unknown"]
        for connection in newcomers:
            self._unknown.remove(connection)
            self._greet(connection)

    def _greet(self, connection: AuthenticatedSocket) -> None:
        """The first message of a connection says whose it is, and what for."""
        try:
            said = json.loads(connection.receive(_SEND_S))
            rank, is_pmi = int(said["rank"]), said["word"] == "pmi"
        except (OSError, EOFError, ValueError, KeyError):
            connection.close()
            return
        if not 0 <= rank < self._job.size or rank in (self._pmi if is_pmi else self._watchers):
            connection.close()
        elif is_pmi:
            raw = connection.detach()
            raw.settimeout(_SEND_S)
            self._pmi[rank] = raw
            self._halves[rank] = b""
            self._job.connected(rank)
        else:
            self._watchers[rank] = connection

    def _hear(self, rank: int) -> None:
        try:
            data = self._pmi[rank].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._close(rank)
            return
        *lines, self._halves[rank] = (self._halves[rank] + data).split(b"\n")
        for line in lines:
            for to, answer in self._job.heard(rank, line.decode(errors="replace"), time.monotonic()):
                with contextlib.suppress(OSError, KeyError):  # its end is heard when it is read from
                    self._pmi[to].sendall(answer.encode())

    def _close(self, rank: int) -> None:
        self._pmi.pop(rank).close()
        self._job.closed(rank, time.monotonic())

    def _hear_watcher(self, rank: int) -> None:
        try:
            if json.loads(self._watchers[rank].receive(_SEND_S))["word"] == "up":
                self._job.up(rank)
        except (OSError, EOFError, ValueError, KeyError):
            self._watchers.pop(rank).close()

    def _end(self, why: str) -> None:
        """Tells the ranks that are left to end, and waits for them."""
        sys.stderr.write(f"ocomm: the job ends: {why}.\n")
        sys.stderr.flush()
        for watcher in self._watchers.values():
            with contextlib.suppress(OSError):
                watcher.send(json.dumps({"word": "end", "why": why}).encode())
        end_s = time.monotonic() + _END_S
        while self._pmi and time.monotonic() < end_s:
            self._listen()


def main() -> int:
    """The exit status of the service."""
    asked = json.loads(sys.stdin.readline() or "null")
    if asked is None:  # rank 0 has ended before the ranks had met
        return 0
    limits = Limits(asked["init_s"], asked["grace_s"])
    job = PmiJob(asked["name"], asked["hosts"], limits, time.monotonic())
    with Server(asked["address"], bytes.fromhex(asked["key"]), backlog=max(128, 2 * job.size)) as server:
        print(server.port, flush=True)
        # Rank 0 reads no more, and its own standard input is not for us.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        return Service(job, server).run()


if __name__ == "__main__":
    sys.exit(main())
