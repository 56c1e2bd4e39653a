"""Stopping and going on: with the same ranks in every bit, with others with equal replicas, and what is refused."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, MismatchError
from ocomm.session import Session
from ocomm_torch.optimizers.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_torch.optimizers.diloco import DistributedDiLoCo
from ocomm_torch.optimizers.ef_sgd import DistributedEFSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.tiers import few
from tests.worlds import run_ranks

STEPS = 24


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.8), weight_decay=0.1, foreach=False)


def ef_sgd(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> DistributedEFSGD:
    """Over the parameters of ``optimizer``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    inner = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)
    return DistributedEFSGD(inner, *args, **options)


#: Short phases: warm-up, freeze, mask refreshes, syncs and refreshes all happen within 24 steps.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "1-bit Adam": functools.partial(DistributedOneBitAdam, freeze_step=6, mask_refresh=3),
    "1-bit Adam, auto": functools.partial(DistributedOneBitAdam, freeze_step="auto", mask_refresh=3),
    "1-bit LAMB": functools.partial(DistributedOneBitLamb, freeze_step=6, mask_refresh=3),
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
    "EF-SGD": ef_sgd,
}


#: Those of which saved states have names of parameters in all the places where they may be.
BY_NAME = {
    **OPTIMIZERS,
    "1-bit Adam, sharded": functools.partial(DistributedOneBitAdam, freeze_step=9, shard_state=True),
    "DiLoCo": functools.partial(DistributedDiLoCo, sync_every=4, bits=1),
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

    def __init__(
        self, kind: str, rank: int, values: Sequence[np.ndarray] | None = None, names: str = "layer.{}", **options: Any
    ) -> None:
        self.rank = rank
        arrays = initial() if values is None else values
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in arrays]
        named = [names.format(number) for number in range(len(self.parameters))]
        self.optimizer = BY_NAME[kind](adam(self.parameters), zip(named, self.parameters, strict=True), **options)
        self.digests: list[str] = []
        #: Of the steps after which all ranks hold the same.
        self.common: dict[int, str] = {}

    @property
    def values(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.parameters]

    def train(self, first: int, last: int) -> list[str]:
        """Steps ``first`` to ``last``; their digests."""
        for step in range(first, last + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / 100)
            self.optimizer.zero_grad()
            backward(self.parameters, sparse(step, self.rank), [2, 0, 3, 1])
            self.optimizer.step()
            self.digests.append(digest(self.values))
            if self.optimizer.compression_report().get("synced", True):
                self.common[step] = self.digests[-1]
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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
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

    run_ranks(ranks, body)


@pytest.mark.parametrize("kind", BY_NAME)
def test_a_run_goes_on_where_compile_or_ddp_is_switched_on_or_off(kind: str) -> None:
    def body(session: Session) -> dict[str, Any]:
        rank = rank_of(session)
        run = Run(kind, rank)
        digests = run.train(1, 14)
        for before, after in [("layer.{}", "_orig_mod.layer.{}"), ("module.layer._orig_mod.{}", "layer.{}")]:
            run = Run(kind, rank, names=before)
            run.train(1, 7)
            saved = run.save()
            again = Run(kind, rank, saved["values"], after)
            again.optimizer.load_state_dict(saved["optimizer"])
            assert again.optimizer.load_rank_state_dict(saved["rank"])["rank_state"] == "loaded"
            assert again.train(8, 14) == digests[7:]
        for names in ("layer.module{}", "other.{}"):  # of another model
            with pytest.raises(CheckpointError):
                Run(kind, rank, saved["values"], names).optimizer.load_state_dict(saved["optimizer"])
        return saved

    saved = run_ranks(2, body)

    def fewer(session: Session) -> None:
        run = Run(kind, 0, saved[0]["values"])
        run.optimizer.load_state_dict(saved[0]["optimizer"])
        assert run.optimizer.load_rank_state_dict([state["rank"] for state in saved])["rank_state"] == "re-sharded"

    run_ranks(1, fewer)


def checkpoint(kind: str, ranks: int, steps: int, **options: Any) -> dict[str, Any]:
    """What ``ranks`` ranks have saved after ``steps`` steps: values and state_dict of rank 0, and all rank states."""

    def body(session: Session) -> dict[str, Any]:
        run = Run(kind, rank_of(session), **options)
        run.train(1, steps)
        return run.save()

    saved = run_ranks(ranks, body)
    return {**saved[0], "ranks": [state["rank"] for state in saved]}


@pytest.mark.parametrize(("before", "after"), few([(2, 4), (4, 3), (3, 1)], [(4, 3)]))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_another_number_of_ranks_the_errors_are_shared_out_and_the_replicas_are_equal(
    kind: str, before: int, after: int
) -> None:
    saved = checkpoint(kind, before, 14)

    def body(session: Session) -> tuple[dict[int, str], dict[str, Any], dict[str, np.ndarray]]:
        run = Run(kind, rank_of(session), saved["values"])
        run.optimizer.load_state_dict(saved["optimizer"])
        done = run.optimizer.load_rank_state_dict(saved["ranks"][::-1])
        core = run.optimizer._driver.core
        kept = {name: buffer.copy() for name, buffer in core.rank_buffers()["worker"].items()}
        run.train(15, 24)
        assert run.optimizer.compression_report()["resumed"] == done
        return run.common, done, kept

    results = run_ranks(after, body)
    for common, done, kept in results:
        assert common == results[0][0] and len(common) > 2
        assert done["rank_state"] == "re-sharded"
        assert done["step"] == 14
        assert done["why"] == (
            f"{before} -> {after} ranks: server errors moved with their blocks, worker errors are the mean over the "
            f"{before} old ranks"
        )
        for name, buffer in kept.items():
            parts = [state["worker"][name].double() for state in saved["ranks"]]
            mean = sum(parts) / before
            np.testing.assert_array_equal(buffer, mean.float().numpy(), err_msg=name)


@pytest.mark.parametrize("lost", few([[0], [1], [0, 1]], [[1]]))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_if_a_rank_has_lost_its_state_all_start_without_and_say_so(
    kind: str, lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoint(kind, 2, 14)

    def body(session: Session) -> tuple[dict[int, str], dict[str, Any], list[str]]:
        rank = rank_of(session)
        run = Run(kind, rank, saved["values"])
        run.optimizer.load_state_dict(saved["optimizer"])
        done = run.optimizer.load_rank_state_dict(None if rank in lost else saved["ranks"][rank])
        run.train(15, 24)
        return run.common, done, [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "ocomm"):
        (first, done, warned), (second, done_there, _) = run_ranks(2, body)
    assert first == second and len(first) > 2
    why = "; ".join(f"rank(s) [{rank}] say that the state of rank {rank} is missing" for rank in lost)
    assert done == done_there == {"step": 14, "ranks": 2, "rank_state": "reset", "why": why}
    assert any(f"errors start at zero on all ranks: {why}" in message for message in warned)


def test_without_rank_states_the_first_step_warns_that_errors_start_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoint("1-bit Adam", 2, 14)

    def body(session: Session) -> tuple[list[str], list[str]]:
        run = Run("1-bit Adam", rank_of(session), saved["values"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.train(15, 17)
        assert run.optimizer.compression_report()["resumed"] == {"step": 14, "ranks": 2, "rank_state": "reset"}
        return run.digests, [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "ocomm"):
        (first, warned), (second, _) = run_ranks(2, body)
    assert first == second
    assert [message for message in warned if "load_rank_state_dict" in message] == [
        "DistributedOneBitAdam: load_rank_state_dict was not called after load_state_dict: errors start at zero on all "
        "ranks."
    ]


# Replicas that are not alike


def test_parameters_that_differ_before_the_first_step_are_an_error_that_names_the_tensor() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)
        values = initial()
        values[2][7] += rank
        with pytest.raises(MismatchError) as raised:
            Run("1-bit Adam", rank, values).train(1, 1)
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith(
        "DistributedOneBitAdam: the replicas are not alike before their first step: rank(s) [0] hold 'layer.2' with "
        "checksum "
    )
    assert first.endswith(
        "Load the same checkpoint on all ranks, or call broadcast_parameters and broadcast_optimizer_state."
    )


@pytest.mark.parametrize("kind", ["1-bit Adam", "0/1 Adam"])
def test_ranks_that_load_different_states_are_caught_in_the_first_step(kind: str) -> None:
    saved = checkpoint(kind, 2, 4)

    def body(session: Session) -> str:
        rank = rank_of(session)
        run = Run(kind, rank, saved["values"])
        state = copy.deepcopy(saved["optimizer"])
        state["state"][1]["exp_avg"][5] += rank
        run.optimizer.load_state_dict(state)
        run.optimizer.load_rank_state_dict(saved["ranks"][rank])
        with pytest.raises(MismatchError) as raised:
            run.train(5, 5)
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "not alike before their first step: rank(s) [0] hold moments of 'layer.1' with checksum " in first


def test_a_state_that_only_one_rank_loads_is_caught_in_the_first_step() -> None:
    saved = checkpoint("1-bit Adam", 2, 8)

    def body(session: Session) -> str:
        rank = rank_of(session)
        run = Run("1-bit Adam", rank, saved["values"])
        if rank == 0:
            run.optimizer.load_state_dict(saved["optimizer"])
        with pytest.raises(MismatchError) as raised:
            run.train(9, 9)
        return str(raised.value)

    assert run_ranks(2, body) == 2 * [
        "DistributedOneBitAdam: the replicas are not alike before their first step: rank(s) [0] hold a state of step "
        "8; "
        "rank(s) [1] hold a state of step 0. Load the same checkpoint on all ranks, or call broadcast_parameters and "
        "broadcast_optimizer_state."
    ]
