"""Validation loss and accuracy of every optimizer against tuned Adam, on real text and real images.

    ocommrun -np 4 python -m benchmarks.convergence [--tune] [--tasks text images small]

All optimizers start from the same parameters and see the same batches, for each seed. lr and beta come from
``benchmarks/results/convergence-tuning.json``; points of the grids that are not in it, or all with ``--tune``, are
tried first, with two seeds of their own: one alone would choose a learning rate at which the next seed fails. The
tables go to ``benchmarks/results/convergence.md``, the runs to ``convergence.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch

import ocomm_torch as hvd
from benchmarks import convergence_tables as tables
from benchmarks.methods import ADAM, METHODS, Method, Settings, Wrap, one_bit_adam
from benchmarks.tasks import Task, language, mnist, shakespeare
from benchmarks.training import Run, train

RESULTS = Path(__file__).resolve().parent / "results"
TUNING = RESULTS / "convergence-tuning.json"
TUNING_SEEDS = (3, 4)
#: Of the images one run more or less right is a tenth of a point of accuracy: three seeds would show that noise.
SEEDS: dict[str, Sequence[int]] = {"text": range(3), "images": (0, 1, 2, *range(5, 14)), "small": range(3)}
STEPS = 300
SCALES, BLOCKS, FLOORS = ("l1", "rms"), (1024, 4096, "tensor"), (0.05, 0.0)

LOADERS: dict[str, Callable[[], Task]] = {
    "text": shakespeare.load,
    "images": mnist.load,
    "small": lambda: shakespeare.load(language.SMALL),
}


def load(name: str, loaders: Mapping[str, Callable[[], Task]] = LOADERS) -> Task:
    """The first rank of each host fills the cache, the others wait for it."""
    if hvd.local_rank() == 0:
        task = loaders[name]()
    hvd.barrier()
    return task if hvd.local_rank() == 0 else loaders[name]()


def run_once(task: Task, name: str, wrap: Wrap, settings: Settings, seed: int) -> Run:
    run = train(task, wrap, settings, seed=seed, steps=STEPS)
    if hvd.rank() == 0:
        told = "  ".join(f"{key} {value:g}" for key, value in settings.items())
        found = f"loss {run.loss:.4f}" + (f"  {100 * run.accuracy:.2f} %" if task.has_accuracy else "")
        mark = "  diverged" if run.diverged else "" if run.replicas_equal else "  REPLICAS DIFFER"
        print(f"{task.name:10}  {name:24} {told:20}  seed {seed}  {found}  {run.seconds:5.1f} s{mark}", flush=True)
    return run


def tune(task: Task, tuning: dict[str, dict[str, list[dict]]]) -> None:
    """A run per seed at the points of each method's grid that ``tuning`` does not have yet: [{lr, beta, losses}, ...].

    The file is written after each method, so that an interrupted run goes on where it was.
    """
    tried = tuning.setdefault(task.name, {})
    for method in METHODS:
        known = {tuple(settings_of(point).items()): point["losses"] for point in tried.get(method.name, [])}
        points = []
        for settings in method.grid:
            losses = list(known.get(tuple(settings.items()), []))
            for seed in TUNING_SEEDS[len(losses) :]:
                loss = run_once(task, method.name, method.wrap, settings, seed).loss
                losses.append(loss if math.isfinite(loss) else None)
            points.append({**settings, "losses": losses})
        if points:
            tried[method.name] = points
        if points and hvd.rank() == 0:
            TUNING.write_text(json.dumps(tuning, indent=1) + "\n")


def settings_of(point: dict) -> Settings:
    """What was tried at a point of a grid."""
    return {key: value for key, value in point.items() if key != "losses"}


def best(tuning: dict[str, list[dict]], method: Method) -> Settings:
    """The point of the method's grid with the lowest mean loss; Adam's where the method has no grid."""
    tried = tuning[method.name if method.grid else ADAM.name]
    return settings_of(min((p for p in tried if None not in p["losses"]), key=lambda p: mean(p["losses"])))


def compare(task: Task, tuning: dict[str, list[dict]]) -> dict[str, list[Run]]:
    return {
        method.name: [run_once(task, method.name, method.wrap, best(tuning, method), seed) for seed in SEEDS[task.name]]
        for method in METHODS
    }


def stability(task: Task, settings: Settings) -> dict[str, list[Run]]:
    """1-bit Adam with every scale and block size, floored and not; Adam beside it."""
    seeds = SEEDS["small"]
    runs = {ADAM.name: [run_once(task, ADAM.name, ADAM.wrap, settings, seed) for seed in seeds]}
    for floor in FLOORS:
        for scale in SCALES:
            for block in BLOCKS:
                wrap = one_bit_adam(scale=scale, block_size=block, variance_floor=floor)
                name = tables.variant(scale, block, floor)
                runs[name] = [run_once(task, name, wrap, settings, seed) for seed in seeds]
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--tune", action="store_true", help="try every point of the grids again")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the tables and the runs")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    started = time.perf_counter()
    tuning = json.loads(TUNING.read_text()) if TUNING.exists() and not options.tune else {}
    results = {}
    for name in options.tasks:
        task = load(name)
        tune(task if name != "small" else load("text"), tuning)
        runs = stability(task, best(tuning["text"], ADAM)) if name == "small" else compare(task, tuning[name])
        results[name] = tables.Result(task, runs)
    if hvd.rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        about = tables.About(hvd.size(), STEPS, TUNING_SEEDS, time.perf_counter() - started)
        text = tables.document(results, tuning, about)
        (options.output / "convergence.md").write_text(text)
        (options.output / "convergence.json").write_text(tables.as_json(results, about))
        print(f"\n{text}")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
