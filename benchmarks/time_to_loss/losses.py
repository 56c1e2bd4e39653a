"""The validation loss of each method over the steps of a run, and the kind of each step.

    ocommrun -np 4 python -m benchmarks.time_to_loss.losses [--tasks text code images] [--seeds 0 1 2] [--tune]

Runs that are in ``losses.json`` already are not repeated. Each is written when it is over, so that what was interrupted
goes on with the next. Models, batches and the schedule of the lr are those of ``benchmarks.convergence``, but images
are distorted at random: in 3,000 steps they would be learned by heart. The rate of
Adam is chosen from a grid, over a third of the steps with a seed of its own (``--tune``), and serves all methods around
Adam that take as many steps; those of ``OWN`` have a grid of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ocomm_torch as hvd
from benchmarks.convergence import load
from benchmarks.tasks import Task, language, mnist, shakespeare, source_code
from benchmarks.time_to_loss.methods import METHODS, Method, kind_of
from benchmarks.training import schedule, validate

RESULTS = Path(__file__).resolve().parents[1] / "results" / "time-to-loss"
LOSSES = RESULTS / "losses.json"
#: "large text": a transformer of 1.2 M parameters.
LOADERS: dict[str, Callable[[], Task]] = {
    "text": shakespeare.load,
    "code": source_code.load,
    "images": mnist.load_distorted,
    "large text": lambda: shakespeare.load(language.LARGE),
}
STEPS = 3000
#: Steps between two evaluations.
EVERY = 50
TUNING_SEED = 3
GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
#: Losses that are no further apart are equal.
NOISE = 1.02
#: The methods whose rate is tuned, and those that use it.
ADAM, OWN = "DDP fp32", ("DDP bf16 hook, 10 accumulated", "Birder", "DiLoCo 30, 4 bits, Muon")


def learn(
    task: Task, method: Method, lr: float, seed: int, steps: int, clock: list[float] | None = None
) -> dict[str, Any]:
    """Trains from scratch. Returns validation losses, one per EVERY steps, and (kind, steps) in their order.

    To ``clock`` the seconds of training so far are added at each of these losses; evaluations take none of them.
    """
    model = task.model_of(seed)
    trained = method.make(model, lr, steps)
    optimizer = trained.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(_scheduled(optimizer), schedule(steps))
    losses, kinds = [], []
    trained_s, started = 0.0, time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(trained.module, task.draw(seed, step, hvd.rank())).backward()
        optimizer.step()
        scheduler.step()
        kinds.append(_kind(method, optimizer, step, steps))
        if (step + 1) % EVERY == 0:
            trained_s += time.perf_counter() - started
            if clock is not None:
                clock.append(trained_s)
            with trained.evaluated():
                losses.append(round(validate(task, model)[0], 5))
            if not math.isfinite(losses[-1]):
                break
            started = time.perf_counter()
    return {
        "seed": seed,
        "lr": lr,
        "steps": steps,
        "losses": losses,
        "kinds": [(kind, len(list(each))) for kind, each in itertools.groupby(kinds)],
        "seconds": round(trained_s, 1),
    }


def _scheduled(optimizer: Any) -> torch.optim.Optimizer:
    """PostLocalSGDOptimizer is a subclass of Optimizer without its attributes: a scheduler takes what it wraps."""
    return getattr(optimizer, "optim", optimizer)


def _kind(method: Method, optimizer: Any, step: int, steps: int) -> str:
    if method.kind is not None:
        return method.kind(step, steps)
    report = optimizer.compression_report()
    dense = report["bytes_dense"] / (step + 1)
    return kind_of(report["last_bytes_sent"], dense, method.steps_of == "DiLoCo")


def stored() -> dict[str, Any]:
    return json.loads(LOSSES.read_text()) if LOSSES.exists() else {"tuning": {}, "runs": {}}


def _store(found: dict[str, Any]) -> None:
    if hvd.rank() == 0:
        LOSSES.parent.mkdir(parents=True, exist_ok=True)
        LOSSES.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def rate_of(found: dict[str, Any], task: str, name: str) -> float:
    """The smallest rate of the grid that is as good as the best, but for noise. KeyError if nothing was tuned.

    Larger ones are at the edge, where a longer run may be worse, and two equal runs part.
    """
    tuned = found["tuning"][task][name if name in OWN else ADAM]
    best = min(tuned.values())
    return min(float(rate) for rate, loss in tuned.items() if loss <= NOISE * best)


def tune(found: dict[str, Any], task: Task, methods: Sequence[str]) -> None:
    """Tries what is missing of the grids that ``methods`` need."""
    for name in (ADAM, *(name for name in OWN if name in methods)):
        losses = found["tuning"].setdefault(task.name, {}).setdefault(name, {})
        for lr in GRID:
            if str(lr) not in losses:
                run = learn(task, METHODS[name], lr, TUNING_SEED, STEPS // 3)
                losses[str(lr)] = run["losses"][-1]
                _say(task.name, name, run)
                _store(found)


def _say(task: str, name: str, run: dict[str, Any]) -> None:
    if hvd.rank() == 0:
        print(
            f"{task:8} {name:40} lr {run['lr']:<6g} seed {run['seed']}  loss {run['losses'][-1]:.4f}  "
            f"{run['seconds']:.0f} s",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(LOADERS), default=["text", "code", "images"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--tune", action="store_true", help="only choose the rates")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    found = hvd.broadcast_object(stored(), 0)
    for seed, name in itertools.product(args.seeds, args.tasks):
        task = load(name, LOADERS)
        tune(found, task, args.methods)
        for method in [] if args.tune else args.methods:
            runs = found["runs"].setdefault(task.name, {}).setdefault(method, [])
            if any(run["seed"] == seed and run["steps"] == STEPS for run in runs):
                continue
            rate = rate_of(found, task.name, method) * METHODS[method].lr
            run = learn(task, METHODS[method], rate, seed, STEPS)
            runs.append(run)
            _say(task.name, method, run)
            _store(found)
    dist.destroy_process_group()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
