"""A rank's line to the ocommrun that supervises it."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.generations import Start
from ocomm.launch.hosts import Host
from ocomm.launch.server import Server
from ocomm.launch.supervise import _Job
from ocomm.runtime import supervisor_client


def test_a_port_that_is_another_programs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_client, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"cannot reach .*: {address}: connected, but no answer after 0 s"):
            supervisor_client.SupervisorClient([address], b"key", 0, 1)


def test_the_key_leaves_the_environment_and_without_one_nobody_is_called() -> None:
    environ = {supervisor_client.KEY: "0a0b", "PATH": "/bin"}
    assert supervisor_client.take_key(environ) == b"\n\x0b" and environ == {"PATH": "/bin"}
    assert supervisor_client.take_key(environ) == b""
    with pytest.raises(LaunchError, match="this rank has no key for the ocommrun"):
        supervisor_client.SupervisorClient(["127.0.0.1:1"], b"", 0, 1)


def test_a_rank_on_whose_line_somebody_else_writes_is_named_and_nothing_of_that_is_heard() -> None:
    job = _Job(["true"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
    with Server("127.0.0.1", b"key") as server, supervisor_client.client("127.0.0.1", server.port, b"key") as rank:
        rank.send(json.dumps({"word": "here", "rank": 0, "host": "a", "generation": 1}).encode())
        rank._connection.sendall(b'{"word": "commit", "number": 99}' + bytes(40))
        end = time.monotonic() + 20.0
        while not job._reported and time.monotonic() < end:
            job._listen(server)
    job._process.wait(20.0)
    for reader in job._readers:
        reader.join(20.0)
    assert job._process.stderr is not None
    job._process.stderr.close()
    (failure,) = job.failures(lambda names: {})
    assert str(failure).startswith("rank 0 on a cannot be heard any more: the length of message 1 is not what")
    assert job.commit == 0
