"""One training run of one optimizer on one task, the same for all that are compared."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

import ocomm_torch as hvd
from benchmarks.methods import BETAS, Settings, Wrap
from benchmarks.tasks import Task
from ocomm.errors import NonFiniteError

#: Training losses are kept as means over this many steps.
WINDOW = 20


@dataclass(frozen=True)
class Run:
    """What a run leaves behind; the same on all ranks. A run that met NaN or Inf has NaN for what comes after."""

    seed: int
    settings: Settings
    loss: float  # validation, nats
    accuracy: float  # validation
    train_losses: list[float]  # means over the ranks and WINDOW steps
    ratio: float | None  # dense bytes over bytes sent; None where nobody counts
    replicas_equal: bool
    seconds: float

    @property
    def diverged(self) -> bool:
        """Not finite, or the training loss at the end is not below that after a fifth of the steps."""
        last, early = self.train_losses[-1], self.train_losses[max(len(self.train_losses) // 5, 1) - 1]
        return not math.isfinite(self.loss) or last >= early


def schedule(steps: int) -> Callable[[int], float]:
    """Factor on the learning rate: rises over the first tenth, then falls to zero."""
    rise = max(1, steps // 10)
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def train(
    task: Task,
    wrap: Wrap,
    settings: Settings,
    *,
    seed: int,
    steps: int,
    max_grad_norm: float | None = None,
    around: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Run:
    """Trains the task's model; parameters, batches and schedule depend on ``seed``, ``steps`` and the lr alone.

    ``max_grad_norm``: what dense averages are clipped by; compressed optimizers clip by themselves. ``around`` wraps
    the model, as DistributedDataParallel does, whose backward pass leaves averages.
    """
    model = task.model_of(seed)
    module = around(model)
    adam = torch.optim.Adam(model.parameters(), lr=settings["lr"], betas=BETAS)
    optimizer = wrap(adam, model, steps, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(steps))
    losses = torch.full((steps,), math.nan)
    started = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(module, task.draw(seed, step, hvd.rank()))
        loss.backward()
        losses[step] = loss.item()
        try:
            if max_grad_norm is None:
                optimizer.step()
            else:
                averages = hasattr(optimizer, "synchronize")
                if averages:
                    optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                with optimizer.skip_synchronize() if averages else contextlib.nullcontext():
                    optimizer.step()
        except NonFiniteError:
            break
        scheduler.step()
    counting = [counts for counts in (optimizer, module) if hasattr(counts, "compression_report")]
    report = counting[0].compression_report() if counting else {}
    replicas_equal = synchronise(model, report)
    losses = hvd.allreduce(losses, name="losses")
    finite = bool(losses.isfinite().all())
    loss, accuracy = validate(task, model) if finite else (math.nan, math.nan)
    return Run(
        seed=seed,
        settings=settings,
        loss=loss,
        accuracy=accuracy,
        train_losses=[mean(window.tolist()) for window in losses.split(WINDOW)],
        ratio=report.get("ratio"),
        replicas_equal=replicas_equal,
        seconds=time.perf_counter() - started,
    )


def validate(task: Task, model: nn.Module) -> tuple[float, float]:
    """Mean cross-entropy and accuracy on the validation split, of which every rank takes its share."""
    sums = task.evaluate(model, slice(hvd.rank(), None, hvd.size()))
    loss, hits, count = hvd.allreduce(sums, op=hvd.Sum, name="validate").tolist()
    return loss / count, hits / count


def synchronise(model: nn.Module, report: dict[str, Any]) -> bool:
    """Ends a local interval of 0/1 Adam by averaging; returns whether all ranks hold the same bits, before or by it."""
    if not report.get("synced", True):
        for number, parameter in enumerate(model.parameters()):
            parameter.data.copy_(hvd.allreduce(parameter.data, name=f"synchronise.{number}"))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1
