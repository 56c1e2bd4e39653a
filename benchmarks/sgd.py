"""dist-EF-SGD against dense SGD with momentum, each at its own best lr, on real text and real images.

    ocommrun -np 4 python -m benchmarks.sgd [--tasks text images] [--into FOLDER]

Tasks, models, batches and the schedule of the lr are those of ``benchmarks.convergence``. Every lr of the grid is tried
with two seeds of their own, the lowest mean validation loss wins, and three other seeds make the comparison. Results go
to ``sgd.md`` and ``sgd.svg``, the training loss over the steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import mean

import torch
from matplotlib import pyplot
from torch import nn

import ocomm_torch as hvd
from benchmarks import convergence_tables as tables
from benchmarks import plots
from benchmarks.convergence import RESULTS, STEPS, TUNING_SEEDS, load
from benchmarks.methods import Settings, Wrap
from benchmarks.tasks import Task
from benchmarks.training import WINDOW, Run, train
from ocomm.version import __version__

MOMENTUM = 0.9
LRS = (0.025, 0.05, 0.1, 0.2, 0.4)
SEEDS = range(3)

#: Of a method, one per seed.
Runs = dict[str, list[Run]]
#: Validation losses by lr, one per tuning seed.
Grid = dict[float, list[float]]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)


def dense(_: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(sgd(model, settings["lr"]), named_parameters=model.named_parameters())


def compressed(_: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return hvd.DistributedEFSGD(sgd(model, settings["lr"]), model.named_parameters())


DENSE, COMPRESSED = "SGD", "dist-EF-SGD"
METHODS: dict[str, Wrap] = {DENSE: dense, COMPRESSED: compressed}


def run_once(task: Task, name: str, lr: float, seed: int) -> Run:
    run = train(task, METHODS[name], {"lr": lr}, seed=seed, steps=STEPS)
    if hvd.rank() == 0:
        mark = "" if run.replicas_equal else "  REPLICAS DIFFER"
        print(
            f"{task.name:8} {name:12} lr {lr:<7g} seed {seed}  loss {run.loss:.4f}  {run.seconds:.1f} s{mark}",
            flush=True,
        )
    return run


def tuned(task: Task, name: str) -> Grid:
    return {lr: [run_once(task, name, lr, seed).loss for seed in TUNING_SEEDS] for lr in LRS}


def best(losses: Grid) -> float:
    return min((lr for lr in losses if all(map(math.isfinite, losses[lr]))), key=lambda lr: mean(losses[lr]))


def document(found: dict[str, Runs], grids: dict[str, dict[str, Grid]], minutes: float) -> str:
    rows, points = [], []
    for task, runs in found.items():
        for name in METHODS:
            change = "" if name == DENSE else tables.percent(tables.changes(runs[name], runs[DENSE]))
            rows.append(
                [
                    task,
                    name,
                    f"{runs[name][0].settings['lr']:g}",
                    tables.spread([run.loss for run in runs[name]], "{:.4f}"),
                    f"{mean(run.loss for run in runs[name]):.4f}",
                    change,
                    f"{100 * mean(run.accuracy for run in runs[name]):.2f} %",
                    "" if runs[name][0].ratio is None else f"{runs[name][0].ratio:.1f}",
                ]
            )
            points.append([f"{task}: {name}", *(f"{mean(grids[task][name][lr]):.3f}" for lr in LRS)])
    headers = [
        "task",
        "",
        "lr",
        "validation loss by seed",
        "mean",
        "against SGD, paired",
        "accuracy",
        "times fewer bytes",
    ]
    equal = all(run.replicas_equal for runs in found.values() for some in runs.values() for run in some)
    return f"""# dist-EF-SGD against dense SGD

{tables.table(rows, headers)}

{"At the end of every run all ranks held the same parameters, bit for bit." if equal else "REPLICAS DIFFER."}
Momentum {MOMENTUM:g}; {STEPS} steps; lr rises linearly over the first tenth and falls linearly to zero.

![Training loss over the steps](sgd.svg)

## The learning rate

Mean validation loss with the tuning seeds, {" and ".join(map(str, TUNING_SEEDS))}; each method takes its own best.

{tables.table(points, ["", *(f"lr {lr:g}" for lr in LRS)])}

- command: `ocommrun -np {hvd.size()} python -m benchmarks.sgd`, {minutes:.0f} minutes, one thread per process
- machine: {tables.machine()}
- versions: torch {torch.__version__}, ocomm {__version__}; commit {tables.commit()}
"""


def draw(found: dict[str, Runs], path: Path) -> None:
    """The training loss of every seed, over the steps."""
    figure, axes = pyplot.subplots(1, len(found), figsize=(4.5 * len(found), 3.4), squeeze=False)
    for axis, (task, runs) in zip(axes[0], found.items(), strict=True):
        for (name, some), colour in zip(runs.items(), ("#4292c6", "#d94801"), strict=True):
            for run in some:
                steps = [WINDOW * (window + 1) for window in range(len(run.train_losses))]
                label = f"{name}, lr {run.settings['lr']:g}" if run is some[0] else None
                axis.plot(steps, run.train_losses, color=colour, linewidth=1, label=label)
        axis.set(title=task, xlabel="step", yscale="log", ylabel=f"training loss, mean of {WINDOW} steps")
        axis.legend(fontsize=8)
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=("text", "images"), default=["text", "images"])
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    started = time.perf_counter()
    grids: dict[str, dict[str, Grid]] = {}
    found: dict[str, Runs] = {}
    for task in map(load, args.tasks):
        grids[task.name] = {name: tuned(task, name) for name in METHODS}
        found[task.name] = {
            name: [run_once(task, name, best(grids[task.name][name]), seed) for seed in SEEDS] for name in METHODS
        }
    if hvd.rank() == 0:
        args.into.mkdir(parents=True, exist_ok=True)
        text = document(found, grids, (time.perf_counter() - started) / 60)
        (args.into / "sgd.md").write_text(text)
        draw(found, args.into / "sgd.svg")
        print(f"\n{text}")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
