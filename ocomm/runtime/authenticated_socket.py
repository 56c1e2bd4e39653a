"""Messages over a socket which nobody can send, change, repeat, drop or read twice who does not know a key.

The end that was connected to is the server. First both prove that they know the key, and make keys for this
connection; the words in quotes are part of the format:

    server -> client    "ocomm-l2", 32 random bytes D
    client -> server    32 random bytes C, HMAC(key, "client" D C)
    server -> client    HMAC(key, "server" D C)

    key of messages to the server: HMAC(key, "to server" D C); to the client: HMAC(key, "to client" D C)

Then a message, the n-th of its direction, is

    length (8 bytes), HMAC(k, "length" n length), content, HMAC(k, "content" n content)

HMACs are those of SHA-256; n and lengths are little-endian 64-bit integers. The length is proved by itself, so that
memory is made for a message only if the other end has announced it. Contents are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable

_HELLO = b"ocomm-l2"
_NONCE = 32
_TAG = 32
_NUMBER = struct.Struct("<Q")
_PIECE = 1 << 20
#: Longest message, in bytes, where nothing else is said.
MOST_BYTES = 1 << 24
#: Seconds for which a message that has begun may stand still.
PAUSE_S = 60.0


class TamperedError(ConnectionError):
    """What has arrived was not sent by the other end, or not now."""


class AuthenticatedSocket:
    """One end of a connection, after ``accept`` or ``connect``. Any thread may send; one at a time may receive.

    ``most_bytes``: of a message, either way. ``pause_s``: how long a message that has begun may stand still.
    """

    def __init__(
        self, connection: socket.socket, send_key: bytes, receive_key: bytes, most_bytes: int, pause_s: float
    ) -> None:
        self._connection = connection
        self._keys = send_key, receive_key
        self._most_bytes = most_bytes
        self._pause_s = pause_s
        self._sent = self._received = 0
        self._lock = threading.Lock()  # of what is sent
        self._broken = ""

    def __enter__(self) -> AuthenticatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Of the socket, which is readable when a message has begun to arrive."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def detach(self) -> socket.socket:
        """The connection itself, for what comes without proofs from now on; this object can no longer be used."""
        with self._lock:
            self._broken = "the connection was detached"
        return self._connection

    def send(self, content: bytes) -> None:
        """Sends a message.

        Raises:
            ValueError: It is longer than ``most_bytes``; nothing is sent.
            OSError: The other end has gone, or has taken nothing for ``pause_s``. Nothing can be sent any more.
        """
        if len(content) > self._most_bytes:
            raise ValueError(f"a message has {len(content)} bytes, and may have {self._most_bytes}")
        key = self._keys[0]
        with self._lock:
            if self._broken:
                raise ConnectionError(self._broken)
            number, length = _NUMBER.pack(self._sent), _NUMBER.pack(len(content))
            self._sent += 1
            start = length + _tag(key, b"length", number, length)
            end = _tag(key, b"content", number, content)
            try:
                # What is short goes at once: packets of a few bytes wait for each other.
                for piece in [start + content + end] if len(content) < _PIECE else [start, content, end]:
                    _write(self._connection, piece, self._pause_s)
            except OSError as error:
                self._broken = f"a message before could not be sent: {error}"  # there may be half of it
                raise

    def receive(self, patience_s: float | None = None) -> bytearray:
        """The next message.

        Args:
            patience_s: How long to wait until it begins; None for as long as the connection lives.

        Raises:
            EOFError: The other end has closed the connection.
            TamperedError: The message is not the next one that the other end has sent.
            OSError: The connection is broken, or there was nothing for ``patience_s`` or ``pause_s``.
        """
        key, number = self._keys[1], _NUMBER.pack(self._received)
        first = _read(self._connection, 1, patience_s)
        header = first + _read(self._connection, _NUMBER.size + _TAG - 1, self._pause_s)
        length = header[: _NUMBER.size]
        self._check(header[_NUMBER.size :], _tag(key, b"length", number, length), "length")
        (nbytes,) = _NUMBER.unpack(length)
        if nbytes > self._most_bytes:
            raise TamperedError(f"message {self._received} has {nbytes} bytes, and may have {self._most_bytes}")
        content = _read(self._connection, nbytes, self._pause_s)
        end = _read(self._connection, _TAG, self._pause_s)
        self._check(end, _tag(key, b"content", number, content), "content")
        self._received += 1
        return content

    def _check(self, got: bytearray, expected: bytes, what: str) -> None:
        if not hmac.compare_digest(got, expected):
            raise TamperedError(
                f"the {what} of message {self._received} is not what the other end has sent: somebody else writes to "
                "this connection"
            )


def accept(
    connection: socket.socket, key: bytes, patience_s: float, most_bytes: int = MOST_BYTES, pause_s: float = PAUSE_S
) -> AuthenticatedSocket:
    """The server's end: lets the client prove that it knows ``key``, in ``patience_s`` seconds in all.

    Raises TamperedError if it does not, and OSError or EOFError if the connection ends or time is up.
    """
    connection.setblocking(False)
    end_s = time.monotonic() + patience_s
    server = secrets.token_bytes(_NONCE)
    _write(connection, _HELLO + server, patience_s, end_s)
    answer = _read(connection, _NONCE + _TAG, patience_s, end_s)
    client = answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _tag(key, b"client", server, client)):
        raise TamperedError("the client does not know the key")
    _write(connection, _tag(key, b"server", server, client), patience_s, end_s)
    to_server, to_client = _tag(key, b"to server", server, client), _tag(key, b"to client", server, client)
    return AuthenticatedSocket(connection, to_client, to_server, most_bytes, pause_s)


def connect(
    connection: socket.socket, key: bytes, patience_s: float, most_bytes: int = MOST_BYTES, pause_s: float = PAUSE_S
) -> AuthenticatedSocket:
    """The client's end. Raises as ``accept``."""
    connection.setblocking(False)
    end_s = time.monotonic() + patience_s
    hello = _read(connection, len(_HELLO) + _NONCE, patience_s, end_s)
    if hello[: len(_HELLO)] != _HELLO:
        raise TamperedError("the port is another program's, or of another version of ocomm")
    client, server = secrets.token_bytes(_NONCE), hello[len(_HELLO) :]
    _write(connection, client + _tag(key, b"client", server, client), patience_s, end_s)
    try:
        answer = _read(connection, _TAG, patience_s, end_s)
    except (EOFError, ConnectionError):
        raise TamperedError("it does not accept our key") from None
    if not hmac.compare_digest(answer, _tag(key, b"server", server, client)):
        raise TamperedError("it does not know the key")
    to_server, to_client = _tag(key, b"to server", server, client), _tag(key, b"to client", server, client)
    return AuthenticatedSocket(connection, to_server, to_client, most_bytes, pause_s)


def wait(lines: Iterable[AuthenticatedSocket], timeout_s: float) -> list[AuthenticatedSocket]:
    """Those on which a message has begun to arrive, or which have ended; [] after ``timeout_s``."""
    poll, found = select.poll(), {}
    for line in lines:
        found[line.fileno()] = line
        poll.register(line, select.POLLIN)
    return [found[descriptor] for descriptor, _ in poll.poll(1000 * timeout_s)]


def _tag(key: bytes, word: bytes, first: bytes | bytearray, second: bytes | bytearray) -> bytes:
    """The HMAC of a word and a zero byte, of ``first``, whose length is that of its kind, and of ``second``."""
    mac = hmac.new(key, word + b"\0" + first, "sha256")
    mac.update(second)
    return mac.digest()


def _read(connection: socket.socket, nbytes: int, pause_s: float | None, end_s: float | None = None) -> bytearray:
    """So many bytes. EOFError at their end, TimeoutError if none come for ``pause_s`` or it is later than ``end_s``."""
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        _wait(connection, select.POLLIN, pause_s, end_s)
        try:
            count = connection.recv_into(view[got : got + _PIECE])
        except (BlockingIOError, InterruptedError):
            continue
        if not count:
            raise EOFError(f"the connection has ended, {nbytes - got} bytes too early" if got else "it has ended")
        got += count
    return data


def _write(connection: socket.socket, data: bytes, pause_s: float, end_s: float | None = None) -> None:
    """All of ``data``; raises as ``_read``."""
    view = memoryview(data)
    while view:
        _wait(connection, select.POLLOUT, pause_s, end_s)
        try:
            view = view[connection.send(view[:_PIECE]) :]
        except (BlockingIOError, InterruptedError):
            continue


def _wait(connection: socket.socket, event: int, pause_s: float | None, end_s: float | None) -> None:
    """Until the socket can be read or written. Its own timeout would be that of all threads."""
    limit_s = pause_s
    if end_s is not None:
        limit_s = max(0.0, end_s - time.monotonic())
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(None if limit_s is None else 1000 * limit_s):
        raise TimeoutError(f"the other end has stood still for {pause_s:.0f} s")
