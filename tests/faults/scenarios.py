"""What uses files and sockets: each scenario takes the calls of its process, one of which may fail, and returns what
was wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import secrets
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import ocomm
from ocomm import elastic
from ocomm import session as sessions
from ocomm.errors import LaunchError
from ocomm.launch.generations import Start
from ocomm.launch.hosts import Host
from ocomm.launch.job import Job
from ocomm.launch.pmi import Service
from ocomm.launch.pmi_job import Limits, PmiJob
from ocomm.launch.server import Server
from ocomm.runtime.pmi_client import PmiClient
from ocomm.runtime.supervisor_client import SupervisorClient
from tests.faults import workloads, world
from tests.faults.calls import Calls
from tests.faults.layers import files_and_sockets
from tests.faults.trail import Trail

#: Seconds of silence after which a rank counts as dead, and after which a scenario counts as stuck.
PATIENCE_S = 5.0
DEADLINE_S = 60.0
_KEY = secrets.token_bytes(32)


# Commits of elastic states


class _Ranked(elastic.ObjectState):
    """Has a part of each rank: ``mine``."""

    step: int
    mine: Any = None

    def own(self) -> Any:
        return {"mine": self.mine}

    def load_own(self, part: elastic.Part) -> None:
        self.mine = None if part.own is None else part.own["mine"]


class _Commits:
    """Elastic jobs of two ranks, each of which makes two commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = [0, 0]  # by rank: the last commit that it says is kept
        self.found: list[str] = []

    def job(self, hosts: tuple[str, str]) -> list[tuple[int, int, Any]]:
        """Returns what each rank began with; one that has not begun is left out."""
        began: dict[int, tuple[int, int, Any]] = {}

        def body(trail: Trail) -> None:
            rank, session = ocomm.rank(), sessions.current()
            session.settings = replace(session.settings, elastic_folder=str(self.folder / hosts[rank]))
            state = _Ranked(step=0)
            state.mine = 100 * rank

            def note() -> None:
                assert state._keeper is not None
                self.kept[rank] = state._keeper._kept.number if state._keeper._kept else 0

            @elastic.run
            def train(state: _Ranked) -> None:
                began[rank] = state.commits, state.step, state.mine
                note()
                for _ in range(2):
                    state.step += 1
                    state.mine = 100 * rank + state.step
                    state.commit()
                    note()

            train(state)

        with mock.patch("ocomm.elastic.loop._rejoin", return_value=False):
            done = world.run(body, 2, workloads.patient(PATIENCE_S), hosts=hosts, deadline_s=DEADLINE_S)
        self.found += [f"{name} hangs" for name in done.stuck]
        for one in done.ranks:
            if one.error is not None:
                self.found += world.unnamed(one.error, None)
        if len({(commits, step) for commits, step, _ in began.values()}) > 1:
            self.found.append(f"ranks began with different states: {began}")
        for rank, (commits, step, mine) in began.items():
            if commits != step or mine not in (100 * rank + step, None):
                self.found.append(f"rank {rank} began with parts of several commits: {began}")
        return list(began.values())


def commits(calls: Calls) -> list[str]:
    """Ranks commit; go on from that on each other's host, which lacks the replicated part; go on again without a
    fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = _Commits(Path(folder))
        with files_and_sockets(calls):
            jobs.job(("a", "b"))
            if min(jobs.kept):  # else host b may be all that is left
                for path in (Path(folder) / "b").glob("*.all"):
                    path.unlink()
            jobs.job(("b", "a"))
        kept = min(jobs.kept)
        began = jobs.job(("b", "a"))
        if len(began) < 2 or any(commits < kept for commits, _, _ in began):
            jobs.found.append(f"the last job began with {began}, and commit {kept} was kept")
        if kept < 4 and not calls.has_failed:
            jobs.found.append(f"without a fault commit {kept} was kept")
        return jobs.found


# The timeline, and the port of counters


@lru_cache
def _clean() -> world.Run:
    done = world.run(workloads.collectives, workloads.RANKS, workloads.patient(PATIENCE_S), deadline_s=DEADLINE_S)
    assert not done.stuck and not any(rank.error for rank in done.ranks)
    return done


def telemetry(calls: Calls) -> list[str]:
    """A job with a timeline and a port of counters, which somebody reads. No fault of these ends the job."""
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(
            workloads.patient(PATIENCE_S), timeline=str(Path(folder) / "timeline.json"), metrics_port="0"
        )

        def body(trail: Trail) -> None:
            runtime = sessions.current().runtime
            if ocomm.rank() == 0 and runtime is not None and runtime.exporter is not None:
                port = runtime.exporter._port
                if port is not None:
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        urllib.request.urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=PATIENCE_S).close()
            workloads.collectives(trail)

        with files_and_sockets(calls):
            done = world.run(body, workloads.RANKS, settings, deadline_s=DEADLINE_S)
        ended = [f"rank {n} has ended: {rank.error!r}" for n, rank in enumerate(done.ranks) if rank.error is not None]
        return world.problems(_clean(), done) + ended


# The supervisor, and the PMI service


@contextlib.contextmanager
def _exits() -> Iterator[list[int]]:
    """Makes ``os._exit`` end the thread that calls it, and notes the status."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    with mock.patch.object(os, "_exit", leave), contextlib.redirect_stderr(io.StringIO()):
        yield codes


def _until(condition: Callable[[], Any], seconds: float = 3 * PATIENCE_S) -> bool:
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True


def supervised(calls: Calls) -> list[str]:
    """A rank tells its supervisor of a commit, hears that hosts have changed, and ends in order. Otherwise either of
    them knows why not.
    """
    job = Job(["true"], dict(os.environ), Start(1, (Host("a", 1),)), PATIENCE_S)
    found: list[str] = []
    try:
        with _exits() as codes, files_and_sockets(calls), Server("127.0.0.1", _KEY) as server:
            try:
                rank = SupervisorClient([f"127.0.0.1:{server.port}"], _KEY, 0, 1)
            except LaunchError:
                return found

            def heard(condition: Callable[[], Any]) -> bool:
                def look() -> bool:
                    job._listen(server)
                    return bool(condition() or job.reports.failed or job._vanished or rank._connection._broken)

                return _until(look)

            is_whole = heard(lambda: 0 in job._connections.values())
            rank.say("commit", number=5, state="set0.1")
            is_whole &= heard(lambda: job.reports.commit == 5)
            job._tell(job._connections)
            is_whole &= heard(lambda: rank.hosts_changed)
            rank.say("bye")
            is_whole &= heard(lambda: -1 in job._connections.values())
            if not is_whole and not calls.has_failed:
                found.append("not everything was heard")
            with contextlib.suppress(OSError):
                rank._connection._connection.shutdown(socket.SHUT_RDWR)
            if not _until(lambda: codes):
                found.append("the rank waits for ever for its supervisor")
            # It has said that it ends, or its end is noticed, or it has never come, which the job's patience is for.
            if not heard(lambda: -1 in job._connections.values() or not job._connections) and not job.reports.failed:
                found.append("the supervisor does not notice that the rank has ended")
            rank._connection.close()
            for line in server.connections:
                line.close()
    except (OSError, LaunchError) as error:
        found += world.unnamed(error, None)
    finally:
        job._launcher._process.wait()
        for reader in job._launcher._readers:
            reader.join()
        if job._launcher._process.stderr is not None:
            job._launcher._process.stderr.close()
        for line in job._connections:
            line.close()
    return found


class _Speaker:
    """A rank of a job with a PMI service, and what it would say to it."""

    def __init__(self, rank: int, port: int) -> None:
        self.client = PmiClient([f"127.0.0.1:{port}"], _KEY, rank, 2)
        self.socket = socket.socket(fileno=self.client._descriptor)
        self.socket.settimeout(3 * PATIENCE_S)

    def ask(self, *lines: str) -> str:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())
        data = b""
        while not data.endswith(b"\n"):
            piece = self.socket.recv(4096)
            if not piece:
                raise EOFError
            data += piece
        return data.decode()


def pmi(calls: Calls) -> list[str]:
    """Two ranks meet by the PMI service, and end in order; or the service has ended them, or they know why not."""
    found: list[str] = []
    problems: dict[int, str] = {}
    clients: list[PmiClient] = []
    with _exits() as codes, files_and_sockets(calls):
        try:
            server = Server("127.0.0.1", _KEY)
        except (OSError, LaunchError) as error:
            return world.unnamed(error, None)
        with server:
            service = Service(PmiJob("space", ["a", "a"], Limits(PATIENCE_S, 0.1), time.monotonic()), server)
            over = threading.Thread(target=service.run, name="pmi service", daemon=True)
            over.start()

            def rank_main(rank: int) -> None:
                try:
                    speaker = _Speaker(rank, server.port)
                    clients.append(speaker.client)
                except LaunchError as error:
                    problems[rank] = str(error)
                    return
                try:
                    speaker.ask("cmd=init pmi_version=1 pmi_subversion=1")
                    speaker.ask(f"cmd=put kvsname=space key=k{rank} value=v{rank}")
                    speaker.ask("cmd=barrier_in")
                    speaker.ask(f"cmd=get kvsname=space key=k{1 - rank}")
                    speaker.client.entered()
                    speaker.client.leave()
                    speaker.ask("cmd=finalize")
                except (OSError, EOFError) as error:
                    problems[rank] = repr(error)
                    if isinstance(error, TimeoutError) and not codes:
                        found.append(f"rank {rank} waits for ever for an answer of the PMI service")
                finally:
                    speaker.socket.close()

            threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in [*threads, over]:
                thread.join(DEADLINE_S)
                if thread.is_alive():
                    found.append(f"{thread.name} hangs")
            # In a job their processes end.
            for line in [*server.connections, *service._unknown, *service._watchers.values()]:
                line.close()
            for peer in service._pmi.values():
                peer.close()
            for client in clients:
                with contextlib.suppress(OSError):
                    client._watch._connection.shutdown(socket.SHUT_RDWR)
            # One that heard of it only after this would end the process, not its thread.
            if not _until(lambda: all(thread.name != "ocomm-pmi" for thread in threading.enumerate())):
                found.append("a rank waits for ever for the PMI service")
            for client in clients:
                client._watch.close()
    found += [f"rank {rank} does not know why: {why}" for rank, why in problems.items() if not why]
    return found


SCENARIOS: dict[str, Callable[[Calls], list[str]]] = {
    "commits": commits,
    "telemetry": telemetry,
    "supervised": supervised,
    "pmi": pmi,
}
