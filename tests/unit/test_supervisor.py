"""A rank's line to the ocommrun that supervises it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ocomm.errors import LaunchError
from ocomm.launch import discovery as discoveries
from ocomm.launch import job as jobs
from ocomm.launch import output, processes
from ocomm.launch.command import LaunchRequest
from ocomm.launch.discovery import Discovery
from ocomm.launch.failures import Failure
from ocomm.launch.flavour import Flavour, Launcher
from ocomm.launch.generations import Limits, Start
from ocomm.launch.hosts import Host
from ocomm.launch.job import Job
from ocomm.launch.reach import HostState
from ocomm.launch.server import Server
from ocomm.launch.supervise import Supervisor
from ocomm.runtime import supervisor_client
from ocomm.runtime.authenticated_socket import AuthenticatedSocket


def join_readers(job: Job) -> None:
    """Waits until all output of a job has been read, and its pipe closed."""
    for reader in job._launcher._readers:
        reader.join(20.0)
    assert job._launcher._process.stderr is not None and job._launcher._process.stderr.closed


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
    job = Job(["true"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
    with Server("127.0.0.1", b"key") as server, supervisor_client.client("127.0.0.1", server.port, b"key") as rank:
        rank.send(json.dumps({"word": "here", "rank": 0, "host": "a", "generation": 1}).encode())
        rank._connection.sendall(b'{"word": "commit", "number": 99, "state": "set0.1"}' + bytes(40))
        end = time.monotonic() + 20.0
        while not job.reports.failed and time.monotonic() < end:
            job._listen(server)
    job._launcher._process.wait(20.0)
    join_readers(job)
    (failure,) = job.failures(lambda names: {})
    assert str(failure).startswith("rank 0 on a cannot be heard any more: the length of message 1 is not what")
    assert job.reports.commit == 0


def test_all_that_ranks_have_said_before_the_launcher_ended_is_heard() -> None:
    job = Job(["true"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
    with Server("127.0.0.1", b"key") as server:
        with supervisor_client.client("127.0.0.1", server.port, b"key") as rank:
            rank.send(json.dumps({"word": "here", "rank": 0, "host": "a", "generation": 1}).encode())
            for number in (1, 2):
                rank.send(json.dumps({"word": "commit", "number": number, "state": "set0.1"}).encode())
            rank.send(json.dumps({"word": "lost", "ranks": {"0": "raised ValueError: no data"}}).encode())
        assert until(lambda: bool(server.connections))
        job._launcher._process.wait(20.0)  # before anything was heard, as on a machine with much to do
        watched(job, server)
    join_readers(job)
    (failure,) = job.failures(lambda names: {})
    assert str(failure) == "rank 0 on a raised ValueError: no data"
    assert job.reports.commit == 2


LOST_DAEMON = """--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-38@0,0] on node node1
  Remote daemon: [prterun-node1-38@0,1] on node b

This is usually due to either a failure of the TCP network
"""


@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_launcher_that_has_lost_a_host_has_not_ended_well_though_it_says_so(came: int) -> None:
    """Open MPI's may end with status 0, at any time in the life of the ranks."""
    job = Job(["sh", "-c", 'printf %s "$0" >&2', LOST_DAEMON], dict(os.environ), Start(1, hosts_of(2)), 10.0)
    with Server("127.0.0.1", b"key") as server, contextlib.ExitStack() as stack:
        for rank in range(came):
            stack.enter_context(here(server, rank))
        assert until(lambda: len(server.connections) == came)
        assert watched(job, server) == 1
    assert job.failures(lambda names: dict.fromkeys(names, True)) == [
        Failure("b", None, "has lost the launcher's daemon", True)
    ]


def test_where_the_launcher_does_not_name_the_host_that_it_has_lost_no_rank_that_fell_with_it_is_blamed() -> None:
    words = "srun returned non-zero exit status (35072) from launching\nthe per-node daemon. You may debug this"
    job = Job(["sh", "-c", 'printf %s "$0" >&2', words], dict(os.environ), Start(1, hosts_of(2)), 10.0)
    with Server("127.0.0.1", b"key") as server, here(server, 0) as first, here(server, 1):
        assert until(lambda: len(server.connections) == 2)
        first.close()
        assert watched(job, server) == 1
    assert job.failures(lambda names: {}) == []


def test_ranks_that_have_not_ended_when_the_launcher_has_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "END_S", 0.3)
    job = Job(["true"], dict(os.environ), Start(1, hosts_of(2)), 10.0)
    with Server("127.0.0.1", b"key") as server, here(server, 0) as first, here(server, 1):
        first.send(b'{"word": "bye"}')
        assert until(lambda: len(server.connections) == 2)
        assert watched(job, server) == 1
    assert job.failures(lambda names: {}) == [
        Failure("b", 1, "has not answered: the launcher has ended before it"),
    ]


def test_ranks_may_end_after_the_launcher_and_who_ends_first_is_named() -> None:
    job = Job(["true"], dict(os.environ), Start(1, hosts_of(2)), 10.0)
    with Server("127.0.0.1", b"key") as server, here(server, 0), here(server, 1) as second:
        assert until(lambda: len(server.connections) == 2)
        job._launcher._process.wait(20.0)
        ends = threading.Timer(0.3, second.close)
        ends.start()
        assert watched(job, server) == 1
        ends.join()
    assert job.failures(lambda names: {}) == [Failure("b", 1, "died")]


def hosts_of(ranks: int) -> tuple[Host, ...]:
    return tuple(Host(chr(ord("a") + rank), 1) for rank in range(ranks))


def here(server: Server, rank: int) -> AuthenticatedSocket:
    line = supervisor_client.client("127.0.0.1", server.port, b"key")
    line.send(json.dumps({"word": "here", "rank": rank, "host": chr(ord("a") + rank), "generation": 1}).encode())
    return line


def watched(job: Job, server: Server, asked_to_end: int = 0) -> int:
    """Returns the status with which the launcher is taken to have ended."""
    while (status := job.attend(server, asked_to_end)) is None:
        pass
    join_readers(job)
    return status


def test_a_launcher_whose_words_nobody_reads_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=SimpleNamespace(write=refuse)))
    job = Job(["sh", "-c", "exec head -c 1000000 /dev/zero >&2"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
    assert job._launcher._process.wait(20.0) == -signal.SIGPIPE
    output.say("something")


def test_words_that_find_the_disk_full_are_lost_and_the_launcher_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # closing it raises OSError if its buffer has kept anything
        monkeypatch.setattr(sys, "stderr", full)
        job = Job(["sh", "-c", "head -c 1000000 /dev/zero >&2"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
        assert job._launcher._process.wait(20.0) == 0
        join_readers(job)
        output.say("something")
        monkeypatch.undo()


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_slow_reader_gets_every_word_though_writes_to_it_do_not_wait(
    buffering: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    data = bytearray()
    with open(reader, "rb", buffering=0) as slow, open(writer, "wb", buffering) as stderr:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(cast(Any, stderr), write_through=True))
        job = Job(["sh", "-c", "head -c 300000 /dev/zero >&2"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
        poll = select.poll()
        poll.register(writer, select.POLLOUT)
        assert until(lambda: not poll.poll(0))  # it is full

        def has_all() -> bool:
            data.extend(slow.read(65536) or b"")
            return len(data) == 300_000

        assert until(has_all), len(data)
        join_readers(job)
        monkeypatch.undo()
    assert job._launcher._process.wait(20.0) == 0


def test_a_folder_for_output_is_made_or_named(tmp_path: Path) -> None:
    output.make_folder(str(tmp_path / "a" / "b"))
    output.make_folder(str(tmp_path / "a" / "b"))
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError) as caught:
        output.make_folder(str(tmp_path / "file" / "c"))
    assert str(caught.value) == f"--output-filename {tmp_path}/file/c: Not a directory; nothing was started."


def supervisor_of(*hosts: Host, ask: Callable[[Sequence[str]], Sequence[HostState]]) -> Supervisor:
    limits = Limits(1, 1, cooldown_s=(1000.0, 1000.0), discovers=True)
    states = ask([host.name for host in hosts])
    launcher = Launcher(Flavour.OPEN_MPI_5, "mpirun", "5")
    return Supervisor(LaunchRequest(1, ("true",)), launcher, limits, ask, hosts, states)


def test_ranks_make_way_for_no_host_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    problems: dict[str, str] = {}
    asked: list[str] = []

    def ask(names: Sequence[str]) -> list[HostState]:
        asked.extend(names)
        return [HostState(name, False, problems.get(name)) for name in names]

    a, b = Host("a", 1), Host("b", 1)
    supervisor = supervisor_of(a, ask=ask)
    assert supervisor.generations.next(0.0) == Start(1, (a,))
    problems["b"] = "no route"
    supervisor.generations.found([a, b])
    asked.clear()
    assert not supervisor.wants_others() and not supervisor.wants_others()
    assert asked == ["b"] and capsys.readouterr().err == "ocommrun: b cannot be reached: no route\n"
    problems.clear()
    supervisor.generations.found([a])
    supervisor.generations.found([a, b])
    assert supervisor.wants_others()


def test_hosts_are_asked_once_before_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def ask(names: Sequence[str]) -> list[HostState]:
        asked.append(names)
        return [HostState(name, False, has_answered=True) for name in names]

    hosts = Host("a", 1), Host("b", 1)
    supervisor = supervisor_of(*hosts, ask=ask)
    supervisor.generations.limits = Limits(2, 1)
    codes, started = [1, 0], []

    def start(step: Start, states: Sequence[HostState], port: int) -> SimpleNamespace:
        started.append((len(asked), [state.name for state in states]))
        failures = [Failure("b", None, "it burns", True)]
        code = codes.pop(0)
        reports = SimpleNamespace(has_left=False, commit=0, step=step)
        return SimpleNamespace(attend=lambda *_: code, failures=lambda lost: failures, reports=reports)

    monkeypatch.setattr(supervisor, "_start", start)
    with Server("127.0.0.1", b"key") as server:
        assert supervisor._run(server) == 0
    assert started == [(1, ["a", "b"]), (2, ["a"])]


def test_a_signal_that_nohup_has_switched_off_stays_off() -> None:
    supervisor = supervisor_of(ask=lambda names: [])
    supervisor.generations.limits = Limits(1, 1)  # no host, and none can come
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert supervisor.run() == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == supervisor._end_on_signal
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_who_never_came_to_init_is_named_by_those_who_waited() -> None:
    job = Job(["true"], dict(os.environ), Start(1, (Host("a", 1), Host("b", 2))), 10.0)
    with Server("127.0.0.1", b"key") as server, supervisor_client.client("127.0.0.1", server.port, b"key") as rank:
        rank.send(json.dumps({"word": "here", "rank": 0, "host": "a", "generation": 1}).encode())
        rank.send(json.dumps({"word": "late"}).encode())
        end = time.monotonic() + 20.0
        while not job.reports.failed and time.monotonic() < end:
            job._listen(server)
        for line in job._connections:
            line.close()
    job._launcher._process.wait(20.0)
    join_readers(job)
    assert [str(failure) for failure in job.failures(lambda names: {})] == [
        "rank 1 on b has not answered: it never came to init()",
        "rank 2 on b has not answered: it never came to init()",
    ]


def test_of_ranks_that_have_died_before_anybody_looked_the_first_is_named() -> None:
    """Hydra kills the others as soon as one has died. What a rank has said before has no part in the order."""
    job = Job(["true"], dict(os.environ), Start(1, (Host("a", 4),)), 10.0)
    with Server("127.0.0.1", b"key") as server:
        ranks = []
        for number in range(4):
            ranks.append(supervisor_client.client("127.0.0.1", server.port, b"key"))
            ranks[-1].send(json.dumps({"word": "here", "rank": number, "host": "a", "generation": 1}).encode())
        assert until(lambda: len(server.connections) == 4)
        ranks[2].send(json.dumps({"word": "commit", "number": 1, "state": "set0.1"}).encode())
        for number in (2, 0, 3, 1):
            ranks[number].close()

        def all_are_lost() -> bool:
            job._listen(server)
            return len(job._vanished) == 4

        assert until(all_are_lost)
    job._launcher._process.wait(20.0)
    job._launcher.clear_up()
    join_readers(job)
    assert [job._vanished[line] for line in job._ended] == [2, 0, 3, 1]
    assert list(map(str, job.failures(lambda names: {}))) == ["rank 2 on a died"]


def test_a_rank_that_is_killed_is_lost_to_its_supervisor_before_its_launcher() -> None:
    """A launcher such as Hydra, whose connection is a file with a number that is higher than the supervisor's was."""
    script = """
import os, signal, sys
from ocomm.runtime.supervisor_client import SupervisorClient
launcher = os.dup2(int(sys.argv[1]), 100)
os.close(int(sys.argv[1]))
SupervisorClient(sys.argv[2:], b"key", 0, 1, launcher)
os.read(launcher, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Both over TCP, whose messages a busy kernel may hold up, but keeps in order.
    with socket.create_server(("127.0.0.1", 0)) as opened:
        theirs = socket.create_connection(opened.getsockname())
        ours, _ = opened.accept()
    with ours, theirs, Server("127.0.0.1", b"key") as server, select.epoll() as ends:
        arguments = [str(theirs.fileno()), f"127.0.0.1:{server.port}"]
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], pass_fds=[theirs.fileno()])
        theirs.close()
        ends.register(ours, select.EPOLLRDHUP | select.EPOLLET)
        assert until(lambda: bool(server.connections))
        with server.connections.pop() as line:
            ends.register(line, select.EPOLLRDHUP | select.EPOLLET)
            ours.send(b"!")
            assert process.wait(20.0) == -signal.SIGKILL
            assert [descriptor for descriptor, _ in ends.poll(20.0)] == [line.fileno(), ours.fileno()]


def test_a_rank_that_was_killed_is_lost_though_a_process_that_it_has_forked_goes_on() -> None:
    script = """
import os, signal, sys, time
from ocomm.runtime.supervisor_client import SupervisorClient
SupervisorClient(sys.argv[1:], b"key", 0, 1)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Server("127.0.0.1", b"key") as server:
        command = [sys.executable, "-c", script, f"127.0.0.1:{server.port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            try:
                assert until(lambda: bool(server.connections))
                with server.connections.pop() as line:
                    assert json.loads(line.receive(20.0))["word"] == "here"
                    with pytest.raises(EOFError):
                        line.receive(20.0)
                assert not has_ended(child)
            finally:
                os.kill(child, signal.SIGKILL)


def until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20.0
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


def test_a_launcher_ends_with_an_ocommrun_that_was_killed() -> None:
    """Its ranks may be programs that have no connection to ocommrun, or none yet."""
    script = """
import os, signal
from ocomm.launch.generations import Start
from ocomm.launch.hosts import Host
from ocomm.launch.job import Job
job = Job(["sleep", "60"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
print(job._launcher._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        launcher = int(process.stdout.readline())  # which has the pipe, too, so it is not read to its end
        assert process.wait(20.0) == -signal.SIGKILL
        assert until(lambda: has_ended(launcher))


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A shell may have switched interrupts off for these tests, and so for what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_is_passed_on_to_the_launcher_as_one_and_other_signals_as_sigterm(asked: signal.Signals) -> None:
    job = Job(["sleep", "60"], dict(os.environ), Start(1, (Host("a", 1),)), 10.0)
    with Server("127.0.0.1", b"key") as server:
        status = watched(job, server, asked)
    join_readers(job)
    assert status == 128 + (signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM)


def test_a_name_that_is_not_utf_8_is_refused_and_the_script_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discoveries, "PERIOD_S", 0.05)
    looks = tmp_path / "looks"
    discovery = Discovery(rf"echo >>{looks}; if [ -s {looks}.wrong ]; then printf 'h\303:2\n'; else echo a:2; fi", None)
    try:
        assert until(lambda: discovery.hosts() == (Host("a", 2),))
        (tmp_path / "looks.wrong").write_text("now")
        before = len(looks.read_text())
        assert until(lambda: len(looks.read_text()) > before + 2)
        assert discovery.hosts() == (Host("a", 2),) and discovery._thread.is_alive()
    finally:
        discovery.close()
    assert capsys.readouterr().err.count("the output: 'h\ufffd:2' is not a host") == 1


def test_a_script_that_fails_at_first_ends_the_job_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost\n")
    launcher, limits = Launcher(Flavour.OPEN_MPI_5, "mpirun", "5"), Limits(1, 1, patience_s=60.0, discovers=True)
    for script, mode, message in (
        ("hosts.sh", 0o755, r"it ended with status 127: .*not found \(write \./hosts\.sh\)\."),
        ("./hosts.sh", 0o644, r"it ended with status 126: .*denied \(chmod \+x \./hosts\.sh\)\."),
        ("./hosts.sh", 0o755, r"the output: 'localhost' does not say how many ranks run there; write one .*\."),
        ("false", 0o755, r"it ended with status 1\."),
        ("head -c 3000000 /dev/zero", 0o755, r"the output: a line of 3000000 characters, '.{160}'\.\.\., is no.*\."),
    ):
        (tmp_path / "hosts.sh").chmod(mode)
        supervisor = Supervisor(
            LaunchRequest(1, ("true",)), launcher, limits, lambda names: [], discovery=Discovery(script, None)
        )
        whole = f"^--host-discovery-script {script}: {message} Nothing was started.$"
        with Server("127.0.0.1", b"key") as server, pytest.raises(LaunchError, match=whole):
            supervisor._run(server)


def script_with_a_child(folder: Path) -> str:
    """A script that waits for a child, and writes the child's number into a file."""
    return f"sleep 60 & echo $! > {folder}/number; mv {folder}/number {folder}/child; wait"


def has_ended(pid: int) -> bool:
    fields = processes.stat(pid)
    return not fields or fields[0] == "Z"  # where nobody waits for orphans


def test_a_script_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discoveries, "_TIMEOUT_S", 1.0)
    discovery = Discovery(script_with_a_child(tmp_path), None)
    try:
        assert until(lambda: discovery.has_looked and (tmp_path / "child").exists())
        child = int((tmp_path / "child").read_text())
        assert until(lambda: has_ended(child))
        with pytest.raises(LaunchError, match="it has not ended in 1 s, and was killed"):
            discovery.hosts()
    finally:
        discovery.close()


def test_a_script_ends_with_ocommrun(tmp_path: Path) -> None:
    discovery = Discovery(script_with_a_child(tmp_path), None)
    try:
        assert until((tmp_path / "child").exists)
    finally:
        discovery.close()
    child = int((tmp_path / "child").read_text())
    assert until(lambda: has_ended(child)) and not discovery._thread.is_alive()


def test_patience_ends_while_the_script_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discoveries, "_TIMEOUT_S", 5.0)
    launcher = Launcher(Flavour.OPEN_MPI_5, "mpirun", "5")
    limits = Limits(2, 1, patience_s=0.2, discovers=True)
    discovery = Discovery("exec sleep 60", None)
    supervisor = Supervisor(LaunchRequest(2, ("true",)), launcher, limits, lambda names: [], discovery=discovery)
    with Server("127.0.0.1", b"key") as server:
        assert supervisor._run(server) == 1
    discovery.close()
    assert capsys.readouterr().err == (
        "ocommrun: the job ends: 0 slots are left, and at least 1 are needed; --host-discovery-script has not ended"
        " yet.\n"
    )
