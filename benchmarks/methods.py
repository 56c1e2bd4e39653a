"""The optimizers that ``benchmarks.convergence`` compares: how each wraps Adam, and which settings are tried for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

import ocomm_torch as hvd
from benchmarks.naive import NaiveOneBitAdam

#: Points of accuracy that an optimizer may be below Adam.
ACCURACY_BOUND = 0.5

BETAS = (0.9, 0.999)
LRS = (3e-3, 5e-3, 8e-3, 1.2e-2, 1.6e-2)
SOFT_LRS = (4e-3, 8e-3, 1.2e-2, 1.6e-2)
SOFT_BETAS = (0.8, 0.9)
BIRDER_LRS = (1e-3, 2e-3, 4e-3, 6e-3, 8e-3)
BIRDER_BETAS = (0.7, 0.8, 0.9)
LION_LRS = (5e-4, 1e-3, 2e-3, 4e-3)
#: Where gradients are clipped.
NORM = 0.5

#: lr and, for SoftSignSGD and Birder, beta.
Settings = Mapping[str, float]
Wrap = Callable[[torch.optim.Optimizer, nn.Module, int, Settings], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """``wrap(adam, model, steps, settings)``; ``grid`` is empty for what runs at Adam's lr.

    ``bounds``: by task, between what the loss should be, as fractions above Adam's. ``keeps_accuracy``: whether the
    accuracy should be within ACCURACY_BOUND of Adam's.
    """

    name: str
    wrap: Wrap
    grid: tuple[Settings, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    keeps_accuracy: bool = True


def _adam(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())


def one_bit_adam(**options: object) -> Wrap:
    """1-bit Adam whose first fifth is dense."""

    def wrap(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
        return hvd.DistributedOneBitAdam(adam, model.named_parameters(), freeze_step=steps // 5, **options)

    return wrap


def zero_one_adam(**options: object) -> Wrap:
    """0/1 Adam at the setting for a short run: syncs at every step, later at every second and fourth."""

    def wrap(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
        return hvd.DistributedZeroOneAdam(
            adam,
            model.named_parameters(),
            local_step_start=steps // 4,
            local_step_doubling=steps // 4,
            local_step_clip=4,
            **options,
        )

    return wrap


def _soft_sign(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return hvd.DistributedSoftSignSGD(adam, model.named_parameters(), beta=settings["beta"])


def _birder(**options: object) -> Wrap:
    def wrap(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
        return hvd.DistributedBirder(adam, model.named_parameters(), beta=settings["beta"], **options)

    return wrap


def _lion(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return hvd.DistributedLion(adam, model.named_parameters())


def _naive(adam: torch.optim.Optimizer, model: nn.Module, steps: int, settings: Settings) -> torch.optim.Optimizer:
    return NaiveOneBitAdam(adam, model)


def _grid(lrs: tuple[float, ...], betas: tuple[float, ...] = ()) -> tuple[Settings, ...]:
    return tuple({"lr": lr, "beta": beta} for lr in lrs for beta in betas) or tuple({"lr": lr} for lr in lrs)


ADAM = Method("Adam", _adam, _grid(LRS), keeps_accuracy=False)
METHODS = (
    ADAM,
    Method("1-bit Adam", one_bit_adam(), bounds={"text": (-math.inf, 0.005)}),
    Method("1-bit Adam, scale l1", one_bit_adam(scale="l1")),
    Method("0/1 Adam", zero_one_adam(), bounds={"text": (-math.inf, 0.01)}),
    Method("0/1 Adam, scale l1, floor 0.05", zero_one_adam(scale="l1", variance_floor=0.05)),
    Method("1-bit Adam, clipped", one_bit_adam(max_grad_norm=NORM)),
    Method("1-bit Adam, clipped by the previous norm", one_bit_adam(max_grad_norm=NORM, clip="previous")),
    Method("SoftSignSGD", _soft_sign, _grid(SOFT_LRS, SOFT_BETAS), {"text": (-math.inf, 0.02)}),
    Method("Birder", _birder(stochastic=True), _grid(BIRDER_LRS, BIRDER_BETAS), {"text": (-math.inf, 0.04)}),
    Method(
        "Birder, signs not random",
        _birder(),
        _grid(SOFT_LRS, SOFT_BETAS),
        {"text": (-math.inf, 0.04)},
    ),
    Method("Lion", _lion, _grid(LION_LRS), keeps_accuracy=False),
    Method("naive 1-bit Adam", _naive, bounds={"text": (0.05, math.inf)}, keeps_accuracy=False),
)
