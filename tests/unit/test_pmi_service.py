"""The process of the PMI service, with ranks that speak PMI without an MPI."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ocomm.runtime.authenticated_socket import AuthenticatedSocket
from ocomm.runtime.pmi_client import PmiService
from ocomm.runtime.supervisor_client import client

KEY = secrets.token_bytes(32)
LIMIT_S = 120.0


@contextmanager
def service(ranks: int, **changes: float) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of a service, and its port."""
    started = PmiService()
    limits = {"init_s": 100.0, "grace_s": 0.0, **changes}
    port = started.start(key=KEY.hex(), name="space", hosts=["a"] * ranks, address="127.0.0.1", **limits)
    try:
        yield started._process, port
    finally:
        started.close()


class Rank:
    """The two connections of a rank."""

    def __init__(self, rank: int, port: int, stack: ExitStack) -> None:
        self.watch = self._connect(rank, port, "watch", stack)
        self.socket = self._connect(rank, port, "pmi", stack).detach()
        self.socket.settimeout(LIMIT_S)
        self._lines = self.socket.makefile("r")

    def _connect(self, rank: int, port: int, word: str, stack: ExitStack) -> AuthenticatedSocket:
        line = stack.enter_context(client("127.0.0.1", port, KEY))
        line.send(json.dumps({"word": word, "rank": rank}).encode())
        return line

    def say(self, line: str) -> None:
        self.socket.sendall(line.encode() + b"\n")

    def hear(self) -> str:
        return self._lines.readline().strip()

    def why(self) -> str:
        """Why this rank has to end."""
        return json.loads(self.watch.receive(LIMIT_S))["why"]

    def die(self) -> None:
        self._lines.close()
        self.socket.close()


def test_ranks_exchange_what_they_put_and_the_service_ends_after_the_last() -> None:
    with service(2) as (process, port), ExitStack() as stack:
        ranks = [Rank(number, port, stack) for number in range(2)]
        for number, rank in enumerate(ranks):
            rank.say("cmd=init pmi_version=1 pmi_subversion=1")
            assert rank.hear() == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            rank.say(f"cmd=put kvsname=space key=k{number} value=v{number}\ncmd=barrier_in")
            assert rank.hear() == "cmd=put_result rc=0 msg=success"
        for number, rank in enumerate(ranks):
            assert rank.hear() == "cmd=barrier_out rc=0"
            rank.say(f"cmd=get kvsname=space key=k{1 - number}")
            assert rank.hear() == f"cmd=get_result rc=0 msg=success value=v{1 - number}"
        for rank in ranks:
            rank.watch.send(b'{"word": "up"}')
            rank.say("cmd=finalize")
            assert rank.hear() == "cmd=finalize_ack rc=0"
            rank.die()
        assert process.wait(LIMIT_S) == 0


def test_a_rank_that_dies_ends_the_others_by_name() -> None:
    with service(3) as (process, port), ExitStack() as stack:
        ranks = [Rank(number, port, stack) for number in range(3)]
        ranks[0].say("cmd=barrier_in")
        ranks[1].die()
        for rank in (ranks[0], ranks[2]):
            assert rank.why() == "rank 1 has ended without MPI_Finalize, in MPI_Init"
            rank.die()
        assert process.wait(LIMIT_S) == 1


def test_a_job_whose_ranks_never_connect_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with service(2, init_s=0.1) as (process, _):
        assert process.wait(LIMIT_S) == 1
    said = "ocomm: the job ends: after 0.1 s ranks [0, 1] have not connected to the PMI service of the job.\n"
    assert capfd.readouterr().err == said


def test_who_does_not_know_the_key_is_no_rank() -> None:
    with service(1) as (process, port), ExitStack() as stack:
        with pytest.raises((OSError, EOFError)):
            client("127.0.0.1", port, secrets.token_bytes(32))
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
            stranger.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n" * 10)
            rank = Rank(0, port, stack)
            rank.say("cmd=finalize")
            assert rank.hear() == "cmd=finalize_ack rc=0"
        assert process.wait(LIMIT_S) == 0


def test_the_service_ends_where_rank_0_has_before_the_ranks_met() -> None:
    command = [sys.executable, "-m", "ocomm.launch.pmi"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
