"""Lets processes in that know a key: ranks of ``ocomm.run``, and of a job that ocommrun supervises."""

from __future__ import annotations

import contextlib
import socket
import threading
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, Listener


class Door:
    """``accept`` waits without limit for a caller to prove that it knows the key: one that never does holds up one of a
    few threads, not the job."""

    _THREADS = 4

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._closed = False
        self.inside: list[Connection] = []
        for _ in range(self._THREADS):
            threading.Thread(target=self._accept, name="ocomm-door", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, EOFError, ProcessError):
                self.inside.append(self._listener.accept())

    def close(self) -> None:
        """Lets nobody in any more."""
        self._closed = True
        host, port = self._listener.address
        for _ in range(self._THREADS):
            # Closing a socket does not wake those who wait on it; a caller does.
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), 1).close()
