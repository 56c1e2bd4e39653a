"""torch.amp.GradScaler with compressed optimizers: an overflow on one rank is everyone's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ocomm.session import Session
from ocomm.types import ReduceOp
from ocomm_torch.functions import broadcast_parameters
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.every_kind import KINDS, whole_state
from tests.frontends.onebit_jobs import digest, gradients, initial
from tests.tiers import alternating, few
from tests.worlds import run_ranks

#: (step, rank) whose gradient is not finite: one rank, the other, both, and one at the very end.
OVERFLOWS = {(7, 1): np.inf, (9, 0): np.nan, (10, 0): np.inf, (10, 1): -np.inf, (13, 1): np.inf}
LAST = 13


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def scaled_backward(scaler: Any, parameters: list[torch.nn.Parameter], step: int, rank: int, overflow: Any) -> None:
    for index, grad in reversed(list(enumerate(gradients(step, rank)))):
        if index == 1 and overflow is not None:
            grad.reshape(-1)[5] = overflow
        scaler.scale((parameters[index] * torch.from_numpy(grad)).sum()).backward()


@pytest.mark.parametrize("overlap", few([False, True], [True]), ids=["no overlap", "overlap"])
@pytest.mark.parametrize(("kind", "unscale"), alternating(KINDS, [False, True]))
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    kind: str, overlap: bool, unscale: bool
) -> None:
    def body(session: Session) -> tuple[list[str], list[float], int, str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters, {"fused": True}, overlap=overlap)
        # A scale that grows again after three good steps.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        digests, scales = [], []
        for step in range(1, LAST + 1):
            optimizer.zero_grad()
            scaled_backward(scaler, parameters, step, rank, OVERFLOWS.get((step, rank)))
            before = whole_state(parameters, optimizer)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skipped = any(s == step for s, _ in OVERFLOWS)
            assert (whole_state(parameters, optimizer) == before) == skipped
            if optimizer.compression_report().get("synced", True):
                digests.append(digest([p.detach().numpy() for p in parameters]))
            scales.append(scaler.get_scale())
        # All ranks are done with the last step, though it overflowed on one of them: they can talk.
        total = np.ones(1)
        session.reduce(0, "after the last step", total, ReduceOp.SUM)
        report = optimizer.compression_report()
        return digests, scales, report["skipped_steps"], str(scaler.state_dict())

    results = run_ranks(2, body)
    assert results[0] == results[1]
    _, scales, skipped, _ = results[0]
    assert skipped == 4
    assert scales[:8] == [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0, 2048.0, 2048.0]
    assert scales[8:] == [1024.0, 512.0, 512.0, 512.0, 256.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_changes_no_bit_of_what_finite_gradients_give(kind: str) -> None:
    def train(session: Session, scale: float | None) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for step in range(1, 9):
            optimizer.zero_grad()
            scaled_backward(scaler, parameters, step, rank, None)
            scaler.step(optimizer)
            scaler.update()
        return whole_state(parameters, optimizer)

    def body(session: Session) -> None:
        assert train(session, 65536.0) == train(session, None)

    run_ranks(2, body)


def test_gradients_unscaled_and_clipped_by_the_user_are_what_is_averaged() -> None:
    def train(session: Session, scaled: bool) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=scaled)
        for step in range(1, 9):
            optimizer.zero_grad()
            scaled_backward(scaler, parameters, step, rank, None)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
        return whole_state(parameters, optimizer)

    def body(session: Session) -> None:
        assert train(session, True) == train(session, False)

    run_ranks(2, body)


def test_two_optimizers_share_a_scaler_and_only_the_one_that_overflowed_skips() -> None:
    def body(session: Session) -> tuple[list[float], str, int, int]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        first, second = (KINDS["1-bit Adam, compressed"].wrap(part) for part in (parameters[:2], parameters[2:]))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for step in range(1, 9):
            first.zero_grad()
            second.zero_grad()
            scaled_backward(scaler, parameters, step, rank, np.inf if (step, rank) == (6, 0) else None)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            scales.append(scaler.get_scale())
        return (
            scales,
            digest([p.detach().numpy() for p in parameters]),
            first.compression_report()["skipped_steps"],
            second.compression_report()["skipped_steps"],
        )

    results = run_ranks(2, body)
    assert results[0] == results[1]
    assert results[0][0] == [1024.0] * 5 + [512.0] * 3
    assert results[0][2:] == (1, 0)


def test_a_rank_that_drops_its_step_without_an_overflow_does_not_change_the_scales() -> None:
    def body(session: Session) -> tuple[float, str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS["1-bit Adam, compressed"].wrap(parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(1, 9):
            optimizer.zero_grad()
            scaled_backward(scaler, parameters, step, rank, None)
            if (step, rank) == (6, 1):
                continue
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), digest([p.detach().numpy() for p in parameters])

    results = run_ranks(2, body)
    assert results[0] == results[1]
    assert results[0][0] == 1024.0


def test_a_model_in_float16_autocast_finds_its_scale_and_learns() -> None:
    def body(session: Session) -> tuple[list[float], float, float, str]:
        rank = rank_of(session)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = DistributedOneBitAdam(
            torch.optim.Adam(model.parameters(), lr=3e-3, fused=True), model.named_parameters(), freeze_step=40
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        generator = torch.Generator().manual_seed(10 + rank)
        scales, losses = [], []
        for _ in range(150):
            # Rank 1 sees larger inputs, so it overflows at scales at which rank 0 does not.
            inputs = torch.randn(32, 20, generator=generator) * (1 + 3 * rank)
            targets = torch.tanh(inputs[:, :1] - inputs[:, 1:2])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(inputs), targets.half())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        early, late = float(np.mean(losses[:10])), float(np.mean(losses[-10:]))
        return scales, early, late, digest([p.detach().numpy() for p in model.parameters()])

    results = run_ranks(2, body)
    assert results[0][0] == results[1][0]
    assert results[0][3] == results[1][3]
    assert results[0][0][-1] < 2.0**24, "nothing overflowed"
    for _, early, late, _ in results:
        assert late < 0.5 * early
