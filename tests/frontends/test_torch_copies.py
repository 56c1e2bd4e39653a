"""Dense collectives of tensors that a device copies to the host's memory: nobody waits for each by itself, and nothing
is sent before it is there.

The device is a fake: a copy is NaN until it has been asked for often enough, or waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ocomm.session import Session
from ocomm_torch import DistributedOptimizer, Sum, allgather, grouped_allreduce, mpi_ops
from ocomm_torch.mpi_ops import TorchAdapter
from ocomm_torch.optimizers import averaging
from tests.frontends.onebit_jobs import digest
from tests.worlds import run_ranks

LAYERS = 12


class LateAdapter(TorchAdapter, threading.local):
    """Takes tensors of the host for those of a device. Each thread has one of its own."""

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Of each wait: how many copies it was for.
        self.waits: list[int] = []

    def host(self, tensor: Any) -> tuple[Any, bool]:
        host = torch.full_like(tensor, float("nan"))
        self.begun.append((host, tensor.detach().clone()))
        return host, False

    def copies(self, tensors: Sequence[Any]) -> Any:
        begun, self.begun = self.begun, []
        assert len(begun) == len(tensors)
        return LateCopies(self, begun)


class LateCopies:
    def __init__(self, adapter: LateAdapter, begun: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.adapter = adapter
        self.begun = begun
        self.left = adapter.asked

    def is_over(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self._finish()
        return self.left <= 0

    def wait(self) -> None:
        if self.begun:
            self.adapter.waits.append(len(self.begun))
            self._finish()

    def _finish(self) -> None:
        for host, values in self.begun:
            host.copy_(values)
        self.begun = []


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(asked: int) -> LateAdapter:
        adapter = LateAdapter(asked)
        monkeypatch.setattr(mpi_ops, "TORCH", adapter)
        return adapter

    return choose


def trained(rank: int) -> str:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(LAYERS)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    wrapped = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(4):
        wrapped.zero_grad()
        model(torch.randn(5, 6, generator=generator) + rank).square().mean().backward()
        wrapped.step()
    return digest([p.detach().numpy() for p in model.parameters()])


@pytest.mark.parametrize(("asked", "waited"), [(1, 0), (3, 7), (1 << 30, LAYERS)])
def test_a_gradient_is_sent_when_its_copy_is_over_and_backward_goes_on_meanwhile(
    asked: int, waited: int, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "FIRST_BUCKET_NBYTES", 1)  # each gradient fills one
    monkeypatch.setattr(averaging, "BUCKET_NBYTES", 1)
    expected = run_ranks(2, lambda s: trained(s.require_topology().rank))
    adapter = use(asked)

    def body(session: Session) -> tuple[str, int]:
        run = trained(session.require_topology().rank)
        return run, len(adapter.waits)

    for reference, (run, waits) in zip(expected, run_ranks(2, body), strict=True):
        assert run == reference
        # A hook asks for the oldest, and the next if that is over. What is left at the end of backward is waited for.
        assert waits == 4 * waited


def test_the_tensors_of_a_group_are_waited_for_together(use: Any) -> None:
    adapter = use(1 << 30)

    def body(session: Session) -> tuple[list[float], list[float], list[int]]:
        rank = session.require_topology().rank
        tensors = [torch.full((3,), float(k + rank)) for k in range(5)]
        sums = grouped_allreduce(tensors, op=Sum)
        rows = allgather(torch.full((1,), float(rank)))
        return [float(s[0]) for s in sums], rows.tolist(), adapter.waits[:2]

    assert run_ranks(2, body) == [([2.0 * k + 1 for k in range(5)], [0.0, 1.0], [5, 1])] * 2
