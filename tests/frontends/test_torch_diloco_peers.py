"""DistributedDiLoCo against torchft's on the same task, where torchft can be imported."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.session import Session
from tests.worlds import run_ranks

peer = pytest.importorskip("torchft.local_sgd", reason="torchft is not installed")

STEPS, RANKS = 24, 2


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))


def inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train(rank: int, of: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    """Returns all parameters after each step."""
    data = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=data)
        (of(inputs) - inputs.sin()).square().sum().backward()
        optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in of.parameters()]).numpy().copy())
    return found


class Group:
    """Replicas as threads, with the calls that torchft's DiLoCo makes to its manager."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.given: list[Any] = [None] * RANKS

    def manager(self, rank: int) -> SimpleNamespace:
        state = {"step": 0}

        def allreduce(tensor: torch.Tensor, should_quantize: bool = False) -> Any:
            self.given[rank] = tensor.clone()
            self.barrier.wait(60)
            tensor.copy_(sum(self.given) / RANKS)
            self.barrier.wait(60)
            return SimpleNamespace(wait=lambda: None)

        def should_commit() -> bool:
            state["step"] += 1
            return True

        names = ("start_quorum", "register_state_dict_fn", "allow_state_dict_read", "disallow_state_dict_read")
        nothing: dict[str, Any] = {name: lambda *args: None for name in names}
        return SimpleNamespace(
            **nothing,
            _use_async_quorum=False,
            allreduce=allreduce,
            should_commit=should_commit,
            current_step=lambda: state["step"],
        )


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_has_the_parameters_of_torchft_after_each_step(fragments: int, delay: int, momentum: float) -> None:
    group, expected = Group(), [[] for _ in range(RANKS)]  # type: ignore[var-annotated]
    models = [model() for _ in range(RANKS)]

    def theirs(rank: int) -> None:
        mine = models[rank]
        parts = [mine] if fragments == 1 else [mine[0], mine[2]]
        outer = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=momentum, nesterov=momentum > 0) for p in parts]
        optimizer = inner(mine.parameters())
        with peer.DiLoCo(group.manager(rank), parts, optimizer, outer, 6, fragment_sync_delay=delay):
            expected[rank] = train(rank, mine, optimizer)

    threads = [threading.Thread(target=theirs, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    started = [model() for _ in range(RANKS)]

    def body(session: Session) -> None:
        rank = session.require_topology().rank
        mine = started[rank]
        optimizer = hvd.DistributedDiLoCo(
            inner(mine.parameters()), mine.named_parameters(), sync_every=6, fragments=fragments, delay=delay,
            outer_lr=0.7, outer_momentum=momentum,
        )  # fmt: skip
        assert optimizer._driver.core.parameters == ([[0, 1, 2, 3]] if fragments == 1 else [[0, 1], [2, 3]])
        for found, wanted in zip(train(rank, mine, optimizer), expected[rank], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)

    run_ranks(RANKS, body)
