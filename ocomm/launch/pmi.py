"""Runs the PMI-1 service of a job that no MPI launcher has started: ``python -m ocomm.launch.pmi``, a child of rank 0.

It reads one line of JSON from its standard input, and writes the number of the port on which it listens:

    {"key": ..., "name": ..., "hosts": [...], "address": ..., "init_s": ..., "grace_s": ...}

The key is in hexadecimal. ``name`` is the name of the key space, ``hosts`` has the node of every rank, and ``address``
is the address to listen on. The others are ``pmi_job.Limits``.

Every rank opens two connections, and proves on each that it knows the key. On one its MPI speaks PMI from then on
(``pmi_job``). On the other the service tells the rank why it has to end (``ocomm.runtime.pmi_client``).

The service is a process of its own, because other ranks need answers while rank 0 is in a call of MPI, and because it
must end them if rank 0 has died. It ends when every rank has sent ``finalize`` or has ended, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time

from ocomm import json_values
from ocomm.launch.pmi_job import LONGEST_LINE, Limits, PmiJob
from ocomm.launch.server import Server
from ocomm.runtime.authenticated_socket import AuthenticatedSocket

_POLL_S = 0.05
#: Seconds for a rank to send or take a message, and for ranks to end that were told to.
_SEND_S = 10.0
_END_S = 10.0


class Service:
    """Holds the connections of a job's ranks, and does what ``job`` decides."""

    def __init__(self, job: PmiJob, server: Server) -> None:
        self._job = job
        self._server = server
        self._unknown: list[AuthenticatedSocket] = []
        self._pmi: dict[int, socket.socket] = {}
        self._halves: dict[int, bytes] = {}  # by rank: the beginning of a line whose end has not come
        self._watchers: dict[int, AuthenticatedSocket] = {}

    def run(self) -> int:
        """Serves until the job is over. Returns the exit status: 1 if the ranks had to be ended, else 0."""
        while not self._job.is_over:
            self._listen()
            if why := self._job.must_end(time.monotonic()):
                self._end(why)
                return 1
        return 0

    def _listen(self) -> None:
        while self._server.connections:
            self._unknown.append(self._server.connections.pop())
        poll = select.poll()
        waiting: dict[int, tuple[str, int]] = {}
        unknown = dict(enumerate(self._unknown))
        for kind, connections in (("unknown", unknown), ("pmi", self._pmi), ("watch", self._watchers)):
            for number, each in connections.items():
                poll.register(each, select.POLLIN)
                waiting[each.fileno()] = kind, number
        ready = [waiting[descriptor] for descriptor, _ in poll.poll(1000 * _POLL_S)]
        for kind, number in ready:
            if kind == "pmi" and number in self._pmi:
                self._hear(number)
            elif kind == "watch":
                self._hear_watcher(number)
        newcomers = [self._unknown[number] for kind, number in ready if kind == "unknown"]
        for connection in newcomers:
            self._unknown.remove(connection)
            self._greet(connection)

    def _greet(self, connection: AuthenticatedSocket) -> None:
        """Receives the first message of a connection, which says which rank has opened it, and what for."""
        try:
            said, word = json_values.fields(json_values.parse(connection.receive(_SEND_S)), "rank", "word")
            rank, is_pmi = json_values.rank(said, self._job.size), word == "pmi"
        except (OSError, EOFError, ValueError):
            connection.close()
            return
        if rank in (self._pmi if is_pmi else self._watchers):
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
        if len(self._halves[rank]) > LONGEST_LINE:
            self._halves[rank] = b""
            self._job.endless(rank, time.monotonic())
        for line in lines:
            for to, answer in self._job.heard(rank, line.decode(errors="replace"), time.monotonic()):
                self._say(to, answer)

    def _say(self, rank: int, answer: str) -> None:
        if rank in self._pmi:
            try:
                self._pmi[rank].sendall(answer.encode())
            except OSError:  # the rank would wait for the rest for ever
                self._close(rank)

    def _close(self, rank: int) -> None:
        self._pmi.pop(rank).close()
        self._job.closed(rank, time.monotonic())

    def _hear_watcher(self, rank: int) -> None:
        try:
            if json_values.fields(json_values.parse(self._watchers[rank].receive(_SEND_S)), "word") == ["up"]:
                self._job.up(rank)
        except (OSError, EOFError, ValueError):
            self._watchers.pop(rank).close()

    def _end(self, why: str) -> None:
        """Tells the remaining ranks to end, and waits until they have, for at most ``_END_S`` seconds."""
        sys.stderr.write(f"ocomm: the job ends: {why}.\n")
        sys.stderr.flush()
        for watcher in self._watchers.values():
            with contextlib.suppress(OSError):
                watcher.send(json.dumps({"word": "end", "why": why}).encode())
        end_s = time.monotonic() + _END_S
        while self._pmi and time.monotonic() < end_s:
            self._listen()


def main() -> int:
    """Runs the service, and returns its exit status."""
    asked = json.loads(sys.stdin.readline() or "null")
    if asked is None:  # rank 0 has given up before all ranks had come
        return 0
    limits = Limits(asked["init_s"], asked["grace_s"])
    job = PmiJob(asked["name"], asked["hosts"], limits, time.monotonic())
    with Server(asked["address"], bytes.fromhex(asked["key"]), backlog=max(128, 2 * job.size)) as server:
        print(server.port, flush=True)
        # Both pipes to rank 0 have served their purpose: it reads nothing more, and sends nothing more.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        return Service(job, server).run()


if __name__ == "__main__":
    sys.exit(main())
