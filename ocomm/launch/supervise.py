"""Runs an elastic job: one MPI job after the other, until one ends well or ``generations`` says that none can.

Other jobs on several hosts have one generation. They are supervised, too, because the launcher would wait for a host
that is lost. So are jobs that somebody watches.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace

from ocomm.launch import reach, session_directory
from ocomm.launch.command import LaunchRequest, build
from ocomm.launch.commit_folder import FOLDER, CommitFolder
from ocomm.launch.discovery import PERIOD_S, Discovery
from ocomm.launch.failures import Failure
from ocomm.launch.flavour import Launcher
from ocomm.launch.generations import End, Generations, Limits, Start, Wait
from ocomm.launch.hosts import Host, total_slots
from ocomm.launch.job import Job
from ocomm.launch.output import is_read, make_folder, say
from ocomm.launch.reach import HostState
from ocomm.launch.server import Server
from ocomm.launch.watch import View
from ocomm.runtime.own_address import ALL_ADDRESSES
from ocomm.runtime.supervisor_client import KEY

#: Seconds between two looks at what to wait for.
_POLL_S = 0.1
#: Variables of ranks: how often the job has been started, and where its supervisor is.
_GENERATION = "OCOMM_ELASTIC_GENERATION"
_SUPERVISOR = "OCOMM_ELASTIC_SUPERVISOR"


class Supervisor:
    """Supervises a job.

    Args:
        request: What to start in each generation, without hosts and number of ranks.
        launcher: The launcher of MPI.
        limits: The limits that the user has set.
        ask: Finds out which hosts can be reached.
        fixed: The hosts, if nothing discovers them.
        states: What ``ask`` has just said of ``fixed``.
        discovery: Discovers the hosts; None for ``fixed``.
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
        discovery: Discovery | None = None,
        verbose: bool = False,
        is_elastic: bool = True,
        view: View | None = None,
    ) -> None:
        self.request = request
        self.launcher = launcher
        self.generations = Generations(limits, time.monotonic())
        self.commits = CommitFolder(request.environ) if is_elastic else None
        self._ask = ask
        self._discovery = discovery
        self._verbose = verbose
        self._view = view
        self._asked_to_end = 0  # the signal that has
        self._kept: dict[str, int] = {}  # states of the script, and the last commit of each
        self._key = secrets.token_bytes(32)
        self._session_folder = ""  # of the running generation's launcher; "" for the usual one
        if discovery is None:
            self.generations.found(fixed)
        self._just_asked = {state.name: state for state in states}  # until the first generation has begun, or waits
        local = reach.own_names(states)
        self._is_here = discovery is None and all(host.name in local for host in fixed)

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
            self._discover()
            step = self.generations.next(time.monotonic())
            if isinstance(step, End):
                why = step.why.rstrip(".") + ("" if has_looked else "; --host-discovery-script has not ended yet")
                if self.commits is not None:
                    say(f"the job ends: {why}.{self._where_commits_are()}")
                return code or 1
            if isinstance(step, Wait):
                self._just_asked = {}
                if step.why != said and has_looked:
                    said = step.why
                    say(f"waiting: {step.why}")
                time.sleep(_POLL_S)
            elif not self._has_lost(states := self._states([host.name for host in step.hosts])):
                job = self._start(step, states, server.port)
                code = self._watch(job, server)
                if not self._asked_to_end and self._ended(job, code):
                    return 0
        say(f"ended by {signal.Signals(self._asked_to_end).name}.{self._where_commits_are()}")
        return 128 + self._asked_to_end

    def _where_commits_are(self) -> str:
        return self.commits.where(self.generations.commit) if self.commits is not None else ""

    # Hosts

    def _discover(self) -> None:
        if self._discovery is not None and (hosts := self._discovery.hosts()) is not None:
            self.generations.found(hosts)

    def _states(self, names: Sequence[str]) -> Sequence[HostState]:
        """Returns what is known of hosts on which a generation is to start; asks unless it was found out just now."""
        known, self._just_asked = self._just_asked, {}
        return [known[name] for name in names] if known.keys() >= {*names} else self._ask(names)

    def _has_lost(self, states: Sequence[HostState]) -> bool:
        """Returns True if some hosts cannot be reached, and keeps these out of the next generation."""
        lost = [state for state in states if state.problem is not None]
        if lost:
            failures = [Failure(state.name, None, f"cannot be reached: {state.problem}", True) for state in lost]
            self.generations.unreachable(time.monotonic(), failures)
            say("; ".join(map(str, failures)))
        return bool(lost)

    def _lost(self, names: Sequence[str]) -> dict[str, bool]:
        """Returns, for hosts whose ranks have been silent, whether they cannot be reached."""
        return {state.name: not state.is_local and not state.has_answered for state in self._ask(names)}

    def wants_others(self) -> bool:
        """Returns True if the running generation should make way for one on other hosts."""
        self._discover()
        now_s = time.monotonic()
        if not self.generations.wants_others(now_s):
            return False
        in_use = {host.name for host in self.generations.running}
        added = [host.name for host in self.generations.outlook(now_s) if host.name not in in_use]
        # The generation goes on rather than make way for a host on which nothing can start.
        return not self._has_lost(self._ask(added)) or self.generations.wants_others(time.monotonic())

    # Generations

    def _start(self, step: Start, states: Sequence[HostState], port: int) -> Job:
        request = reach.placed(self._of_generation(step, states, port), step.hosts, states)
        line = build(request, self.launcher)
        if self.commits is not None:
            self.commits.hosts |= {state.name: state.is_local for state in states}
            say(f"generation {step.number}: {request.num_proc} ranks on {','.join(map(str, step.hosts))}")
        if self._verbose:
            say(str(line))
        if line.make_directory is not None:
            make_folder(line.make_directory)
        # What the line adds comes last, because with Hydra it has to (``command._LAST``).
        environ = {**self.request.environ, KEY: self._key.hex(), **line.added_environ}
        if self.launcher.flavour.is_open_mpi and self._is_here and session_directory.BASE not in environ:
            # One that is killed leaves a folder, which the launcher of a later generation could not have.
            environ[session_directory.BASE] = self._session_folder = session_directory.new_folder()
        return Job(line.argv, environ, step, self.generations.limits.patience_s, self._view, self._kept)

    def _of_generation(self, step: Start, states: Sequence[HostState], port: int) -> LaunchRequest:
        """Returns what to start as a generation, whose ranks connect to ``port``."""
        address = self._listens_at()
        addresses = reach.own_addresses(states) if address == ALL_ADDRESSES else [address]
        settings = {_GENERATION: str(step.number), _SUPERVISOR: ",".join(f"{name}:{port}" for name in addresses)}
        output = self.request.output_directory
        if self.commits is not None:
            settings = {FOLDER: self.commits.path, **settings}
            output = output and os.path.join(output, f"generation.{step.number}")
        return replace(
            self.request,
            output_directory=output,
            num_proc=total_slots(step.hosts),
            settings={**self.request.settings, **settings},
            environ={**self.request.environ, KEY: ""},
        )

    def _watch(self, job: Job, server: Server) -> int:
        """Waits until the generation has ended, or is to make way, and returns its exit status."""
        looked_s = 0.0
        while (code := job.attend(server, self._asked_to_end)) is None:
            now_s = time.monotonic()
            if math.isinf(job.deadline.at_s) and now_s - looked_s >= PERIOD_S:
                looked_s = now_s
                if not job.makes_way and self.wants_others():
                    job.make_way()
            self.generations.committed(job.reports.commit)
        self.generations.committed(job.reports.commit)
        if self._session_folder:
            shutil.rmtree(self._session_folder, ignore_errors=True)
        return code

    def _ended(self, job: Job, code: int) -> bool:
        """Notes how a generation has ended, and returns True if the job is over because it has ended well."""
        now_s, number = time.monotonic(), job.reports.step.number
        if code == 0 and job.reports.has_left:
            self.generations.left(now_s)
            say(f"generation {number} has made way for one on other hosts")
            return False
        if code == 0:
            if self.commits is not None:
                self.commits.remove(self.request, self.launcher, self._ask, self.generations.lost)
            return True
        failures = job.failures(self._lost)
        ended = f"the launcher ended with status {code}"
        self.generations.ended(now_s, failures, ended)
        who = "; ".join(map(str, failures))
        if self.commits is not None:
            say(f"generation {number} failed: {who or ended}; its last commit was {job.reports.commit or 'none'}")
            if not is_read():  # the next generation would end as this one, when it prints
                self._asked_to_end = signal.SIGPIPE
        elif failures:
            say(f"the job failed: {who}")
        return False


def leave_supervised_job(environ: MutableMapping[str, str]) -> None:
    """Removes from ``environ`` what a supervisor has told its ranks, one of which starts another job. That job would
    look for a supervisor that is not its own, and take over the commits of this rank's job.
    """
    if _SUPERVISOR in environ:
        for name in (_SUPERVISOR, _GENERATION, FOLDER, KEY):
            environ.pop(name, None)
