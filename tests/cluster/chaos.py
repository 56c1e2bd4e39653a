"""Does harm to jobs at random moments, and looks at how they go on or end, and at what all ranks had at every step.

    python -m tests.cluster.chaos --output benchmarks/results/chaos.md
    python -m tests.cluster.chaos --faults 1000 --seed 1 --output benchmarks/results/chaos-many.md

Ranks train without end (``train_until_harmed.py``), and record what they have after each step. Then something is done
to one of them (``harms.Harm``). What is for good must end the job soon, with an error that names the rank; behind a cut
cable mpirun waits for its daemon there, which it cannot reach: ocommrun ends it, and the ranks must end on both sides.
After what passes the job must go on. In both cases the records must agree (``tests/invariants.py``).

The first form harms jobs of Torch on four hosts of a lab, one harm each. The second makes many faults cheap: ranks of
NumPy alone, most of them on one host, several harms to a job; a part of the jobs is on several hosts, and a part is
elastic (``chaos_elastic.py``).
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.numpy_training import KINDS as OPTIMIZERS
from ocomm.bench._lab import Lab, LabError, why_not
from tests.cluster import chaos_elastic
from tests.cluster.harms import (
    DEADLINE_S,
    KINDS,
    Harm,
    Outcome,
    any_alive,
    do,
    line_counts,
    ocommrun,
    send_signal,
    summary,
)
from tests.invariants import Expected, Records, differences, lags, read

PROGRAM = Path(__file__).with_name("train_until_harmed.py")
RANKS = 4
RATE = "200mbit"
START_S = 90.0
LOSS = 0.02
#: Steps that every rank must make after a harm that passes: each optimizer's, and more.
GOES_ON = len(OPTIMIZERS) + 2


@dataclass(frozen=True)
class Job:
    """Harms that are done to one job, one after the other; only the last may be for good.

    ``hosts``: 1 for all ranks on one host, else the number of hosts, of one rank each. ``mpich``: instead of Open MPI.
    """

    harms: tuple[Harm, ...]
    hosts: int = RANKS
    ranks: int = RANKS
    program: Literal["torch", "numpy"] = "torch"
    mpich: bool = False

    @property
    def last(self) -> Harm:
        return self.harms[-1]

    @property
    def loss(self) -> float:
        return LOSS if any(harm.kind == "loss" for harm in self.harms) else 0.0


@dataclass
class Ended:
    """What became of the job. Seconds count from the last harm; ``code`` is None if mpirun did not end by itself."""

    job: Job
    doing: str
    code: int | None
    seconds: float
    heard_s: dict[int, float]  # rank -> when its training ended with an error
    said: dict[int, str]  # rank -> that error
    ended: int  # number of ranks that came to their end in order
    records: Records
    output: str
    passed: list[Outcome]  # of the harms before the last
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def harm(self) -> Harm:
        return self.job.last

    @property
    def named_by(self) -> list[str]:
        """Who names a victim: the launcher, ranks."""
        victims = "|".join(map(str, self.harm.deadly))
        named = re.compile(rf"\brank(?:\(s\)|s)? \[?(?:\d+, )*(?:{victims})\b")
        ranks = [f"rank {rank}" for rank, text in sorted(self.said.items()) if named.search(text)]
        return ["mpirun"] * any(rank in self.harm.deadly for rank in self.named_by_mpirun) + ranks

    @property
    def named_by_mpirun(self) -> list[int]:
        return [int(rank) for rank in re.findall(r"(?:process|failed:) rank (\d+) (?:with PID|on)", self.output)]

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.job.ranks) if rank not in self.harm.deadly]

    @property
    def faults(self) -> list[str]:
        """What is not as it should be at the end of the job and in the records of all ranks; empty if all is well."""
        if self.code is None or self.stacks:
            return [f"no end after {self.seconds:.0f} s", *self.recorded]
        return [*self._faults_of_the_end(), *self.recorded]

    @property
    def recorded(self) -> list[str]:
        if len(self.records) != self.job.ranks:
            return [f"only ranks {sorted(self.records)} have kept a record"]
        return [*differences(self.records), *lags(self.records)]

    def _faults_of_the_end(self) -> list[str]:
        harm = self.harm
        if not harm.is_deadly:
            well = self.code == 0 and not self.said and self.ended == self.job.ranks
            return [] if well else ["the job did not go on"]
        faults = []
        if self.code == 0:
            faults.append("the job ended as if nothing had happened")
        if not self.named_by:
            faults.append("nobody names the rank")
        blamed = set(self.named_by_mpirun)
        # A launcher tells of the first rank that it finds dead.
        if harm.kind == "kill" and not (blamed and blamed <= set(harm.deadly)):
            faults.append(f"mpirun blames {self.named_by_mpirun}")
        silent = [rank for rank in self.survivors if rank in self.said and f"rank {rank}" not in self.named_by]
        if silent:
            faults.append(f"ranks {silent} blame another")
        if "kill" not in harm.name:
            late = [rank for rank in self.survivors if self.heard_s.get(rank, 1e9) > DEADLINE_S + 4.0]
            if late:
                faults.append(f"ranks {late} did not say within the deadline what had happened")
        return faults


def endure(job: Job) -> Ended:
    """Starts a job, does the harms, and waits for the end of the job, but not for ever."""
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(job.hosts, RATE, loss=job.loss) as lab,
        ThreadPoolExecutor(1) as pool,
    ):
        folder = Path(name)
        flags = ["-np", str(job.ranks)]
        if job.hosts > 1:
            flags += ["-H", ",".join(f"{name}:1" for name in lab.names)]
        command = ocommrun(lab, flags, [str(PROGRAM), name, job.program], job.mpich)
        patience_s = START_S + sum(harm.after_s + harm.pause_s + harm.limit_s for harm in job.harms) + 30
        running = pool.submit(lab.run, command, patience_s, job.last.environment)
        try:
            return _endure(job, lab, folder, running)
        finally:
            lab.close()  # the end of all that runs in it, and so of the thread that waits for it


def _endure(job: Job, lab: Lab, folder: Path, running: Future[subprocess.CompletedProcess[str]]) -> Ended:
    ranks, harm = range(job.ranks), job.last
    paths = [folder / f"record-{rank}" for rank in ranks]
    end = time.monotonic() + START_S
    while len(list(folder.glob("doing-?"))) < job.ranks:
        if running.done() or time.monotonic() > end:
            lab.close()
            raise LabError(f"the job did not start: {running.result()}")
        time.sleep(0.05)
    passed = []
    for each in job.harms[:-1]:
        time.sleep(each.after_s)
        do(each, lab, folder)
        passed.append(_goes_on(each, paths, running))
    time.sleep(harm.after_s)
    if running.done() and not any(outcome.faults for outcome in passed):
        raise LabError(f"the job ended before any harm was done to it: {running.result()}")
    doing = (folder / f"doing-{harm.victim}").read_text()
    begin_clock, begin = time.time(), time.monotonic()
    do(harm, lab, folder)
    if not harm.is_deadly:
        (folder / "enough").touch()
    while not running.done() and time.monotonic() - begin < harm.limit_s:
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    code, output, stacks = None, "", {}
    if running.done():
        done = running.result()
        code, output = done.returncode, done.stdout + done.stderr
    while harm.is_deadly and any_alive(lab, folder) and time.monotonic() - begin < harm.limit_s:
        time.sleep(0.1)
    if code is None or (harm.is_deadly and any_alive(lab, folder)):
        stacks = _stacks(job, lab, folder)
    said = {rank: path for rank in ranks if (path := folder / f"error-{rank}").exists()}
    return Ended(
        job,
        doing,
        code,
        seconds,
        {rank: path.stat().st_mtime - begin_clock for rank, path in said.items()},
        {rank: path.read_text() for rank, path in said.items()},
        len(list(folder.glob("end-?"))),
        {rank: read(path) for rank, path in enumerate(paths) if path.exists()},
        output,
        passed,
        stacks,
    )


def _goes_on(harm: Harm, paths: Sequence[Path], running: Future[subprocess.CompletedProcess[str]]) -> Outcome:
    """Waits until all ranks have made steps after a harm that has passed."""
    begin, before = time.monotonic(), line_counts(paths)
    while time.monotonic() - begin < harm.limit_s and not running.done():
        now = line_counts(paths)
        if all(after >= old + GOES_ON for old, after in zip(before, now, strict=True)):
            return Outcome(harm.name, time.monotonic() - begin, [])
        time.sleep(0.02)
    return Outcome(harm.name, time.monotonic() - begin, [f"the job did not go on after {harm}"])


def _stacks(job: Job, lab: Lab, folder: Path) -> dict[int, str]:
    """Where the ranks are that still live."""
    for rank in range(job.ranks):
        send_signal(lab, folder, rank, signal.SIGUSR1)
    time.sleep(1.0)
    alive = lab.run(lab.on(None, ["ps", "-eo", "pid,ppid,stat,args"]), 10).stdout
    return {-1: alive} | {rank: (folder / f"stacks-{rank}").read_text() for rank in range(job.ranks)}


# One harm to a job, on four hosts


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
            *(harm.name, str(harm.victim), deadline, f"{harm.after_s:.1f}", ended.doing),
            *("none" if ended.code is None else str(ended.code), f"{max(heard):.1f}" if heard else ""),
            *(f"{ended.seconds:.1f}", ", ".join(ended.named_by), "; ".join(ended.faults)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(ended: Ended) -> None:
    """Prints what became of a job, and all that is known if it is not as it should be."""
    print(table([ended]).splitlines()[-1], flush=True)
    for rank, text in sorted(ended.said.items()):
        print(f"    rank {rank} after {ended.heard_s[rank]:.1f} s: {text}", flush=True)
    if ended.faults or any(outcome.faults for outcome in ended.passed):
        print(*ended.passed, ended.output, *ended.stacks.values(), sep="\n", flush=True)


# Many faults

#: What is done on one host: a harm that passes; one that ends the job. With weights.
_PASSING = {"pause": 5, "delay": 5, "pause + pause": 1, "pause + delay": 1}
_ENDING = {"kill": 7, "kill + kill": 1, "kill + pause": 1, "stop": 1}
#: On several hosts, in turn: for 50 faults there is one of these jobs, and one that is elastic.
_ON_HOSTS = ("cut", "loss", "cut out", "heal", "cut in")
#: Seconds of a fault on two idle cores, on average, and of one of these jobs.
_FAULT_S, _HOSTS_S, _ELASTIC_S = 1.3, 25.0, 30.0
_EVERY = 50


def many(faults: int, seed: int, mpich: bool = False) -> list[Job | chaos_elastic.Job]:
    """Returns jobs in which as many faults are done, or a few more."""
    draw = random.Random(seed)
    jobs: list[Job | chaos_elastic.Job] = []
    planned = 0
    for turn in range(max(faults // _EVERY, 1 if faults >= 20 else 0)):
        kind = _ON_HOSTS[turn % len(_ON_HOSTS)]
        harm = Harm(kind, draw.randrange(3), draw.uniform(0.0, 2.0), pause_s=2.0)
        jobs += [Job((harm,), 3, 3, "numpy", mpich), chaos_elastic.many(draw, mpich=mpich)]
        planned += sum(len(job.harms) for job in jobs[-2:])
    while planned < faults:
        jobs.append(_on_one_host(draw, mpich))
        planned += len(jobs[-1].harms)
    draw.shuffle(jobs)
    return jobs


def _on_one_host(draw: random.Random, mpich: bool, ranks: int = 3) -> Job:
    def harm(weights: dict[str, int]) -> Harm:
        one, _, other = draw.choices(list(weights), list(weights.values()))[0].partition(" + ")
        victim, second = draw.sample(range(ranks), 2)
        pause_s, moment_s = draw.uniform(0.05, 0.6), draw.uniform(0.0, 0.4)
        also = Harm(other, second, 0.0, pause_s=pause_s) if other else None
        return Harm(one, victim, moment_s, pause_s=pause_s, second=also)

    passing = [harm(_PASSING) for _ in range(draw.randrange(4, 10))]
    return Job((*passing, harm(_ENDING)), 1, ranks, "numpy", mpich)


def run_many(faults: int, seed: int, mpich: bool) -> tuple[list[Outcome], str]:
    """Does the faults. Returns their outcomes, and what else the table says."""
    jobs = many(faults, seed, mpich)
    on_hosts = sum(isinstance(job, Job) and job.hosts > 1 for job in jobs)
    elastic = sum(isinstance(job, chaos_elastic.Job) for job in jobs)
    planned = sum(len(job.harms) for job in jobs)
    seconds = _HOSTS_S * on_hosts + _ELASTIC_S * elastic + _FAULT_S * planned
    print(f"{planned} faults in {len(jobs)} jobs: about {seconds / 60:.0f} minutes on two idle cores", flush=True)
    expected, expected_elastic = Expected(), Expected()
    outcomes: list[Outcome] = []
    begin, steps = time.monotonic(), 0
    for job in jobs:
        try:
            if isinstance(job, chaos_elastic.Job):
                found, lines = _elastic(job, expected_elastic)
            else:
                found, lines = _not_elastic(job, expected)
        except LabError as error:  # of a job that did not start, after which others may
            found, lines = [Outcome("nothing", 0.0, [str(error)])], 0
        outcomes += found
        steps += lines
        names = Counter(outcome.name for outcome in found)
        bad = [fault for outcome in found for fault in outcome.faults]
        said = ", ".join(f"{count} {name}" for name, count in names.items())
        print(f"{len(outcomes)} faults, {time.monotonic() - begin:.0f} s: {said} {bad or ''}", flush=True)
    took = time.monotonic() - begin
    violations = sum(bool(outcome.faults) for outcome in outcomes)
    words = (
        f"{len(outcomes)} faults in {len(jobs)} jobs ({on_hosts} of them on three hosts of a lab, {elastic} elastic), "
        f"{steps} steps of ranks recorded and compared, in {took:.0f} s: {violations} violations.\n"
    )
    return outcomes, words


def _elastic(job: chaos_elastic.Job, expected: Expected) -> tuple[list[Outcome], int]:
    """Returns the outcomes of the harms, and the number of lines that the ranks have recorded."""
    ended = chaos_elastic.endure_many(job, expected)
    if any(outcome.faults for outcome in ended.outcomes):
        print(ended.output, flush=True)
    return ended.outcomes, ended.lines


def _not_elastic(job: Job, expected: Expected) -> tuple[list[Outcome], int]:
    """Returns the outcomes of the harms, and the number of lines that the ranks have recorded."""
    ended = endure(job)
    at_end = [*ended.faults, *expected.departures(ended.records, job.ranks)]
    found = [*ended.passed, Outcome(job.last.name, ended.seconds, at_end)]
    if any(outcome.faults for outcome in found):
        report(ended)
    return found, sum(map(len, ended.records.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="this many, in cheap jobs; says first how long it takes")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS, help="without --faults: these kinds only")
    parser.add_argument("--mpich", action="store_true", help="ranks of the MPI at TEST_MPICH (tests/cluster/jobs.py)")
    parser.add_argument("--output", type=Path, help="a file for the tables")
    args = parser.parse_args()
    if reason := why_not():
        print(f"chaos: skipped, no lab: {reason}", file=sys.stderr)
        return 77
    if args.faults is not None:
        outcomes, words = run_many(args.faults, args.seed, args.mpich)
        text = f"{words}\n{summary(sorted(outcomes, key=lambda outcome: outcome.name))}"
        print(text)
    else:
        all_ended = []
        for harm in plan(args.kills, args.seed):
            if args.only and harm.kind not in args.only:
                continue
            all_ended.append(endure(Job((harm,), mpich=args.mpich)))
            report(all_ended[-1])
        outcomes = [Outcome(ended.harm.name, ended.seconds, ended.faults) for ended in all_ended]
        text = f"{summary(outcomes)}\n{table(all_ended)}"
    if args.output is not None:
        args.output.write_text(text)
    return any(outcome.faults for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
