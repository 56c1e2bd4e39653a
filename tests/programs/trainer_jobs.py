"""Runs batches of programs whose ranks are processes: one job of two ranks for each batch.

    python -m tests.programs.trainer_jobs KIND --programs 100 --seed 7

draws programs of a kind, runs them in batches, and prints those that break the law.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

_RANKS = 2
#: Seconds that a job gets, and more of them for each program.
_START_S, _PROGRAM_S = 60.0, 12.0
_BATCH = 25


class Outcome(NamedTuple):
    """How a job went: by number of the program what does not hold, how many programs are over, and what was printed."""

    failures: dict[int, str]
    over: int
    printed: str


def run(kind: str, batch: Sequence[Any]) -> None:
    """Runs a batch of the module ``kind``. Raises AssertionError that says which programs break its law, and how."""
    outcome = _job(kind, batch)
    if outcome.failures:
        said = "\n".join(f"{what}\n    {batch[number]!r}," for number, what in outcome.failures.items())
        raise AssertionError(f"{said}\n{outcome.printed[-3000:]}")


def survey(kind: str, count: int, seed: int) -> list[str]:
    """Draws ``count`` programs and runs them, in as many jobs as it takes. Returns a text for each that fails."""
    drawn = _drawn(kind, count, seed)
    said, at = [], 0
    while at < len(drawn):
        batch = drawn[at : at + _BATCH]
        outcome = _job(kind, batch)
        for number, what in outcome.failures.items():
            said.append(f"{what[-900:]}\n    {batch[number]!r},")
            print(f"FAILS {said[-1]}\n", flush=True)
        if outcome.over < len(batch):
            print(outcome.printed[-1500:], flush=True)
        at += outcome.over
        print(f"{at} programs, {len(said)} of which fail", flush=True)
    return said


def _drawn(kind: str, count: int, seed: int) -> list[Any]:
    drawn: list[Any] = []

    def body(program: Any) -> None:
        drawn.append(program)

    every = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    seeded(seed)(every(given(importlib.import_module(kind).program())(body)))()
    return drawn


def _job(kind: str, batch: Sequence[Any]) -> Outcome:
    """Runs a batch in one job, which ends early if an error leaves its ranks apart."""
    from tests.cluster.jobs import MPIRUN, ROOT

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "batch").write_bytes(pickle.dumps(list(batch)))
        command = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", str(_RANKS), sys.executable]
        command += ["-m", "tests.programs.trainer_jobs", "--rank-of", kind, folder]
        environment = {
            # A job within another one has ranks of its own.
            **{name: value for name, value in os.environ.items() if not name.startswith("TEST_MPI")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OCOMM_LOG_LEVEL": "error",
            "OCOMM_STALL_SHUTDOWN_TIME_SECONDS": "20",
        }
        with tempfile.TemporaryFile("w+") as output:
            job = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                job.wait(_START_S + _PROGRAM_S * len(batch))
            except subprocess.TimeoutExpired:
                job.terminate()  # mpirun ends its ranks
                job.wait(30)
            output.seek(0)
            printed = output.read()
        done = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("done.*"))]
    failures = {number: what for number, what in done if what}
    over = len(done)
    if job.returncode and not failures.get(over - 1):
        failures[over] = f"the job ended in this program, with status {job.returncode}"
        over += 1
    return Outcome(failures, over, printed)


def _on_rank(kind: str, folder: str) -> None:
    """Runs the batch in ``folder`` on this rank; rank 0 writes a file for each program that is over."""
    import ocomm_torch as hvd

    batch = pickle.loads(Path(folder, "batch").read_bytes())
    runs = importlib.import_module(kind).runner()
    is_first = hvd.rank() == 0
    for number, program in enumerate(batch):
        place = hvd.broadcast_object(tempfile.mkdtemp(dir=folder) if is_first else "")
        failed = False
        try:
            said = "; ".join(runs(program, place))
        except Exception:
            said, failed = traceback.format_exc(), True
            print(said, file=sys.stderr, flush=True)
        if failed:  # the other rank may be anywhere
            _write(folder, number, said)
            os._exit(1)
        hvd.barrier()
        if is_first:
            shutil.rmtree(place, ignore_errors=True)
            _write(folder, number, said)
    hvd.barrier()


def _write(folder: str, number: int, said: str) -> None:
    part = Path(folder, f"part.{os.getpid()}")
    part.write_bytes(pickle.dumps((number, said)))
    os.replace(part, Path(folder, f"done.{number:06}"))


def main() -> int:
    """Draws programs, and says which break the law."""
    if sys.argv[1] == "--rank-of":
        _on_rank(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.monotonic()
    failed = len(survey(f"tests.programs.{chosen.kind}", chosen.programs, chosen.seed))
    seconds = time.monotonic() - began
    print(f"{chosen.kind}: {failed} of {chosen.programs} programs fail (--seed {chosen.seed}), {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
