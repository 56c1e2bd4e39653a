"""Writes what ``benchmarks.convergence`` found: a table per task, and everything in numbers."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from benchmarks.methods import ACCURACY_BOUND, ADAM, BETAS, METHODS, NORM
from benchmarks.tasks import Task
from benchmarks.training import Run
from ocomm.bench.kernels import commit, machine
from ocomm.version import __version__


@dataclass(frozen=True)
class Result:
    task: Task
    runs: dict[str, list[Run]]  # by optimizer, one per seed


@dataclass(frozen=True)
class About:
    """The job that made the results."""

    ranks: int
    steps: int
    tuning_seeds: Sequence[int]
    seconds: float


def variant(scale: str, block: int | str, floor: float) -> str:
    return f"scale {scale}, blocks {block}, floor {floor:g}"


def changes(runs: Sequence[Run], reference: Sequence[Run]) -> list[float]:
    """Loss over the reference's with the same seed, less 1."""
    return [run.loss / other.loss - 1 for run, other in zip(runs, reference, strict=True)]


def percent(values: Sequence[float]) -> str:
    return f"{100 * mean(values):+.2f} % ± {100 * stdev(values):.2f}"


def spread(values: Sequence[float], form: str) -> str:
    """Each of a few values, the lowest and the highest of many."""
    if len(values) <= 3:
        return " / ".join(form.format(value) for value in values)
    return " ... ".join(form.format(value) for value in (min(values), max(values)))


def verdict(bounds: tuple[float, float] | None, value: float) -> str:
    """The bounds in words, and whether the value keeps them; nothing where there are none. NaN keeps none."""
    if bounds is None:
        return ""
    low, high = bounds
    said = f"at most {100 * high:+g} %" if math.isfinite(high) else f"at least {100 * low:+g} %"
    return f"{said}: {'yes' if low <= value <= high else 'NO'}"


def comparison(result: Result) -> str:
    """One row per optimizer."""
    task, adam = result.task, result.runs[ADAM.name]
    rows = []
    for method in METHODS:
        runs = result.runs[method.name]
        change = changes(runs, adam)
        row = [
            method.name,
            ", ".join(f"{key} {value:g}" for key, value in runs[0].settings.items()),
            spread([run.loss for run in runs], "{:.4f}"),
            f"{mean(run.loss for run in runs):.4f}",
            "" if method is ADAM else percent(change),
            verdict(method.bounds.get(task.name), mean(change)),
        ]
        if task.has_accuracy:
            points = [100 * (run.accuracy - other.accuracy) for run, other in zip(runs, adam, strict=True)]
            row[5:] = [
                spread([100 * run.accuracy for run in runs], "{:.1f}"),
                f"{100 * mean(run.accuracy for run in runs):.2f} %",
                "" if method is ADAM else f"{mean(points):+.2f} ± {stdev(points) / math.sqrt(len(points)):.2f}",
                ("yes" if mean(points) >= -ACCURACY_BOUND else "NO") if method.keeps_accuracy else "",
            ]
        row.append("" if runs[0].ratio is None else f"{runs[0].ratio:.1f}")
        rows.append(row)
    headers = ["", "settings", "validation loss by seed", "mean", "against Adam, paired", "bound kept?"]
    if task.has_accuracy:
        headers[5:] = ["accuracy by seed", "mean", "points against Adam", f"within {ACCURACY_BOUND} points?"]
    return table(rows, [*headers, "times fewer bytes"])


def stability(result: Result) -> str:
    """One row per scale and block size, the floored runs beside those without a floor."""
    adam = result.runs[ADAM.name]
    rows: dict[str, list[str]] = {}
    for name, runs in result.runs.items():
        if name == ADAM.name:
            continue
        setting, _, floor = name.rpartition(", floor ")
        diverged = sum(run.diverged for run in runs)
        losses = " / ".join(f"{run.loss:.3f}" for run in runs)
        cells = [losses, percent(changes(runs, adam)), f"{diverged} of {len(runs)}"]
        rows.setdefault(setting, [setting]).extend(cells if floor != "0" else [cells[0], cells[2]])
    headers = ["1-bit Adam with", "loss by seed, floor 0.05", "against Adam", "diverged", "loss, floor 0", "diverged"]
    adam_row = [ADAM.name, " / ".join(f"{run.loss:.3f}" for run in adam), "", "", "", ""]
    return table([adam_row, *rows.values()], headers)


def grids(tuning: dict[str, dict[str, list[dict]]]) -> str:
    """Validation losses of every point that was tried, by task and method."""
    parts = []
    for task, by_method in tuning.items():
        for method, points in by_method.items():
            betas = sorted({point.get("beta", 0.0) for point in points})
            lrs = sorted({point["lr"] for point in points})
            found = {
                (point["lr"], point.get("beta", 0.0)): " / ".join(
                    "-" if x is None else f"{x:.4f}" for x in point["losses"]
                )
                for point in points
            }
            rows = [
                [f"{task}: {method}" + (f", beta {beta:g}" if beta else ""), *(found[lr, beta] for lr in lrs)]
                for beta in betas
            ]
            parts.append(table(rows, ["validation loss", *(f"lr {lr:g}" for lr in lrs)]))
    return "\n\n".join(parts)


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def document(results: dict[str, Result], tuning: dict, about: About) -> str:
    parts = ["# Convergence\n"]
    for name, result in results.items():
        task = result.task
        numel = sum(p.numel() for p in task.make_model().parameters())
        unequal = [method for method, runs in result.runs.items() if not all(run.replicas_equal for run in runs)]
        parts.append(f"## {task.name.capitalize()}\n")
        parts.append(
            f"{task.source}. Model: {task.model}; {numel:,} parameters. {about.steps} steps of {task.batch} examples "
            f"on each of {about.ranks} ranks, {len(result.runs[ADAM.name])} seeds.\n"
        )
        parts.append((stability if name == "small" else comparison)(result) + "\n")
        parts.append(
            f"REPLICAS DIFFER: {', '.join(unequal)}.\n"
            if unequal
            else "At the end of every run all ranks held the same parameters, bit for bit.\n"
        )
    return "\n".join([*parts, notes(tuning, about)])


def notes(tuning: dict[str, dict[str, list[dict]]], about: About) -> str:
    return f"""## How

- All optimizers start from the same parameters and see the same batches, per seed. lr rises linearly over the first
  tenth of the steps and falls linearly to zero; betas {BETAS[0]:g} and {BETAS[1]:g}. "Against Adam, paired": mean and
  standard deviation over the seeds of loss / Adam's loss - 1. Points of accuracy: mean and its standard error. By seed:
  each of three, or the lowest and the highest.
- Adam's lr is the best of its grid below; 1-bit Adam, 0/1 Adam and naive 1-bit Adam take the same. SoftSignSGD, Birder
  and Lion have their own. Each point was tried with seeds {" and ".join(map(str, about.tuning_seeds))}, on the same
  validation split; the lowest mean wins.
- Clipped: max_grad_norm {NORM:g}, by this step's norm or by the previous one's.
- 1-bit Adam: freeze_step {about.steps // 5}. 0/1 Adam: local_step_start {about.steps // 4}, local_step_doubling
  {about.steps // 4}, local_step_clip 4; where the last step is no sync, the ranks' parameters are averaged. All else is
  default. Naive: the gradient goes through the compressed allreduce from step 1 on, the variance lives.
- Diverged: not finite, or a training loss at the end that is not below the one after a fifth of the steps.
- Times fewer bytes: dense bytes over bytes sent, of the whole run. Headers count, and these models are small.

{grids(tuning)}

- command: `ocommrun -np {about.ranks} python -m benchmarks.convergence`, {about.seconds / 60:.0f} minutes
- ranks: {about.ranks} processes under MPI, one thread each
- machine: {machine()}
- versions: Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, ocomm {__version__}
- commit: {commit()}, {date.today()}
"""


def as_json(results: dict[str, Result], about: About) -> str:
    """Every run in numbers; NaN, which is no JSON, becomes null."""
    runs = {
        name: {method: [_without_nan(asdict(run)) for run in found] for method, found in result.runs.items()}
        for name, result in results.items()
    }
    return json.dumps({"about": asdict(about), "commit": commit(), "machine": machine(), "runs": runs}, indent=1) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
