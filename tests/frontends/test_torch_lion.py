"""DistributedLion against the plain simulation, and against what can go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError, SettingsError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import DistributedLion, Lion
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.frontends.test_torch_birder import SMALL, follow_schedule, lr_at, sgd, sparse_gradients
from tests.frontends.test_torch_onebit import rank_of
from tests.oracle import lion as oracle
from tests.worlds import run_ranks


def state_digest(parameters: list[torch.Tensor], optimizer: Any) -> str:
    """Hash of everything that a step may change on this rank."""
    core = optimizer._driver.core
    return digest([p.detach().numpy() for p in parameters] + [core.momentum, core.steps, np.array(core.committed)])


def job(rank: int, steps: int, **options: Any) -> dict[str, Any]:
    return train(rank, steps, wrap=DistributedLion, hash_state=state_digest, **{"make": sgd, **options})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_equals_the_simulation_for_100_steps_on_all_ranks(ranks: int) -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.95), "seed": 2**63 + 12345}
    simulation = oracle.Lion(initial(SMALL), ranks, lr=lr_at, weight_decay=0.1, **options)
    expected = []
    for step in range(1, 101):
        simulation.step([sparse_gradients(step, rank) for rank in range(ranks)])
        expected.append(digest(simulation.params))
    assert (simulation.ties > 100) == (ranks % 2 == 0), "ties must occur where they can"
    results = run_ranks(
        ranks,
        lambda s: job(rank_of(s), 100, shapes=SMALL, grads=sparse_gradients, before_step=follow_schedule, **options),
    )
    for result in results:
        assert result["digests"] == expected


def test_on_one_rank_it_is_lion_as_published() -> None:
    steps = [gradients(step, 0) for step in range(1, 21)]
    expected = oracle.plain(initial(), steps, lr=1e-2, wd=0.1)  # type: ignore[arg-type]
    (result,) = run_ranks(1, lambda s: job(0, 20))
    assert result["digests"][-1] == digest(expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_result_does_not_depend_on_fusion_segments_window_overlap_blocks_or_arrival_order(ranks: int) -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    plain = run_ranks(ranks, lambda s: job(rank_of(s), 10, overlap=False))
    base = Settings()
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (base, {"order": shuffled}),
        (base, {"block_size": 16}),
        (replace(base, segment_nbytes=65536, window=1), {"block_size": 256, "order": shuffled}),
        (replace(base, engine="python"), {}),
    ]
    for settings, options in variants:
        results = run_ranks(ranks, lambda s, o=options: job(rank_of(s), 10, **o), settings=settings)
        for result in results:
            assert result["digests"] == plain[0]["digests"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_non_finite_gradient_on_one_rank_raises_on_all_and_changes_nothing(overlap: bool, bad: float) -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if step == 6 and rank == 1:
            result[0][69, 129] = bad
        return result

    def body(session: Session) -> tuple[str, str, str, list[str]]:
        seen: list[Any] = []

        def remember(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            if step == 6:
                seen.extend([state_digest(parameters, optimizer), parameters, optimizer])

        rank = rank_of(session)
        with pytest.raises(NonFiniteError) as raised:
            job(rank, 20, grads=grads, before_step=remember, overlap=overlap)
        before, parameters, optimizer = seen
        after, digests = state_digest(parameters, optimizer), []
        for step in range(7, 12):  # the next steps are as if this one had not been
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return before, after, str(raised.value), digests

    simulation = oracle.Lion(initial(), 2, lr=1e-2, weight_decay=0.1)
    expected = []
    for step in range(1, 12):
        if step != 6:
            simulation.step([gradients(step, rank) for rank in range(2)])
            expected.append(digest(simulation.params))
    for before, after, message, digests in run_ranks(2, body):
        assert before == after
        assert "a gradient is NaN or Inf in step 6, on rank(s) [1]" in message
        assert digests == expected[5:]


def test_a_gradient_that_changes_after_backward_gives_what_no_overlap_gives() -> None:
    def halve(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        if step > 4 and rank == 1:
            for parameter in parameters:
                parameter.grad.mul_(-0.5)  # type: ignore[union-attr]

    expected, found = (
        run_ranks(2, lambda s, o=overlap: job(rank_of(s), 8, before_step=halve, overlap=o)) for overlap in (False, True)
    )
    assert [r["digests"] for r in found] == [r["digests"] for r in expected]
    assert [r["state"] for r in found] == [r["state"] for r in expected]
    assert {r["report"]["redone_steps"] for r in found} == {1}


def test_it_sends_a_thirty_second_part_of_dense_and_keeps_no_errors() -> None:
    numel = 4_000_000

    def body(session: Session) -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.zeros(numel))
        optimizer = DistributedLion(torch.optim.SGD([parameter], lr=1e-2))
        parameter.grad = torch.ones(numel)
        optimizer.step()
        assert (parameter == -1e-2).all()
        return optimizer.compression_report()

    for report in run_ranks(2, body):
        assert report["stage"] == "compressed" and report["compressed_steps"] == report["step"] == 1
        assert 31 <= report["ratio"] < 32
        memory = report["memory_bytes"]
        assert memory["momentum"] == 8 * numel
        assert memory["worker_error"] == memory["server_error"] == 0
        assert sum(memory.values()) < 8.5 * numel


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_has_no_gradient_stays_about_where_it_is_and_does_not_outvote_what_has(ranks: int) -> None:
    steps, lr = 100, 2.0**-7

    def body(session: Session) -> np.ndarray:
        parameter = torch.nn.Parameter(torch.zeros(2000))
        optimizer = DistributedLion(torch.optim.SGD([parameter], lr=lr))
        history = []
        for _ in range(steps):
            parameter.grad = torch.zeros(2000)
            if rank_of(session) == ranks - 1:
                parameter.grad[:1000] = 1.0  # a row that only the last rank uses
            optimizer.step()
            history.append(parameter.detach().numpy() / lr)
        return np.array(history)

    for moves in run_ranks(ranks, body):
        used, unused = moves[:, :1000], moves[:, 1000:]
        assert (used[-1] == -steps).all() if ranks % 2 else abs(used[-1].mean() + steps / 2) < 2
        assert np.abs(unused).max() <= (1 if ranks % 2 else 5 * np.sqrt(steps))
        assert abs(unused[-1].mean()) < 2


def test_other_ties_are_decided_by_another_seed() -> None:
    def opposite(step: int, rank: int) -> list[np.ndarray | None]:
        return [g if rank else -g for g in gradients(step, 0)]  # type: ignore[operator]

    digests = [
        run_ranks(2, lambda s, n=seed: job(rank_of(s), 3, seed=n, grads=opposite))[0]["digests"] for seed in (1, 1, 2)
    ]
    assert digests[0] == digests[1] != digests[2]


def regression(rank: int, optimizer_of: Any, steps: int = 300) -> float:
    """Fits a small network to a function, each rank on data of its own; the loss on data of nobody's."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    generator = torch.Generator().manual_seed(3)  # ranks may be threads, which share Torch's own
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    generator.manual_seed(100 + rank)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size, 4, generator=generator)
        return x, (torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y) ** 2).mean()

    optimizer = optimizer_of(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / steps)
        optimizer.zero_grad()
        loss_of(*batch(64)).backward()
        optimizer.step()
    generator.manual_seed(7)
    with torch.no_grad():
        return float(loss_of(*batch(4000)))


@pytest.mark.long  # minimizes; that every step is the simulation's is tested above
def test_it_trains_about_as_well_as_adam_on_the_averaged_gradient() -> None:
    def body(session: Session) -> tuple[float, float]:
        import ocomm_torch as hvd

        rank = rank_of(session)
        adam = regression(rank, lambda m: hvd.DistributedOptimizer(torch.optim.Adam(m.parameters(), lr=3e-2)))
        lion = regression(rank, lambda m: DistributedLion(torch.optim.SGD(m.parameters(), lr=1e-2)))
        return adam, lion

    losses = run_ranks(3, body)
    assert len(set(losses)) == 1
    adam, lion = losses[0]
    assert lion < 1.2 * adam < 0.4, (adam, lion)


# What cannot be wrapped


@pytest.mark.parametrize("option", ["momentum", "maximize"])
def test_options_of_the_wrapped_optimizer_that_would_be_ignored_are_refused_by_name(option: str) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(InvalidRequestError, match=f"DistributedLion does not support {option}=True; leave"):
            DistributedLion(torch.optim.SGD([parameter], lr=0.1, **{option: True}))  # type: ignore[arg-type]

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        ({"betas": (-0.1, 0.9)}, "betas must be two numbers in"),
        ({"betas": (0.9,)}, "betas must be two numbers in"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**64}, "seed must be in"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError, match=message):
            DistributedLion(sgd([torch.nn.Parameter(torch.zeros(4))]), **options)

    run_ranks(1, body)


@pytest.mark.parametrize(("option", "values"), [("seed", (0, 1)), ("betas", ((0.9, 0.99), (0.9, 0.98)))])
def test_ranks_with_different_options_are_told(option: str, values: tuple[Any, Any]) -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            DistributedLion(sgd([torch.nn.Parameter(torch.zeros(4))]), **{option: values[rank_of(session)]})
        return str(raised.value)

    spelled = [list(value) if option == "betas" else value for value in values]
    for message in run_ranks(2, body):
        assert f"rank(s) [0] registered {option}={spelled[0]}; rank(s) [1] registered {option}={spelled[1]}" in message


def test_the_short_name_is_the_same_class() -> None:
    assert Lion is DistributedLion
