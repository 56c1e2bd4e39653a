"""Muon for the matrices inside a model, and Adam for the rest, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Muon's learning rate beside Adam's, as ``benchmarks.codecs`` has them: 0.02 beside 4e-3.
MUON = 5


def parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside a model, which Muon moves, and the rest."""
    named = list(model.named_parameters())
    inner = [p for n, p in named if p.ndim == 2 and "token" not in n and "place" not in n and "embed" not in n]
    ids = set(map(id, inner))
    return inner, [p for _, p in named if id(p) not in ids]


class MuonAndAdam(torch.optim.Optimizer):
    """``lr`` and ``options`` are Adam's; Muon's rate is MUON times Adam's."""

    def __init__(self, model: nn.Module, lr: float, **options: Any) -> None:
        inner, rest = parted(model)
        self._parts = torch.optim.Muon(inner, lr=MUON * lr), torch.optim.Adam(rest, lr=lr, **options)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()
