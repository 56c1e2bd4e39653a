"""DistributedBirder and DistributedSoftSignSGD against the plain simulation, and against what can go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError, SettingsError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import Birder, DistributedBirder, DistributedLion, DistributedSoftSignSGD, SoftSignSGD
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.frontends.test_torch_onebit import CHANGES, change_betas, change_lr, rank_of
from tests.oracle import birder as oracle
from tests.tiers import alternating, few
from tests.worlds import MPI_SIZE, run_ranks

KINDS = {"Birder": (DistributedBirder, oracle.Birder), "SoftSignSGD": (DistributedSoftSignSGD, oracle.SoftSign)}
#: The elements of the last two have indices that are no multiples of four.
SMALL = ((20, 13), (33,), (1,), (50,))


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1)


def state_digest(parameters: list[torch.Tensor], optimizer: Any) -> str:
    """Hash of everything that a step may change on this rank."""
    core = optimizer._driver.core
    buffers = [core.momentum, core.magnitude, core.error, core.server_error, core.steps, np.array(core.committed)]
    return digest([p.detach().numpy() for p in parameters] + buffers)


def job(rank: int, steps: int, kind: str = "Birder", **options: Any) -> dict[str, Any]:
    return train(rank, steps, wrap=KINDS[kind][0], hash_state=state_digest, **{"make": sgd, **options})


def sparse_gradients(step: int, rank: int) -> list[np.ndarray | None]:
    """Some are missing on some ranks, some on all."""
    result = gradients(step, rank, SMALL)
    chance = np.random.default_rng([13, step])
    nowhere, here = chance.random(len(SMALL)) < 0.1, np.random.default_rng([14, step, rank]).random(len(SMALL)) < 0.2
    return [None if a or b else g for g, a, b in zip(result, nowhere, here, strict=True)]


def lr_at(step: int) -> float:
    return 1e-2 if step < 100 else 1e-2 / (step - 98)


def follow_schedule(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = lr_at(step)


@pytest.mark.parametrize(
    ("kind", "options", "ranks"),
    few(
        [
            (*kind, ranks)
            for kind in [("Birder", {}), ("Birder", {"stochastic": True, "seed": 2**63 + 12345}), ("SoftSignSGD", {})]
            for ranks in (1, 2, 4)
        ],
        lambda kind, options, ranks: ranks == 2,
    ),
)
def test_it_equals_the_simulation_on_all_ranks_after_every_step(kind: str, options: dict[str, Any], ranks: int) -> None:
    steps = 200 if ranks == 4 and not MPI_SIZE else 120
    options = {"beta": 0.9, "amsgrad_after": 60, **options}
    simulation = KINDS[kind][1](initial(SMALL), ranks, lr=lr_at, weight_decay=0.1, **options)
    expected = []
    for step in range(1, steps + 1):
        simulation.step([sparse_gradients(step, rank) for rank in range(ranks)])
        expected.append(digest(simulation.params))
    results = run_ranks(
        ranks,
        lambda s: job(
            rank_of(s), steps, kind, shapes=SMALL, grads=sparse_gradients, before_step=follow_schedule, **options
        ),
    )
    for result in results:
        assert result["digests"] == expected


@pytest.mark.parametrize(("kind", "ranks"), alternating(KINDS, [2, 3]))
def test_the_result_does_not_depend_on_fusion_segments_window_overlap_blocks_or_arrival_order(
    ranks: int, kind: str
) -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    plain = run_ranks(ranks, lambda s: job(rank_of(s), 10, kind, overlap=False))
    base = Settings()
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (base, {"order": shuffled}),
        (base, {"block_size": 16}),
        (replace(base, segment_nbytes=65536, window=1), {"block_size": 256, "order": shuffled}),
        (replace(base, engine="python"), {}),
    ]
    for settings, options in variants:
        results = run_ranks(ranks, lambda s, o=options: job(rank_of(s), 10, kind, **o), settings=settings)
        for result in results:
            assert result["digests"] == plain[0]["digests"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_non_finite_gradient_on_one_rank_raises_on_all_and_changes_nothing(
    overlap: bool, bad: float, kind: str
) -> None:
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
            job(rank, 20, kind, grads=grads, before_step=remember, overlap=overlap)
        before, parameters, optimizer = seen
        after, digests = state_digest(parameters, optimizer), []
        for step in range(7, 12):  # the next steps are as if this one had not been
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return before, after, str(raised.value), digests

    simulation = KINDS[kind][1](initial(), 2, lr=1e-2, weight_decay=0.1)
    expected = []
    for step in range(1, 12):
        if step != 6:
            simulation.step([gradients(step, rank) for rank in range(2)])
            expected.append(digest(simulation.params))
    for before, after, message, digests in run_ranks(2, body):
        assert before == after
        assert "a gradient is NaN or Inf in step 6, on rank(s) [1]" in message
        assert digests == expected[5:]


@pytest.mark.parametrize("kind", few(KINDS, ["Birder"]))
@pytest.mark.parametrize("change", [change for change in CHANGES if change is not change_betas])
def test_a_change_after_backward_gives_what_no_overlap_gives(change: Any, kind: str) -> None:
    def both(overlap: bool) -> list[Any]:
        return run_ranks(2, lambda s: job(rank_of(s), 12, kind, before_step=change, overlap=overlap))

    expected, found = both(False), both(True)
    assert expected[0]["digests"] == expected[1]["digests"]
    assert [r["digests"] for r in found] == [r["digests"] for r in expected]
    assert [r["state"] for r in found] == [r["state"] for r in expected]
    # lr does not go into what is sent.
    assert {r["report"]["redone_steps"] for r in found} == ({0} if change is change_lr else {1})


def test_elements_that_never_have_a_gradient_stay_within_four_steps() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        return [np.concatenate([gradients(step, rank, ((40,),))[0], np.zeros(3000, np.float32)])]

    def zeros(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        with torch.no_grad():
            parameters[0].zero_()
        return torch.optim.SGD(parameters, lr=1e-2)

    (result, _) = run_ranks(2, lambda s: job(rank_of(s), 150, shapes=((3040,),), grads=grads, make=zeros))
    drift = np.abs(np.array([values[0][40:] for values in result["parameters"]]))
    assert drift.max() <= 4e-2 * (1 + 1e-5)
    assert np.abs(np.diff(drift, axis=0)).max() > 0.9e-2, "they do move"


def test_from_the_first_step_on_it_sends_a_thirty_second_part_of_dense() -> None:
    numel = 10_000_000

    def body(session: Session) -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.zeros(numel))
        optimizer = DistributedBirder(torch.optim.SGD([parameter], lr=1e-2))
        parameter.grad = torch.ones(numel)
        optimizer.step()
        return optimizer.compression_report()

    for report in run_ranks(2, body):
        assert report["stage"] == "compressed" and report["compressed_steps"] == report["step"] == 1
        assert 31 <= report["ratio"] < 32
        assert report["bytes_sent"] >= numel / 8  # 1 bit to the other owner, 1 bit of every average owned here


def test_soft_sign_sgd_is_dense_and_says_so() -> None:
    for result in run_ranks(2, lambda s: job(rank_of(s), 3, "SoftSignSGD")):
        report = result["report"]
        assert (report["stage"], report["dense_steps"], report["compressed_steps"]) == ("dense", 3, 0)
        assert 0.9 < report["ratio"] < 1


def test_other_signs_come_from_another_seed() -> None:
    first, again, other = (
        run_ranks(1, lambda s, seed=seed: job(rank_of(s), 3, stochastic=True, seed=seed))[0]["digests"]
        for seed in (1, 1, 2)
    )
    assert first == again != other


# State


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_run_goes_on_bit_for_bit(kind: str) -> None:
    wrap = KINDS[kind][0]

    def body(session: Session) -> tuple[list[str], list[str]]:
        rank = rank_of(session)

        def resume(parameters: list[torch.Tensor], optimizer: Any, first: int) -> list[str]:
            digests = []
            for step in range(first, first + 5):
                optimizer.zero_grad()
                backward(parameters, gradients(step, rank), range(len(parameters)))
                optimizer.step()
                digests.append(digest([p.detach().numpy() for p in parameters]))
            return digests

        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = wrap(sgd(parameters), amsgrad_after=3)
        resume(parameters, optimizer, 1)
        copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        saved, own = optimizer.state_dict(), optimizer.rank_state_dict()
        second = wrap(torch.optim.SGD(copies, lr=7.0), amsgrad_after=3)
        second.load_state_dict(saved)
        assert second.load_rank_state_dict(own)["rank_state"] == "loaded"
        assert second.compression_report()["step"] == 5
        return resume(parameters, optimizer, 6), resume(copies, second, 6)

    for went_on, loaded in run_ranks(2, body):
        assert went_on == loaded


def test_a_state_of_other_options_is_refused() -> None:
    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial(SMALL)]
        saved = DistributedBirder(sgd(parameters), seed=1).state_dict()
        with pytest.raises(CheckpointError, match="of a run with seed=1, this one has seed=2"):
            DistributedBirder(sgd(parameters), seed=2).load_state_dict(saved)
        with pytest.raises(CheckpointError, match=r"groups of \[4\] parameters, the optimizer has \[3\]"):
            DistributedBirder(sgd(parameters[:3]), seed=1).load_state_dict(saved)

    run_ranks(1, body)


# What cannot be wrapped


@pytest.mark.parametrize(
    ("option", "value"), [("momentum", 0.9), ("maximize", True), ("dampening", 0.5), ("differentiable", True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_options_of_the_wrapped_optimizer_that_would_be_ignored_are_refused_by_name(
    kind: str, option: str, value: Any
) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(InvalidRequestError, match=f"Distributed{kind} does not support {option}={value}; leave"):
            KINDS[kind][0](torch.optim.SGD([parameter], lr=0.1, **{option: value}))

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.0}, "beta must be in"),
        ({"beta": -0.1}, "beta must be in"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**64}, "seed must be in"),
        ({"amsgrad_after": -1}, "amsgrad_after must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError, match=message):
            DistributedBirder(sgd([torch.nn.Parameter(torch.zeros(4))]), **options)

    run_ranks(1, body)


def test_ranks_with_different_seeds_are_told() -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            DistributedBirder(sgd([torch.nn.Parameter(torch.zeros(4))]), seed=rank_of(session))
        return str(raised.value)

    for message in run_ranks(2, body):
        assert "rank(s) [0] registered seed=0; rank(s) [1] registered seed=1" in message


def test_ranks_with_different_learning_rates_are_told() -> None:
    def body(session: Session) -> str:
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = DistributedBirder(torch.optim.SGD([parameter], lr=0.1 * (1 + rank_of(session))))
        parameter.grad = torch.ones(4)
        with pytest.raises(MismatchError) as raised:
            optimizer.step()
        return str(raised.value)

    for message in run_ranks(2, body):
        assert "rank(s) [0] (lr 0.1); rank(s) [1] (lr 0.2)" in message


def test_the_papers_names_are_the_same_classes() -> None:
    assert (Birder, SoftSignSGD) == (DistributedBirder, DistributedSoftSignSGD)


def test_a_schedule_made_before_wrapping_hears_of_the_steps() -> None:
    """Torch warns of one that is ahead of its optimizer's steps, and warnings are errors here."""

    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        inner = sgd([parameter])
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = DistributedBirder(inner)
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 5e-3

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("inner", "said"), [(torch.optim.SGD, "momentum=0.95"), (torch.optim.Adam, "betas=(0.95, 0.999)")]
)
@pytest.mark.parametrize("wrap", [DistributedBirder, DistributedLion])
def test_a_momentum_that_a_schedule_cycles_is_said_once_to_be_ignored(
    wrap: Any, inner: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = wrap(inner([parameter], lr=0.1))
        for cycle in (False, True):
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=cycle)
            for _ in range(4):
                optimizer.zero_grad()
                parameter.sum().backward()
                optimizer.step()
                scheduler.step()
            assert len(caplog.records) == cycle
        assert f"{said} of the param groups is ignored" in caplog.text

    run_ranks(1, body)
