"""Who is accepted by ocommrun: clients that know the key, whoever else connects."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ocomm.launch.server import Server
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError
from ocomm.runtime.own_address import ALL_ADDRESSES, own_address
from ocomm.runtime.supervisor_client import client

KEY, LIMIT_S = b"key", 20.0


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for stranger in made:
        stranger.close()


def call(server: Server, strangers: list[socket.socket], count: int) -> None:
    """Strangers who have heard the question and say nothing."""
    for _ in range(count):
        strangers.append(socket.create_connection(("127.0.0.1", server.port), LIMIT_S))
        assert strangers[-1].recv(1)


def enter(server: Server, address: str = "127.0.0.1") -> tuple[AuthenticatedSocket, AuthenticatedSocket]:
    """A client's end of the line, and the server's."""
    found: list[AuthenticatedSocket] = []
    thread = threading.Thread(target=lambda: found.append(client(address, server.port, KEY)), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    end = time.monotonic() + LIMIT_S
    while not server.connections and time.monotonic() < end:
        time.sleep(1e-3)
    assert found and server.connections, "nobody is accepted"
    return found[0], server.connections[0]


def test_silent_strangers_hold_nobody_up(strangers: list[socket.socket]) -> None:
    with Server("127.0.0.1", KEY, patience_s=3600.0) as server:
        call(server, strangers, 20)
        outer, inner = enter(server)
        with outer, inner:
            outer.send(b"here")
            assert inner.receive(LIMIT_S) == b"here" and server.connections == [inner]


def test_who_is_silent_for_long_is_sent_away_unless_inside(strangers: list[socket.socket]) -> None:
    with Server("127.0.0.1", KEY, patience_s=0.1) as server:
        call(server, strangers, 3)
        for stranger in strangers:
            while stranger.recv(100):
                pass
    with Server("127.0.0.1", KEY, patience_s=0.1) as server:
        outer, inner = enter(server)
        with outer, inner:
            # Who is inside may be silent for as long as it likes: longer than a stranger, who is sent away meanwhile.
            call(server, strangers, 1)
            while strangers[-1].recv(100):
                pass
            outer.send(b"still here")
            assert inner.receive(LIMIT_S) == b"still here"


def test_a_stranger_who_says_a_little_now_and_then_is_sent_away_all_the_same() -> None:
    with (
        Server("127.0.0.1", KEY, patience_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port)) as stranger,
    ):
        assert stranger.recv(100)
        end = time.monotonic() + LIMIT_S
        while not select.select([stranger], [], [], 0.02)[0]:
            stranger.sendall(b"x")
            assert time.monotonic() < end
        assert not server.connections


def test_who_does_not_know_the_key_stays_outside_and_nobody_connects_to_one_that_is_closed() -> None:
    with Server("127.0.0.1", KEY) as server, pytest.raises(TamperedError, match="does not accept our key"):
        client("127.0.0.1", server.port, b"another")
    assert not server.connections
    for thread in threading.enumerate():
        if thread.name == "ocomm-server":
            thread.join(LIMIT_S)
    with pytest.raises(OSError):
        client("127.0.0.1", server.port, KEY)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_server_on_all_addresses_hears_those_of_ipv4_and_where_there_is_one_of_ipv6(
    has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ipv6 = has_ipv6 and bool(own_address("::1"))
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    with Server(ALL_ADDRESSES, KEY) as server:
        for address in ["127.0.0.1", *["::1"] * has_ipv6]:
            for end in enter(server, address):
                end.close()
            server.connections.clear()


def test_this_host_has_an_address_on_the_way_to_another_of_the_same_family() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("::1") in ("::1", "")  # there may be no IPv6
    assert own_address("nosuchhost.invalid") == ""
