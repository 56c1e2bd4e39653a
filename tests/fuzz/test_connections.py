"""Connections with a key, the PMI service, ocommrun's supervisor and the store: damaged bytes are an error, and nothing
of them is handed on.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.errors import LaunchError
from ocomm.json_values import parse
from ocomm.launch import run as run_module
from ocomm.launch.generations import Start
from ocomm.launch.hosts import Host
from ocomm.launch.job import Job
from ocomm.launch.pmi import Service
from ocomm.launch.pmi_job import LONGEST_LINE, Limits, PmiJob
from ocomm.launch.reports import Reports
from ocomm.runtime import authenticated_socket, pmi_client, rendezvous, supervisor_client
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError
from ocomm.runtime.rendezvous import Member
from tests.fuzz.harm import examples, harmed, json_values

LIMIT_S = 20.0


@examples(40)
@given(st.data())
def test_of_damaged_messages_those_before_the_damage_arrive_and_no_others(data: st.DataObject) -> None:
    contents = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
    ends = socket.socketpair()
    with ends[0], ends[1]:
        sender = AuthenticatedSocket(ends[0], b"a" * 32, b"b" * 32, 1 << 10, LIMIT_S)
        receiver = AuthenticatedSocket(ends[1], b"b" * 32, b"a" * 32, 1 << 10, LIMIT_S)
        for content in contents:
            sender.send(content)
        whole = ends[1].recv(1 << 16)
        damaged = data.draw(harmed(whole))
        ends[0].sendall(damaged)
        ends[0].shutdown(socket.SHUT_WR)
        heard: list[bytes] = []
        with pytest.raises((EOFError, TamperedError)):
            while True:
                heard.append(bytes(receiver.receive(LIMIT_S)))
    assert heard == contents[: len(heard)]
    assert damaged == whole or len(heard) < len(contents) or damaged.startswith(whole)


@examples(40)
@given(st.binary(max_size=200))
def test_who_does_not_know_the_key_gets_no_connection(said: bytes) -> None:
    for meet in (authenticated_socket.accept, authenticated_socket.connect):
        ends = socket.socketpair()
        with ends[0], ends[1]:
            ends[0].sendall(said)
            ends[0].shutdown(socket.SHUT_WR)
            with pytest.raises((EOFError, TamperedError)):
                meet(ends[1], b"key", LIMIT_S)


class Line:
    """A connection on which one message has come."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.is_closed = False

    def receive(self, patience_s: float = 0.0) -> bytes:
        return self.said

    def close(self) -> None:
        self.is_closed = True

    def detach(self) -> socket.socket:
        return socket.socket()


json_bytes = json_values.map(lambda value: json.dumps(value).encode())


def pmi_service(size: int = 2) -> Service:
    server: Any = SimpleNamespace(connections=[])
    return Service(PmiJob("space", ["a"] * size, Limits(10.0, 1.0), time.monotonic()), server)


@examples(40)
@given(st.data())
def test_the_pmi_service_closes_a_connection_whose_first_message_is_none_of_a_rank(data: st.DataObject) -> None:
    said = data.draw(json_bytes | harmed(b'{"word": "watch", "rank": 1}'))
    service, line = pmi_service(), Line(said)
    service._greet(line)  # type: ignore[arg-type]
    known = {**service._pmi, **service._watchers}
    assert line.is_closed != bool(known)
    for connection in service._pmi.values():
        connection.close()
    assert all(rank in (0, 1) for rank in known)
    for rank in service._watchers.copy():
        line.said = data.draw(json_bytes)
        service._hear_watcher(rank)


@examples(40)
@given(
    st.lists(
        st.text(max_size=30)
        | st.sampled_from(
            ["cmd=init", "cmd=put key=a value=b", "mcmd=spawn", "endcmd", "cmd=barrier_in", "cmd=get key=a", "cmd="]
        )
    )
)
def test_whatever_a_rank_says_by_pmi_is_answered_in_lines_or_ends_the_job(lines: list[str]) -> None:
    job = pmi_service()._job
    for line in lines:
        for rank, answer in job.heard(1, line.replace("\n", " "), 1.0):
            assert rank in (0, 1) and answer.startswith("cmd=") and answer.index("\n") == len(answer) - 1
    assert not job.failure or job.failure.startswith("rank 1 has sent")


def test_a_line_of_pmi_without_an_end_ends_the_job_before_it_fills_the_memory() -> None:
    service = pmi_service()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        service._pmi[1], service._halves[1] = theirs, b""
        for _ in range(2 + LONGEST_LINE // 4096):
            ours.sendall(b"x" * 4096)
            service._hear(1)
    assert service._job.must_end(time.monotonic()) == "rank 1 has sent a line of PMI of more than 65536 bytes"
    assert len(service._halves[1]) <= LONGEST_LINE


# ocommrun and its ranks


MESSAGES = [
    {"word": "here", "rank": 1, "host": "a", "generation": 1},
    {"word": "commit", "number": 12, "state": "set0.1"},
    {"word": "anew", "state": "set0.1", "folder": "/tmp/a"},
    {"word": "lost", "ranks": {"1": "has not answered for 7 s"}},
    {"word": "counters", "job": {"at_s": 1.0, "size": 2, "ranks": []}},
    {"word": "leave"},
    {"word": "bye"},
    {"word": "late"},
]


@examples(40)
@given(st.data())
def test_a_damaged_message_to_ocommrun_is_a_value_error_and_not_its_end(data: st.DataObject) -> None:
    reports = Reports(Start(1, (Host("a", 2),)), {"set0.1": 11}, 10.0)
    said = data.draw(st.sampled_from(MESSAGES)).copy()
    if data.draw(st.booleans()):
        said[data.draw(st.sampled_from(sorted(said)))] = data.draw(json_values)  # type: ignore[index]
        damaged = json.dumps(said).encode()
    else:
        damaged = data.draw(json_bytes | harmed(json.dumps(said).encode()))
    try:
        heard = reports.hear(-1, parse(damaged))
    except (ValueError, EOFError):
        return
    assert type(heard.rank) is int and heard.rank in (-1, 0, 1) and type(heard.notice) is str
    assert type(reports.commit) is int and all(rank in (0, 1) for rank in {*reports._hosts, *reports.failed})
    assert all(type(text) is str for text in (*reports._hosts.values(), *reports.failed.values()))


def test_a_rank_whose_message_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job, line = Job.__new__(Job), Line(b'{"word": "commit"}')
    job.reports, job._ended = Reports(Start(1, (Host("a", 2),)), {}, 10.0), []
    job._connections = {line: 1}  # type: ignore[dict-item]
    monkeypatch.setattr("ocomm.launch.job.wait", lambda connections, seconds: [line])
    server = SimpleNamespace(connections=[], ended=lambda: [line], end=lambda line: line.close())
    job._listen(server)  # type: ignore[arg-type]
    assert job.reports.failed == {1: "cannot be heard any more: None where int is expected"} and line.is_closed


class Exited(BaseException):
    """In the place of the end of the process."""


@pytest.mark.parametrize("said", [b"", b"null", b"{}", b"[" * 100_000, b'"word"', b"\xff"])
def test_a_rank_ends_if_ocommrun_or_the_pmi_service_says_what_it_cannot_read(
    said: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exit_(status: int) -> None:
        raise Exited(status)

    for module in (supervisor_client, pmi_client):
        monkeypatch.setattr(module.os, "_exit", exit_)
    client = supervisor_client.SupervisorClient.__new__(supervisor_client.SupervisorClient)
    client._rank, client._connection = 3, Line(said)  # type: ignore[assignment]
    with pytest.raises(Exited):
        client._listen()
    rank = pmi_client.PmiClient.__new__(pmi_client.PmiClient)
    rank.rank, rank._watch, rank._is_leaving = 3, Line(said), False  # type: ignore[assignment]
    with pytest.raises(Exited):
        rank._listen()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("ocomm: rank 3: ocommrun, which supervises this job, has sent ")
    assert second.startswith("ocomm: rank 3 ends: the PMI service of the job, which rank 0 has started, has sent ")


def test_a_result_that_cannot_be_unpickled_is_an_error_of_launching() -> None:
    line = Line(pickle.dumps(("result", 0, 1))[:-3])
    line.send = lambda task: None  # type: ignore[attr-defined]
    line.fileno = lambda: 0  # type: ignore[attr-defined]
    server: Any = SimpleNamespace(connections=[line])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "wait", lambda connections, seconds: [line])
        with pytest.raises(LaunchError, match="a rank's result cannot be read here: "):
            run_module._collect(SimpleNamespace(poll=lambda: None), server, b"", 1)  # type: ignore[arg-type]


# The store in which ranks meet


@examples(40)
@given(st.data())
def test_what_is_wrong_in_the_store_is_an_error_that_names_the_rank_that_wrote_it(data: st.DataObject) -> None:
    mine = json.dumps({"rank": 1, "host": "h", "node": "n", "version": "1", "library": "m"}).encode()
    text = data.draw(json_bytes | harmed(mine))
    for read in (lambda: rendezvous._member(text, 1), lambda: rendezvous._read(text, 1)):
        try:
            found = read()
        except LaunchError as error:
            assert str(error).startswith(
                "rank 1 has written into the store in which the ranks meet what cannot be read"
            )
        else:
            assert isinstance(found, (Member, dict))
