"""Trains for long, and looks at whether the ranks use more and more memory, descriptors, threads or files.

    python -m tests.cluster.soak --steps 100000 --minutes 60 --output benchmarks/results/soak.md

Each optimizer makes as many steps on two real ranks. Then an elastic job trains for so many minutes, while one of its
ranks is killed every minute: of that, the supervisor and the folder of commits are looked at, at each new generation.
What counts is a straight line through the second half (``usage.py``, with the limits).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.numpy_training import KINDS
from tests.cluster.harms import TO_TESTS
from tests.cluster.jobs import ROOT, run_job
from tests.cluster.usage import LIMITS, PER, Growth, Usage, growth

PROGRAM = Path(__file__).with_name("train_soak.py")
ELASTIC = Path(__file__).with_name("train_elastic.py")
RANKS = 2
#: Seconds of a step at most, for a job that is ended if it takes longer, and of its start.
STEP_S, START_S = 0.05, 120.0
HEADER = (
    "| what | rank | steps | RSS MB at the end | RSS, KB | descriptors | threads | files | too much |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def row(what: str, rank: str, steps: str, found: list[Growth]) -> str:
    """A row of the table; ``found`` per ``PER`` steps."""
    by = {each.what: each for each in found}
    cells = [what, rank, steps, f"{by['rss'].last / 1e6:.1f}", f"{by['rss'].per / 1e3:+.0f}"]
    cells += [f"{by[name].last} ({by[name].per:+.2f})" for name in ("descriptors", "threads", "files")]
    return "| " + " | ".join([*cells, ", ".join(each.what for each in found if each.is_too_much)]) + " |\n"


def soak(name: str, steps: int) -> tuple[str, bool]:
    """Makes ``steps`` steps of an optimizer on real ranks. Returns a row for each, and whether none grows too much."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(RANKS, PROGRAM, folder, name, str(steps), timeout_s=START_S + STEP_S * steps, **TO_TESTS)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")
        rows, is_flat = "", True
        for rank in range(RANKS):
            usages = [Usage.of(line) for line in (Path(folder) / f"usage-{rank}").read_text().splitlines()]
            found = growth(usages)
            rows += row(name, str(rank), f"{steps:,}", found)
            is_flat = is_flat and not any(each.is_too_much for each in found)
        return rows, is_flat


def soak_elastic(minutes: float, every_s: float, seed: int = 1) -> tuple[str, bool]:
    """Trains for ``minutes`` while a rank is killed every ``every_s`` seconds. Returns a row and whether it is flat."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, commits = Path(name), Path(name) / "commits"
        flags = ["-np", str(RANKS), "--min-np", str(RANKS)]
        job = subprocess.Popen(
            [sys.executable, "-m", "ocomm.launch", *flags, sys.executable, str(ELASTIC), name, str(1 << 40), "numpy"],
            cwd=ROOT,
            env={**os.environ, **TO_TESTS, "OCOMM_ELASTIC_FOLDER": str(commits)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        usages: list[Usage] = []
        try:
            end_s = time.monotonic() + 60 * minutes
            while time.monotonic() < end_s:
                pids = _wait_for_commits(folder, len(usages) + 1, job)
                time.sleep(every_s)
                files = sum(len(files) for _, _, files in os.walk(commits))
                usages.append(Usage.now(len(usages) + 1, job.pid, files))
                os.kill(draw.choice(pids), signal.SIGKILL)
            _wait_for_commits(folder, len(usages) + 1, job)
            (folder / "enough").touch()
            code = job.wait(START_S)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)  # on which it ends its ranks
                job.wait(START_S)
        steps = max(int(path.read_text().split()[1]) for path in folder.glob("doing-?"))
    found = growth(usages)
    is_flat = code == 0 and not any(each.is_too_much for each in found)
    words = f"{len(usages)} kills, {steps:,} steps"
    return row("elastic, per kill", "supervisor", words, [each._replace(per=each.per / PER) for each in found]), is_flat


def _wait_for_commits(folder: Path, generation: int, job: subprocess.Popen[bytes]) -> list[int]:
    """Waits until all ranks of a generation have made a commit; returns their process numbers."""
    paths = [folder / f"record-{generation}-{rank}" for rank in range(RANKS)]
    end_s = time.monotonic() + START_S
    while not all(path.exists() and b"committing" in path.read_bytes() for path in paths):
        if job.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"generation {generation} has not come to a commit")
        time.sleep(0.1)
    return [int((folder / f"pid-{rank}").read_text()) for rank in range(RANKS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="of each optimizer; 0: none")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the elastic job; 0: none")
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=[], choices=["allreduce", *KINDS])
    parser.add_argument("--output", type=Path, help="a file for the table")
    args = parser.parse_args()
    limits = ", ".join(f"{what} {limit / 1e6:.1f} MB" if what == "rss" else what for what, limit in LIMITS.items())
    text, all_flat = f"Growth of the second half per {PER:,} steps; limits: {limits} below 1.\n\n{HEADER}", True
    print(text, end="", flush=True)
    for name in args.only or ["allreduce", *KINDS] if args.steps else []:
        rows, is_flat = soak(name, args.steps)
        print(rows, end="", flush=True)
        text, all_flat = text + rows, all_flat and is_flat
    if args.minutes:
        rows, is_flat = soak_elastic(args.minutes, args.kill_every_s)
        print(rows, end="", flush=True)
        text, all_flat = text + rows, all_flat and is_flat
    if args.output is not None:
        args.output.write_text(text)
    return not all_flat


if __name__ == "__main__":
    sys.exit(main())
