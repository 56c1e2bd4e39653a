"""Accepts connections of processes that know a key: the ranks of ``ocomm.run``, of a supervised job, or of a job with
a PMI service.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from ocomm.errors import LaunchError
from ocomm.runtime import authenticated_socket
from ocomm.runtime.authenticated_socket import AuthenticatedSocket
from ocomm.runtime.own_address import ALL_ADDRESSES


class Server:
    """Listens on a free port of ``host``.

    Every client has a thread of its own until it has proved that it knows ``key``, so that no client blocks another.

    Args:
        host: The IPv4 address to listen on, or ``ALL_ADDRESSES``.
        key: The key that clients must know.
        backlog: The number of connections that the system holds until they are accepted.
        patience_s: Seconds after which a client is disconnected that has not proved that it knows the key.
        most_bytes: Limit for the length of a message, in bytes.

    Raises:
        LaunchError: Nobody can listen there.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        backlog: int = 128,
        patience_s: float = 20.0,
        most_bytes: int = authenticated_socket.MOST_BYTES,
    ) -> None:
        self._key = key
        self._patience_s = patience_s
        self._most_bytes = most_bytes
        self._closed = False
        try:
            # Where the kernel has no IPv6, all addresses are those of IPv4.
            of_both = host == ALL_ADDRESSES and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if of_both else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=backlog, dualstack_ipv6=of_both)
        except OSError as error:
            where = host or "any address"
            raise LaunchError(f"nobody can listen on {where}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        #: Connections to clients that know the key.
        self.connections: list[AuthenticatedSocket] = []
        self._watched: dict[int, AuthenticatedSocket] = {}
        # It notes ends of connections in the order in which they come, whatever else comes, and once.
        self._ends = select.epoll()
        threading.Thread(target=self._accept, name="ocomm-server", daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with self._socket:
            while not self._closed:
                try:
                    client, _ = self._socket.accept()
                    threading.Thread(
                        target=self._authenticate, args=(client,), name="ocomm-client", daemon=True
                    ).start()
                except (OSError, RuntimeError):  # out of descriptors or threads: some clients are refused
                    time.sleep(0.0 if self._closed else 0.1)

    def _authenticate(self, client: socket.socket) -> None:
        try:
            found = authenticated_socket.accept(client, self._key, self._patience_s, self._most_bytes)
        except (OSError, EOFError):
            client.close()
            return
        if self._closed:
            found.close()
        else:
            self._watched[found.fileno()] = found
            self._ends.register(found, select.EPOLLRDHUP | select.EPOLLET)
            self.connections.append(found)

    def ended(self) -> list[AuthenticatedSocket]:
        """Returns the connections that have ended since the last call, in this order: a process that has died early is
        first, however late this is called. To be called before an ended one is given to ``end``.
        """
        return [self._watched[descriptor] for descriptor, _ in self._ends.poll(0)]

    def end(self, connection: AuthenticatedSocket) -> None:
        """Closes a connection, of which ``ended`` tells no more."""
        self._ends.unregister(connection)
        del self._watched[connection.fileno()]
        connection.close()

    def close(self) -> None:
        """Stops to accept clients. Connections that exist stay open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; close() would not
