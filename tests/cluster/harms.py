"""What can be done to a rank of a job in a lab, and what must hold of the job then."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ocomm.bench._lab import Lab
from tests.cluster.jobs import ROOT, python_beside_mpich

#: With which a rank finds the modules of the tests.
TO_TESTS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
PAUSE_S = 3.0
DEADLINE_S = 6
#: From the harm, or from the deadline that finds it out, to the end of the job.
LIMIT_S = 25.0
#: The direction in which each harm cuts a cable.
_CUTS = {"cut": "both", "cut out": "out", "cut in": "in", "heal": "both"}
_DEADLY = ("kill", "stop", "cut", "cut out", "cut in")
KINDS = (*_DEADLY, "pause", "delay", "heal", "loss")


@dataclass(frozen=True)
class Harm:
    """What is done to rank ``victim``, ``after_s`` seconds after what came before.

    ``kind``: kill, stop (for good), cut (its host's cable, for good), "cut out" and "cut in" (only what leaves the
    host, or what comes to it), pause (the rank stops for ``pause_s``), delay (it stops again and again for short random
    times, in all for about ``pause_s``), heal (the cable is cut for ``pause_s``), loss (the job's network loses
    packets).

    ``by`` says which deadline finds out: "peer" (silence) or "stall" (an operation that does not end). ``second`` is
    done to another rank at the same moment. ``in_recovery``: as soon as an elastic job has started its ranks again, in
    place of any later moment.
    """

    kind: str
    victim: int
    after_s: float
    by: str = "peer"
    pause_s: float = PAUSE_S
    second: Harm | None = None
    in_recovery: bool = False

    @property
    def name(self) -> str:
        both = self.kind if self.second is None else f"{self.kind} + {self.second.kind}"
        return both + " in recovery" * self.in_recovery

    @property
    def deadly(self) -> list[int]:
        """The victims that cannot go on."""
        mine = [self.victim] if self.kind in _DEADLY else []
        return mine if self.second is None else [*mine, *self.second.deadly]

    @property
    def is_deadly(self) -> bool:
        return bool(self.deadly)

    @property
    def environment(self) -> dict[str, str]:
        name = {"peer": "OCOMM_PEER_TIMEOUT_SECONDS", "stall": "OCOMM_STALL_SHUTDOWN_TIME_SECONDS"}[self.by]
        return {name: str(self.deadline_s), **TO_TESTS}

    @property
    def deadline_s(self) -> int:
        return DEADLINE_S if self.is_deadly else 2 * DEADLINE_S

    @property
    def limit_s(self) -> float:
        return LIMIT_S + (0 if self.kind == "kill" else DEADLINE_S)


@dataclass(frozen=True)
class Outcome:
    """A harm that was done: how long it took until all ranks went on or had ended, and what was not as it should be."""

    name: str
    seconds: float
    faults: list[str]


def ocommrun(lab: Lab, flags: Sequence[str], program: Sequence[str], mpich: bool) -> list[str]:
    """Returns the command line of ocommrun on the lab's switch, which reaches all hosts, for a program in Python.

    ``mpich``: the ranks use MPICH, or what is in its place (``jobs.MPICH``), instead of Open MPI.
    """
    if not mpich:
        launcher = [sys.executable, "-m", "ocomm.launch", *flags, "--mpi-args", " ".join(lab.mpi_options())]
        return lab.on(None, [*launcher, sys.executable, *program])
    python, environ = python_beside_mpich()
    launcher = [python, "-m", "ocomm.launch", *flags, "--mpi-args", " ".join(lab.hydra_options())]
    if "-H" in flags:
        launcher.append("--tcp")  # UCX shares memory between hosts of a lab, whatever becomes of their cables
    variables = [f"{name}={environ[name]}" for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH", "PYTHONPATH")]
    return lab.on(None, ["env", *variables, *launcher, python, *program])


def summary(outcomes: Iterable[Outcome]) -> str:
    """A row for each kind of harm."""
    lines = ["| harm | as it should be | went on or ended after s: median | most |", "|---|---|---|---|"]
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.name, []).append(outcome)
    for name, some in by_name.items():
        took = [outcome.seconds for outcome in some]
        good = sum(not outcome.faults for outcome in some)
        lines.append(f"| {name} | {good} of {len(some)} | {statistics.median(took):.1f} | {max(took):.1f} |")
    return "\n".join(lines) + "\n"


def do(harm: Harm, lab: Lab, folder: Path) -> None:
    """Does the harm, and what is done at the same moment; the ranks' process numbers are in ``folder``.

    Returns when it is over, or at once if it is for good.
    """
    begun = [each for each in (harm, harm.second) if each is not None]
    for each in sorted(begun, key=lambda each: each.kind == "delay"):  # which takes its time
        if each.kind in _CUTS:
            lab.set_cable(each.victim, False, _CUTS[each.kind])
        elif each.kind == "delay":
            delay(lab, folder, each)
        elif each.kind != "loss":
            send_signal(lab, folder, each.victim, signal.SIGKILL if each.kind == "kill" else signal.SIGSTOP)
    passing = [each for each in begun if each.kind in ("pause", "heal", "loss")]
    if passing:
        time.sleep(max(each.pause_s for each in passing))
    for each in passing:
        if each.kind == "pause":
            send_signal(lab, folder, each.victim, signal.SIGCONT)
        elif each.kind == "heal":
            lab.set_cable(each.victim, True)


def delay(lab: Lab, folder: Path, harm: Harm) -> None:
    """Stops a rank for 1 to 50 ms, lets it run for as long, and so on."""
    draw = random.Random(repr(harm))
    pid = (folder / f"pid-{harm.victim}").read_text()
    script, left_s = "", harm.pause_s
    while left_s > 0:
        stopped_s, running_s = draw.uniform(0.001, 0.05), draw.uniform(0.001, 0.05)
        script += f"kill -STOP {pid}; sleep {stopped_s:.3f}; kill -CONT {pid}; sleep {running_s:.3f}\n"
        left_s -= stopped_s + running_s
    lab.run(lab.on(None, ["sh", "-c", script]), 60)


def send_signal(lab: Lab, folder: Path, rank: int, number: int) -> None:
    """Sends a signal to a rank, if it still lives."""
    pid = (folder / f"pid-{rank}").read_text()
    lab.run(lab.on(None, ["sh", "-c", f"kill -{int(number)} {pid}"]), 10)


def any_alive(lab: Lab, folder: Path) -> bool:
    """Returns whether any rank still runs. One that has ended but not been buried does not."""
    states = [f"/proc/{path.read_text()}/status" for path in folder.glob("pid-?")]
    return lab.run(lab.on(None, ["grep", "-qs", "^State:.[^ZX]", *states]), 10).returncode == 0


def line_counts(paths: Sequence[Path]) -> list[int]:
    """Returns the numbers of lines that ranks have written so far."""
    return [path.read_bytes().count(b"\n") if path.exists() else 0 for path in paths]
