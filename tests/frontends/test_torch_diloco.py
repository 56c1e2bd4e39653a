"""DistributedDiLoCo against the plain simulation, what it sends, what is saved of it, and what can go wrong."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError, PeerError, SettingsError
from ocomm.optim.diloco import DiLoCoOptions, _runs
from ocomm.session import Session
from ocomm.types import Settings
from tests.frontends.counted_traffic import CountedTraffic
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial
from tests.oracle import diloco as oracle
from tests.oracle.dense_codes import bfloat16
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
#: The tensors of each fragment, by the number of fragments: runs of about equal numbers of elements.
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 3: [[0], [1], [2, 3]]}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"sync_every": 3},
    "every step": {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "fragments": {"sync_every": 6, "fragments": 3},
    "delay": {"sync_every": 4, "delay": 3},
    "mix": {"sync_every": 3, "mix": 0.25, "outer_momentum": 0.9},
    "8 bits": {"sync_every": 3, "bits": 8},
    "4 bits": {"sync_every": 3, "bits": 4},
    "1 bit": {"sync_every": 3, "bits": 1},
    "all of it": {"sync_every": 6, "fragments": 2, "delay": 2, "mix": 0.5, "bits": 1},
    "all of it, 8 bits": {"sync_every": 6, "fragments": 3, "delay": 1, "mix": 0.25, "bits": 8},
}


def adam(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def rank_of(session: Session) -> int:
    return session.require_topology().rank


def law(
    ranks: int, sync_every: int, fragments: int = 1, outer_lr: float = 0.9, outer_momentum: float = 0.6, **options: Any
) -> oracle.DiLoCo:
    how = {"sync_every": sync_every, "lr": outer_lr, "momentum": outer_momentum, **options}
    return oracle.DiLoCo(initial(), ranks, FRAGMENTS[fragments], **how)


class Run:
    """A model on one rank with its optimizer; ``train`` takes steps with the rank's own gradients."""

    def __init__(
        self, rank: int, make: Make = adam, dtype: torch.dtype = torch.float32, buffers: Any = None, **options: Any
    ) -> None:
        self.rank = rank
        self.parameters = [torch.nn.Parameter(torch.from_numpy(array.copy()).to(dtype)) for array in initial()]
        names = [f"tensor.{number}" for number in range(len(self.parameters))]
        self.inner = make(self.parameters)
        named = zip(names, self.parameters, strict=True)
        self.optimizer = hvd.DistributedDiLoCo(self.inner, named, named_buffers=buffers, **options)

    @property
    def core(self) -> Any:
        return self.optimizer._driver.core

    @property
    def values(self) -> list[np.ndarray]:
        return [p.detach().float().numpy().reshape(-1).copy() for p in self.parameters]

    @property
    def anchors(self) -> list[np.ndarray]:
        return [self.core.anchor[self.core.flat_span(t)].copy() for t in range(len(self.parameters))]

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        grads = [torch.from_numpy(g) for g in gradients(step, self.rank) if g is not None]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)

    def train(self, first: int, last: int) -> list[str]:
        found = []
        for step in range(first, last + 1):
            self.backward(step)
            self.optimizer.step()
            found.append(digest([*self.values, *self.anchors]))
        return found

    @property
    def everything(self) -> str:
        """Hash of all that a step may change on this rank."""
        arrays = [*self.values, self.core.anchor, self.core.momentum, self.core.error, self.core.server_error]
        for parameter in self.parameters:
            entry = self.optimizer.state.get(parameter, {})
            arrays += [value.float().numpy() for _, value in sorted(entry.items()) if torch.is_tensor(value)]
        return digest(arrays)


def simulated(simulation: oracle.DiLoCo, steps: int, dtype: torch.dtype = torch.float32) -> list[list[str]]:
    """The digests of ``Run.train``, of each rank; local steps are those of plain optimizers."""
    models = [[torch.nn.Parameter(torch.from_numpy(a.copy()).to(dtype)) for a in initial()] for _ in simulation.thetas]
    optimizers = [adam(model) for model in models]
    found: list[list[str]] = [[] for _ in models]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for number, (parameter, grad) in enumerate(zip(model, gradients(step, rank), strict=True)):
                assert grad is not None
                parameter.grad = torch.from_numpy(grad).to(dtype)
                theta = torch.from_numpy(simulation.thetas[rank][number])
                parameter.data.copy_(theta.view(parameter.shape))
            optimizer.step()
            simulation.thetas[rank] = [p.detach().float().numpy().reshape(-1).copy() for p in model]
        simulation.end_step()
        for rank in range(simulation.ranks):
            found[rank].append(digest([*simulation.thetas[rank], *simulation.anchors]))
    return found


@pytest.mark.short("plain-2", "all of it-4")
@pytest.mark.parametrize(
    ("form", "ranks"),
    few(
        itertools.product(FORMS, (1, 2, 4)),
        lambda form, ranks: ranks == 2 or form == "plain" or (form, ranks) == ("all of it", 4),
    ),
)
def test_it_equals_the_simulation_on_all_ranks_after_each_step(form: str, ranks: int) -> None:
    expected = simulated(law(ranks, **FORMS[form]), 19)
    assert run_ranks(ranks, lambda s: Run(rank_of(s), **FORMS[form]).train(1, 19)) == expected


@pytest.mark.short("4-aaab")
@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
@pytest.mark.parametrize("bits", [32, 4, 1])
def test_hosts_that_add_up_equal_the_simulation(bits: int, hosts: str) -> None:
    nodes = [hosts.count(host) for host in "ab"]
    options = {"sync_every": 4, "fragments": 2, "bits": bits, "block_size": 64}
    expected = simulated(law(4, nodes=nodes, **options), 9)
    assert run_ranks(4, lambda s: Run(rank_of(s), hierarchical=True, **options).train(1, 9), hosts=hosts) == expected


def test_bfloat16_parameters_have_float32_anchors_that_equal_the_simulation() -> None:
    options = {"sync_every": 3, "mix": 0.25}
    start = [bfloat16(a) for a in initial()]
    simulation = oracle.DiLoCo(start, 2, FRAGMENTS[1], sync_every=3, mix=0.25, rounded=bfloat16)
    expected = simulated(simulation, 10, torch.bfloat16)
    assert run_ranks(2, lambda s: Run(rank_of(s), dtype=torch.bfloat16, **options).train(1, 10)) == expected
    assert any((bfloat16(a) != a).any() for a in simulation.anchors)


def test_the_result_does_not_depend_on_segments_window_or_engine() -> None:
    form = FORMS["all of it"]
    expected = simulated(law(2, **form), 13)
    for settings in (replace(Settings(), segment_nbytes=4096, window=1), replace(Settings(), engine="python")):
        assert run_ranks(2, lambda s: Run(rank_of(s), **form).train(1, 13), settings=settings) == expected


@pytest.mark.parametrize("form", ["plain", "8 bits", "1 bit"])
def test_after_a_sync_all_ranks_have_the_same_parameters_and_between_them_the_same_anchors(form: str) -> None:
    def body(session: Session) -> list[tuple[str, str]]:
        run, found = Run(rank_of(session), **FORMS[form]), []
        for step in range(1, 8):
            run.train(step, step)
            assert run.optimizer.compression_report()["synced"] is (step % 3 == 0)
            found.append((digest(run.values), digest(run.anchors)))
        return found

    first, second = run_ranks(2, body)
    for step, (mine, other) in enumerate(zip(first, second, strict=True), 1):
        assert mine[1] == other[1]
        assert (mine[0] == other[0]) is (step % 3 == 0)


# What is sent


def test_between_syncs_nothing_is_sent_and_nobody_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = CountedTraffic(monkeypatch)

    def body(session: Session) -> list[tuple[int, int, int, int]]:
        run, found = Run(rank_of(session), sync_every=4), []
        counts = traffic.of(run.optimizer, run.rank)
        for step in range(1, 13):
            run.train(step, step)
            found.append(counts())
        return found

    for counts in run_ranks(2, body, settings=replace(Settings(), engine="python")):
        for step in range(2, 13):
            before, now = counts[step - 2], counts[step - 1]
            if step % 4:
                assert now == before, f"step {step} has sent something"
            else:
                # One plan with the changes, and the vote; at the first two syncs none of them is a request.
                assert now[1] - before[1] == 2
                assert now[3] > before[3]
        if not MPI_SIZE:
            assert counts[-1][2] > 0


@pytest.mark.parametrize(("bits", "share"), [(32, 1.0), (8, 1.04 / 4), (4, 0.54 / 4), (1, 1 / 31.75)])
def test_a_sync_sends_the_bytes_of_its_codes(bits: int, share: float) -> None:
    numel = 1 << 18

    def body(session: Session) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.zeros(numel))
        optimizer = hvd.DistributedDiLoCo(torch.optim.SGD([weight], lr=1.0), sync_every=2, bits=bits)
        for step in range(4):
            weight.grad = torch.full((numel,), 1.0 + rank_of(session) + step)
            optimizer.step()
        return optimizer.compression_report()

    for report in run_ranks(2, body):
        dense = 4 * numel  # of one step: half of it to each of the owner and the others
        assert report["bytes_dense"] == 4 * dense
        assert 2 * dense * share * 0.97 < report["bytes_sent"] <= 2 * dense * share * 1.03 + 4000
        assert (report["syncs"], report["local_steps"], report["step"]) == (2, 2, 4)


# The end of a run, and evaluation


@pytest.mark.short("7-")
@pytest.mark.parametrize("form", ["plain", "all of it", "all of it, 8 bits"])
@pytest.mark.parametrize("steps", [7, 11, 12])
def test_finish_syncs_the_incomplete_period_and_makes_the_anchors_the_parameters(form: str, steps: int) -> None:
    options = FORMS[form]
    simulation = law(2, **options)
    simulated(simulation, steps)
    count, period = len(simulation.fragments), simulation.period
    following = steps // period
    order = [(following + k) % count for k in range(count)]
    if (steps + simulation.delay) // period > following:  # a sync is under way
        simulation.sync(following)
        order.remove(following % count)
    if steps % period == 0:
        order.remove((following - 1) % count)
    simulation.finish(order)
    expected = digest([*simulation.thetas[0], *simulation.anchors])

    def body(session: Session) -> None:
        run = Run(rank_of(session), **options)
        run.train(1, steps)
        run.optimizer.finish()
        assert digest([*run.values, *run.anchors]) == expected
        report = run.optimizer.compression_report()
        assert report["synced"] and report["step"] == steps and report["stage"] == "local"
        # What finish() exchanges is no step.
        assert report["dense_steps"] + report["compressed_steps"] + report["local_steps"] == steps
        run.optimizer.finish()
        assert digest([*run.values, *run.anchors]) == expected, "nothing was left to sync"
        run.train(steps + 1, steps + 6)

    run_ranks(2, body)


def test_the_anchors_are_the_parameters_inside_evaluation_parameters() -> None:
    def body(session: Session) -> str:
        run = Run(rank_of(session), sync_every=3)
        with run.optimizer.evaluation_parameters():
            assert digest(run.values) == digest(initial())
        run.train(1, 5)
        own = digest(run.values)
        with run.optimizer.evaluation_parameters():
            inside = digest(run.values)
            assert inside == digest(run.anchors) != own
            for call in (run.optimizer.step, run.optimizer.finish, run.optimizer.rank_state_dict):
                with pytest.raises(InvalidRequestError, match="inside evaluation_parameters"):
                    call()
        assert digest(run.values) == own
        return inside

    assert len(set(run_ranks(2, body))) == 1


def test_buffers_are_averaged_at_syncs_and_whole_numbers_stay() -> None:
    def body(session: Session) -> None:
        rank = rank_of(session)
        norm = torch.nn.BatchNorm1d(3)
        inner = torch.optim.SGD(norm.parameters(), lr=0.1)
        optimizer = hvd.DistributedDiLoCo(
            inner, norm.named_parameters(), sync_every=2, bits=1, named_buffers=norm.named_buffers()
        )
        noise = torch.Generator().manual_seed(rank)
        seen: list[Any] = []
        for step in range(1, 5):
            optimizer.zero_grad()
            norm(torch.randn(8, 3, generator=noise) * (rank + 1)).square().sum().backward()
            seen.append((norm.running_mean.clone(), norm.running_var.clone()))  # type: ignore[union-attr,operator]
            optimizer.step()
            if step == 2:
                both = hvd.allgather_object([value.numpy() for value in seen[-1]])
                for number, value in enumerate((norm.running_mean, norm.running_var)):
                    mean = (both[0][number] + both[1][number]) * np.float32(0.5)
                    np.testing.assert_array_equal(value.numpy(), mean)  # type: ignore[union-attr,operator]
        assert int(norm.num_batches_tracked) == 4  # type: ignore[arg-type]
        hvd.check_replicas({k: v for k, v in norm.state_dict().items() if k != "num_batches_tracked"})

    run_ranks(2, body)


# Saved states


@pytest.mark.short("8 bits")
@pytest.mark.parametrize("form", ["plain", "all of it", "all of it, 8 bits"])
def test_a_run_that_is_saved_in_the_middle_goes_on_in_every_bit(form: str) -> None:
    """Between syncs, at one, and while one is under way."""

    def body(session: Session) -> None:
        rank, options = rank_of(session), FORMS[form]
        whole = Run(rank, **options)
        digests = whole.train(1, 16)
        for stop in (0, 3, 4, 5, 6):
            before = Run(rank, **options)
            before.train(1, stop)
            file = io.BytesIO()
            torch.save([before.optimizer.state_dict(), before.optimizer.rank_state_dict()], file)
            file.seek(0)
            replicated, own = torch.load(file, weights_only=True)
            before.optimizer.finish()
            after = Run(rank, **options)
            after.optimizer.load_state_dict(replicated)
            assert digest(after.values) == digest(after.anchors)
            assert after.optimizer.load_rank_state_dict(own)["rank_state"] == "loaded"
            assert after.train(stop + 1, 16) == digests[stop:], stop
            assert after.everything == whole.everything

    run_ranks(2, body)


def test_without_rank_states_all_ranks_go_on_from_the_anchors() -> None:
    def body(session: Session) -> list[str]:
        run = Run(rank_of(session), **FORMS["all of it"])
        run.train(1, 5)  # a sync is under way
        state = hvd.broadcast_object(run.optimizer.state_dict(), 0)
        run.optimizer.finish()
        other = Run(rank_of(session), **FORMS["all of it"])
        other.optimizer.load_state_dict(state)
        assert other.optimizer.load_rank_state_dict(None)["rank_state"] == "reset"
        assert digest(other.values) == digest(other.anchors)
        other.train(6, 9)
        other.optimizer.finish()
        return [digest(other.values)]

    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's log is another process's")
@pytest.mark.parametrize("loads", [False, True], ids=["not loaded", "missing"])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_run_without_its_rank_states_says_what_is_lost(
    bits: int, loads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3, bits=bits)
        run.train(1, 4)
        state = hvd.broadcast_object(run.optimizer.state_dict(), 0)
        other = Run(rank_of(session), sync_every=3, bits=bits)
        other.optimizer.load_state_dict(state)
        if loads:
            other.optimizer.load_rank_state_dict(None)
        other.train(5, 6)

    with caplog.at_level(logging.WARNING, "ocomm"):
        run_ranks(2, body)
    before = "" if loads else "load_rank_state_dict was not called after load_state_dict: "
    text = (
        "all ranks go on from the anchors, with the wrapped optimizer's state that is in state_dict(): each rank's own "
        "state of it is lost, and so are its steps since the last sync"
    )
    text += ("" if bits == 32 else "; errors start at zero") + (":" if loads else ".")
    (said,) = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    assert f": {before}{text}" in said


def test_the_states_of_another_number_of_ranks_are_their_mean() -> None:
    def save(session: Session) -> tuple[Any, Any, list[np.ndarray]]:
        run = Run(rank_of(session), sync_every=3, bits=1)
        run.train(1, 5)
        return run.optimizer.state_dict(), run.optimizer.rank_state_dict(), run.values

    if MPI_SIZE:
        pytest.skip(reason="needs jobs of 2 ranks and of 1")
    saved = run_ranks(2, save)

    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3, bits=1)
        run.optimizer.load_state_dict(saved[0][0])
        assert run.optimizer.load_rank_state_dict([each[1] for each in saved])["rank_state"] == "re-sharded"
        for value, one, other in zip(run.values, saved[0][2], saved[1][2], strict=True):
            np.testing.assert_allclose(value, (one + other) / 2, rtol=1e-6, atol=1e-7)
        run.train(6, 7)

    run_ranks(1, body)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=4)
        run.train(1, 2)
        state, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        with pytest.raises(CheckpointError, match=r"with sync_every=4, this one has sync_every=2\. Pass"):
            Run(rank_of(session), sync_every=2).optimizer.load_state_dict(state)
        later = Run(rank_of(session), sync_every=4)
        later.train(1, 3)
        before = later.everything
        with pytest.raises(CheckpointError, match="was saved at step 2, the optimizer is at step 3"):
            later.optimizer.load_rank_state_dict(own)
        own["flat"]["parameter"][0] += 1
        run.optimizer.load_state_dict(state)
        with pytest.raises(CheckpointError, match="is damaged"):
            run.optimizer.load_rank_state_dict(own)
        assert later.everything == before
        delayed = Run(rank_of(session), sync_every=4, delay=2)
        delayed.train(1, 3)
        with pytest.raises(InvalidRequestError, match="while a sync is under way, until step 4"):
            delayed.optimizer.load_state_dict(delayed.optimizer.state_dict())
        delayed.optimizer.finish()

    run_ranks(1, body)


INNER: dict[str, Make] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad, whose state is there from the start": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
if hasattr(torch.optim, "Adafactor"):
    INNER["Adafactor, whose state has other shapes"] = lambda p: torch.optim.Adafactor(p, lr=1e-2)


@pytest.mark.parametrize("kind", INNER)
def test_any_optimizer_is_wrapped_and_resumed(kind: str) -> None:
    def body(session: Session) -> str:
        run = Run(rank_of(session), INNER[kind], sync_every=3)
        run.train(1, 4)
        state, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        after = Run(rank_of(session), INNER[kind], sync_every=3)
        after.optimizer.load_state_dict(state)
        after.optimizer.load_rank_state_dict(own)
        assert after.train(5, 7) == run.train(5, 7)
        return digest(run.anchors)

    assert len(set(run_ranks(2, body))) == 1


def test_it_goes_on_from_the_state_of_the_plain_optimizer() -> None:
    def body(session: Session) -> None:
        plain = [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in initial()]
        inner = adam(plain)
        backward(plain, gradients(1, 0), range(len(plain)))
        inner.step()
        run = Run(rank_of(session), sync_every=2)
        run.optimizer.load_state_dict(inner.state_dict())
        assert float(run.optimizer.state[run.parameters[0]]["step"]) == 1.0
        run.train(1, 2)
        assert run.optimizer.compression_report()["step"] == 2

    run_ranks(1, body)


def test_the_wrapped_optimizer_saves_the_whole_state_and_loads_none_alone() -> None:
    def body(session: Session) -> str:
        run = Run(rank_of(session), sync_every=3)
        run.train(1, 4)
        saved = run.inner.state_dict()
        assert saved["ocomm"]["checksum"] == run.optimizer.state_dict()["ocomm"]["checksum"]
        with pytest.raises(InvalidRequestError) as raised:
            run.inner.load_state_dict(saved)
        after = Run(rank_of(session), sync_every=3)
        after.optimizer.load_state_dict(saved)
        after.optimizer.load_rank_state_dict(run.optimizer.rank_state_dict())
        assert after.train(5, 7) == run.train(5, 7)
        run.optimizer.disconnect()
        run.inner.load_state_dict(run.inner.state_dict())
        return str(raised.value)

    assert run_ranks(2, body) == 2 * [
        "load_state_dict() of the AdamW that DistributedDiLoCo wraps was called, which would change nothing here; call "
        "load_state_dict() of the DistributedDiLoCo, or load before you wrap."
    ]


def test_an_elastic_state_returns_to_what_was_committed() -> None:
    def body(session: Session) -> None:
        model = torch.nn.Linear(4, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        inner = torch.optim.Adam(model.parameters(), lr=0.05)
        optimizer = hvd.DistributedDiLoCo(inner, model.named_parameters(), sync_every=3)
        state = hvd.elastic.TorchState(model, optimizer, batch=0)
        data = torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(rank_of(session)))

        def train(first: int, last: int) -> str:
            for step in range(first, last):
                optimizer.zero_grad()
                model(data[step]).square().sum().backward()
                optimizer.step()
            return digest([p.detach().numpy() for p in model.parameters()])

        train(0, 4)
        state.save()
        expected = train(4, 8)
        state.restore()
        assert train(4, 8) == expected

    run_ranks(2, body)


# What can go wrong


def test_a_step_whose_gradients_are_not_finite_changes_nothing_and_is_counted() -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3)
        run.train(1, 1)
        before = run.everything
        run.backward(2)
        if rank_of(session) == 1:
            assert run.parameters[1].grad is not None
            run.parameters[1].grad[5] = float("inf")
        run.optimizer.step()
        assert (run.everything == before) is (rank_of(session) == 1)
        run.train(3, 3)
        report = run.optimizer.compression_report()
        assert report["non_finite_steps"] == rank_of(session) and report["syncs"] == 1 and report["step"] == 3
        hvd.check_replicas(run.parameters)

    run_ranks(2, body)


@pytest.mark.parametrize("form", ["plain", "all of it", "all of it, 8 bits"])
def test_a_parameter_that_is_not_finite_takes_all_ranks_back_to_their_anchors(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ocomm")

    def body(session: Session) -> str:
        run = Run(rank_of(session), **FORMS[form])
        run.train(1, 7)
        if run.rank == 1:
            with torch.no_grad():
                for parameter in run.parameters:
                    parameter.view(-1)[0] = float("nan")
            run.optimizer.state[run.parameters[2]]["exp_avg"][0] = float("inf")
        failed = None
        for step in range(8, 20):
            run.backward(step)
            anchors, error = digest(run.anchors), digest([run.core.error, run.core.server_error])
            try:
                run.optimizer.step()
            except NonFiniteError as problem:
                failed = step, str(problem)
                break
        assert failed is not None and "on rank(s) [1]; all ranks have returned" in failed[1]
        assert digest([run.core.error, run.core.server_error]) == error
        assert digest(run.values) == digest(run.anchors) == anchors
        if run.rank == 1:
            assert "state on rank 1 was not finite; it starts anew" in caplog.text
        report = run.optimizer.compression_report()
        assert report["inner_resets"] == (run.rank == 1) and report["skipped_steps"] == 1
        assert bool(len(run.optimizer.state)) is (run.rank == 0)
        run.train(failed[0] + 1, failed[0] + 12)
        run.optimizer.finish()
        return digest(run.values)

    assert len(set(run_ranks(2, body))) == 1


def test_settings_that_differ_are_told_at_the_sync_after_which_parameters_are_the_anchors() -> None:
    def body(session: Session) -> str:
        run = Run(rank_of(session), sync_every=3)
        run.train(1, 3)
        anchors = digest(run.anchors)
        run.optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank_of(session))
        run.train(4, 5)
        with pytest.raises(MismatchError, match=r"differ between ranks in step 6: .*lr 0\.02"):
            run.train(6, 6)
        assert digest(run.values) == anchors
        with pytest.raises(MismatchError):
            run.train(7, 7)
        return anchors

    assert len(set(run_ranks(2, body))) == 1


def test_parameters_that_differ_are_told_before_the_first_step() -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session))
        with torch.no_grad():
            run.parameters[2] += rank_of(session)
        with pytest.raises(MismatchError, match=r"not alike before their first step: .*'tensor\.2'"):
            run.train(1, 1)

    run_ranks(2, body)


def test_a_rank_that_leaves_between_syncs_is_told_at_the_next_one() -> None:
    left = threading.Event()

    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3)
        run.train(1, 4)
        if rank_of(session) == 1:
            left.set()
            session.shutdown(failed=True, why="raised ValueError: enough")
            return
        assert left.wait(60)
        run.train(5, 5)
        with pytest.raises(PeerError, match="enough"):
            run.train(6, 6)
        assert digest(run.values) == digest(run.anchors)

    if MPI_SIZE:
        pytest.skip(reason="a failed rank would end the job")
    run_ranks(2, body)


@pytest.mark.parametrize("bits", [32, 1])
def test_what_a_sync_reads_and_writes_outlives_an_optimizer_that_is_dropped(bits: int) -> None:
    dropped = threading.Barrier(2)

    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3, delay=2, bits=bits)
        run.train(1, 3)
        flows = run.optimizer._driver.stepper.flows
        if rank_of(session) == 1:
            dropped.wait(60)
            run.train(4, 4)
            return
        run.train(4, 4)  # a sync is under way, which waits for rank 1
        memory = [weakref.ref(run.core.delta)] + [weakref.ref(flows.averages)] * (bits == 32)
        del run, flows
        gc.collect()
        alive = [reference() is not None for reference in memory]
        dropped.wait(60)
        assert all(alive)

    if MPI_SIZE:
        pytest.skip(reason="ranks meet as threads")
    run_ranks(2, body)


def test_an_overflow_of_one_ranks_loss_scale_is_a_step_like_others() -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(1, 7):
            run.optimizer.zero_grad()
            loss = sum((p * float(step)).sum() for p in run.parameters)
            if step == 2 and rank_of(session) == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
        assert scaler.get_scale() == 16.0 / (1 + rank_of(session))
        report = run.optimizer.compression_report()
        assert report["non_finite_steps"] == rank_of(session) and report["syncs"] == 2
        hvd.check_replicas(run.parameters)

    run_ranks(2, body)


def test_options_that_cannot_be_are_named() -> None:
    for options, text in (
        ({"sync_every": 0}, "sync_every must be a whole number of at least 1"),
        ({"sync_every": 10, "fragments": 3}, "must be a multiple of fragments=3"),
        ({"sync_every": 10, "fragments": 5, "delay": 2}, "delay=2 must be less than sync_every / fragments = 2"),
        ({"bits": 16}, "bits must be 32, 8, 4 or 1, got 16"),
        ({"mix": 1.0}, r"mix must be in \[0, 1\)"),
        ({"outer_lr": float("nan")}, "outer_lr must be in"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in"),
    ):
        with pytest.raises(SettingsError, match=text):
            DiLoCoOptions(**options)


@pytest.mark.parametrize("is_grown", [False, True], ids=["the same shape", "another shape"])
def test_a_parameter_that_was_replaced_in_a_group_is_named_before_replicas_come_apart(is_grown: bool) -> None:
    def body(session: Session) -> None:
        run = Run(rank_of(session), sync_every=2)
        run.train(1, 3)
        data = run.parameters[1].detach().clone()
        run.parameters[1] = torch.nn.Parameter(torch.cat([data, data]) if is_grown else data)
        run.inner.param_groups[0]["params"][1] = run.parameters[1]
        before = digest(run.values)
        for call in (run.optimizer.step, run.optimizer.finish):
            with pytest.raises(
                InvalidRequestError, match=r"'tensor\.1' was replaced by another one in its param group. .* new AdamW"
            ):
                call()
        assert digest(run.values) == before

    run_ranks(2, body)


def test_what_cannot_be_wrapped_is_named() -> None:
    def body(session: Session) -> None:
        def one(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
            return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]

        shared = torch.ones(3)
        twice = [torch.nn.Parameter(shared), torch.nn.Parameter(shared)]
        for make, text in (
            (lambda: hvd.DistributedDiLoCo(torch.optim.LBFGS(one())), "needs no closure"),
            (lambda: hvd.DistributedDiLoCo(torch.optim.SGD(one(torch.float64))), "is torch.float64; Distributed"),
            (lambda: hvd.DistributedDiLoCo(torch.optim.SGD(twice)), "share memory"),
            (lambda: hvd.DistributedDiLoCo(torch.optim.SGD(one()), fragments=2), "only 1 parameters to divide"),
            (
                lambda: hvd.DistributedDiLoCo(hvd.DistributedOptimizer(torch.optim.SGD(one()))),
                "wrap the plain optimizer, not a DistributedOptimizer",
            ),
            (
                lambda: hvd.DistributedOneBitAdam(hvd.DistributedDiLoCo(torch.optim.Adam(one()))),
                "wrap the plain optimizer, not a DistributedDiLoCo",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=text):
                make()
        run = Run(0)
        run.backward(1)
        with pytest.raises(InvalidRequestError, match="call step\\(\\) of the DistributedDiLoCo"):
            run.inner.step()

    run_ranks(1, body)


def test_fragments_are_runs_of_about_equal_size() -> None:
    assert _runs([int(np.prod(shape)) for shape in SHAPES], 2) == FRAGMENTS[2]
    assert _runs([int(np.prod(shape)) for shape in SHAPES], 3) == FRAGMENTS[3]
    assert _runs([1] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert _runs([100, 1, 1], 3) == [[0], [1], [2]]
    assert _runs([1, 1, 100], 2) == [[0, 1], [2]]
    assert _runs([0, 0], 2) == [[0], [1]]
