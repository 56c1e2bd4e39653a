"""Losses of a pretrained transformer that is fine-tuned, with gradient clipping: every optimizer against Adam.

    ocommrun -np 2 python -m benchmarks.fine_tuning [--steps 240 720] [--seeds 0 1 2] [--methods "1-bit Adam" ...]

MiniLM, 22.7 million parameters, learns to classify glosses of nouns (``benchmarks/tasks/glosses.py``): 16 examples per
rank and step, lr 1e-4 with a tenth of warm-up and linear decay, ``max_grad_norm`` 1. Dropout is off. All see the same
batches for a seed. Each run is added to ``benchmarks/results/fine-tuning.json`` when it is over, and is not made again;
the table is ``fine-tuning.md``. Needs transformers (``pip install 'ocomm[transformers]'``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import ocomm_torch as hvd
from benchmarks.convergence import load
from benchmarks.methods import Settings, Wrap
from benchmarks.tasks import glosses
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
        return wrapper(adam, model.named_parameters(), total_steps=steps, **options)

    return wrap


#: By name: how Adam is wrapped, and the norm by which dense averages are clipped.
METHODS: dict[str, tuple[Wrap, float | None]] = {
    ADAM: (_dense, NORM),
    "1-bit Adam": (_compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM), None),
    "1-bit Adam, 8-bit warm-up, previous norm": (
        _compressed(hvd.DistributedOneBitAdam, max_grad_norm=NORM, clip="previous", dense_bits=8),
        None,
    ),
    "0/1 Adam": (_compressed(hvd.DistributedZeroOneAdam, max_grad_norm=NORM), None),
    UNCLIPPED: (_dense, None),
    "1-bit Adam, not clipped": (_compressed(hvd.DistributedOneBitAdam), None),
}


def key(name: str, steps: int, seed: int) -> str:
    return f"{name} / {hvd.size()} ranks / {steps} steps / seed {seed}"


def table(found: dict[str, Any]) -> str:
    """The runs of each method and length, against Adam's with the same seeds."""
    rows = []
    cases = sorted({(run["ranks"], run["steps"]) for run in found.values()})
    for ranks, steps in cases:
        own = {
            (run["method"], run["seed"]): run
            for run in found.values()
            if (run["ranks"], run["steps"]) == (ranks, steps)
        }
        for name in METHODS:
            seeds = sorted(seed for method, seed in own if method == name)
            runs = [own[name, seed] for seed in seeds]
            if not runs:
                continue
            dense = UNCLIPPED if name.endswith("not clipped") else ADAM
            gaps = [run["loss"] / own[dense, seed]["loss"] - 1 for seed, run in zip(seeds, runs, strict=True)]
            spread = f" ± {100 * stdev(gaps):.1f}" if len(gaps) > 1 else ""
            ratio = [run["ratio"] for run in runs if run["ratio"]]
            rows.append(
                [
                    ranks,
                    steps,
                    name,
                    " / ".join(f"{run['loss']:.4f}" for run in runs),
                    "" if name == dense else f"{100 * mean(gaps):+.1f}{spread} %",
                    f"{100 * mean(run['accuracy'] for run in runs):.1f} %",
                    f"{1 / mean(ratio):.3f}" if ratio else "1",
                ]
            )
    columns = ["ranks", "steps", "method", "loss by seed", "against Adam", "right", "bytes of dense"]
    return tabulate(rows, columns, "github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[240])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args(arguments)
    if not find_spec("transformers"):
        print("no transformers: pip install 'ocomm[transformers]'", file=sys.stderr)
        return SKIPPED
    torch.set_num_threads(1)
    hvd.init()
    file, page = args.into / "fine-tuning.json", args.into / "fine-tuning.md"
    found = hvd.broadcast_object(json.loads(file.read_text()) if file.exists() else {}, 0)
    task = load("glosses", {"glosses": glosses.load})
    for steps in args.steps:
        for seed in args.seeds:
            for name in args.methods:
                if (at := key(name, steps, seed)) in found:
                    continue
                wrap, norm = METHODS[name]
                run = train(task, wrap, {"lr": LR}, seed=seed, steps=steps, max_grad_norm=norm)
                found[at] = {
                    **asdict(run),
                    "method": name,
                    "ranks": hvd.size(),
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
