"""Runs every case of the layers that are named, or a sample of them, and writes a table.

    python -m tests.faults [transport] [mpi] [allocations] [files] [mpirun] [--sample N --seed N] [--only REGEX]

With no layer it runs all of the first four; ``mpirun`` has the faults of these in real jobs. The exit status is 1 if a
case has failed.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import scenarios, workloads, world
from tests.faults.allocations import Allocations, library
from tests.faults.calls import Calls, Fault, faults

LAYERS = ("transport", "mpi", "allocations", "files")
MPIRUN = "mpirun"
#: Seconds after which a run counts as stuck. The longest wait of a rank is twice its patience, one after the other.
DEADLINE_S = 120.0
#: Seconds of silence after which a rank counts as dead, of all runs in process.
_patience_s = 3.0


@dataclass(frozen=True)
class Case:
    """One fault. ``run`` returns whether it has happened, and what was wrong."""

    layer: str
    fault: str
    run: Callable[[], tuple[bool, list[str]]]


def _run(native: bool, calls: dict[int, Calls] | None = None) -> world.Run:
    settings = workloads.patient(_patience_s)
    return world.run(workloads.everything, workloads.RANKS, settings, calls, native=native, deadline_s=DEADLINE_S)


def _clean(native: bool) -> world.Run:
    done = _run(native)
    for rank in done.ranks:
        if rank.error is not None:
            raise rank.error
    if done.stuck:
        sys.exit(f"without a fault {done.stuck} hang")
    return done


def _network_cases(layer: str) -> Iterator[Case]:
    """Returns the faults of the transport under the engine in Python, or of MPI's functions under that in C."""
    native = layer == "mpi"
    clean = _clean(native)
    for victim, rank in enumerate(clean.ranks):
        counts = {site: n for site, n in rank.calls.counts.items() if site.startswith("MPI_") == native}
        if native:  # and what the runtime itself sends: the engine in C shares the thread with it
            counts |= {site: n for site, n in rank.calls.counts.items() if "process_set" in site}
        for fault in faults(counts, lasting=True):

            def run(victim: int = victim, fault: Fault = fault) -> tuple[bool, list[str]]:
                calls = Calls(fault)
                done = _run(native, {victim: calls})
                return calls.has_failed, world.problems(clean, done, victim)

            yield Case(layer, f"rank {victim}: {fault}", run)


def _allocation_cases() -> Iterator[Case]:
    allocations = Allocations()
    allocations.begin()
    clean = _clean(native=True)
    for allocation, count in allocations.counts().items():
        for fault in faults({allocation.name: count}, lasting=True):

            def run(chosen: tuple[Any, ...] = (allocation, fault.number, fault.lasting)) -> tuple[bool, list[str]]:
                allocations.begin(chosen)
                done = _run(native=True)
                has_failed = allocations.has_failed
                allocations.begin()
                blamed = [str(rank.error) for rank in done.ranks if "MPI error" in str(rank.error)]
                return has_failed, world.problems(clean, done) + blamed

            yield Case("allocations", str(fault), run)


def _file_cases() -> Iterator[Case]:
    for name, scenario in scenarios.SCENARIOS.items():
        calls = Calls()
        if wrong := scenario(calls):
            sys.exit(f"without a fault {name}: {wrong}")
        for fault in faults(calls.counts):

            def run(scenario: Callable[[Calls], list[str]] = scenario, fault: Fault = fault) -> tuple[bool, list[str]]:
                calls = Calls(fault)
                wrong = scenario(calls)
                return calls.has_failed, wrong

            yield Case("files", f"{name}: {fault}", run)


def _mpirun_cases() -> Iterator[Case]:
    from tests.faults import mpirun

    preload = library(Path(tempfile.mkdtemp(prefix="ocomm-faults-")))
    if preload is None:
        sys.exit("there is no gcc")
    atexit.register(shutil.rmtree, preload.parent)
    clean, status = mpirun.job(preload)
    if status != 0:
        sys.exit(f"without a fault the job has ended with status {status}: {clean}")
    for victim, rank in enumerate(clean):
        assert rank.counts is not None and rank.allocations is not None
        chosen = [mpirun.Chosen(victim, fault) for fault in faults(rank.counts)]
        for name, (offset, count) in rank.allocations.items():
            chosen += [mpirun.Chosen(victim, fault, offset) for fault in faults({name: count})]
        for each in chosen:

            def run(each: mpirun.Chosen = each) -> tuple[bool, list[str]]:
                ranks, status = mpirun.job(preload, each)
                return ranks[each.victim].has_failed, mpirun.problems(clean, ranks, status, each.victim)

            yield Case(MPIRUN, f"rank {victim}: {each.fault}", run)


def cases(layer: str) -> Iterator[Case]:
    """Returns the cases of a layer, after a run without a fault that counts the calls."""
    if layer == MPIRUN:
        return _mpirun_cases()
    if layer == "allocations":
        return _allocation_cases()
    return _file_cases() if layer == "files" else _network_cases(layer)


def _preloaded(given: list[str]) -> int:
    """Runs the cases of allocations in a process that has the library preloaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = library(Path(folder))
        if path is None:
            print("allocations: there is no gcc")
            return 0
        environ = {**os.environ, "LD_PRELOAD": str(path)}
        return subprocess.run([sys.executable, "-m", "tests.faults", *given], env=environ).returncode


def main() -> int:
    """Runs what the command line asks for. Returns the exit status."""
    global _patience_s
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("layers", nargs="*", help=f"some of {', '.join((*LAYERS, MPIRUN))}")
    parser.add_argument("--sample", type=int, default=0, help="how many cases of each layer, 0 for all")
    parser.add_argument("--seed", type=int, default=1, help="for the choice of these")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in whose name it is found")
    parser.add_argument("--patience", type=float, default=_patience_s, help="seconds of silence of a dead rank")
    asked = parser.parse_args()
    _patience_s = asked.patience
    logging.getLogger("ocomm").setLevel(logging.CRITICAL)  # every case would say that a rank has failed
    codes, rows = [0], []
    for layer in asked.layers or LAYERS:
        if layer == "allocations" and "allocations.so" not in os.environ.get("LD_PRELOAD", ""):
            more = ["--sample", str(asked.sample), "--seed", str(asked.seed), "--only", asked.only]
            more += ["--patience", str(asked.patience)]
            codes.append(_preloaded(["allocations", *more]))
            continue
        chosen = [case for case in cases(layer) if re.search(asked.only, case.fault)]
        if not chosen:
            sys.exit(f"{layer}: no case has {asked.only}")
        if 0 < asked.sample < len(chosen):
            chosen = random.Random(asked.seed).sample(chosen, asked.sample)
        found: Counter[str] = Counter()
        began_s = time.monotonic()
        for case in chosen:
            case_s = time.monotonic()
            has_happened, wrong = case.run()
            how = "wrong" if wrong else "right" if has_happened else "not reached"
            found[how] += 1
            print(
                f"{how:12}{time.monotonic() - case_s:5.1f} s  {layer}  {case.fault}", *wrong, sep="\n    ", flush=True
            )
        codes.append(int(found["wrong"] > 0))
        rows.append(
            f"| {layer} | {len(chosen)} | {found['right']} | {found['not reached']} | {found['wrong']} "
            f"| {time.monotonic() - began_s:.0f} s |"
        )
    if rows:
        print(
            "\n| layer | cases | as promised | not reached | wrong | time |\n|---|---|---|---|---|---|", *rows, sep="\n"
        )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
