"""Lets processes in that know a key: ranks of ``ocomm.run``, and of a job that ocommrun supervises."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge


class Door:
    """A port of ``host``. Every caller has a thread of its own until it has proved that it knows ``key``, so that none
    holds up another; one that is silent for ``patience_s`` is sent away."""

    def __init__(self, host: str, key: bytes, backlog: int = 128, patience_s: float = 10.0) -> None:
        self._key = key
        self._patience_s = patience_s
        self._closed = False
        self._server = socket.create_server((host, 0), backlog=backlog)
        self.port: int = self._server.getsockname()[1]
        self.inside: list[Connection] = []
        threading.Thread(target=self._accept, name="ocomm-door", daemon=True).start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with self._server:
            while not self._closed:
                try:
                    caller, _ = self._server.accept()
                    threading.Thread(target=self._meet, args=(caller,), name="ocomm-caller", daemon=True).start()
                except (OSError, RuntimeError):  # no room for so many: some will be sent away
                    time.sleep(0.0 if self._closed else 0.1)

    def _meet(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ProcessError), caller:
            _limit(caller, self._patience_s)
            line = Connection(caller.dup().detach())
            deliver_challenge(line, self._key)
            answer_challenge(line, self._key)
            _limit(caller, 0.0)
            self.inside.append(line)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing would not


def _limit(connection: socket.socket, seconds: float) -> None:
    """How long a read waits; 0: for ever. Python's own limit is not known to a ``Connection``."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
