"""DistributedAuto: it measures, decides once and alike on all ranks, and trains on as the chosen optimizer would."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ocomm_torch as hvd
from ocomm import operations
from ocomm.errors import CheckpointError, InvalidRequestError, SettingsError
from ocomm.predict import methods
from ocomm.predict.model import CodecTimes, Network
from ocomm.predict.probe import Probe
from ocomm.session import Session
from ocomm.telemetry.log import NOTICE
from ocomm_torch import auto, trainers
from tests.frontends.onebit_jobs import digest, gradients, initial
from tests.frontends.test_torch_onebit import rank_of
from tests.worlds import MPI_SIZE, run_ranks

#: Rates at which one of the methods is far ahead of the others, whatever compute takes here.
FAST, SLOW = 1e12, 1e5
WRAPPERS = {
    "exact averages": "AdamW",
    "averages in 8 bits": "Optimizer",
    "1-bit Adam": "OneBitAdam",
    "0/1 Adam": "ZeroOneAdam",
    "DiLoCo, a sync in 10 steps, 4 bits": "DiLoCo",
}


#: Ranks whose calls this process sees.
MPI_SHARE = 1 if MPI_SIZE else 2
STEPS_LOCALLY = ("0/1 Adam", "DiLoCo, a sync in 10 steps, 4 bits")


@pytest.fixture(params=[SLOW])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """A network that was measured, without measuring."""

    def measured() -> Probe:
        assert hvd.size() > 1
        return Probe(hvd.size(), 1, Network(request.param, round_s=1e-3), CodecTimes())

    monkeypatch.setattr(auto, "measure", measured)
    return float(request.param)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one method, beside exact averages, the only one whose loss is known, and the choice, whatever compute takes
    here.
    """

    def choose(name: str) -> None:
        monkeypatch.setattr(auto, "fastest", lambda found: next(each for each in found if each.method.name == name))
        monkeypatch.setattr(methods.Method, "gap", lambda method, *_: 0.0 if method.name in (name, EXACT) else None)

    return choose


EXACT = "exact averages"


class Run:
    """A model on one rank; ``train`` takes steps with the rank's own gradients."""

    def __init__(self, rank: int, make: Any = torch.optim.AdamW, fused: bool = False, **options: Any) -> None:
        self.rank = rank
        self.parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        self.inner = make(self.parameters, lr=1e-2, **({"fused": True} if fused else {}))
        named = [(f"tensor.{number}", p) for number, p in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedAuto(self.inner, named, **{"total_steps": 40, **options})

    def train(self, first: int, last: int) -> list[str]:
        found = []
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            grads = [torch.from_numpy(g) for g in gradients(step, self.rank) if g is not None]
            sum((p * g).sum() for p, g in zip(self.parameters, grads, strict=True)).backward()
            self.optimizer.step()
            found.append(digest([p.detach().numpy() for p in self.parameters]))
        return found


@pytest.mark.parametrize("method", WRAPPERS)
def test_after_four_steps_the_known_method_takes_over(
    method: str, network: float, only: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    only(method)

    def body(session: Session) -> tuple[list[str], str, str]:
        run = Run(rank_of(session))
        before = type(run.optimizer.optimizer).__name__
        found = run.train(1, auto.MEASURED_STEPS)
        assert run.optimizer.method.name == method
        assert type(run.optimizer.optimizer).__name__ == WRAPPERS[method]
        assert before == "Optimizer", "a slow network begins in 8 bits"
        found += run.train(auto.MEASURED_STEPS + 1, 24)
        while (
            method == "0/1 Adam" and run.optimizer.compression_report()["synced"]
        ):  # a run that ends between two syncs
            found += run.train(len(found) + 1, len(found) + 1)
        run.optimizer.finish()
        found.append(digest([p.detach().numpy() for p in run.parameters]))
        return found, run.optimizer.decision, run.optimizer.method.name

    (found, decision, _), *others = run_ranks(2, body)
    assert "the run ended" not in caplog.text, "finish() has made the replicas equal"
    for other in others:
        assert other[1:] == (decision, method)
        assert other[0][-1] == found[-1]
        if method not in STEPS_LOCALLY:
            assert other[0] == found
    assert f"DistributedAuto: {method}, " in decision and decision.count("\n") == len(methods.METHODS)


@pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's log is another process's")
def test_rank_0_says_the_decision_among_the_lines_that_every_run_has(
    network: float, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> str:
        run = Run(rank_of(session))
        run.train(1, auto.MEASURED_STEPS)
        return str(run.optimizer.decision)

    with caplog.at_level(NOTICE, "ocomm"):
        decision, _ = run_ranks(2, body)
    said = [record.getMessage() for record in caplog.records if record.levelno == NOTICE]
    assert decision and said.count(decision) == 1


@pytest.mark.parametrize("network", [FAST], indirect=True)
def test_a_run_with_exact_averages_is_that_of_distributed_optimizer(
    network: float, only: Callable[[str], None]
) -> None:
    only(EXACT)

    def body(session: Session) -> tuple[list[str], list[str]]:
        found = Run(rank_of(session)).train(1, 8)
        plain = Run.__new__(Run)
        plain.rank = rank_of(session)
        plain.parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        named = [(f"plain.{number}", p) for number, p in enumerate(plain.parameters)]
        plain.optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(plain.parameters, lr=1e-2), named)
        return found, plain.train(1, 8)

    for found, plain in run_ranks(2, body):
        assert found == plain


def test_one_rank_has_nothing_to_decide() -> None:
    def body(session: Session) -> str:
        run = Run(0)
        run.train(1, 6)
        return run.optimizer.method.name

    assert run_ranks(1, body) == [EXACT]


def test_an_optimizer_whose_losses_are_unknown_keeps_exact_averages(network: float) -> None:
    def body(session: Session) -> tuple[str, str]:
        run = Run(rank_of(session), torch.optim.RMSprop, max_loss_gap=1.0)
        run.train(1, 6)
        return run.optimizer.method.name, run.optimizer.decision

    for name, decision in run_ranks(2, body):
        assert name == EXACT
        assert "its loss with RMSprop was not measured" in decision
        assert "1-bit Adam" in decision and "RMSprop" in decision


def test_a_scheduler_of_either_object_sets_the_rate_of_every_method(
    network: float, only: Callable[[str], None]
) -> None:
    only("1-bit Adam")

    def body(session: Session) -> list[float]:
        run = Run(rank_of(session))
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, 0.5)
        rates = []
        for step in range(1, 8):
            run.train(step, step)
            scheduler.step()
            rates.append(run.optimizer.optimizer.param_groups[0]["lr"])
        assert run.inner.param_groups[0]["lr"] == rates[-1]
        return rates

    for rates in run_ranks(2, body):
        assert rates == [1e-2, 1e-2, 5e-3, 5e-3, 5e-3, 2.5e-3, 2.5e-3]


@pytest.mark.parametrize(("ranks", "at"), [(1, 7), (2, 3)])
def test_a_run_that_goes_on_before_anything_was_decided_measures_four_steps(
    ranks: int, at: int, network: float, only: Callable[[str], None]
) -> None:
    only("1-bit Adam")

    def before(session: Session) -> dict[str, Any]:
        run = Run(rank_of(session))
        run.train(1, at)
        return {"values": [p.detach().clone() for p in run.parameters], "state": run.optimizer.state_dict()}

    saved = run_ranks(ranks, before)[0]

    def body(session: Session) -> list[tuple[str, int]]:
        run = Run(rank_of(session))
        with torch.no_grad():
            for p, value in zip(run.parameters, saved["values"], strict=True):
                p.copy_(value)
        run.optimizer.load_state_dict(copy.deepcopy(saved["state"]))  # torch takes over the tensors that it loads
        found = []
        for step in range(at + 1, at + 6):
            run.train(step, step)
            found.append((run.optimizer.method.name, len(run.optimizer._computed)))
        assert run.optimizer.steps == at + 5
        return found

    for found in run_ranks(2, body):
        assert [name == "1-bit Adam" for name, _ in found] == [False, False, False, True, True]
        assert found[3][1] == 3  # the first step of a process is not measured


@pytest.mark.parametrize("at", [2, 9])
@pytest.mark.parametrize("method", [EXACT, "averages in 4 bits", "1-bit Adam", "DiLoCo, a sync in 10 steps, 4 bits"])
def test_a_saved_run_goes_on_with_its_method_bit_for_bit(
    method: str, at: int, network: float, only: Callable[[str], None]
) -> None:
    only(method)

    def body(session: Session) -> tuple[list[str], list[str]]:
        rank = rank_of(session)
        run = Run(rank)
        run.train(1, at)
        state, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        values = [p.detach().clone() for p in run.parameters]
        expected = run.train(at + 1, 16)
        again = Run(rank)
        with torch.no_grad():
            for p, value in zip(again.parameters, values, strict=True):
                p.copy_(value)
        again.optimizer.load_state_dict(state)
        again.optimizer.load_rank_state_dict(own)
        if at > auto.MEASURED_STEPS:
            assert again.optimizer.method.name == method
        found = again.train(at + 1, 16)
        return (found, expected) if at > auto.MEASURED_STEPS else (found[:1], expected[:1])

    for found, expected in run_ranks(2, body):
        assert found == expected


@pytest.mark.parametrize("longer", [47, 49])
def test_a_run_that_is_made_longer_ends_with_a_sync(longer: int, network: float, only: Callable[[str], None]) -> None:
    only("0/1 Adam")

    def body(session: Session) -> tuple[str, bool]:
        rank = rank_of(session)
        run, again = Run(rank, total_steps=20), Run(rank, total_steps=longer)
        run.train(1, 16)
        with torch.no_grad():
            for p, q in zip(run.parameters, again.parameters, strict=True):
                q.copy_(p)
        again.optimizer.load_state_dict(run.optimizer.state_dict())
        again.optimizer.load_rank_state_dict(run.optimizer.rank_state_dict())
        last = again.train(17, longer)[-1]
        return last, again.optimizer.compression_report()["synced"]

    first, second = run_ranks(2, body)
    assert first == second and first[1]


@pytest.mark.parametrize("network", [FAST, SLOW], indirect=True)
def test_a_state_that_is_replaced_by_an_empty_one_is_that_of_all_methods(
    network: float, only: Callable[[str], None]
) -> None:
    only("1-bit Adam")

    def train(rank: int, reset: Callable[[Any], None] | None) -> list[str]:
        run = Run(rank)
        found = run.train(1, 2)
        if reset is not None:
            reset(run.optimizer)
        found += run.train(3, 12)
        assert run.optimizer.method.name == "1-bit Adam"
        return found

    def assign(optimizer: Any) -> None:
        optimizer.state = defaultdict(dict)

    def zero(optimizer: Any) -> None:
        for entry in optimizer.state.values():
            for moment in entry.values():
                moment.zero_()

    def body(session: Session) -> bool:
        rank = rank_of(session)
        reset = train(rank, assign)
        assert reset == train(rank, zero)
        return reset == train(rank, None)

    assert not any(run_ranks(2, body))


def test_what_cannot_be_is_refused(network: float) -> None:
    def body(session: Session) -> None:
        rank = rank_of(session)
        with pytest.raises(SettingsError, match="total_steps"):
            Run(rank, total_steps=0)
        with pytest.raises(ValueError, match="max_loss_gap must be at least 0"):
            Run(rank, max_loss_gap=-0.1)
        run = Run(rank)
        with pytest.raises(InvalidRequestError, match="cannot be added"):
            run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        with pytest.raises(InvalidRequestError, match="DistributedAuto"):
            hvd.DistributedAuto(run.optimizer, total_steps=10)
        with pytest.raises(CheckpointError, match="is not of a DistributedAuto"):
            run.optimizer.load_state_dict(torch.optim.AdamW(run.parameters).state_dict())

    run_ranks(2, body)


@pytest.mark.parametrize("network", [FAST, SLOW], indirect=True)
@pytest.mark.parametrize("method", [EXACT, "averages in 8 bits", "1-bit Adam"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    method: str, network: float, only: Callable[[str], None]
) -> None:
    only(method)

    def body(session: Session) -> tuple[list[str], list[float], int]:
        rank = rank_of(session)
        run = Run(rank, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        found, scales = [], []
        for step in range(1, 10):
            run.optimizer.zero_grad()
            grads = [torch.from_numpy(g) for g in gradients(step, rank) if g is not None]
            if step in (2, 7) and rank == 1:
                grads[0][0] = torch.inf
            scaler.scale(sum((p * g).sum() for p, g in zip(run.parameters, grads, strict=True))).backward()
            before = digest([p.detach().numpy() for p in run.parameters])
            scaler.step(run.optimizer)
            scaler.update()
            found.append(digest([p.detach().numpy() for p in run.parameters]))
            assert (found[-1] == before) == (step in (2, 7))
            scales.append(scaler.get_scale())
        return found, scales, run.optimizer.steps

    first, second = run_ranks(2, body)
    assert first == second
    assert first[1] == [1024.0, *[512.0] * 5, *[256.0] * 3]
    assert first[2] == 7


@pytest.mark.parametrize("network", [FAST], indirect=True)
def test_a_rank_with_no_gradient_under_way_unscales_the_averages(network: float, only: Callable[[str], None]) -> None:
    only(EXACT)

    def body(session: Session) -> list[str]:
        run = Run(rank_of(session))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found = []
        for step in range(1, 8):
            for p in run.parameters:
                p.grad = torch.zeros_like(p)
            if step == 1 or run.rank == 0:
                overflow = torch.inf if step in (2, 5) else 1.0
                scaler.scale(sum(p.sum() for p in run.parameters) * overflow).backward()
            scaler.step(run.optimizer)
            scaler.update()
            found.append(digest([scaler.get_scale(), *(p.detach().numpy() for p in run.parameters)]))
        assert scaler.get_scale() == 2.0
        return found

    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.parametrize("network", [FAST], indirect=True)
def test_clipped_averages_are_those_that_a_script_would_clip(network: float, only: Callable[[str], None]) -> None:
    only(EXACT)

    def body(session: Session) -> tuple[list[str], list[str]]:
        rank = rank_of(session)
        found = Run(rank, max_grad_norm=0.5).train(1, 8)
        parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(parameters, lr=1e-2))
        plain = []
        for step in range(1, 9):
            optimizer.zero_grad()
            grads = [torch.from_numpy(g) for g in gradients(step, rank) if g is not None]
            sum((p * g).sum() for p, g in zip(parameters, grads, strict=True)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            plain.append(digest([p.detach().numpy() for p in parameters]))
        return found, plain

    for found, plain in run_ranks(2, body):
        assert found == plain


@pytest.mark.parametrize("method", [EXACT, "1-bit Adam"])
def test_an_elastic_state_returns_to_its_commit(method: str, network: float, only: Callable[[str], None]) -> None:
    only(method)

    def body(session: Session) -> tuple[list[str], list[str]]:
        run = Run(rank_of(session))
        model = torch.nn.ParameterList(run.parameters)
        hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)
        state = hvd.elastic.TorchState(model, run.optimizer, batch=0)
        run.train(1, 8)
        state.commit()
        expected = run.train(9, 14)
        state.restore()
        assert run.optimizer.method.name == method
        return run.train(9, 14), expected

    for found, expected in run_ranks(2, body):
        assert found == expected


def test_a_trainer_may_not_clip_in_another_way(network: float) -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), max_grad_norm=0.5)
        assert trainers.has_clipped(run.optimizer, 0.5, 2.0, "it")
        with pytest.raises(InvalidRequestError, match=r"it would clip each rank's gradients by its own norm to 1\.0"):
            trainers.has_clipped(run.optimizer, 1.0, 2.0, "it")

    run_ranks(2, body)


@pytest.mark.parametrize("network", [FAST], indirect=True)
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_are_averaged_once_in_a_step(
    unscales: bool, network: float, only: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(EXACT)
    calls: list[int] = []
    prepare = operations.prepare_allreduce

    def counted(session: Session, adapter: Any, request: Any, *memory: Any) -> Any:
        calls.append(len(request.tensors))
        return prepare(session, adapter, request, *memory)

    monkeypatch.setattr(operations, "prepare_allreduce", counted)

    def body(session: Session) -> None:
        run = Run(rank_of(session), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=unscales)
        for step in range(1, 8):
            run.optimizer.zero_grad()
            grads = [torch.from_numpy(g) for g in gradients(step, run.rank) if g is not None]
            scaler.scale(sum((p * g).sum() for p, g in zip(run.parameters, grads, strict=True))).backward()
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()

    run_ranks(2, body)
    assert sum(calls) == MPI_SHARE * (7 * len(initial()) + 1)  # and once the slowest rank's seconds


@pytest.mark.parametrize("network", [FAST, SLOW], indirect=True)
@pytest.mark.parametrize("method", ["1-bit Adam", "DiLoCo, a sync in 10 steps, 4 bits"])
def test_an_optimizer_of_the_first_steps_that_lives_on_exchanges_nothing(
    method: str, network: float, only: Callable[[str], None]
) -> None:
    only(method)

    def body(session: Session) -> None:
        run = Run(rank_of(session))
        before = run.optimizer.optimizer if run.rank == 0 else None  # as in a cycle that is collected later
        run.train(1, 12)
        assert run.optimizer.method.name == method
        assert before is not run.optimizer.optimizer

    run_ranks(2, body)
