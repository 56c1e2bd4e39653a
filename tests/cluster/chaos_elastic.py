"""Does harm to an elastic job of several hosts at a random moment, and looks at how it goes on.

    python -m tests.cluster.chaos_elastic --output benchmarks/results/chaos-elastic.md

Four hosts of a lab with one rank each train under ``ocommrun --min-np`` (``train_elastic.py``). A rank is killed or
stopped, or its host's cable is cut for good. The job must go on from the last commit: where all four hosts are needed
and there, to the very parameters of a job that nothing happened to; where three are enough, with the three others.
Every generation must begin, on all ranks, with what they had at the commit (``tests/invariants.py``).

``many`` and ``endure_many`` are the cheap form, for chaos.py: two ranks of NumPy on one host, with several harms to a
job, also while it recovers from the last one.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ocomm.bench._lab import Lab, LabError, why_not
from tests.cluster.harms import DEADLINE_S, TO_TESTS, Harm, Outcome, do, line_counts, ocommrun, summary
from tests.invariants import Expected, Line, Records, differences, lags, read, restores

PROGRAM = Path(__file__).with_name("train_elastic.py")
RANKS = 4
RATE = "200mbit"
STEPS = 250
COMMIT_EVERY = 5  # train_elastic.py
#: From the start to the first step, and from the harm to the end of the job.
START_S = 90.0
LIMIT_S = 150.0


@dataclass
class Ended:
    """What became of a job. Seconds count from the harm; ``doing`` is what the victim did then."""

    harm: Harm | None
    before: int
    least: int
    doing: str
    code: int
    seconds: float
    ends: list[str]
    generations: list[Records]
    output: str
    mpich: bool

    @property
    def named(self) -> str:
        """Whom ocommrun names as the cause."""
        found = re.search(r"generation 1 failed: (.*); its last commit was", self.output)
        return found[1] if found else ""

    @property
    def faults(self) -> list[str]:
        """What is not as it should be; empty if all is well."""
        assert self.harm is not None
        if self.code != 0:
            return [f"the job ended with status {self.code}"]
        faults = recorded(self.generations)
        if not self.named.startswith(f"rank {self.harm.victim} on host{self.harm.victim} "):
            faults.append(f"ocommrun blames {self.named!r}")
        ranks = self.before if self.least == self.before else self.before - 1
        if len(self.ends) != ranks or len(set(self.ends)) != 1:
            return [*faults, f"the ranks ended with {self.ends}"]
        size, generation, commit, digest = self.ends[0].split()
        if (int(size), int(generation)) != (ranks, 2):
            faults.append(f"{size} ranks ended in generation {generation}")
        begun = int(self.doing.split()[1]) // 5
        if not begun - 1 <= int(commit) <= begun + 2:
            faults.append(f"it went on from commit {commit}")
        if ranks == RANKS and digest != undisturbed(self.mpich):
            faults.append("the parameters are not those of an undisturbed job")
        return faults


@functools.cache
def undisturbed(mpich: bool) -> str:
    """The digest of the parameters of a job of RANKS ranks to which nothing happens."""
    ended = endure(None, RANKS, mpich=mpich)
    assert ended.code == 0 and len(set(ended.ends)) == 1, ended
    return ended.ends[0].split()[3]


def recorded(generations: Sequence[Records], expected: Expected | None = None, size: int = 0) -> list[str]:
    """What does not hold of the records of all generations; those of ``size`` ranks are compared with ``expected``."""
    faults = restores(generations)
    for number, records in enumerate(generations, 1):
        found = [*differences(records), *lags(records), *(expected.departures(records, size) if expected else ())]
        faults += [f"generation {number}: {words}" for words in found]
    return faults


def read_records(folder: Path) -> list[Records]:
    """Returns what the ranks of each generation have recorded, in order; one that came to no step has nothing."""
    found: dict[int, dict[int, list[Line]]] = {}
    for path in folder.glob("record-*-*"):
        generation, rank = map(int, path.name.split("-")[1:])
        found.setdefault(generation, {})[rank] = read(path)
    return [found.get(number, {}) for number in range(1, max(found, default=0) + 1)]


def endure(harm: Harm | None, least: int, ranks: int = RANKS, steps: int = STEPS, mpich: bool = False) -> Ended:
    """Starts a job of so many ranks and steps, does the harm, and waits for the end of the job, but not for ever.

    ``least``: ranks that are enough. ``mpich``: the ranks use MPICH instead of Open MPI.
    """
    with tempfile.TemporaryDirectory() as name, Lab(ranks, RATE) as lab, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        environment = {"OCOMM_ELASTIC_FOLDER": f"{name}/commits", **(harm.environment if harm else TO_TESTS)}
        hosts = ",".join(f"{name}:1" for name in lab.names)
        flags = ["-np", str(ranks), "--min-np", str(least), "-H", hosts]
        command = ocommrun(lab, flags, [str(PROGRAM), name, str(steps), "torch"], mpich)
        job = pool.submit(lab.run, command, START_S + LIMIT_S, environment)
        try:
            return _endure(harm, least, lab, folder, job, mpich)
        finally:
            lab.close()  # the end of all that runs in it, and so of the thread that waits for it


def _endure(
    harm: Harm | None, least: int, lab: Lab, folder: Path, job: Future[subprocess.CompletedProcess[str]], mpich: bool
) -> Ended:
    end = time.monotonic() + START_S
    while len(list(folder.glob("doing-?"))) < len(lab.names):
        if job.done() or time.monotonic() > end:
            raise LabError(f"the job did not start: {job.result()}")
        time.sleep(0.05)
    doing = ""
    begin = time.monotonic()
    if harm is not None:
        time.sleep(harm.after_s)
        doing = (folder / f"doing-{harm.victim}").read_text()
        if job.done():
            raise LabError(f"the job ended before any harm was done to it: {job.result()}")
        begin = time.monotonic()
        do(harm, lab, folder)
    done = job.result()
    ends = [path.read_text() for path in sorted(folder.glob("end-?"))]
    output = done.stdout + done.stderr
    seconds = time.monotonic() - begin
    records = read_records(folder)
    return Ended(harm, len(lab.names), least, doing, done.returncode, seconds, ends, records, output, mpich)


def plan(kills: int, seed: int) -> list[tuple[Harm, int]]:
    """The harms of the long run: ``kills``, of jobs which need all hosts and others in turn; then stops and cuts."""
    draw = random.Random(seed)

    def moment() -> float:
        return draw.uniform(0.0, 4.0)

    harms = [(Harm("kill", draw.randrange(RANKS), moment()), RANKS - number % 2) for number in range(kills)]
    return harms + [(Harm(kind, victim, moment()), RANKS - 1) for kind in ("stop", "cut") for victim in (0, 2)]


def table(all_ended: Sequence[Ended]) -> str:
    """A row for each."""
    lines = [
        "| harm | rank | at s | at step | ranks after | from commit | ended after s | named | faults |",
        "|" + "---|" * 9,
    ]
    for ended in all_ended:
        assert ended.harm is not None
        size, _, commit, *_ = (ended.ends[0] if ended.ends else "? ? ?").split()
        cells = [
            *(ended.harm.kind, str(ended.harm.victim), f"{ended.harm.after_s:.1f}", ended.doing.split()[1]),
            *(size, commit, f"{ended.seconds:.1f}", ended.named, "; ".join(ended.faults)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# Many harms to a job on one host


def _are_new(pids: Sequence[Path], before: Sequence[str]) -> bool:
    return all(text and text not in before for text in (path.read_text() for path in pids))


@dataclass(frozen=True)
class Job:
    """Harms that are done to one job, one after the other."""

    harms: tuple[Harm, ...]
    ranks: int = 2
    mpich: bool = False


@dataclass
class EndedMany:
    """What became of the harms, and how many lines the ranks have recorded."""

    outcomes: list[Outcome]
    lines: int
    output: str


def many(draw: random.Random, ranks: int = 2, mpich: bool = False) -> Job:
    """Returns a job with one harm of each kind in a random order, after one of which it is harmed in its recovery."""

    def harm(kind: str, **more: Any) -> Harm:
        return Harm(kind, draw.randrange(ranks), draw.uniform(0.0, 0.3), pause_s=draw.uniform(0.1, 0.6), **more)

    both = [Harm("kill", rank, 0.0) for rank in range(2)]
    harms = [harm("kill"), replace(both[0], second=both[1]), harm("pause"), harm("delay"), harm("stop")]
    draw.shuffle(harms)
    after = draw.choice([place for place, each in enumerate(harms, 1) if each.is_deadly])
    harms.insert(after, harm("kill", in_recovery=True))
    return Job(tuple(harms), ranks, mpich)


def endure_many(job: Job, expected: Expected) -> EndedMany:
    """Starts a job without end, does the harms in turn, each when the job has gone on after the last, and ends it."""
    with tempfile.TemporaryDirectory() as name, Lab(1) as lab, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        flags = ["-np", str(job.ranks), "--min-np", str(job.ranks)]
        command = ocommrun(lab, flags, [str(PROGRAM), name, str(1 << 40), "numpy"], job.mpich)
        environment = {
            "OCOMM_ELASTIC_FOLDER": f"{name}/commits",
            "OCOMM_PEER_TIMEOUT_SECONDS": str(DEADLINE_S),
            **TO_TESTS,
        }
        patience_s = START_S + LIMIT_S * (len(job.harms) + 1)
        running = pool.submit(lab.run, command, patience_s, environment)
        try:
            return _endure_many(job, expected, lab, folder, running)
        finally:
            lab.close()


def _endure_many(
    job: Job, expected: Expected, lab: Lab, folder: Path, running: Future[subprocess.CompletedProcess[str]]
) -> EndedMany:
    pids = [folder / f"pid-{rank}" for rank in range(job.ranks)]

    def records_of(generation: int) -> list[Path]:
        return [folder / f"record-{generation}-{rank}" for rank in range(job.ranks)]

    def until(is_so: Callable[[], bool], what: str) -> list[str]:
        begin = time.monotonic()
        while not is_so():
            if running.done() or time.monotonic() - begin > LIMIT_S:
                return [f"{what} did not come within {time.monotonic() - begin:.0f} s"]
            time.sleep(0.02)
        return []

    outcomes: list[Outcome] = []
    failed: list[int] = []  # for each generation that has ended, the place of its harm

    def goes_on() -> bool:
        """Whether all ranks of the generation that is due have made steps and a commit."""
        return min(line_counts(records_of(len(failed) + 1))) > 2 * COMMIT_EVERY

    begin = time.monotonic()
    while not goes_on():
        if running.done() or time.monotonic() - begin > START_S:
            lab.close()
            raise LabError(f"the job did not start: {running.result()}")
        time.sleep(0.05)
    found: list[str] = []
    for place, harm in enumerate(job.harms):
        if found:
            break
        if not harm.in_recovery:
            time.sleep(harm.after_s)
        begin, before = time.monotonic(), [path.read_text() for path in pids]
        paths = records_of(len(failed) + 1)
        counts = line_counts(paths)
        do(harm, lab, folder)
        if harm.is_deadly:
            failed.append(place)
        following = job.harms[place + 1] if place + 1 < len(job.harms) else None
        if following is not None and following.in_recovery:
            found = until(lambda before=before: _are_new(pids, before), "the next generation")
        elif harm.is_deadly:
            found = until(goes_on, "a commit of the next generation")
        else:
            found = until(
                lambda paths=paths, counts=counts: all(
                    now > old + COMMIT_EVERY for old, now in zip(counts, line_counts(paths), strict=True)
                ),
                "a step after the harm",
            )
        outcomes.append(Outcome(f"elastic: {harm.name}", time.monotonic() - begin, found))
    (folder / "enough").touch()
    try:
        done = running.result(LIMIT_S)
        code, output = done.returncode, done.stdout + done.stderr
    except TimeoutError:
        code, output = None, ""
    generations = read_records(folder)
    blamed = re.findall(r"generation \d+ failed: (.*?); its last commit", output)
    for place, words in zip(failed, blamed, strict=False):
        harm = job.harms[place]
        named = re.findall(r"rank (\d+) on", words)
        # Of a rank that dies in MPI_Init nobody knows but the launcher, which may die of it without a name; of one that
        # dies before, nobody but Open MPI's.
        is_unknown = harm.in_recovery and words == "the launcher ended with status 137"
        if harm.in_recovery and (before := re.search(r"one of the rank\(s\) (\d+), which had not come", words)):
            named = [before[1]]
        ranks = set(map(int, named))
        if not is_unknown and not (ranks and ranks <= set(harm.deadly)):
            outcomes[place].faults.append(f"ocommrun blames {words!r} for {harm}")
    at_end = recorded(generations, expected, job.ranks)
    if code != 0 or len(list(folder.glob("end-?"))) != job.ranks:
        at_end.append(f"the job ended with status {code}")
    if len(blamed) != len(failed):
        at_end.append(f"{len(blamed)} generations failed, {len(failed)} were harmed")
    outcomes[-1].faults.extend(at_end)
    lines = sum(len(lines) for records in generations for lines in records.values())
    return EndedMany(outcomes, lines, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="these kinds only: kill stop cut")
    parser.add_argument("--mpich", action="store_true", help="ranks of the MPI at TEST_MPICH (tests/cluster/jobs.py)")
    parser.add_argument("--output", type=Path, help="a file for the tables")
    args = parser.parse_args()
    if reason := why_not():
        print(f"chaos_elastic: skipped, no lab: {reason}", file=sys.stderr)
        return 77
    all_ended = []
    for harm, least in plan(args.kills, args.seed):
        if args.only and harm.kind not in args.only:
            continue
        ended = endure(harm, least, mpich=args.mpich)
        all_ended.append(ended)
        print(table([ended]).splitlines()[-1], flush=True)
        if ended.faults:
            print(ended.output, flush=True)
    if args.output is not None:
        outcomes = [Outcome(ended.harm.name, ended.seconds, ended.faults) for ended in all_ended if ended.harm]
        args.output.write_text(summary(outcomes) + "\n" + table(all_ended))
    return any(ended.faults for ended in all_ended)


if __name__ == "__main__":
    sys.exit(main())
