"""The norm by which compressed optimizers clip, against that of the averaged gradient, along a run.

    python -m benchmarks.clip_norms [--steps 100] [--every 10] [--into FOLDER]

MiniLM is fine-tuned (``benchmarks/fine_tuning``) in one process, by Adam on the batches of two workers. In some steps
the gradients of 64 workers are made one after the other. The norm of the average of the first n is compared with what
their sketches estimate, and with the root of the mean of their squared norms. Needs transformers.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from tabulate import tabulate

from benchmarks.fine_tuning import LR, NORM, RESULTS
from benchmarks.tasks import Task, glosses
from benchmarks.training import schedule
from benchmarks.turns import MARK
from ocomm.bench.kernels import commit
from ocomm.kernels import cpu_kernels
from ocomm.optim.sketch import SKETCH_NBYTES, square_of_mean, write_sketch

WORKERS = (2, 4, 16, 64)


def gradients(task: Task, model: torch.nn.Module, step: int, worker: int) -> list[np.ndarray]:
    model.zero_grad()
    task.loss(model, task.draw(0, step, worker)).backward()
    return [p.grad.numpy() for p in model.parameters() if p.grad is not None]


def norms(task: Task, model: torch.nn.Module, step: int) -> dict[int, tuple[float, float, float]]:
    """By number of workers: the norm of their average, the estimate, and the root of the mean of their squares."""
    kernels, total, squares, messages, found = cpu_kernels(), [], 0.0, [], {}
    for worker in range(max(WORKERS)):
        own = gradients(task, model, step, worker)
        addresses = np.array([grad.ctypes.data for grad in own], np.uint64)
        numels = np.array([grad.size for grad in own])
        messages.append(np.zeros(SKETCH_NBYTES, np.uint8))
        write_sketch(kernels.sketch(addresses, numels, step + 1), messages[-1])
        squares += sum(kernels.squares(addresses, numels).tolist())
        total = [a + b for a, b in zip(total, own, strict=True)] if total else [grad.astype(np.float64) for grad in own]
        if (count := worker + 1) in WORKERS:
            exact = math.sqrt(sum(float(np.square(grad).sum()) for grad in total)) / count
            found[count] = exact, math.sqrt(square_of_mean(messages)), math.sqrt(squares / count)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = glosses.load()
    model = task.model_of(0)
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, schedule(args.steps))
    measured = []
    for step in range(args.steps):
        if step % args.every == 0:
            measured.append(norms(task, model, step))
            print(step, *(f"{n}: {a:.4f} {b:.4f} {c:.4f}" for n, (a, b, c) in measured[-1].items()), flush=True)
        adam.zero_grad()
        for worker in range(2):
            (task.loss(model, task.draw(0, step, worker)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        adam.step()
        scheduler.step()
    rows = []
    for count in WORKERS:
        errors = [abs(found[count][1] / found[count][0] - 1) for found in measured]
        before = [found[count][2] / found[count][0] for found in measured]
        rows.append([count, f"{mean(errors):.2%}", f"{max(errors):.2%}", f"{mean(before):.2f}", f"{max(before):.2f}"])
    columns = ["workers", "mean error", "largest error", "root mean square / norm", "largest"]
    text = f"{tabulate(rows, columns, 'github', disable_numparse=True)}\n\nCommit {commit()}, {len(measured)} steps.\n"
    print(text)
    page = args.into / "clip-norms.md"
    above = page.read_text().partition(MARK)[0] if page.exists() else ""
    page.write_text(f"{above}{MARK}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
