"""Messages between ends that know a key: what somebody else does to them is noticed, and nothing of it is handed on."""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ocomm.runtime import authenticated_socket
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError

KEY, LIMIT_S = b"k" * 32, 20.0


@contextmanager
def pair(
    key: bytes = KEY, most_bytes: int = 1 << 20, pause_s: float = LIMIT_S
) -> Iterator[tuple[AuthenticatedSocket, AuthenticatedSocket]]:
    """The ends of the client and of the server."""
    outer, inner = socket.socketpair()
    found: list[Any] = []

    def meet() -> None:
        try:
            found.append(authenticated_socket.accept(inner, KEY, LIMIT_S, most_bytes, pause_s))
        except (OSError, EOFError) as error:
            found.append(error)
            inner.close()

    thread = threading.Thread(target=meet)
    thread.start()
    try:
        client = authenticated_socket.connect(outer, key, LIMIT_S, most_bytes, pause_s)
        thread.join(LIMIT_S)
        yield client, found[0]
    finally:
        thread.join(LIMIT_S)
        outer.close()
        inner.close()


def tap(sender: AuthenticatedSocket, receiver: AuthenticatedSocket, content: bytes) -> bytes:
    """What goes over the wire for a message, which does not arrive."""
    sender.send(content)
    return receiver._connection.recv(1 << 16)


def put(sender: AuthenticatedSocket, data: bytes) -> None:
    """On the wire, as anybody could."""
    sender._connection.sendall(data)


def test_messages_go_both_ways_in_order() -> None:
    with pair() as (client, server):
        for one, other in ((client, server), (server, client)):
            for content in (b"", b"a", b"b" * 1000):
                one.send(content)
            assert [other.receive(LIMIT_S) for _ in range(3)] == [b"", b"a", b"b" * 1000]
        assert authenticated_socket.wait([client, server], 0.0) == []
        client.send(b"x")
        assert authenticated_socket.wait([client, server], LIMIT_S) == [server]


def test_a_message_that_is_larger_than_the_wire_holds_arrives() -> None:
    content = bytes(range(256)) * (1 << 14)
    with pair(most_bytes=len(content)) as (client, server):
        thread = threading.Thread(target=client.send, args=(content,))
        thread.start()
        assert server.receive(LIMIT_S) == content
        thread.join(LIMIT_S)


@pytest.mark.parametrize("way", ["to the server", "to the client"])
def test_every_changed_byte_of_a_message_is_noticed(way: str) -> None:
    length = 8 + 32 + len(b"content") + 32
    for at in range(length):
        with pair(pause_s=0.0) as ends:
            sender, receiver = ends if way == "to the server" else ends[::-1]
            data = bytearray(tap(sender, receiver, b"content"))
            assert len(data) == length
            data[at] ^= 1
            put(sender, bytes(data))
            with pytest.raises(TamperedError, match=r"(length|content) of message 0"):
                receiver.receive(LIMIT_S)


def harm(change: Callable[[bytes, bytes], list[bytes]], heard: int) -> None:
    """Of two messages, what arrives is changed: so many are handed on, and the next is noticed."""
    with pair() as (client, server):
        for data in change(tap(client, server, b"first"), tap(client, server, b"second")):
            put(client, data)
        assert [server.receive(LIMIT_S) for _ in range(heard)] == [b"first", b"second"][:heard]
        with pytest.raises(TamperedError):
            server.receive(LIMIT_S)


def test_messages_that_are_repeated_left_out_or_in_another_order_are_noticed() -> None:
    harm(lambda first, second: [first, first], heard=1)
    harm(lambda first, second: [first, second, first], heard=2)
    harm(lambda first, second: [second], heard=0)
    harm(lambda first, second: [second, first], heard=0)
    harm(lambda first, second: [first[:-32] + second[-32:]], heard=0)


def test_a_message_that_comes_back_or_is_of_another_connection_is_noticed() -> None:
    with pair() as (client, server), pair() as (other, other_server):
        sent = tap(client, server, b"mine")
        put(server, sent)
        with pytest.raises(TamperedError):
            client.receive(LIMIT_S)
        put(other, sent)
        with pytest.raises(TamperedError):
            other_server.receive(LIMIT_S)


def test_lengths_that_nobody_has_proved_or_that_are_too_large_make_no_memory() -> None:
    with pair() as (client, server):
        put(client, struct.pack("<Q", 1 << 60) + b"\0" * 32)
        with pytest.raises(TamperedError, match="length"):
            server.receive(LIMIT_S)
    with pair(most_bytes=100) as (client, server):
        client.send(b"x" * 100)
        with pytest.raises(ValueError, match="has 101 bytes, and may have 100"):
            client.send(b"x" * 101)
        assert len(server.receive(LIMIT_S)) == 100
        client._most_bytes = 200
        client.send(b"x" * 101)
        with pytest.raises(TamperedError, match="has 101 bytes, and may have 100"):
            server.receive(LIMIT_S)


def test_a_message_that_stands_still_is_given_up() -> None:
    with pair(pause_s=0.05) as (client, server):
        sent = tap(client, server, b"content")
        for part in (1, 20, 45, len(sent) - 1):
            put(client, sent[:part])
            with pytest.raises(TimeoutError, match="stood still"):
                server.receive(LIMIT_S)
        with pytest.raises(TimeoutError):
            server.receive(0.01)  # none begins
    with pair(pause_s=0.05, most_bytes=1 << 24) as (client, server):
        with pytest.raises(TimeoutError):
            client.send(b"x" * (1 << 24))  # nobody reads
        # There is half of it on the wire.
        with pytest.raises(ConnectionError, match="a message before could not be sent"):
            client.send(b"y")


def test_an_end_is_an_end() -> None:
    with pair() as (client, server):
        client.send(b"last")
        client.close()
        assert server.receive(LIMIT_S) == b"last"
        with pytest.raises(EOFError):
            server.receive(LIMIT_S)


def test_threads_may_send_at_the_same_time() -> None:
    with pair() as (client, server):
        contents = [bytes([i]) * 3000 for i in range(8)]
        threads = [threading.Thread(target=client.send, args=(content,)) for content in contents]
        for thread in threads:
            thread.start()
        assert sorted(bytes(server.receive(LIMIT_S)) for _ in threads) == contents
        for thread in threads:
            thread.join(LIMIT_S)


def test_ends_that_know_different_keys_do_not_meet() -> None:
    with pytest.raises(TamperedError, match="it does not accept our key"), pair(key=b"another"):
        pass


def test_a_door_that_does_not_know_the_key_is_found_out_by_the_caller() -> None:
    """It takes whoever comes, and sends back what it has heard, or what it can make without the key."""
    for answer in (lambda said: said[32:], lambda said: hmac.digest(b"", b"server" + said, hashlib.sha256)):
        outer, inner = socket.socketpair()

        def false_server(inner: socket.socket = inner, answer: Any = answer) -> None:
            inner.sendall(b"ocomm-l2" + b"\0" * 32)
            said = b""
            while len(said) < 64 and select.select([inner], [], [], LIMIT_S)[0]:
                said += inner.recv(64)
            inner.sendall(answer(said))

        thread = threading.Thread(target=false_server)
        thread.start()
        with outer, inner:
            with pytest.raises(TamperedError, match="it does not know the key"):
                authenticated_socket.connect(outer, KEY, LIMIT_S)
            thread.join(LIMIT_S)


def test_another_program_at_the_port_is_named() -> None:
    outer, inner = socket.socketpair()
    with outer, inner:
        inner.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something\r\n\r\n")
        with pytest.raises(TamperedError, match="another program's"):
            authenticated_socket.connect(outer, KEY, LIMIT_S)
