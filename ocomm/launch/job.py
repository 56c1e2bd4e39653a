"""One generation that runs: the launcher's process, its output, and the connections of its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from ocomm import json_values
from ocomm.launch import processes
from ocomm.launch.failures import Failure, lost_daemons
from ocomm.launch.generations import Start
from ocomm.launch.output import say, write_all
from ocomm.launch.reports import END_S, Deadline, Reports
from ocomm.launch.server import Server
from ocomm.launch.watch import View
from ocomm.runtime.authenticated_socket import AuthenticatedSocket, TamperedError, wait
from ocomm.runtime.supervisor_client import SILENT

#: Seconds from when the launcher is told to end until it is killed.
_KILL_S = 5.0
#: Longest wait for messages, in seconds.
_POLL_S = 0.1


class LauncherProcess:
    """The process of a launcher, whose output is passed on to ``view``, or to stderr if nobody watches."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], view: View | None) -> None:
        self.printed = ""  # the end of what it has written to stderr: there it says what has failed
        self._view = view
        self._offspring: dict[int, str] | None = None  # its processes when it was told to end, and their start times
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
        self.printed = (self.printed + data.decode(errors="replace"))[-20_000:]

    def poll(self) -> int | None:
        """Returns the exit status of the launcher; None while it runs."""
        return self._process.poll()

    def end(self, deadline: Deadline, now_s: float) -> None:
        """Tells the launcher to end if it should have ended by now, and kills it if it should have long ago."""
        if now_s >= deadline.at_s and self._offspring is None:
            self._offspring = processes.offspring(self._process.pid)
            self._process.send_signal(deadline.signal_number)
        if now_s >= deadline.at_s + _KILL_S:
            processes.kill_group(self._process.pid)

    def clear_up(self) -> None:
        """Ends the processes that the launcher has left on this machine."""
        processes.kill_group(self._process.pid)  # an ssh to a lost host keeps our output open
        for pid, started in (self._offspring or {}).items():
            if processes.start_of(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)


class Job:
    """Generation ``step``: starts the launcher, hears the ranks, and does what ``Reports`` decide.

    All ranks have ``patience_s`` to come to ``init()``. ``view`` shows what they count; None if nobody watches.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        step: Start,
        patience_s: float,
        view: View | None = None,
        kept: dict[str, int] | None = None,
    ) -> None:
        self.reports = Reports(step, {} if kept is None else kept, time.monotonic() + patience_s)
        self.makes_way = False  # have its ranks been told to make way for another generation?
        self.deadline = Deadline()
        self._view = view
        self._connections: dict[AuthenticatedSocket, int] = {}  # the rank of each; -1 if its end is no failure
        self._vanished: dict[AuthenticatedSocket, int] = {}
        # In this order. The launcher ends all ranks as soon as one has died, and this process may be late to look.
        self._ended: list[AuthenticatedSocket] = []
        self._launcher = LauncherProcess(argv, environ, view)

    def attend(self, server: Server, asked_to_end: int) -> int | None:
        """Listens to the ranks for a while, and ends the launcher if it should have ended, or if a signal has
        ``asked_to_end``. Returns the exit status of the generation once the launcher has ended; None before that.
        """
        code = self._launcher.poll()
        if code is None:
            self._listen(server)
            now_s, before = time.monotonic(), self.deadline
            self.deadline = self.reports.deadline(before, now_s, asked_to_end, bool(self._vanished))
            if self.deadline.why and self.deadline is not before:
                say(self.deadline.why)
            self._launcher.end(self.deadline, now_s)
            return None
        self._hear_the_rest(server, has_ended_well=code == 0)
        self._launcher.clear_up()
        for connection in self._connections:
            server.end(connection)
        if code == 0 and self._has_failed():
            return 1  # Open MPI's launcher ends with 0 if it has lost a host, Hydra if a rank left MPI_Finalize out
        return code if code >= 0 else 128 - code

    def make_way(self) -> None:
        """Tells the ranks to end at their next commit, for a generation on other hosts."""
        self.makes_way = True
        say("the hosts have changed; the ranks make way at their next commit")
        self._tell(self._connections)

    def failures(self, lost: Callable[[Sequence[str]], dict[str, bool]]) -> list[Failure]:
        """Returns the failures that ended this generation. ``lost`` finds out which of some hosts cannot be reached."""
        died = [self._vanished[connection] for connection in self._ended if connection in self._vanished]
        return self.reports.failures(self._launcher.printed, died, time.monotonic(), lost)

    def _hear_the_rest(self, server: Server, has_ended_well: bool) -> None:
        """Takes in what ranks have said and was not heard while they ran, above all why they end.

        A launcher that has lost a host may end as if all were well, before its ranks do: their ends are waited for.
        """
        last_s = time.monotonic() + END_S
        while self._listen(server) or (has_ended_well and self._running() and not self._has_failed()):
            if time.monotonic() >= last_s:
                break
        if has_ended_well and not self._has_failed():
            self.reports.failed = dict.fromkeys(self._running(), f"{SILENT}: the launcher has ended before it")

    def _running(self) -> list[int]:
        """Returns the ranks that have come to ``init()``, and have neither ended nor said that they will."""
        return [rank for rank in self._connections.values() if rank >= 0]

    def _has_failed(self) -> bool:
        """Returns True if ranks or the launcher have said so, whatever the launcher's exit status is."""
        return bool(self.reports.failed or self._vanished or lost_daemons(self._launcher.printed))

    def _tell(self, connections: Iterable[AuthenticatedSocket]) -> None:
        for connection in list(connections):
            with contextlib.suppress(OSError):
                connection.send(b'{"word": "hosts"}')

    def _listen(self, server: Server) -> bool:
        """Takes in a message of each rank that has sent one. Returns False if none has for a while."""
        while server.connections:
            self._connections[server.connections.pop()] = -1
        heard = wait(list(self._connections), _POLL_S)
        for connection in heard:
            try:
                self._hear(connection)
            except (EOFError, OSError, ValueError) as error:
                self._ended += server.ended()
                rank = self._connections.pop(connection)
                server.end(connection)
                if rank >= 0 and isinstance(error, (TamperedError, TimeoutError, ValueError)):
                    self.reports.failed.setdefault(rank, f"cannot be heard any more: {error}")
                elif rank >= 0:
                    self._vanished[connection] = rank
        return bool(heard)

    def _hear(self, connection: AuthenticatedSocket) -> None:
        heard = self.reports.hear(self._connections[connection], json_values.parse(connection.receive()))
        has_come = self._connections[connection] < 0 <= heard.rank
        self._connections[connection] = heard.rank
        if has_come and self.makes_way:
            self._tell([connection])
        if heard.notice:
            say(heard.notice)
        if heard.counters is not None and self._view is not None:
            with contextlib.suppress(OSError, ValueError):  # whoever has watched is gone
                self._view.show(heard.counters)
