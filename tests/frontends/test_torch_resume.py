"""Stopping and going on: with the same ranks in every bit, with others with equal replicas, and what is refused."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.session import Session
from ocomm_torch.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_torch.lion import DistributedLion
from ocomm_torch.onebit import DistributedOneBitAdam
from ocomm_torch.zero_one import DistributedZeroOneAdam
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.worlds import run_ranks

STEPS = 24


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.8), weight_decay=0.1, foreach=False)


#: Short phases: warm-up, freeze, mask refreshes, syncs and refreshes all happen within 24 steps.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "1-bit Adam": functools.partial(DistributedOneBitAdam, freeze_step=6, mask_refresh=3),
    "1-bit Adam, auto": functools.partial(DistributedOneBitAdam, freeze_step="auto", mask_refresh=3),
    "0/1 Adam": functools.partial(
        DistributedZeroOneAdam,
        var_update_scaler=2,
        local_step_start=8,
        local_step_doubling=6,
        local_step_clip=4,
        mask_refresh=2,
    ),
    "Birder": functools.partial(DistributedBirder, beta=0.9, seed=3, amsgrad_after=10),
    "SoftSignSGD": functools.partial(DistributedSoftSignSGD, beta=0.9, amsgrad_after=10),
    "Lion": functools.partial(DistributedLion, betas=(0.8, 0.9), seed=3),
}


def sparse(step: int, rank: int) -> list[np.ndarray | None]:
    """Some elements are used late, one tensor is used late, and one is sometimes missing on a rank."""
    result = gradients(step % 3 + 1 if step < 17 else step, rank)
    if step < 9:
        result[0][:20] = 0.0
    if step < 11:
        result[2] = None
    if step % 5 == rank:
        result[3] = None
    return result


class Run:
    """A model, its optimizer, and the digests of the parameters after each step."""

    def __init__(self, kind: str, rank: int, values: Sequence[np.ndarray] | None = None, **options: Any) -> None:
        self.rank = rank
        arrays = initial() if values is None else values
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in arrays]
        names = [f"layer.{number}" for number in range(len(self.parameters))]
        self.optimizer = OPTIMIZERS[kind](adam(self.parameters), zip(names, self.parameters, strict=True), **options)
        self.digests: list[str] = []

    @property
    def values(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.parameters]

    def train(self, first: int, last: int) -> list[str]:
        """Steps ``first`` to ``last``; their digests."""
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            backward(self.parameters, sparse(step, self.rank), [2, 0, 3, 1])
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / 100)
            self.optimizer.step()
            self.digests.append(digest(self.values))
        return self.digests[first - last - 1 :]

    def save(self) -> dict[str, Any]:
        """What a checkpoint has, after a way through ``torch.save``."""
        file = io.BytesIO()
        torch.save([self.optimizer.state_dict(), self.optimizer.rank_state_dict()], file)
        file.seek(0)
        replicated, own = torch.load(file, weights_only=True)
        return {"values": self.values, "optimizer": replicated, "rank": own}


def rank_of(session: Session) -> int:
    return session.require_topology().rank


#: Steps to stop at: in the warm-up, with a freeze announced, right at the freeze, compressed, between two syncs, late.
STOPS = (3, 5, 6, 7, 13, 16, 19, 22)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_stops_and_goes_on_equals_one_that_never_stopped_in_every_bit(kind: str, ranks: int) -> None:
    def body(session: Session) -> None:
        rank = rank_of(session)
        run = Run(kind, rank)
        saved: dict[int, Any] = {}
        for step in range(1, STEPS + 1):
            run.train(step, step)
            if step in STOPS:
                saved[step] = run.save()
        for stop, state in saved.items() if ranks == 2 else [(13, saved[13])]:
            again = Run(kind, rank, state["values"])
            again.optimizer.load_state_dict(state["optimizer"])
            assert again.optimizer.load_rank_state_dict(state["rank"])["rank_state"] == "loaded"
            assert again.train(stop + 1, STEPS) == run.digests[stop:], f"stopped after step {stop}"
            found, expected = again.optimizer.compression_report(), run.optimizer.compression_report()
            for key in ("stage", "step", "freeze_step", "masked_elements", "woken_elements", "syncs", "refreshes"):
                assert found.get(key) == expected.get(key), key
            assert found["resumed"]["step"] == stop

    run_ranks(ranks, body, timeout_s=100)
