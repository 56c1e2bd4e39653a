"""Discovers the hosts of an elastic job: runs the script that the user has given with --host-discovery-script."""

from __future__ import annotations

import os
import subprocess
import threading

from ocomm.errors import LaunchError, clause
from ocomm.launch import processes
from ocomm.launch.hosts import Host, parse_discovered
from ocomm.launch.output import say

#: Seconds between two runs of the script, limit for one, and for the thread that runs it to end.
PERIOD_S = 1.0
_TIMEOUT_S = 30.0
_END_S = 5.0


class Discovery:
    """Runs the script repeatedly, on a thread of its own, because it may take long.

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
        self._thread.join(_END_S)

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
                    say(f"--host-discovery-script {self._script}: {trouble}")
            finally:
                self.has_looked = True
            self._closing.wait(PERIOD_S)

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
                output, words = script.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                processes.kill_group(script.pid)
                raise LaunchError(f"it has not ended in {_TIMEOUT_S:.0f} s, and was killed") from None
            finally:
                with self._lock:
                    self._running = None
        if script.returncode:
            said = words.strip()[-200:]
            how = f"it ended with status {script.returncode}{said and f': {said}'}"
            raise LaunchError(how + self._hint(script.returncode))
        return output

    def _hint(self, status: int) -> str:
        """Returns what to do if the shell has not found, or could not run, the script."""
        if status not in (126, 127) or not os.path.isfile(self._script):
            return ""
        return f" (write ./{self._script})" if status == 127 else f" (chmod +x {self._script})"
