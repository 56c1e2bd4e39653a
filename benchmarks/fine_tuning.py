"""Losses of a pretrained transformer that is fine-tuned, with gradient clipping: every optimizer against Adam.

    ocommrun -np 2 python -m benchmarks.fine_tuning [--steps 240 720] [--seeds 0 1 2] [--methods "1-bit Adam" ...]
    ocommrun -np 16 python -m benchmarks.fine_tuning --batch 2 [...]
    ocommrun -np 2 python -m benchmarks.fine_tuning --task pairs [...]

MiniLM, 22.7 million parameters, learns to classify glosses of nouns, or to find the noun of each gloss
(``benchmarks/tasks/glosses.py``): 16 examples per rank and step, lr 1e-4 with a tenth of warm-up and linear decay,
``max_grad_norm`` 1. Dropout is off. All see the same batches for a seed. Optimizers of signs alone have rates that are
to Adam's as the best ones of ``benchmarks.convergence`` are. Each run is added to
``benchmarks/results/fine-tuning.json`` when it is over, and is not made again; the table is ``fine-tuning.md``. Needs
transformers (``pip install 'ocomm[transformers]'``).
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch as hvd
from benchmarks.convergence import load
from benchmarks.methods import Settings, Wrap
from benchmarks.ranks import start
from benchmarks.tasks import Task, glosses
from benchmarks.training import train
from benchmarks.turns import MARK, SKIPPED
from ocomm.bench.kernels import commit

RESULTS = Path(__file__).resolve().parent / "results"
LR, NORM = 1e-4, 1.0
ADAM, UNCLIPPED = "Adam", "Adam, not clipped"


def _dense(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> Any:
    return hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())


def _compressed(wrapper: Any, **options: Any) -> Wrap:
    def wrap(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> Any:
        length = {"total_steps": steps} if wrapper in (hvd.DistributedOneBitAdam, hvd.DistributedZeroOneAdam) else {}
        return wrapper(adam, model.named_parameters(), **length, **options)

    return wrap


def _power_sgd(model: nn.Module) -> nn.Module:
    # In one bucket: PowerSGD's second allreduce of a bucket would meet the first of the next on gloo.
    module = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def report() -> dict[str, float]:
        dense, (ratio, *_) = min(state.iter, state.start_powerSGD_iter), state.compression_stats()
        return {"ratio": state.iter / (dense + (state.iter - dense) / ratio)}

    module.compression_report = report
    return module


@dataclass(frozen=True)
class Method:
    wrap: Wrap
    #: By which averages are clipped; compressed optimizers clip by themselves.
    norm: float | None = None
    #: Times Adam's learning rate.
    lr: float = 1.0
    around: Callable[[nn.Module], nn.Module] = lambda model: model


METHODS = {
    ADAM: Method(_dense, NORM),
    "1-bit Adam": Method(_compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM)),
    "1-bit Adam, 8-bit warm-up": Method(_compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM, dense_bits=8)),
    "1-bit Adam, previous norm": Method(_compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM, clip="previous")),
    "1-bit Adam, 8-bit warm-up, previous norm": Method(
        _compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM, clip="previous", dense_bits=8)
    ),
    "0/1 Adam": Method(_compressed(hvd.DistributedZeroOneAdam, max_grad_norm=NORM)),
    "1-bit LAMB": Method(_compressed(hvd.DistributedOneBitLamb, max_grad_norm=NORM), lr=20.0),
    "Lion": Method(_compressed(hvd.DistributedLion, max_grad_norm=NORM), lr=1 / 3),
    "Birder": Method(_compressed(hvd.DistributedBirder, max_grad_norm=NORM)),
    "SoftSignSGD": Method(_compressed(hvd.DistributedSoftSignSGD)),
    "DDP PowerSGD rank 1": Method(lambda adam, *_: adam, NORM, around=_power_sgd),
    UNCLIPPED: Method(_dense),
    "1-bit Adam, not clipped": Method(_compressed(hvd.DistributedOneBitAdam)),
}
TASKS = {"glosses": glosses.load, "pairs": glosses.load_pairs}


def key(task: Task, name: str, steps: int, seed: int) -> str:
    return f"{task.name} / {name} / {hvd.size()} ranks x {task.batch} / {steps} steps / seed {seed}"


def table(found: dict[str, Any]) -> str:
    """The runs of each method and length, against Adam's with the same seeds."""
    rows = []
    case_of = operator.itemgetter("task", "ranks", "batch", "steps")
    for case in sorted(set(map(case_of, found.values()))):
        own = {(run["method"], run["seed"]): run for run in found.values() if case_of(run) == case}
        task, ranks, batch, steps = case
        for name in METHODS:
            seeds = sorted(seed for method, seed in own if method == name)
            runs = [own[name, seed] for seed in seeds]
            if not runs:
                continue
            dense = UNCLIPPED if name.endswith("not clipped") else ADAM
            pairs = [(run["loss"], own[dense, run["seed"]]["loss"]) for run in runs if (dense, run["seed"]) in own]
            gaps = [loss / adams - 1 for loss, adams in pairs]
            spread = f" ± {100 * stdev(gaps):.1f}" if len(gaps) > 1 else ""
            ratio = [run["ratio"] for run in runs if run["ratio"]]
            rows.append(
                [
                    task,
                    f"{ranks} x {batch}",
                    steps,
                    name,
                    " / ".join(f"{run['loss']:.4f}" for run in runs),
                    "" if name == dense or not gaps else f"{100 * mean(gaps):+.1f}{spread} %",
                    f"{100 * mean(run['accuracy'] for run in runs):.1f} %",
                    f"{1 / mean(ratio):.3f}" if ratio else "1",
                ]
            )
    columns = ["task", "ranks x batch", "steps", "method", "loss by seed", "against Adam", "right", "bytes of dense"]
    return tabulate(rows, columns, "github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="glosses")
    parser.add_argument("--batch", type=int, default=16, help="examples per rank and step")
    parser.add_argument("--steps", type=int, nargs="+", default=[240])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args(arguments)
    if not find_spec("transformers"):
        print("no transformers: pip install 'ocomm[transformers]'", file=sys.stderr)
        return SKIPPED
    start(threads=1)
    file, page = args.into / "fine-tuning.json", args.into / "fine-tuning.md"
    found = hvd.broadcast_object(json.loads(file.read_text()) if file.exists() else {}, 0)
    task = replace(load(args.task, TASKS), batch=args.batch)
    for steps in args.steps:
        for seed in args.seeds:
            for name in args.methods:
                if (at := key(task, name, steps, seed)) in found:
                    continue
                method = METHODS[name]
                run = train(
                    task,
                    method.wrap,
                    {"lr": LR * method.lr},
                    seed=seed,
                    steps=steps,
                    max_grad_norm=method.norm,
                    around=method.around,
                )
                found[at] = {
                    **asdict(run),
                    "task": task.name,
                    "method": name,
                    "ranks": hvd.size(),
                    "batch": task.batch,
                    "steps": steps,
                    "commit": hvd.broadcast_object(commit(), 0),
                }
                if hvd.rank() == 0:
                    print(f"{at}: loss {run.loss:.4f}, right {run.accuracy:.4f}, {run.seconds:.0f} s", flush=True)
                    file.write_text(json.dumps(found, indent=1) + "\n")
    if hvd.rank() == 0:
        above = page.read_text().partition(MARK)[0] if page.exists() else ""
        page.write_text(f"{above}{MARK}\n\n{table(found)}\n")
        print(table(found))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
