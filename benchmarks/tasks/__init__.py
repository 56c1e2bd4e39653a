"""The tasks that optimizers are compared on: real data, a small model, batches that depend on seed, step and rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


#: Examples of a validation batch.
VALIDATED = 250


@dataclass(frozen=True)
class Task:
    """Data and model of one task.

    ``inputs`` and ``targets`` hold N examples, their first dimension; ``targets`` are class numbers, int64, one per
    prediction. The model maps a batch of inputs to scores whose last dimension is the classes.
    """

    name: str
    source: str  # of the data, for the reader of a result
    train: Batch
    validation: Batch
    make_model: Callable[[], nn.Module]
    model: str  # in words
    batch: int  # examples per rank and step
    has_accuracy: bool  # whether accuracy is reported beside the loss

    def model_of(self, seed: int) -> nn.Module:
        """A new model, the same for equal seeds."""
        torch.manual_seed(seed)
        return self.make_model()

    def draw(self, seed: int, step: int, rank: int) -> Batch:
        """``batch`` examples for one rank and step, drawn with replacement; nothing but the arguments decides."""
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank)
        chosen = torch.randint(len(self.train[0]), (self.batch,), generator=generator)
        return self.train[0][chosen], self.train[1][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy in nats, a scalar."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: slice = slice(None)) -> torch.Tensor:
        """(sum of cross-entropies, right answers, predictions) over a part of the validation batches, float64."""
        sums = torch.zeros(3, dtype=torch.float64)
        for inputs, targets in zip(*(half.split(VALIDATED)[part] for half in self.validation), strict=True):
            scores, wanted = model(inputs).flatten(0, -2), targets.flatten()
            hits = (scores.argmax(1) == wanted).sum()
            sums += torch.tensor([functional.cross_entropy(scores, wanted, reduction="sum"), hits, len(wanted)])
        return sums
