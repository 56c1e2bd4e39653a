"""Does harm to an elastic job of several hosts at a random moment, and looks at how it goes on.

    python -m tests.cluster.chaos_elastic --output benchmarks/results/chaos-elastic.md

Four hosts of a lab with one rank each train under ``ocommrun --min-np`` (``train_elastic.py``). A rank is killed or
stopped, or its host's cable is cut for good. The job must go on from the last commit: where all four hosts are needed
and there, to the very parameters of a job that nothing happened to; where three are enough, with the three others.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ocomm.bench._lab import Lab, LabError, why_not
from tests.cluster.chaos import Harm, do

PROGRAM = Path(__file__).with_name("train_elastic.py")
RANKS = 4
RATE = "200mbit"
STEPS = 250
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
    output: str

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
        faults = []
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
        if ranks == RANKS and digest != undisturbed():
            faults.append("the parameters are not those of an undisturbed job")
        return faults


@functools.cache
def undisturbed() -> str:
    """The digest of the parameters of a job of RANKS ranks to which nothing happens."""
    ended = endure(None, RANKS)
    assert ended.code == 0 and len(set(ended.ends)) == 1, ended
    return ended.ends[0].split()[3]


def command(lab: Lab, least: int, folder: str, steps: int) -> list[str]:
    """ocommrun on the lab's switch, which reaches all hosts."""
    hosts = ",".join(f"{name}:1" for name in lab.names)
    flags = ["-np", str(len(lab.names)), "--min-np", str(least), "-H", hosts, "--mpi-args", " ".join(lab.mpi_options())]
    return lab.on(
        None, [sys.executable, "-m", "ocomm.launch", *flags, sys.executable, str(PROGRAM), folder, str(steps)]
    )


def endure(harm: Harm | None, least: int, ranks: int = RANKS, steps: int = STEPS) -> Ended:
    """Starts a job of so many ranks and steps, does the harm, and waits for the end of the job, but not for ever.

    ``least``: ranks that are enough.
    """
    with tempfile.TemporaryDirectory() as name, Lab(ranks, RATE) as lab, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        environment = {"OCOMM_ELASTIC_FOLDER": f"{name}/commits", **(harm.environment if harm else {})}
        job = pool.submit(lab.run, command(lab, least, name, steps), START_S + LIMIT_S, environment)
        try:
            return _endure(harm, least, lab, folder, job)
        finally:
            lab.close()  # the end of all that runs in it, and so of the thread that waits for it


def _endure(
    harm: Harm | None, least: int, lab: Lab, folder: Path, job: Future[subprocess.CompletedProcess[str]]
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
    return Ended(harm, len(lab.names), least, doing, done.returncode, time.monotonic() - begin, ends, output)


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


def summary(all_ended: Sequence[Ended]) -> str:
    """A row for each kind of harm."""
    lines = ["| harm | goes on as it should | ended after s: median | most |", "|---|---|---|---|"]
    for kind in dict.fromkeys(ended.harm.kind for ended in all_ended if ended.harm):
        some = [ended for ended in all_ended if ended.harm and ended.harm.kind == kind]
        took = [ended.seconds for ended in some]
        good = sum(not ended.faults for ended in some)
        lines.append(f"| {kind} | {good} of {len(some)} | {statistics.median(took):.1f} | {max(took):.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="these kinds only: kill stop cut")
    parser.add_argument("--output", type=Path, help="a file for the tables")
    args = parser.parse_args()
    if reason := why_not():
        print(f"chaos_elastic: skipped, no lab: {reason}", file=sys.stderr)
        return 77
    all_ended = []
    for harm, least in plan(args.kills, args.seed):
        if args.only and harm.kind not in args.only:
            continue
        ended = endure(harm, least)
        all_ended.append(ended)
        print(table([ended]).splitlines()[-1], flush=True)
        if ended.faults:
            print(ended.output, flush=True)
    if args.output is not None:
        args.output.write_text(summary(all_ended) + "\n" + table(all_ended))
    return any(ended.faults for ended in all_ended)


if __name__ == "__main__":
    sys.exit(main())
