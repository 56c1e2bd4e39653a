"""Does harm to a job of several hosts at a random moment, and looks at how the job ends.

    python -m tests.cluster.chaos --output benchmarks/results/chaos.md

Four hosts of a lab with one rank each train without end (``train_until_harmed.py``). Then a rank is killed or stopped,
or its host's cable is cut, for a while or for good. The job must end by itself soon, with an error that names the rank;
after a short pause of a rank or a cable it must go on, with the same parameters on all ranks. Behind a cut cable mpirun
waits for its daemon there, which it cannot reach: ocommrun ends it, and the ranks must end on both sides.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ocomm.bench._lab import Lab, LabError, why_not

PROGRAM = Path(__file__).with_name("train_until_harmed.py")
RANKS = 4
RATE = "200mbit"
START_S = 90.0
#: From the harm, or from the deadline that finds it out, to the end of the job.
LIMIT_S = 25.0
PAUSE_S = 3.0
DEADLINE_S = 6


@dataclass(frozen=True)
class Harm:
    """``kind``: kill, stop, cut, pause (a rank stops for a while) or heal (a cable is cut for a while).

    ``by`` says which deadline finds out: "peer" (silence) or "stall" (an operation that does not end).
    """

    kind: str
    victim: int
    after_s: float
    by: str = "peer"

    @property
    def environment(self) -> dict[str, str]:
        name = {"peer": "OCOMM_PEER_TIMEOUT_SECONDS", "stall": "OCOMM_STALL_SHUTDOWN_TIME_SECONDS"}[self.by]
        return {name: str(self.deadline_s)}

    @property
    def deadline_s(self) -> int:
        return DEADLINE_S if self.is_deadly else 2 * DEADLINE_S

    @property
    def is_deadly(self) -> bool:
        return self.kind in ("kill", "stop", "cut")

    @property
    def limit_s(self) -> float:
        return LIMIT_S + (0 if self.kind == "kill" else DEADLINE_S)


@dataclass
class Ended:
    """What became of the job. Seconds count from the harm; ``code`` is None if mpirun did not end by itself."""

    harm: Harm
    doing: str
    code: int | None
    seconds: float
    heard_s: dict[int, float]  # rank -> when its training ended with an error
    said: dict[int, str]  # rank -> that error
    digests: list[str]
    output: str
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def named_by(self) -> list[str]:
        """Who names the victim: the launcher, ranks."""
        named = re.compile(rf"\brank(?:\(s\)|s)? \[?(?:\d+, )*{self.harm.victim}\b")
        ranks = [f"rank {rank}" for rank, text in sorted(self.said.items()) if named.search(text)]
        return ["mpirun"] * (self.harm.victim in self.named_by_mpirun) + ranks

    @property
    def named_by_mpirun(self) -> list[int]:
        return [int(rank) for rank in re.findall(r"process rank (\d+) with PID", self.output)]

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(RANKS) if rank != self.harm.victim]

    @property
    def faults(self) -> list[str]:
        """What is not as it should be; empty if all is well."""
        if self.code is None or self.stacks:
            return [f"no end after {self.seconds:.0f} s"]
        if not self.harm.is_deadly:
            well = self.code == 0 and not self.said and len(self.digests) == RANKS and len(set(self.digests)) == 1
            return [] if well else ["the job did not go on"]
        faults = []
        if self.code == 0:
            faults.append("the job ended as if nothing had happened")
        if not self.named_by:
            faults.append("nobody names the rank")
        if self.harm.kind == "kill" and self.named_by_mpirun != [self.harm.victim]:
            faults.append(f"mpirun blames {self.named_by_mpirun}")
        silent = [rank for rank in self.survivors if rank in self.said and f"rank {rank}" not in self.named_by]
        if silent:
            faults.append(f"ranks {silent} blame another")
        if self.harm.kind != "kill":
            late = [rank for rank in self.survivors if self.heard_s.get(rank, 1e9) > DEADLINE_S + 4.0]
            if late:
                faults.append(f"ranks {late} did not say within the deadline what had happened")
        return faults


def endure(harm: Harm) -> Ended:
    """Starts a job, does the harm, and waits for the end of the job, but not for ever."""
    with tempfile.TemporaryDirectory() as name, Lab(RANKS, RATE) as lab, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        hosts = ",".join(f"{name}:1" for name in lab.names)
        flags = ["-np", str(RANKS), "-H", hosts, "--mpi-args", " ".join(lab.mpi_options())]
        command = lab.on(None, [sys.executable, "-m", "ocomm.launch", *flags, sys.executable, str(PROGRAM), name])
        patience_s = START_S + harm.after_s + harm.limit_s + 30
        job = pool.submit(lab.run, command, patience_s, harm.environment)
        try:
            return _endure(harm, lab, folder, job)
        finally:
            lab.close()  # the end of all that runs in it, and so of the thread that waits for it


def _endure(harm: Harm, lab: Lab, folder: Path, job: Future[subprocess.CompletedProcess[str]]) -> Ended:
    end = time.monotonic() + START_S
    while len(list(folder.glob("doing-?"))) < RANKS:
        if job.done() or time.monotonic() > end:
            lab.close()
            raise LabError(f"the job did not start: {job.result()}")
        time.sleep(0.05)
    time.sleep(harm.after_s)
    if job.done():
        raise LabError(f"the job ended before any harm was done to it: {job.result()}")
    doing = (folder / f"doing-{harm.victim}").read_text()
    begin_clock, begin = time.time(), time.monotonic()
    do(harm, lab, folder)
    if not harm.is_deadly:
        (folder / "enough").touch()
    while not job.done() and time.monotonic() - begin < harm.limit_s:
        time.sleep(0.1)
    seconds = time.monotonic() - begin
    code, output, stacks = None, "", {}
    if job.done():
        done = job.result()
        code, output = done.returncode, done.stdout + done.stderr
    while harm.is_deadly and _any_alive(lab, folder) and time.monotonic() - begin < harm.limit_s:
        time.sleep(0.1)
    if code is None or (harm.is_deadly and _any_alive(lab, folder)):
        stacks = _stacks(lab, folder)
    said = {rank: path for rank in range(RANKS) if (path := folder / f"error-{rank}").exists()}
    return Ended(
        harm,
        doing,
        code,
        seconds,
        {rank: path.stat().st_mtime - begin_clock for rank, path in said.items()},
        {rank: path.read_text() for rank, path in said.items()},
        [path.read_text() for path in folder.glob("end-?")],
        output,
        stacks,
    )


def do(harm: Harm, lab: Lab, folder: Path) -> None:
    """Does the harm; the ranks' process numbers are in ``folder``."""
    if harm.kind in ("cut", "heal"):
        lab.set_cable(harm.victim, False)
        if harm.kind == "heal":
            time.sleep(PAUSE_S)
            lab.set_cable(harm.victim, True)
        return
    _signal(lab, folder, harm.victim, signal.SIGKILL if harm.kind == "kill" else signal.SIGSTOP)
    if harm.kind == "pause":
        time.sleep(PAUSE_S)
        _signal(lab, folder, harm.victim, signal.SIGCONT)


def _signal(lab: Lab, folder: Path, rank: int, number: int) -> None:
    pid = (folder / f"pid-{rank}").read_text()
    lab.run(lab.on(None, ["sh", "-c", f"kill -{int(number)} {pid}"]), 10)


def _any_alive(lab: Lab, folder: Path) -> bool:
    """Whether any rank still runs. One that has ended but not been buried does not."""
    states = [f"/proc/{path.read_text()}/status" for path in folder.glob("pid-?")]
    return lab.run(lab.on(None, ["grep", "-qs", "^State:.[^ZX]", *states]), 10).returncode == 0


def _stacks(lab: Lab, folder: Path) -> dict[int, str]:
    """Where the ranks are that still live."""
    for rank in range(RANKS):
        _signal(lab, folder, rank, signal.SIGUSR1)
    time.sleep(1.0)
    alive = lab.run(lab.on(None, ["ps", "-eo", "pid,ppid,stat,args"]), 10).stdout
    return {-1: alive} | {rank: (folder / f"stacks-{rank}").read_text() for rank in range(RANKS)}


def plan(kills: int, seed: int) -> list[Harm]:
    """The harms of the long run: ``kills``, then every other one once per deadline and for two victims."""
    draw = random.Random(seed)

    def moment() -> float:
        return draw.uniform(0.0, 6.0)

    harms = [Harm("kill", draw.randrange(RANKS), moment()) for _ in range(kills)]
    for kind in ("stop", "cut"):
        harms += [Harm(kind, victim, moment(), by) for victim in (0, 2) for by in ("peer", "stall")]
    return harms + [Harm(kind, victim, moment()) for kind in ("pause", "heal") for victim in (0, 2)]


def table(all_ended: Sequence[Ended]) -> str:
    lines = [
        "| harm | rank | deadline | at s | while it did | status | heard after s | ended after s | named by | faults |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ended in all_ended:
        harm = ended.harm
        heard = [s for rank, s in ended.heard_s.items() if rank != harm.victim]
        deadline = "" if harm.kind == "kill" else f"{harm.by} {harm.deadline_s} s"
        cells = [
            *(harm.kind, str(harm.victim), deadline, f"{harm.after_s:.1f}", ended.doing),
            *("none" if ended.code is None else str(ended.code), f"{max(heard):.1f}" if heard else ""),
            *(f"{ended.seconds:.1f}", ", ".join(ended.named_by), "; ".join(ended.faults)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(all_ended: Sequence[Ended]) -> str:
    lines = ["| harm | as it should be | ended after s: median | most |", "|---|---|---|---|"]
    for kind in dict.fromkeys(ended.harm.kind for ended in all_ended):
        some = [ended for ended in all_ended if ended.harm.kind == kind]
        took = [ended.seconds for ended in some]
        good = sum(not ended.faults for ended in some)
        lines.append(f"| {kind} | {good} of {len(some)} | {statistics.median(took):.1f} | {max(took):.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="these kinds only: kill stop cut pause heal")
    parser.add_argument("--output", type=Path, help="a file for the tables")
    args = parser.parse_args()
    if reason := why_not():
        print(f"chaos: skipped, no lab: {reason}", file=sys.stderr)
        return 77
    all_ended = []
    for harm in plan(args.kills, args.seed):
        if args.only and harm.kind not in args.only:
            continue
        ended = endure(harm)
        all_ended.append(ended)
        print(table([ended]).splitlines()[-1], flush=True)
        for rank, text in sorted(ended.said.items()):
            print(f"    rank {rank} after {ended.heard_s[rank]:.1f} s: {text}", flush=True)
        if ended.faults:
            print(ended.output, *ended.stacks.values(), sep="\n", flush=True)
    if args.output is not None:
        args.output.write_text(summary(all_ended) + "\n" + table(all_ended))
    return any(ended.faults for ended in all_ended)


if __name__ == "__main__":
    sys.exit(main())
