"""0/1 Adam with ``vote="sync"``: the bits of ``vote="step"``, and between syncs no message, also where a rank fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError, SettingsError
from ocomm.optim.zero_one_adam import ZeroOneAdamOptions
from ocomm.session import Session
from ocomm.types import Settings
from tests.frontends.counted_traffic import CountedTraffic
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.frontends.test_torch_zero_one import ADAMS, SHORT, rank_of, simulated, sparse, state_digest, trained
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

#: Every step is a sync up to 4; then intervals of 2, and from step 10 on of 4.
FOURS = {"local_step_start": 2, "local_step_doubling": 4, "local_step_clip": 4, "var_update_scaler": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "up to 4": SHORT,
    "up to 33": {"local_step_start": 3, "local_step_doubling": 2, "local_step_clip": 33},
    "refreshes between syncs": {**SHORT, "var_freeze_step": 25, "block_size": 64},
    "8-bit refreshes": {**FOURS, "dense_bits": 8},
}


class Run:
    """A model on one rank with its optimizer; ``steps`` takes steps with the rank's own gradients."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rank = rank
        self.parameters = [torch.nn.Parameter(torch.from_numpy(p).to(dtype)) for p in initial()]
        inner = torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=0.1)
        self.optimizer = hvd.DistributedZeroOneAdam(inner, **{"vote": "sync", **FOURS, **options})

    def backward(self, step: int, grads: Any = gradients) -> None:
        self.optimizer.zero_grad()
        backward(self.parameters, grads(step, self.rank), range(len(self.parameters)))

    def steps(self, first: int, last: int, grads: Any = gradients) -> list[str]:
        found = []
        for step in range(first, last + 1):
            self.backward(step, grads)
            self.optimizer.step()
            found.append(self.values)
        return found

    @property
    def values(self) -> str:
        return digest([p.detach().float().numpy() for p in self.parameters])

    @property
    def everything(self) -> str:
        return state_digest([p.detach().float() for p in self.parameters], self.optimizer)

    @property
    def report(self) -> dict[str, Any]:
        return self.optimizer.compression_report()


@pytest.mark.parametrize("ranks", few([1, 2, 4], [2]))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", few(list(ADAMS), ["AdamW"]))
def test_every_bit_is_that_of_a_run_that_votes_in_each_step(kind: str, schedule: str, ranks: int) -> None:
    make, settings = ADAMS[kind]
    options = SCHEDULES[schedule]
    results = {vote: trained(ranks, 60, make=make, vote=vote, **options) for vote in ("step", "sync")}
    for by_step, by_sync in zip(*results.values(), strict=True):
        assert by_sync["digests"] == by_step["digests"]
        assert by_sync["state"] == by_step["state"]
        kinds = ("syncs", "local_steps", "refreshes", "interval", "step")
        assert [by_sync["report"][name] for name in kinds] == [by_step["report"][name] for name in kinds]
        assert by_sync["report"]["local_steps"] > 20
        if ranks > 1:
            assert by_sync["report"]["bytes_sent"] < by_step["report"]["bytes_sent"]
    if schedule == "up to 33":
        assert results["sync"][0]["report"]["interval"] == 33
        expected, _ = simulated(60, ranks, **settings, **options)
        assert [result["digests"] for result in results["sync"]] == expected


def test_low_precision_and_groups_whose_rates_change_keep_the_bits() -> None:
    def body(session: Session, vote: str) -> list[str]:
        run = Run(rank_of(session), torch.bfloat16, vote=vote)
        found = []
        for step in range(1, 40):
            run.optimizer.param_groups[0]["lr"] = 0.0 if step in (11, 17, 18) else 1e-2 / step
            found += run.steps(step, step)
        return [*found, run.everything]

    by_step, by_sync = (run_ranks(2, lambda s, vote=vote: body(s, vote)) for vote in ("step", "sync"))
    assert by_sync == by_step


def test_between_syncs_nothing_is_sent_and_nobody_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = CountedTraffic(monkeypatch)

    def body(session: Session) -> list[tuple[bool, tuple[int, int, int, int]]]:
        run, found = Run(rank_of(session)), []
        counts = traffic.of(run.optimizer, run.rank)
        for step in range(1, 31):
            is_silent = run.optimizer._driver.core.is_silent
            run.steps(step, step)
            found.append((is_silent, counts()))
        return found

    for counts in run_ranks(2, body, settings=replace(Settings(), engine="python")):
        silent = [is_silent for is_silent, _ in counts]
        assert silent[-4:].count(True) == 3 and sum(silent) > 15 and not any(silent[:3])
        for step in range(1, 30):
            before, now = counts[step - 1][1], counts[step][1]
            if silent[step]:
                assert now == before, f"step {step + 1} has sent something"
            else:
                assert now[1] >= before[1] + 2, "what is exchanged, and the vote"
                assert now[3] > before[3]


def a_bad_step(run: Run, step: int, value: float, **how: Any) -> None:
    run.backward(step)
    if run.rank == 1:
        gradient = run.parameters[0].grad
        assert gradient is not None
        gradient[3, 5] = value
    run.optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_whose_gradients_are_not_finite_changes_nothing_on_its_rank_and_is_told_at_the_sync(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ocomm")
    syncs = [step for step in range(1, 31) if simulated_sync(step)]
    bad = next(step for step in range(14, 30) if step not in syncs and step + 1 not in syncs)

    def body(session: Session) -> tuple[bool, list[str], int, int, str]:
        run = Run(rank_of(session))
        run.steps(1, bad - 1)
        before = run.values
        a_bad_step(run, bad, value)
        stayed = run.values == before
        met = [run.steps(step, step)[0] for step in range(bad + 1, 31)]
        return stayed, met, run.report["non_finite_steps"], run.report["step"], str(run.optimizer.outcome)

    first, second = run_ranks(2, body)
    assert (first[0], second[0]) == (False, True)
    assert (first[2], second[2]) == (0, 1)
    assert first[3] == second[3] == 30
    for step, mine, other in zip(range(bad + 1, 31), first[1], second[1], strict=True):
        assert (mine == other) is (step in syncs), step
    told = [record.getMessage() for record in caplog.records if "NaN or Inf" in record.getMessage()]
    if not MPI_SIZE:
        (said,) = told
        assert "on rank(s) [1]" in said and "changed nothing there" in said


def simulated_sync(step: int) -> bool:
    """Whether a step of a ``Run`` is a sync or refresh: what the options alone decide."""
    syncs, refreshes = ZeroOneAdamOptions(vote="sync", **FOURS).schedules()
    for number in range(1, step + 1):
        is_sync = syncs.is_due(number)
        if is_sync and number > 1:
            syncs.synced(number)
    del refreshes
    return is_sync


def test_a_sync_with_a_gradient_that_is_not_finite_is_taken_by_no_rank() -> None:
    sync = next(step for step in range(14, 31) if simulated_sync(step))

    def body(session: Session) -> list[str]:
        run = Run(rank_of(session))
        run.steps(1, sync - 1)
        before = run.everything
        with pytest.raises(NonFiniteError, match=rf"in step {sync}, on rank\(s\)"):
            a_bad_step(run, sync, float("nan"))
        assert run.everything == before
        return run.steps(sync, 30)

    plain = run_ranks(2, lambda s: Run(rank_of(s)).steps(1, 30)[sync - 1 :])
    assert run_ranks(2, body) == plain


def test_an_overflow_and_a_cleared_step_are_steps_of_their_rank() -> None:
    local = [step for step in range(12, 31) if not simulated_sync(step)][:2]

    def body(session: Session) -> tuple[float, int, int, str]:
        run = Run(rank_of(session))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(1, 31):
            run.optimizer.zero_grad()
            loss = sum((p * float(step)).sum() for p in run.parameters)
            if step == local[0] and run.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == local[1] and run.rank == 0:
                run.optimizer.zero_grad()
                continue
            scaler.step(run.optimizer)
            scaler.update()
        last = next(step for step in range(31, 40) if simulated_sync(step))
        run.steps(31, last)
        return scaler.get_scale(), run.report["non_finite_steps"], run.report["step"], run.values

    first, second = run_ranks(2, body)
    assert (first[:2], second[:2]) == ((16.0, 0), (8.0, 1))
    assert first[2:] == second[2:]


def test_a_tensor_that_comes_late_in_a_local_step_begins_at_the_next_sync() -> None:
    local = next(step for step in range(14, 31) if not simulated_sync(step) and not simulated_sync(step + 1))

    def late(step: int, rank: int) -> list[np.ndarray | None]:
        found = gradients(step, rank)
        shows = step >= local + 4 or (step == local and rank == 1)
        return [*found[:2], found[2] if shows else None, found[3]]

    def body(session: Session) -> tuple[list[str], bool, bool]:
        run = Run(rank_of(session))
        before = run.parameters[2].detach().clone()
        found = run.steps(1, local, late)
        stayed = torch.equal(run.parameters[2], before)
        found += run.steps(local + 1, 60, late)
        return found, stayed, torch.equal(run.parameters[2], before)

    first, second = run_ranks(2, body)
    assert first[1:] == second[1:] == (True, False)
    met = [a == b for a, b in zip(first[0], second[0], strict=True)]
    assert met[-4:].count(True) >= 1 and met[local - 1 :].count(True) > 5
    assert all(same for step, same in enumerate(met, 1) if simulated_sync(step))


@pytest.mark.parametrize("what", ["rate", "tensors"])
def test_what_ranks_did_not_do_alike_between_syncs_is_told_at_the_next_one(what: str) -> None:
    local = next(step for step in range(14, 31) if not simulated_sync(step) and not simulated_sync(step + 1))

    def body(session: Session) -> str:
        run = Run(rank_of(session))
        run.steps(1, local - 1)
        is_odd = run.rank == 1
        if what == "rate" and is_odd:
            run.optimizer.param_groups[0]["lr"] = 5e-3
        run.backward(local)
        if what == "tensors" and is_odd:
            run.parameters[1].grad = None
        run.optimizer.step()
        run.optimizer.param_groups[0]["lr"] = 1e-2
        with pytest.raises(MismatchError) as caught:
            run.steps(local + 1, local + 4)
        return str(caught.value)

    for said in run_ranks(2, body):
        assert "in a step since the last sync lr, weight decay or the tensors with gradients" in said


@pytest.mark.parametrize("stop", [13, 14, 15, 16, 17])
def test_a_saved_run_goes_on_bit_for_bit(stop: int) -> None:
    def body(session: Session) -> tuple[list[str], list[str]]:
        rank = rank_of(session)
        run, again = Run(rank), Run(rank)

        def steps(of: Run, first: int, last: int) -> list[str]:
            return of.steps(first, last, late_on_one_rank)

        steps(run, 1, stop)
        saved, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        with torch.no_grad():
            for p, q in zip(run.parameters, again.parameters, strict=True):
                q.copy_(p)
        expected = steps(run, stop + 1, 40)
        again.optimizer.load_state_dict(saved)
        again.optimizer.load_rank_state_dict(own)
        return expected, steps(again, stop + 1, 40)

    for expected, found in run_ranks(2, body):
        assert found == expected


def late_on_one_rank(step: int, rank: int) -> Sequence[np.ndarray | None]:
    """A tensor of which rank 1 has a first gradient in a local step, and no rank another before step 30."""
    found = gradients(step, rank)
    local = next(s for s in range(13, 31) if not simulated_sync(s))
    return [*found[:2], found[2] if step >= 30 or (step == local and rank == 1) else None, found[3]]


@pytest.mark.parametrize("has_it", [0, 1])
def test_a_gradient_that_waits_on_one_rank_waits_on_all_where_errors_are_redistributed(has_it: int) -> None:
    local = next(step for step in range(14, 31) if not simulated_sync(step))

    def late(step: int, rank: int) -> Sequence[np.ndarray | None]:
        found = gradients(step, rank)
        return [*found[:2], found[2] if step == local and rank == has_it else None, found[3]]

    def before(session: Session) -> dict[str, Any]:
        run = Run(rank_of(session))
        run.steps(1, local, late)
        state, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        return {"values": [p.detach().clone() for p in run.parameters], "state": state, "own": own}

    saved = run_ranks(2, before)

    def after(session: Session) -> tuple[str, list[np.ndarray]]:
        run = Run(rank_of(session), block_size=64)
        with torch.no_grad():
            for p, value in zip(run.parameters, saved[0]["values"], strict=True):
                p.copy_(value)
        run.optimizer.load_state_dict(saved[0]["state"])
        done = run.optimizer.load_rank_state_dict([each["own"] for each in saved])
        core = run.optimizer._driver.core
        waiting = [core.error[core.local_span(2)].copy()]
        sync = next(step for step in range(local + 1, 40) if simulated_sync(step))
        run.steps(local + 1, sync + 1, late)
        return done["rank_state"], [*waiting, core.error[core.local_span(2)]]

    for how, (waited, waits) in run_ranks(2, after):
        assert how == "re-sharded" and waited.any()
        np.testing.assert_array_equal(waits, waited)


def test_all_parameters_are_compared_in_as_many_steps_as_with_votes() -> None:
    """A rank writes into a parameter at a sync; votes are rarer, and compare as much more."""
    within = 8

    def body(session: Session) -> int:
        run = Run(rank_of(session))
        at = next(step for step in range(14, 31) if simulated_sync(step))
        run.steps(1, at)
        if run.rank == 1:
            run.parameters[2].data.view(-1)[-1] += 0.125
        for step in range(at + 1, at + 40):
            try:
                run.steps(step, step)
            except MismatchError as error:
                assert "parameters have become different" in str(error)
                return step - at
        return 0

    first, second = run_ranks(2, body, replace(Settings(), replica_check_steps=within))
    assert first == second and 0 < first <= 2 * within


def test_options_that_need_a_message_in_each_step_are_refused() -> None:
    def body(session: Session) -> None:
        for options, words in (
            ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 with vote='sync'"),
            ({"hierarchical": True}, "hierarchical=True with vote='sync'"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                Run(rank_of(session), **options)
        with pytest.raises(SettingsError, match="vote must be 'step' or 'sync', got 'never'"):
            Run(rank_of(session), vote="never")
        assert Run(rank_of(session)).report["form"] == "flat"

    run_ranks(2, body)


def test_rows_that_come_late_are_woken_as_with_votes() -> None:
    def rows(step: int, rank: int) -> Any:
        table, wide, _, single = sparse(step, rank)
        common = gradients(step, rank)
        return [table, wide if wide is not None else common[1], common[2], single]

    results = [trained(2, 60, grads=rows, mask_refresh=2, vote=vote, **SHORT) for vote in ("step", "sync")]
    for by_step, by_sync in zip(*results, strict=True):
        assert by_sync["digests"] == by_step["digests"]
        assert by_sync["report"]["woken_elements"] == by_step["report"]["woken_elements"] > 0
