"""Runs an elastic job: one MPI job after the other, until one ends well or ``generations`` says that none can.

Other jobs on several hosts have one generation. They are supervised, too, because the launcher would wait for a host
that is lost. So are jobs that somebody watches.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import IO, Any

from ocomm import json_values
from ocomm.errors import LaunchError, clause
from ocomm.json_values import expect
from ocomm.launch import processes, reach, session_directory
from ocomm.launch.command import LaunchRequest, build
from ocomm.launch.flavour import Launcher
from ocomm.launch.generations import End, Failure, Generations, Limits, Start, Wait, blame
from ocomm.launch.hosts import Host, parse_discovered, total_slots
from ocomm.launch.reach import HostState
from ocomm.launch.server import Server
from ocomm.launch.watch import View, write_all
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError, wait
from ocomm.runtime.own_address import ALL_ADDRESSES
from ocomm.runtime.supervisor_client import KEY, SILENT
from ocomm.telemetry.counters import read_job

#: Seconds from the first report of a failure until the launcher is told to end, if it has not ended by itself; and from
#: then until it is killed.
END_S = 12.0
_KILL_S = 5.0
#: Longest wait for messages, and the time between two looks at the hosts, in seconds.
_POLL_S = 0.1
_DISCOVERY_S = 1.0
#: Limits for one run of the discovery script, and for the removal of commits, in seconds.
_DISCOVERY_TIMEOUT_S = 30.0
_CLEAN_S = 30.0
#: Variables of ranks: where their commits are kept, how often the job has been started, and where its supervisor is.
_FOLDER = "OCOMM_ELASTIC_FOLDER"
_GENERATION = "OCOMM_ELASTIC_GENERATION"
_SUPERVISOR = "OCOMM_ELASTIC_SUPERVISOR"


class Supervisor:
    """Supervises a job.

    Args:
        request: What to start in each generation, without hosts and number of ranks.
        launcher: The launcher of MPI.
        limits: The limits that the user has set.
        ask: Finds out which hosts can be reached.
        fixed: The hosts, if no ``script`` discovers them.
        states: What ``ask`` has just said of ``fixed``.
        script: A shell command that prints the hosts; None for ``fixed``.
        slots_per_host: The number of ranks of discovered hosts that come without one; None if all must have one.
        verbose: Whether to print the command lines.
        is_elastic: If False there is one generation, and nothing is kept for another.
        view: Shows what the ranks count; None if nobody watches.
    """

    def __init__(
        self,
        request: LaunchRequest,
        launcher: Launcher,
        limits: Limits,
        ask: Callable[[Sequence[str]], Sequence[HostState]],
        fixed: Sequence[Host] = (),
        states: Sequence[HostState] = (),
        script: str | None = None,
        slots_per_host: int | None = None,
        verbose: bool = False,
        is_elastic: bool = True,
        view: View | None = None,
    ) -> None:
        self._view = view
        self.is_elastic = is_elastic
        self.request = request
        self.launcher = launcher
        self.generations = Generations(limits, time.monotonic())
        self._ask = ask
        self._verbose = verbose
        self._asked_to_end = 0
        self._kept: dict[str, int] = {}  # states of the script, and the last commit of each
        self._used: dict[str, bool] = {}  # the hosts of all generations, and whether each is this machine
        self._key = secrets.token_bytes(32)
        self._session_folder = ""  # of the running generation's launcher; "" for the usual one
        given = request.environ.get(_FOLDER)
        self._is_own_folder = not given
        token = secrets.token_hex(4)
        self.folder = given or os.path.join(tempfile.gettempdir(), f"ocomm-elastic-{os.getuid()}-{token}")
        self._discovery = Discovery(script, slots_per_host) if script is not None else None
        if self._discovery is None:
            self.generations.found(fixed)
        self._fresh = {state.name: state for state in states}  # until the first generation has begun, or waits
        local = {state.name for state in states if state.is_local}
        self._is_here = script is None and all(host.name in local for host in fixed)

    def run(self) -> int:
        """Runs the job and returns its exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, self._end_on_signal)
        try:
            with Server(self._listens_at(), self._key) as server:
                return self._run(server)
        finally:
            if self._discovery is not None:
                self._discovery.close()
            if self._view is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._view.close()

    def _listens_at(self) -> str:
        """Returns the address of the port to which ranks connect."""
        if self._is_here:
            return "127.0.0.1"
        return reach.address_of(self.request.interfaces) if self.request.interfaces else ALL_ADDRESSES

    def _end_on_signal(self, number: int, frame: object) -> None:
        self._asked_to_end = number

    def _run(self, server: Server) -> int:
        code, said = 1, ""
        while not self._asked_to_end:
            has_looked = self._discovery is None or self._discovery.has_looked
            self._look_around()
            step = self.generations.next(time.monotonic())
            if isinstance(step, End):
                why = step.why.rstrip(".") + ("" if has_looked else "; --host-discovery-script has not ended yet")
                if self.is_elastic:
                    _say(f"the job ends: {why}.{self._where_commits_are()}")
                return code or 1
            if isinstance(step, Wait):
                self._fresh = {}
                if step.why != said and has_looked:
                    said = step.why
                    _say(f"waiting: {step.why}")
                time.sleep(_POLL_S)
                continue
            states = self._states([host.name for host in step.hosts])
            if self._has_lost(states):
                continue
            job = self._start(step, states, server.port)
            code = job.watch(server, self)
            if self._session_folder:
                shutil.rmtree(self._session_folder, ignore_errors=True)
            if self._asked_to_end:
                break
            now_s = time.monotonic()
            if code == 0 and job.has_left:
                self.generations.left(now_s)
                _say(f"generation {step.number} has made way for one on other hosts")
            elif code == 0:
                self._clean()
                return 0
            else:
                failures = job.failures(self._lost)
                self.generations.ended(now_s, failures, f"the launcher ended with status {code}")
                who = "; ".join(map(str, failures)) or f"the launcher ended with status {code}"
                if self.is_elastic:
                    _say(f"generation {step.number} failed: {who}; its last commit was {job.commit or 'none'}")
                    if not _is_read():  # the next generation would end as this one, when it prints
                        self._asked_to_end = signal.SIGPIPE
                elif failures:
                    _say(f"the job failed: {who}")
        _say(f"ended by {signal.Signals(self._asked_to_end).name}.{self._where_commits_are()}")
        return 128 + self._asked_to_end

    # Hosts

    def _look_around(self) -> None:
        if self._discovery is not None and (hosts := self._discovery.hosts()) is not None:
            self.generations.found(hosts)

    def _states(self, names: Sequence[str]) -> Sequence[HostState]:
        """Returns what is known of hosts on which a generation is to start; asks unless it was found out just now."""
        fresh, self._fresh = self._fresh, {}
        return [fresh[name] for name in names] if fresh.keys() >= {*names} else self._ask(names)

    def _has_lost(self, states: Sequence[HostState]) -> bool:
        """Returns True if some hosts cannot be reached, and keeps these out of the next generation."""
        lost = [state for state in states if state.problem is not None]
        if lost:
            failures = [Failure(state.name, None, f"cannot be reached: {state.problem}", True) for state in lost]
            self.generations.unreachable(time.monotonic(), failures)
            _say("; ".join(map(str, failures)))
        return bool(lost)

    def _lost(self, names: Sequence[str]) -> dict[str, bool]:
        """Returns, for hosts whose ranks have been silent, whether they cannot be reached."""
        states = self._ask(names)
        return {state.name: not state.is_local and not state.has_answered for state in states}

    def wants_others(self) -> bool:
        """Returns True if the running generation should make way for one on other hosts."""
        self._look_around()
        now_s = time.monotonic()
        if not self.generations.wants_others(now_s):
            return False
        in_use = {host.name for host in self.generations.running}
        added = [host.name for host in self.generations.outlook(now_s) if host.name not in in_use]
        # The generation goes on rather than make way for a host on which nothing can start.
        return not self._has_lost(self._ask(added)) or self.generations.wants_others(time.monotonic())

    @property
    def asked_to_end(self) -> int:
        """The signal that has asked this process to end; 0 if none has."""
        return self._asked_to_end

    # Generations

    def _start(self, step: Start, states: Sequence[HostState], port: int) -> _Job:
        hosts = {state.name: state.is_local for state in states}
        self._used |= hosts
        settings = {
            **self.request.settings,
            **({_FOLDER: self.folder} if self.is_elastic else {}),
            _GENERATION: str(step.number),
            _SUPERVISOR: ",".join(f"{name}:{port}" for name in self._addresses(hosts)),
        }
        ranks = total_slots(step.hosts)
        torch_environ = self.request.torch_environ
        if torch_environ is not None:
            torch_environ = reach.torch_environ(
                step.hosts[0].name, states, self.request.interfaces, self.request.environ
            )
        output = self.request.output_directory
        if output is not None and self.is_elastic:
            output = os.path.join(output, f"generation.{step.number}")
        line = build(
            replace(
                self.request,
                output_directory=output,
                hosts=step.hosts,
                own_names=reach.own_names(states),
                num_proc=ranks,
                spans_hosts=not all(hosts.values()),
                settings=settings,
                torch_environ=torch_environ,
                environ={**self.request.environ, KEY: ""},
            ),
            self.launcher,
        )
        if self.is_elastic:
            _say(f"generation {step.number}: {ranks} ranks on {','.join(map(str, step.hosts))}")
        if self._verbose:
            _say(str(line))
        if line.make_directory is not None:
            make_folder(line.make_directory)
        # What the line adds comes last, because with Hydra it has to (``command._LAST``).
        environ = {**self.request.environ, KEY: self._key.hex(), **line.added_environ}
        if self.launcher.flavour.is_open_mpi and self._is_here and session_directory.BASE not in environ:
            # One that is killed leaves a folder, which the launcher of a later generation could not have.
            environ[session_directory.BASE] = self._session_folder = session_directory.new_folder()
        return _Job(line.argv, environ, step, self.generations.limits.patience_s, self._view, self._kept)

    def _addresses(self, hosts: Mapping[str, bool]) -> list[str]:
        address = self._listens_at()
        return reach.own_addresses(hosts) if address == ALL_ADDRESSES else [address]

    def _where_commits_are(self) -> str:
        if not self.generations.commit:
            return ""
        where = f"{self.folder} on {', '.join(self._used)}"
        return (
            f" Commits up to {self.generations.commit} are in {where}; a job with that OCOMM_ELASTIC_FOLDER goes on "
            "from the last one that is whole."
        )

    def _clean(self) -> None:
        """Removes the commits of a job that has ended well, on all hosts that it has used."""
        if not self._is_own_folder or not self.is_elastic:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        lost = self.generations.lost
        others = [name for name, is_local in self._used.items() if not is_local and name not in lost]
        there = [state.name for state in self._ask(others) if state.problem is None] if others else []
        if not there:
            return
        request = replace(
            self.request,
            hosts=tuple(Host(name, 1) for name in there),
            num_proc=len(there),
            spans_hosts=True,
            command=("rm", "-rf", self.folder),
            torch_environ=None,
        )
        line = build(request, self.launcher)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                line.argv,
                env={**self.request.environ, **line.added_environ},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_CLEAN_S,
            )


class _Job:
    """One generation: the launcher's process, and the connections to its ranks."""

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        step: Start,
        patience_s: float,
        view: View | None = None,
        kept: dict[str, int] | None = None,
    ) -> None:
        self.step = step
        self._view = view
        self._kept = {} if kept is None else kept
        self.ranks = total_slots(step.hosts)
        self.commit = 0
        self.has_left = False
        self._hosts: dict[int, str] = {}
        self._lines: dict[AuthenticatedSocket, int] = {}
        self._reported: dict[int, str] = {}
        self._vanished: dict[AuthenticatedSocket, int] = {}
        # In this order. The launcher ends all ranks as soon as one has died, and this process may be late to look.
        self._ended: list[AuthenticatedSocket] = []
        self._told = False
        self._words = ""
        self._here_until_s = time.monotonic() + patience_s
        self._end_s: float | None = None  # time by which the launcher must have ended
        self._ending = signal.SIGTERM  # what asks the launcher to end
        self._is_terminated = False  # has it been asked?
        self._offspring: dict[int, str] = {}  # its processes when it was, and when they were started
        self._looked_s = 0.0  # when hosts were looked for last
        self._process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if view is not None and view.takes_output else None,
            stderr=subprocess.PIPE,
            # An interrupt at the terminal reaches this process only, which then ends the launcher in order.
            start_new_session=True,
            preexec_fn=processes.end_with_parent,
        )
        # The launcher says on stderr what has failed.
        pipes = (self._process.stderr, self._note), (self._process.stdout, lambda data: None)
        self._readers = [
            threading.Thread(target=self._pass_on, args=(pipe, note), name="ocomm-output", daemon=True)
            for pipe, note in pipes
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    def _pass_on(self, pipe: IO[bytes], note: Callable[[bytes], None]) -> None:
        """Prints what the launcher and the ranks write.

        If nobody reads that, the launcher hears so when it writes, as if it printed by itself. It would wait for ever
        for a pipe that is not emptied. Words that cannot be printed for another reason, such as a full disk, are lost.
        """
        with pipe:
            while data := os.read(pipe.fileno(), 65536):
                note(data)
                try:
                    if self._view is not None:
                        self._view.write(data)
                    else:
                        write_all(sys.stderr, data)
                except BrokenPipeError:
                    return
                except OSError:
                    pass

    def _note(self, data: bytes) -> None:
        """Keeps the end of what the launcher has written, for diagnosis."""
        self._words = (self._words + data.decode(errors="replace"))[-20_000:]

    def watch(self, server: Server, supervisor: Supervisor) -> int:
        """Waits until the launcher has ended, and returns its exit status."""
        while (code := self._process.poll()) is None:
            self._listen(server)
            now_s = time.monotonic()
            self._decide_end(supervisor.asked_to_end, now_s)
            if self._end_s is not None:
                self._end(self._end_s, now_s)
            elif now_s - self._looked_s >= _DISCOVERY_S:
                self._looked_s = now_s
                self._look_for_hosts(supervisor)
            supervisor.generations.committed(self.commit)
        self._hear_the_rest(server, has_ended_well=code == 0)
        supervisor.generations.committed(self.commit)
        self._clear_up(server)
        if code == 0 and self._has_failed():
            return 1  # Open MPI's launcher ends with 0 if it has lost a host, Hydra if a rank left MPI_Finalize out
        return code if code >= 0 else 128 - code

    def _decide_end(self, asked_to_end: int, now_s: float) -> None:
        """Sets the time by which the launcher must have ended, if there is a reason why it should."""
        if asked_to_end:
            # Hydra passes an interrupt on, and so the ranks raise KeyboardInterrupt.
            self._ending = signal.SIGINT if asked_to_end == signal.SIGINT else signal.SIGTERM
            self._end_s = now_s if self._end_s is None else min(self._end_s, now_s)
        elif self._end_s is not None:
            return
        elif self._reported or self._vanished:
            self._end_s = now_s + END_S
        elif len(self._hosts) < self.ranks and now_s > self._here_until_s:
            _say(f"ranks {list(self._never_came())} have not come to init() in time")
            self._end_s = now_s

    def _end(self, end_s: float, now_s: float) -> None:
        """Ends the launcher if it should have ended by ``end_s`` and has not, some time later without asking it."""
        if now_s >= end_s and not self._is_terminated:
            self._is_terminated = True
            self._offspring = processes.offspring(self._process.pid)
            self._process.send_signal(self._ending)
        if now_s >= end_s + _KILL_S:
            processes.kill_group(self._process.pid)

    def _look_for_hosts(self, supervisor: Supervisor) -> None:
        if not self._told and supervisor.wants_others():
            self._told = True
            _say("the hosts have changed; the ranks make way at their next commit")
            self._tell(self._lines)

    def _hear_the_rest(self, server: Server, has_ended_well: bool) -> None:
        """Takes in what ranks have said and was not heard while they ran, above all why they end.

        A launcher that has lost a host may end as if all were well, before its ranks do: their ends are waited for.
        """
        last_s = time.monotonic() + END_S
        while self._listen(server) or (has_ended_well and self._running() and not self._has_failed()):
            if time.monotonic() >= last_s:
                break
        if has_ended_well and not self._has_failed():
            self._reported = dict.fromkeys(self._running(), f"{SILENT}: the launcher has ended before it")

    def _running(self) -> list[int]:
        """Returns the ranks that have come to ``init()``, and have neither ended nor said that they will."""
        return [rank for rank in self._lines.values() if rank >= 0]

    def _has_failed(self) -> bool:
        """Returns True if ranks or the launcher have said so, whatever the launcher's exit status is."""
        return bool(self._reported or self._vanished or lost_daemons(self._words))

    def _clear_up(self, server: Server) -> None:
        """Ends the processes that the launcher has left on this machine, and the connections to ranks."""
        processes.kill_group(self._process.pid)  # an ssh to a lost host keeps our output open
        for pid, started in self._offspring.items():
            if processes.start_of(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)
        for line in self._lines:
            server.end(line)

    def _tell(self, lines: Sequence[AuthenticatedSocket] | Mapping[AuthenticatedSocket, int]) -> None:
        for line in list(lines):
            with contextlib.suppress(OSError):
                line.send(b'{"word": "hosts"}')

    def _listen(self, server: Server) -> bool:
        """Takes in a message of each rank that has sent one. Returns False if none has for a while."""
        while server.lines:
            self._lines[server.lines.pop()] = -1
        if not self._lines:
            time.sleep(_POLL_S)
        heard = wait(list(self._lines), _POLL_S)
        for line in heard:
            try:
                self._hear(line, json_values.parse(line.receive()))
            except (EOFError, OSError, ValueError) as error:
                self._ended += server.ended()
                rank = self._lines.pop(line)
                server.end(line)
                if rank >= 0 and isinstance(error, (TamperedError, TimeoutError, ValueError)):
                    self._reported.setdefault(rank, f"cannot be heard any more: {error}")
                elif rank >= 0:
                    self._vanished[line] = rank
        return bool(heard)

    def _hear(self, line: AuthenticatedSocket, message: Any) -> None:
        """Takes in a message. Raises ValueError if it is none that a rank sends."""
        (word,) = json_values.fields(message, "word")
        if word == "here":
            rank, host, generation = json_values.fields(message, "rank", "host", "generation")
            if generation != self.step.number:
                raise EOFError  # the connection is of a generation that is over
            self._lines[line] = json_values.rank(rank, self.ranks)
            self._hosts[rank] = expect(host, str)
            if self._told:
                self._tell([line])
        elif word == "commit":
            number, state = expect(message.get("number"), int), expect(message.get("state"), str)
            self.commit = max(self.commit, number)
            self._kept[state] = number
        elif word == "anew":
            state, folder = (expect(message.get(name), str) for name in ("state", "folder"))
            if number := self._kept.pop(state, 0):
                _say(
                    f"commit {number} is gone: generation {self.step.number} has found none in {folder} on "
                    f"{', '.join(host.name for host in self.step.hosts)}, and begins anew"
                )
        elif word == "counters":
            if self._view is not None:
                job = read_job(message.get("job"))
                with contextlib.suppress(OSError, ValueError):  # whoever has watched is gone
                    self._view.show(job)
        elif word == "lost":
            for rank, why in expect(message.get("ranks"), dict).items():
                self._reported.setdefault(json_values.rank(int(rank), self.ranks), expect(why, str))
        elif word == "late":
            self._reported = {**self._never_came(), **self._reported}
        elif word in ("leave", "bye"):
            self.has_left = self.has_left or word == "leave"
            self._lines[line] = -1  # its connection may end now

    def _never_came(self) -> dict[int, str]:
        """Returns the ranks that have not come to ``init()``, and says so of each."""
        return {rank: f"{SILENT}: it never came to init()" for rank in range(self.ranks) if rank not in self._hosts}

    def _name_of(self, rank: int) -> str:
        """Returns the name by which the supervisor knows a rank's host. If the rank's own name for it is another, ranks
        fill the hosts in order.
        """
        own = self._hosts.get(rank, "")
        for host in self.step.hosts:
            if own and host.name.partition(".")[0] == own.partition(".")[0]:
                return host.name
        for host in self.step.hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        raise LaunchError(f"there is a rank too many: {rank}")

    def failures(self, lost: Callable[[Sequence[str]], dict[str, bool]]) -> list[Failure]:
        """Returns the failures that ended this generation. ``lost`` finds out which of some hosts cannot be reached."""
        signalled, exited = said_by_launcher(self._words)
        names = {rank: self._name_of(rank) for rank in range(self.ranks)}
        reported = self._reported
        if not reported and time.monotonic() > self._here_until_s:
            reported = self._never_came()
        silent = sorted({names[rank] for rank, why in reported.items() if rank in names and why.startswith(SILENT)})
        vanished = [self._vanished[line] for line in self._ended if line in self._vanished]
        absent = list(self._never_came())
        daemons = lost_daemons(self._words)
        if daemons:
            vanished = []  # the launcher has ended the ranks of the other hosts
        failures = blame(signalled, reported, exited, vanished, absent, names, lost(silent) if silent else {})
        named = list(filter(None, daemons))
        if not named or any(failure.host in named for failure in failures):
            return failures
        is_lost = lost(named)
        return [Failure(host, None, "has lost the launcher's daemon", is_lost[host]) for host in named]


class Discovery:
    """Runs the user's script repeatedly to find the hosts, on a thread of its own, because it may take long.

    A script that fails at first is wrong, and is not run again. Later it may be the cluster, and the hosts stay what
    they were.
    """

    def __init__(self, script: str, slots_per_host: int | None) -> None:
        self._script = script
        self._slots = slots_per_host
        self._found: tuple[Host, ...] | None = None
        self._trouble = ""
        self.has_looked = False
        self._closing = threading.Event()
        self._lock = threading.Lock()  # no script starts once _closing is set
        self._running: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._look, name="ocomm-discovery", daemon=True)
        self._thread.start()

    def hosts(self) -> tuple[Host, ...] | None:
        """Returns the hosts that the script has printed last; None before that. Raises LaunchError if it failed at
        first.
        """
        if self._found is None and self._trouble:
            raise LaunchError(f"--host-discovery-script {self._script}: {self._trouble}. Nothing was started.")
        return self._found

    def close(self) -> None:
        """Ends the script, if it runs, and everything that it has started. It is not run again."""
        self._closing.set()
        with self._lock:
            if self._running is not None:
                processes.kill_group(self._running.pid)
        self._thread.join(_KILL_S)

    def _look(self) -> None:
        while not self._closing.is_set():
            try:
                self._found = parse_discovered(self._output(), self._slots)
                self._trouble = ""
            except Exception as error:
                trouble = clause(error)
                if trouble != self._trouble and not self._closing.is_set():
                    self._trouble = trouble
                    if self._found is None:
                        return
                    _say(f"--host-discovery-script {self._script}: {trouble}")
            finally:
                self.has_looked = True
            self._closing.wait(_DISCOVERY_S)

    def _output(self) -> str:
        """Runs the script, and returns what it prints. Raises LaunchError if it fails, or has no end in time."""
        with self._lock:
            if self._closing.is_set():
                return ""
            self._running = subprocess.Popen(
                self._script,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",  # a name with such a character is refused
                start_new_session=True,  # so that it can be ended with its children, which hold its output open
            )
        with self._running as script:
            try:
                output, words = script.communicate(timeout=_DISCOVERY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                processes.kill_group(script.pid)
                raise LaunchError(f"it has not ended in {_DISCOVERY_TIMEOUT_S:.0f} s, and was killed") from None
            finally:
                with self._lock:
                    self._running = None
        if script.returncode:
            hint = ""
            if os.path.isfile(self._script) and script.returncode in (126, 127):  # the shell cannot run, or find, it
                hint = f" (write ./{self._script})" if script.returncode == 127 else f" (chmod +x {self._script})"
            said = words.strip()[-200:]
            raise LaunchError(f"it ended with status {script.returncode}{said and f': {said}'}{hint}")
        return output


_SIGNAL = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)")
_STATUS = re.compile(r"Process name: \[\S+@\d+,(\d+)\]\s+Exit code:\s+(\d+)")
_DAEMON = re.compile(
    r"lost\s+communication\s+with\s+a\s+remote\s+daemon.*?Remote\s+daemon:\s+\[\S+\]\s+on\s+node\s+(\S+)|"
    r"returned\s+non-zero\s+exit\s+status\s+\(\d+\)\s+from\s+launching\s+the\s+per-node\s+daemon",
    re.DOTALL,
)


def said_by_launcher(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the ranks that Open MPI's launcher names in its output: those ended by a signal, and those with an exit
    status.
    """
    signalled = {int(rank): f"was ended by signal {number}" for rank, number in _SIGNAL.findall(text)}
    return signalled, {int(rank): f"ended with status {code}" for rank, code in _STATUS.findall(text)}


def leave_supervised_job(environ: MutableMapping[str, str]) -> None:
    """Removes from ``environ`` what a supervisor has told its ranks, one of which starts another job. That job would
    look for a supervisor that is not its own, and take over the commits of this rank's job.
    """
    if _SUPERVISOR in environ:
        for name in (_SUPERVISOR, _GENERATION, _FOLDER, KEY):
            environ.pop(name, None)


def lost_daemons(text: str) -> list[str]:
    """Returns the hosts whose daemon Open MPI's launcher has lost, as it says in its output; "" for one of an
    allocation that it does not name.
    """
    return _DAEMON.findall(text)


def make_folder(path: str) -> None:
    """Makes the folder for the output of ranks. Raises LaunchError if it cannot be made or written to."""
    try:
        os.makedirs(path, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=path))
    except OSError as error:
        raise LaunchError(f"--output-filename {path}: {error.strerror}; nothing was started.") from None


def _is_read() -> bool:
    """Returns False if what this process and its job print goes into a pipe that nobody reads any more."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        write_all(sys.stderr, f"ocommrun: {text}\n".encode(errors="backslashreplace"))
