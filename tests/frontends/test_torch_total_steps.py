"""Optimizers that know the length of the run, and runs that end before anything was compressed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ocomm.api import rank
from ocomm.errors import SettingsError
from ocomm.predict.methods import zero_one_kinds
from ocomm.session import Session
from ocomm.telemetry.log import NOTICE
from ocomm_torch.compression import Compression
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.diloco import DistributedDiLoCo
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.world.test_runtime import threads_only
from tests.worlds import run_ranks

pytestmark = threads_only  # nothing here depends on the network

WRAPS = {"1-bit Adam": DistributedOneBitAdam, "1-bit LAMB": DistributedOneBitLamb}


def train(steps: int, kind: str = "1-bit Adam", scale: float = 1.0, **options: Any) -> dict[str, Any]:
    """The report after so many steps, whose losses are multiplied by ``scale``."""
    parameters = [torch.nn.Parameter(torch.ones(40))]
    optimizer = WRAPS[kind](torch.optim.Adam(parameters), **options)
    for step in range(steps):
        optimizer.zero_grad()
        (parameters[0] * torch.arange(40.0) * (step % 3 + 1 + rank()) * scale).sum().backward()
        optimizer.step()
    return optimizer.compression_report()


def warnings_of(records: Sequence[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", WRAPS)
def test_the_warm_up_takes_a_fifth_of_the_run_at_most(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    reports = run_ranks(2, lambda session: train(30, kind, total_steps=30))
    assert [report["freeze_step"] for report in reports] == [6, 6]
    assert [report["compressed_steps"] for report in reports] == [24, 24]
    assert not warnings_of(caplog.records)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "freeze_step='auto' waits for a stable variance, at least 2 / (1 - beta2) = 2000 steps. Pass"),
        ({"freeze_step": 100}, "freeze_step is 100. Leave it at 'auto' and pass"),
        ({"freeze_step": 100, "total_steps": 1000}, "freeze_step is 100. Leave it at 'auto' and pass"),
        (
            {"total_steps": 1000},
            "total_steps=1000, which counts steps of the optimizer, ends the warm-up after step 200 at the latest. "
            "Pass",
        ),
    ],
)
def test_a_run_that_never_compressed_ends_with_a_warning(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, lambda session: train(7, **options))
    (said,) = warnings_of(caplog.records)
    assert said == (
        f"DistributedOneBitAdam: all 7 steps were dense, so nothing was compressed: {why} total_steps=7, with which "
        "the warm-up takes a fifth of the run at most, or a smaller freeze_step."
    )


@pytest.mark.parametrize("kind", WRAPS)
def test_a_warm_up_that_a_length_in_another_unit_has_ended_is_told_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, lambda session: train(12, kind, total_steps=3))
    (said,) = warnings_of(caplog.records)
    assert "total_steps=3 is over and the run goes on, and because of it the warm-up ended after step 2. " in said
    assert said.endswith(
        "total_steps counts the optimizer's steps of the whole run: epochs * len(loader), if each batch is one."
    )


def test_a_run_whose_warm_up_another_option_has_ended_may_be_longer(caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda session: train(30, freeze_step=6, total_steps=20))
    assert not warnings_of(caplog.records)


@pytest.mark.parametrize("options", [{"total_steps": 30}, {"freeze_step": 6}])
def test_a_run_whose_gradients_are_zero_is_not_told_to_shorten_its_warm_up(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, lambda session: train(30, scale=0.0, **options))
    (said,) = warnings_of(caplog.records)
    assert "after step 6, the variance of all parameters was zero, because no gradient other than zero had come" in said
    assert "Pass" not in said


def test_a_run_is_told_in_three_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(NOTICE, "ocomm"):
        run_ranks(2, lambda session: train(30, total_steps=30), hosts=["a", "b"])
    begin, freeze, end = [record.getMessage() for record in caplog.records if record.levelno == NOTICE]
    assert begin == (
        "2 ranks on 2 hosts, no MPI, parameters in host memory. DistributedOneBitAdam, 40 parameters: a step sends 160 "
        "bytes per rank in the warm-up, about 9 bytes once the variance is frozen, after step 6 at the latest (a fifth "
        "of total_steps)."
    )
    assert freeze.startswith("DistributedOneBitAdam: the warm-up is over. From step 7 on this rank sends ")
    assert end.startswith("DistributedOneBitAdam: 30 steps (6 dense, 24 compressed). This rank sent ")


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({"freeze_step": 5}, "after step 5 (freeze_step)."),
        ({}, "after 2000 steps at the earliest (freeze_step='auto'; total_steps= sets a limit)."),
    ],
)
def test_the_end_of_the_warm_up_is_told_at_the_start(
    options: dict[str, Any], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(NOTICE, "ocomm"):
        run_ranks(2, lambda session: train(0, **options))
    assert [record.getMessage().endswith(when) for record in caplog.records] == [True]


def test_a_dense_run_is_told_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.ones(1000)), torch.nn.Parameter(torch.ones(7), requires_grad=False)]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), compression=Compression.bf16)
        for _ in range(3):
            optimizer.zero_grad()
            (parameters[0].sum() * (1.0 + session.require_topology().rank)).backward()
            optimizer.step()

    with caplog.at_level(NOTICE, "ocomm"):
        run_ranks(2, body)
    assert [record.getMessage() for record in caplog.records] == [
        "2 ranks on 1 host, no MPI, parameters in host memory. DistributedOptimizer, 1000 parameters: a step sends 2 "
        "kB "
        "per rank, dense.",
        "DistributedOptimizer: 3 steps, all dense. This rank sent about 6 kB.",
    ]


def test_one_rank_alone_has_nothing_to_compress(caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(1, lambda session: train(7))
    assert not warnings_of(caplog.records)


def test_many_optimizers_that_never_compressed_are_not_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        for _ in range(10):
            train(2)

    run_ranks(2, body)
    assert len(warnings_of(caplog.records)) == 3


def test_a_freeze_after_the_end_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda session: train(0, freeze_step=50, total_steps=50))
    (said,) = warnings_of(caplog.records)
    assert "all of the 50 steps will be dense, because freeze_step is 50" in said


def test_syncs_of_zero_one_adam_become_rarer_after_half_of_the_run() -> None:
    def body(session: Session) -> tuple[list[int], list[int]]:
        parameters = [torch.nn.Parameter(torch.ones(40))]
        optimizer = DistributedZeroOneAdam(torch.optim.Adam(parameters), total_steps=40)
        synced, refreshed, refreshes = [], [], 0
        for step in range(1, 41):
            optimizer.zero_grad()
            (parameters[0] * torch.arange(40.0)).sum().backward()
            optimizer.step()
            report = optimizer.compression_report()
            if report["synced"]:
                synced.append(step)
            if report["refreshes"] > refreshes:
                refreshed.append(step)
                refreshes = report["refreshes"]
        return synced, refreshed

    found = run_ranks(2, body)
    assert found[0] == found[1]
    # Every step up to half of the run, then every second one for a quarter, then every fourth, and the last one.
    assert found[0][0] == [*range(1, 20), 21, 23, 25, 27, 29, 33, 37, 40]
    expected = list(enumerate(zero_one_kinds(40), 1))
    assert found[0][0] == [step for step, kind in expected if "1" in kind]
    assert found[0][1] == [step for step, kind in expected if "8" in kind]


def step_apart(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps whose gradients differ between the ranks."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for step in range(steps):
        optimizer.zero_grad()
        (parameter * torch.arange(40.0) * (step % 3 + 1 + rank())).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("vote", ["step", "sync"])
@pytest.mark.parametrize(
    ("total_steps", "told"),
    [(40, "total_steps is 40"), (20, "total_steps is 20"), (None, "total_steps was not given")],
)
def test_a_run_of_zero_one_adam_that_ends_between_syncs_ends_with_a_warning(
    total_steps: int | None, told: str, vote: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> tuple[bool, list[float]]:
        parameter = torch.nn.Parameter(torch.ones(40))
        rare = {} if total_steps else {"local_step_start": 10, "local_step_doubling": 10, "local_step_clip": 4}
        adam = torch.optim.Adam([parameter])
        optimizer = DistributedZeroOneAdam(adam, total_steps=total_steps, vote=vote, **rare)
        step_apart(optimizer, 39)
        return optimizer.compression_report()["synced"], parameter.tolist()

    (is_synced, first), (_, second) = run_ranks(2, body)
    assert not is_synced and first != second
    *earlier, said = warnings_of(caplog.records)
    over = "total_steps=20 is over and the run goes on, with syncs up to 4 steps apart. total_steps counts the"
    assert [over in each for each in earlier] == [True] * (total_steps == 20)
    assert said.startswith(
        "DistributedZeroOneAdam: the run ended with step 39, which was no sync, and without finish()"
    )
    assert f"{told}. Call finish() on all ranks after the last step, or pass total_steps=39, with which the" in said


def test_options_that_follow_from_total_steps_are_told_of_it_where_a_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(session: Session) -> None:
        def wrap(**options: Any) -> DistributedZeroOneAdam:
            return DistributedZeroOneAdam(torch.optim.Adam([torch.nn.Parameter(torch.ones(40))]), **options)

        saved = wrap(total_steps=32, local_step_clip=2).state_dict()
        wrap(total_steps=80, local_step_clip=3).load_state_dict(saved)

    run_ranks(2, body)
    assert [said for said in warnings_of(caplog.records) if "resumed" in said] == [
        "DistributedZeroOneAdam#2: resumed with other options: local_step_clip 2 -> 3, total_steps 32 -> 80 (so "
        "local_step_doubling 8 -> 20, local_step_start 8 -> 20)"
    ]


@pytest.mark.parametrize("finishes", [False, True])
def test_a_run_of_zero_one_adam_that_ends_with_a_sync_is_not_warned(
    finishes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(40))])
        optimizer = DistributedZeroOneAdam(adam, total_steps=40 if finishes else 39)
        step_apart(optimizer, 39)
        if finishes:
            optimizer.finish()

    run_ranks(2, body)
    assert not warnings_of(caplog.records)


@pytest.mark.parametrize("finishes", [False, True])
def test_a_run_of_diloco_that_ends_without_finish_ends_with_a_warning(
    finishes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        optimizer = DistributedDiLoCo(torch.optim.Adam([torch.nn.Parameter(torch.ones(40))]), sync_every=4)
        step_apart(optimizer, 11)
        if finishes:
            optimizer.finish()

    run_ranks(2, body)
    told = ["DistributedDiLoCo: the run ended without finish() after its last step, 11, so the parameters are each"]
    assert [said[: len(told[0])] for said in warnings_of(caplog.records)] == ([] if finishes else told)


@pytest.mark.parametrize("wrap", [DistributedOneBitAdam, DistributedOneBitLamb, DistributedZeroOneAdam])
def test_an_impossible_length_is_refused(wrap: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError, match="total_steps must be a positive number of steps, got 0"):
            wrap(torch.optim.Adam([torch.nn.Parameter(torch.ones(4))]), total_steps=0)

    run_ranks(1, body)
