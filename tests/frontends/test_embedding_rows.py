"""Rows of an embedding that come up only long after the variance is frozen learn as they do under Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ocomm.session import Session
from ocomm_torch import DistributedOneBitAdam, DistributedOptimizer, DistributedZeroOneAdam
from tests.frontends.onebit_jobs import digest
from tests.worlds import run_ranks

ROWS, EARLY, WIDTH, CLASSES = 48, 32, 8, 6
#: The last step is one at which 0/1 Adam brings the ranks together.
STEPS, ARRIVAL = 599, 120

Wrap = Callable[[torch.optim.Optimizer], Any]

COMPRESSED: dict[str, Wrap] = {
    "1-bit Adam": lambda adam: DistributedOneBitAdam(adam, freeze_step=40, mask_refresh=10),
    "0/1 Adam": lambda adam: DistributedZeroOneAdam(
        adam, local_step_start=60, local_step_doubling=60, local_step_clip=4, mask_refresh=10
    ),
}


def classify(session: Session, wrap: Wrap) -> tuple[float, float, int, str]:
    """Learns the class of each row, a quarter of the labels are random; rows from EARLY on come from step ARRIVAL on.

    Returns the expected loss on the early and on the late rows at the end, how many elements woke, and a digest.
    """
    assert session.topology is not None
    start = torch.Generator().manual_seed(1)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=start))
    head = torch.nn.Parameter(0.5 * torch.randn(CLASSES, WIDTH, generator=start))
    chances = 0.75 * torch.eye(CLASSES)[torch.randint(CLASSES, (ROWS,), generator=start)] + 0.25 / CLASSES
    optimizer = wrap(torch.optim.Adam([table, head], lr=0.06))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    draws = torch.Generator().manual_seed(session.topology.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.randint(EARLY if step < ARRIVAL else ROWS, (64,), generator=draws)
        labels = torch.multinomial(chances[rows], 1, generator=draws).view(-1)
        functional.cross_entropy(table[rows] @ head.T, labels).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        losses = functional.cross_entropy(table @ head.T, chances, reduction="none")
    woken = optimizer.compression_report()["woken_elements"] if hasattr(optimizer, "compression_report") else 0
    parameters = digest([p.detach().numpy() for p in (table, head)])
    return losses[:EARLY].mean().item(), losses[EARLY:].mean().item(), woken, parameters


@pytest.fixture(scope="module")
def dense() -> tuple[float, float, int, str]:
    return run_ranks(2, lambda s: classify(s, DistributedOptimizer))[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["1-bit Adam", "0/1 Adam"])
def test_rows_first_seen_long_after_the_freeze_reach_the_loss_they_reach_under_adam(
    kind: str, dense: tuple[float, float, int, str]
) -> None:
    found = run_ranks(2, lambda s: classify(s, COMPRESSED[kind]))
    assert found[0] == found[1]
    early, late, woken, _ = found[0]
    assert woken == (ROWS - EARLY) * WIDTH
    assert late < 1.03 * dense[1] and early < 1.02 * dense[0]
