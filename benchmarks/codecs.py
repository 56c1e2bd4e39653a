"""``Compression.int8`` and ``int4`` against float32: what they cost an optimizer that is not made for them.

    python -m benchmarks.codecs [--tasks images small] [--steps 400] [--seeds 0 1] [--into FOLDER]

SGD with momentum and Muon, on text and on images, with four workers simulated in one process: the exchange is that of
docs/algorithms.md, in Torch. Rows are paired: seeds, batches and rates are those of float32. Beside plain error
feedback there is LoCo's (arXiv 2407.04480): e = beta * e + (1 - beta) * (c - C(c)), reset every 1,024 steps. A last row
is float32 with its first gradients changed by a millionth: a difference of this size says nothing.

Muon moves matrices inside the model, Adam the rest; both are compressed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from benchmarks import convergence_tables as tables
from benchmarks.convergence import LOADERS, RESULTS
from benchmarks.muon import parted
from benchmarks.tasks import Task
from benchmarks.training import schedule

WORKERS = 4
GROUP = 128
LOCO_BETA, LOCO_RESET = 0.8, 1024
#: Learning rates of SGD, and of Muon and its Adam, by task.
RATES = {"small": (0.2, 0.02, 4e-3), "text": (0.2, 0.02, 4e-3), "images": (0.05, 0.01, 2e-3)}
FLOAT, CHANGED = "float32", "float32, changed"


@dataclass(frozen=True)
class Run:
    """What a run leaves behind: losses in nats."""

    task: str
    optimizer: str
    method: str
    seed: int
    validation: float
    #: Mean over the last tenth of the steps and the workers.
    training: float


class Codes:
    """One tensor's exchange of ``WORKERS`` workers in ``bits`` bits; ``beta`` is LoCo's, 0 for plain feedback."""

    def __init__(self, numel: int, bits: int, beta: float) -> None:
        self.levels = 2 ** (bits - 1) - 1
        self.beta = beta
        self.numel = numel
        padded = -(-numel // GROUP) * GROUP
        self.errors = torch.zeros(WORKERS, padded)
        self.server_error = torch.zeros(1, padded)
        self.steps = 0

    def sent(self, c: torch.Tensor) -> torch.Tensor:
        """What the codes of the rows of c stand for."""
        groups = c.view(len(c), -1, GROUP)
        largest = groups.abs().amax(2, keepdim=True)
        q = torch.round(groups * (self.levels / largest))
        return torch.where(largest < 2.0**-100, 0.0, q * (largest / self.levels)).view(c.shape)

    def kept(self, error: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        if not self.beta:
            return lost
        if self.steps % LOCO_RESET == 0:
            return torch.zeros_like(lost)
        return self.beta * error + (1 - self.beta) * lost

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """The average of a row per worker."""
        self.steps += 1
        c = nn.functional.pad(gradients, (0, self.errors.shape[1] - self.numel)) + self.errors
        u = self.sent(c)
        self.errors = self.kept(self.errors, c - u)
        a = u.mean(0, keepdim=True) + self.server_error
        result = self.sent(a)
        self.server_error = self.kept(self.server_error, a - result)
        return result[0, : self.numel]


#: Bits and LoCo's beta of each compressed method.
METHODS = {
    "int8": (8, 0.0),
    "int4": (4, 0.0),
    "int4, LoCo": (4, LOCO_BETA),
}


def optimizers(name: str, model: nn.Module, task: str) -> list[torch.optim.Optimizer]:
    sgd, muon, adam = RATES[task]
    if name == "SGD":
        return [torch.optim.SGD(model.parameters(), lr=sgd, momentum=0.9)]
    inner, rest = parted(model)
    return [torch.optim.Muon(inner, lr=muon), torch.optim.Adam(rest, lr=adam)]


def train(task: Task, label: str, optimizer: str, method: str, seed: int, steps: int) -> Run:
    model = task.model_of(seed)
    chosen = optimizers(optimizer, model, label)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, schedule(steps)) for each in chosen]
    parameters = list(model.parameters())
    codes = [Codes(p.numel(), *METHODS[method]) for p in parameters] if method in METHODS else None
    losses = torch.zeros(steps)
    for step in range(steps):
        each = []
        for worker in range(WORKERS):
            loss = task.loss(model, task.draw(seed, step, worker))
            each.append(torch.autograd.grad(loss, parameters))
            losses[step] += loss.item() / WORKERS
        for number, parameter in enumerate(parameters):
            rows = torch.stack([own[number].reshape(-1) for own in each])
            if method == CHANGED and step == 0:
                rows = rows * (1 + 1e-6)
            average = rows.mean(0) if codes is None else codes[number].average(rows)
            parameter.grad = average.view_as(parameter)
        for one, its in zip(chosen, schedules, strict=True):
            one.step()
            its.step()
    total, _, count = task.evaluate(model).tolist()
    return Run(label, optimizer, method, seed, total / count, losses[-(steps // 10) :].mean().item())


def change(runs: list[Run], dense: list[Run], name: str) -> str:
    """Paired change against float32 in percent: mean, and standard deviation over seeds."""
    changes = [100 * (getattr(a, name) / getattr(b, name) - 1) for a, b in zip(runs, dense, strict=True)]
    spread = f" ± {stdev(changes):.2f}" if len(changes) > 1 else ""
    return f"{mean(changes):+.2f} %{spread}"


def document(runs: list[Run], steps: int, command: str, minutes: float) -> str:
    rows = []
    for label, optimizer in dict.fromkeys((run.task, run.optimizer) for run in runs):
        of = [run for run in runs if (run.task, run.optimizer) == (label, optimizer)]
        dense = [run for run in of if run.method == FLOAT]
        for method in dict.fromkeys(run.method for run in of):
            some = [run for run in of if run.method == method]
            row = [label, optimizer, method, f"{mean(run.validation for run in some):.4f}"]
            row += ["", ""] if method == FLOAT else [change(some, dense, "validation"), change(some, dense, "training")]
            rows.append(row)
    headers = ["task", "", "", "validation loss", "against float32, paired", "training loss against float32, paired"]
    return f"""# int8 and int4 under SGD and Muon

{tables.table(rows, headers)}

Mean over seeds, ± the standard deviation of the paired changes. The training loss is that of the last tenth of the
steps. {WORKERS} simulated workers, {steps} steps; rates rise over the first tenth and fall linearly to zero. The row
of changed float32 shows how far runs part by themselves.

- command: `{command}`, {minutes:.0f} minutes
- machine: {tables.machine()}
- versions: torch {torch.__version__}; commit {tables.commit()}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(RATES), default=["images", "small"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    runs = []
    for label in args.tasks:
        task = LOADERS[label]()
        for optimizer in ("SGD", "Muon"):
            for method in (FLOAT, *METHODS, CHANGED):
                for seed in args.seeds:
                    run = train(task, label, optimizer, method, seed, args.steps)
                    print(json.dumps(asdict(run)), flush=True)
                    runs.append(run)
    seeds = " ".join(map(str, args.seeds))
    command = f"python -m benchmarks.codecs --tasks {' '.join(args.tasks)} --steps {args.steps} --seeds {seeds}"
    minutes = (time.perf_counter() - started) / 60
    (args.into / "codecs.md").write_text(document(runs, args.steps, command, minutes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
