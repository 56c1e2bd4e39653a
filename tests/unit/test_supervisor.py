"""A rank's line to the ocommrun that supervises it."""

from __future__ import annotations

import socket

import pytest

from ocomm.errors import LaunchError
from ocomm.runtime import supervisor


def test_a_port_that_is_another_programs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"cannot reach .*: {address}: connected, but no answer after 0 s"):
            supervisor.Supervisor([address], b"key", 0, 1)


def test_the_key_leaves_the_environment_and_without_one_nobody_is_called() -> None:
    environ = {supervisor.KEY: "0a0b", "PATH": "/bin"}
    assert supervisor.take_key(environ) == b"\n\x0b" and environ == {"PATH": "/bin"}
    assert supervisor.take_key(environ) == b""
    with pytest.raises(LaunchError, match="this rank has no key for the ocommrun"):
        supervisor.Supervisor(["127.0.0.1:1"], b"", 0, 1)
