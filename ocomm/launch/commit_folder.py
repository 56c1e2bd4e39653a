"""The folder on every host in which the ranks of an elastic job keep commits."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from ocomm.launch import reach
from ocomm.launch.command import LaunchRequest, build
from ocomm.launch.flavour import Launcher
from ocomm.launch.hosts import Host
from ocomm.launch.reach import HostState

#: The variable with which the user, and ocommrun the ranks, name the folder.
FOLDER = "OCOMM_ELASTIC_FOLDER"
#: Seconds for the removal on other hosts.
_REMOVE_S = 30.0


class CommitFolder:
    """The folder that ``environ`` names, or a new one, which is removed when the job has ended well."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        given = environ.get(FOLDER)
        self._is_own = not given
        token = secrets.token_hex(4)
        self.path = given or os.path.join(tempfile.gettempdir(), f"ocomm-elastic-{os.getuid()}-{token}")
        self.hosts: dict[str, bool] = {}  # those of all generations, and whether each is this machine

    def where(self, commit: int) -> str:
        """Returns a sentence that says where the commits up to ``commit`` are, after a space; "" if there are none."""
        if not commit:
            return ""
        return (
            f" Commits up to {commit} are in {self.path} on {', '.join(self.hosts)}; a job with that "
            f"{FOLDER} goes on from the last one that is whole."
        )

    def remove(
        self,
        request: LaunchRequest,
        launcher: Launcher,
        ask: Callable[[Sequence[str]], Sequence[HostState]],
        lost: Set[str],
    ) -> None:
        """Removes the folder from all hosts, unless the user has named it. ``lost`` hosts are left alone."""
        if not self._is_own:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        others = [name for name, is_local in self.hosts.items() if not is_local and name not in lost]
        there = [state for state in ask(others) if state.problem is None] if others else []
        if not there:
            return
        command = ("rm", "-rf", self.path)
        alike = replace(request, num_proc=len(there), command=command, torch_environ=None)
        line = build(reach.placed(alike, [Host(state.name, 1) for state in there], there), launcher)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                line.argv,
                env={**request.environ, **line.added_environ},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_REMOVE_S,
            )
