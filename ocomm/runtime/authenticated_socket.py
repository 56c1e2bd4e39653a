"""Messages over a socket that nobody can send, change, repeat, drop or read twice without knowing a key.

The end that was connected to is the server. First both ends prove that they know the key, and derive keys for this
connection. The words in quotes are part of the format:

    server -> client    "ocomm-l2", 32 random bytes D
    client -> server    32 random bytes C, HMAC(key, "client" D C)
    server -> client    HMAC(key, "server" D C)

    key of messages to the server: HMAC(key, "to server" D C); to the client: HMAC(key, "to client" D C)

Then the n-th message of a direction is

    length (8 bytes), HMAC(k, "length" n length), content, HMAC(k, "content" n content)

HMACs use SHA-256; n and lengths are little-endian 64-bit integers. The length has an HMAC of its own, so that memory is
allocated only for a message that the other end has announced. Contents are not encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
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
#: Default limit for the length of a message, in bytes.
MOST_BYTES = 1 << 24
#: Default limit for the time in which no further byte of a message arrives, in seconds.
PAUSE_S = 60.0


class TamperedError(ConnectionError):
    """The bytes that arrived are not the next message that the other end has sent."""


class AuthenticatedSocket:
    """One end of a connection, after ``accept`` or ``connect``. Any thread may send; one at a time may receive.

    Args:
        most_bytes: Limit for the length of a message, in both directions.
        pause_s: Limit for the time in which no further byte of a message arrives or can be sent.
    """

    def __init__(
        self, connection: socket.socket, send_key: bytes, receive_key: bytes, most_bytes: int, pause_s: float
    ) -> None:
        self._connection = connection
        _notice_silence(connection)
        self._keys = send_key, receive_key
        self._most_bytes = most_bytes
        self._pause_s = pause_s
        self._sent = self._received = 0
        self._lock = threading.Lock()  # held while a message is sent
        self._broken = ""

    def __enter__(self) -> AuthenticatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Returns the descriptor of the socket, which is readable when a message has begun to arrive."""
        return self._connection.fileno()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def end_before(self, descriptor: int) -> None:
        """Lets this connection end before the file ``descriptor`` of this process, if the process dies.

        Linux closes the files of a process from the highest number to the lowest (since 4.3), so the socket gets a
        higher one. Where no more files may be open it keeps its own. No other thread may use it meanwhile.
        """
        old = self._connection
        if old.fileno() > descriptor:
            return
        with contextlib.suppress(OSError):
            number = fcntl.fcntl(old.fileno(), fcntl.F_DUPFD_CLOEXEC, descriptor + 1)
            self._connection = socket.socket(fileno=number)
            self._connection.settimeout(old.gettimeout())
            old.close()

    def detach(self) -> socket.socket:
        """Returns the socket, for bytes that are sent without proofs of the key. This object can no longer be used."""
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
                # A short message goes in one packet: packets of a few bytes wait for each other.
                for piece in [start + content + end] if len(content) < _PIECE else [start, content, end]:
                    _write(self._connection, piece, self._pause_s)
            except OSError as error:
                self._broken = f"a message before could not be sent: {error}"  # there may be half of it
                raise

    def receive(self, patience_s: float | None = None) -> bytearray:
        """Returns the content of the next message.

        Args:
            patience_s: How long to wait until the message begins; None for as long as the connection lives.

        Raises:
            EOFError: The other end has closed the connection.
            TamperedError: The message is not the next one that the other end has sent.
            OSError: The connection is broken, or nothing came for ``patience_s`` or ``pause_s``.
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
    """Makes the server's end of a connection: the client has ``patience_s`` seconds in all to prove that it knows
    ``key``.

    Raises TamperedError if it does not know the key, and OSError or EOFError if the connection ends or time is up.
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
    """Makes the client's end of a connection: the server has ``patience_s`` seconds in all to prove that it knows
    ``key``.

    Raises TamperedError if it does not know the key or does not accept ours, and OSError or EOFError if the connection
    ends or time is up.
    """
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


def wait(connections: Iterable[AuthenticatedSocket], timeout_s: float) -> list[AuthenticatedSocket]:
    """Returns the connections on which a message has begun to arrive or which have ended; [] after ``timeout_s``
    seconds.
    """
    poll, found = select.poll(), {}
    for connection in connections:
        found[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)
    return [found[descriptor] for descriptor, _ in poll.poll(1000 * timeout_s)]


def _notice_silence(connection: socket.socket) -> None:
    """Makes the kernel end a TCP connection whose other host has not answered for about 40 s."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 40_000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _tag(key: bytes, word: bytes, first: bytes | bytearray, second: bytes | bytearray) -> bytes:
    """Returns the HMAC of a word, a zero byte, ``first`` and ``second``. The length of ``first`` is the same for each
    word.
    """
    mac = hmac.new(key, word + b"\0" + first, "sha256")
    mac.update(second)
    return mac.digest()


def _read(connection: socket.socket, nbytes: int, pause_s: float | None, end_s: float | None = None) -> bytearray:
    """Reads ``nbytes`` bytes.

    Raises EOFError at the end of the connection, TimeoutError if no byte comes for ``pause_s`` or the clock has passed
    ``end_s``.
    """
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
    """Writes all of ``data``. Raises TimeoutError if no byte can be sent for ``pause_s`` or the clock has passed
    ``end_s``.
    """
    view = memoryview(data)
    while view:
        _wait(connection, select.POLLOUT, pause_s, end_s)
        try:
            view = view[connection.send(view[:_PIECE]) :]
        except (BlockingIOError, InterruptedError):
            continue


def _wait(connection: socket.socket, event: int, pause_s: float | None, end_s: float | None) -> None:
    """Waits until the socket can be read or written. The socket's own timeout is not used, because all threads share
    it.
    """
    limit_s = pause_s
    if end_s is not None:
        limit_s = max(0.0, end_s - time.monotonic())
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(None if limit_s is None else 1000 * limit_s):
        raise TimeoutError(f"the other end has stood still for {pause_s:.0f} s")
