"""Adam, 1-bit Adam and naive 1-bit Adam on the demo's task: test accuracy and loss, mean of three seeds.

    ocommrun -np 2 python benchmarks/digits_accuracy.py [--output benchmarks/results/digits-accuracy.md]

Naive 1-bit Adam is what 1-bit Adam is not: it sends the gradient through the same compressed allreduce, with error
feedback, from the first step on, and lets Adam's variance live on the result. Same model, batches, learning rate and
schedule for all three; nothing is tuned for any of them.
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import date
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from tabulate import tabulate

import ocomm_torch as hvd
from ocomm.bench.kernels import commit, machine
from ocomm.version import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import torch_digits as digits  # noqa: E402

from benchmarks.naive import NaiveOneBitAdam  # noqa: E402

SEEDS = (0, 1, 2)
STEPS, BATCH, LR, FREEZE_STEP = 400, 32, 2e-3, 80


def optimizers() -> dict:
    return {
        "Adam": lambda adam, model: hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters()),
        "1-bit Adam": lambda adam, model: hvd.DistributedOneBitAdam(
            adam, named_parameters=model.named_parameters(), freeze_step=FREEZE_STEP
        ),
        "naive 1-bit Adam": NaiveOneBitAdam,
    }


def run_all() -> dict[str, list[digits.Run]]:
    data = digits.load_data()
    results: dict[str, list[digits.Run]] = {name: [] for name in optimizers()}
    for seed in SEEDS:
        for name, wrap in optimizers().items():
            run = digits.train(
                name,
                wrap,
                data,
                steps=STEPS,
                batch=BATCH,
                lr=LR,
                seed=seed,
                progress=False,
                test_every=STEPS,
            )
            assert len(set(run.fingerprints)) == 1, f"{name}: the ranks' parameters differ"
            results[name].append(run)
            if hvd.rank() == 0:
                print(
                    f"seed {seed}  {name:16}  {100 * run.accuracy:6.2f} %  test loss {run.test_losses[-1]:.4f}  "
                    f"{run.seconds:5.1f} s",
                    flush=True,
                )
    return results


def table(results: dict[str, list[digits.Run]]) -> str:
    dense_loss = mean(run.test_losses[-1] for run in results["Adam"])
    dense_accuracy = mean(run.accuracy for run in results["Adam"])
    rows = []
    for name, runs in results.items():
        accuracies = [100 * run.accuracy for run in runs]
        losses = [run.test_losses[-1] for run in runs]
        rows.append(
            [
                name,
                " / ".join(f"{a:.2f}" for a in accuracies),
                f"{mean(accuracies):.2f} %",
                f"{round(mean(accuracies) - 100 * dense_accuracy, 2) + 0.0:+.2f}",
                f"{mean(losses):.4f} ± {stdev(losses):.4f}",
                f"{mean(losses) / dense_loss:.2f}",
                f"{mean(mean(run.losses[-20:]) for run in runs):.4f}",
            ]
        )
    headers = [
        "", "accuracy by seed", "mean", "points against Adam", "test loss", "against Adam", "train loss, last 20 steps",
    ]  # fmt: skip
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def document(text: str) -> str:
    """The result file: the table, and where it comes from."""
    images = len(digits.load_data().test_labels)
    return f"""# Digits: Adam, 1-bit Adam, naive 1-bit Adam

{text}

Test split of {images} images: one image is {100 / images:.2f} points. All three take {STEPS} steps of {BATCH} images
per rank, lr {LR:g} with linear warm-up over {STEPS // 10} steps and then linear decay to zero, betas 0.9 and 0.999,
seeds {", ".join(map(str, SEEDS))}. 1-bit Adam: freeze_step {FREEZE_STEP}, defaults otherwise. Naive: gradient
compressed with error feedback from step 1 on, blocks of 4096, live variance.

- command: `ocommrun -np {hvd.size()} python benchmarks/digits_accuracy.py --output FILE`
- ranks: {hvd.size()} processes under MPI, one thread each
- machine: {machine()}
- versions: Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, ocomm {__version__}
- commit: {commit()}, {date.today()}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy of Adam, 1-bit Adam and naive 1-bit Adam on digits.")
    parser.add_argument("--output", type=Path, help="write the table, with where it comes from, to this file")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    results = run_all()
    if hvd.rank() == 0:
        text = table(results)
        print(f"\n{text}")
        if options.output:
            options.output.write_text(document(text))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
