"""Losses of a small language model through Lightning and Hugging Face's Trainer: their own DDP, and 1-bit Adam.

    ocommrun -np 2 python -m benchmarks.trainer_losses [--steps 2000] [--seeds 2] [--into FOLDER]

trains the transformer of the task "text" (``benchmarks/tasks``) with Adam at the lr that was tuned for it. A trainer
sees the same batches with DDP and with 1-bit Adam, which has a dense warm-up of a fifth. The loss is that of held-out
text, in nats. Both trainers must be installed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import ocomm_torch as hvd
from benchmarks.ranks import start
from benchmarks.tasks import shakespeare
from benchmarks.trainers import METHODS, Training
from benchmarks.turns import MARK, SKIPPED
from ocomm.bench.kernels import commit, processor

LR = 8e-3


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


def losses(steps: int, seed: int) -> dict[str, float]:
    """The loss on held-out text after ``steps``, by method; the same on all ranks. Collective."""
    task = shakespeare.load()
    onebit: Mapping[str, Any] = {"total_steps": steps}

    def loss(model: nn.Module, number: int) -> Tensor:
        return task.loss(model, task.draw(seed, number, 0))

    found = {}
    for title, _, train, compresses in METHODS.values():
        model = task.model_of(seed)
        train(Training(model, loss, adam, steps, onebit if compresses else None))
        total, _, count = task.evaluate(model)
        found[title] = float(total / count)
        replicas = hvd.allgather_object(found[title])
        if len(set(replicas)) > 1:
            raise SystemExit(f"the replicas of {title} differ: {replicas}")
    return found


def table(found: list[dict[str, float]]) -> str:
    rows = []
    for title in found[0]:
        own = f"{title.split(',')[0]}, DDP"
        gap = statistics.fmean(each[title] / each[own] - 1 for each in found)
        rows.append([title, " / ".join(f"{each[title]:.4f}" for each in found), f"{gap:+.2%}" if title != own else ""])
    return tabulate(rows, ["method", "loss by seed", "against own DDP"], "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="also writes trainer-losses.md there")
    args = parser.parse_args()
    missing = [package for _, package, *_ in METHODS.values() if not find_spec(package)]
    if missing:
        print(f"no {missing[0]}: pip install 'ocomm[lightning,transformers]'", file=sys.stderr)
        return SKIPPED
    warnings.filterwarnings("ignore", module="lightning|transformers|accelerate")
    rank, ranks = start(1)
    found = [losses(args.steps, seed) for seed in range(args.seeds)]
    if rank == 0:
        packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning", "transformers"))
        said = (
            f"{ranks} ranks, {args.steps} steps. Processor {processor()}, Python {platform.python_version()}, "
            f"{packages}, commit {commit()}."
        )
        print(f"{table(found)}\n\n{said}")
        if args.into:
            page = args.into / "trainer-losses.md"
            above = page.read_text().partition(MARK)[0] if page.exists() else ""
            page.write_text(f"{above}{MARK}\n\n{table(found)}\n\n{said}\n")
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
