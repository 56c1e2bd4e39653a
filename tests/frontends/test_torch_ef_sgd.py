"""DistributedEFSGD against the plain simulation, the paper, and what can go wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import DistributedEFSGD
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.frontends.test_torch_birder import SMALL, follow_schedule, lr_at, sparse_gradients
from tests.frontends.test_torch_onebit import rank_of
from tests.oracle import ef_sgd as oracle
from tests.oracle.clipping import Clipping
from tests.worlds import run_ranks

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}


def sgd(parameters: list[torch.Tensor], **form: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, **form)


def law(ranks: int, shapes: Any = SHAPES, weight_decay: float = 0.0, **options: Any) -> oracle.EFSGD:
    return oracle.EFSGD(initial(shapes), ranks, coupled=weight_decay, **options)


def state_digest(parameters: list[torch.Tensor], optimizer: Any) -> str:
    """Hash of everything that a step may change on this rank."""
    core = optimizer._driver.core
    buffers = [core.momentum, core.error, core.server_error, core.steps]
    return digest([p.detach().numpy() for p in parameters] + buffers)


def job(rank: int, steps: int, form: str = "Nesterov", **options: Any) -> dict[str, Any]:
    make = partial(sgd, **FORMS[form])
    return train(rank, steps, wrap=DistributedEFSGD, hash_state=state_digest, **{"make": make, **options})


def expected_digests(simulation: oracle.EFSGD, steps: int, grads: Any = gradients) -> list[str]:
    found = []
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in range(simulation.ranks)])
        found.append(digest(simulation.params))
    return found


@pytest.mark.short("-2")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_the_simulation_for_60_steps_on_all_ranks(form: str, ranks: int) -> None:
    expected = expected_digests(law(ranks, SMALL, lr=lr_at, **FORMS[form]), 60, sparse_gradients)
    options = {"shapes": SMALL, "grads": sparse_gradients, "before_step": follow_schedule}
    for result in run_ranks(ranks, lambda s: job(rank_of(s), 60, form, **options)):
        assert result["digests"] == expected
        assert result["report"]["stage"] == "compressed"


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
@pytest.mark.parametrize("form", ["Nesterov", "decay"])
def test_hosts_that_add_up_equal_the_simulation(form: str, hosts: str) -> None:
    nodes = [hosts.count(host) for host in "ab"]
    expected = expected_digests(law(4, SMALL, lr=1e-2, nodes=nodes, block_size=64, **FORMS[form]), 20, sparse_gradients)
    options = {"shapes": SMALL, "grads": sparse_gradients, "block_size": 64, "hierarchical": True}
    for result in run_ranks(4, lambda s: job(rank_of(s), 20, form, **options), hosts=hosts):
        assert result["digests"] == expected
        assert result["report"]["form"] == "hierarchical"


def test_clipped_gradients_count_as_clipped_in_the_momentum_and_not_in_the_decay() -> None:
    clipping = Clipping(0.5, previous=False)
    expected = expected_digests(law(2, lr=1e-2, clipping=clipping, **FORMS["decay"]), 8)
    for result in run_ranks(2, lambda s: job(rank_of(s), 8, "decay", max_grad_norm=0.5)):
        assert result["digests"] == expected


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_papers_algorithm_whose_errors_follow_the_learning_rate(nesterov: bool) -> None:
    """In exact arithmetic; with float32 the two come apart in the last digits, until a sign differs."""
    rates = [0.1, 0.1, 0.05, 0.025, 0.05, 0.01, 0.01]
    start = initial([(300,)])
    paper = oracle.Paper(start[0], 2, 0.9, nesterov)
    ours = oracle.EFSGD(start, 2, lr=lambda t: rates[t - 1], momentum=0.9, nesterov=nesterov)
    for step, lr in enumerate(rates, 1):
        both = [gradients(step, rank, [(300,)])[0] for rank in range(2)]
        paper.step([g.reshape(-1) for g in both if g is not None], lr)
        ours.step([[g] for g in both])
        np.testing.assert_allclose(ours.params[0], paper.param, rtol=1e-5, atol=1e-5)


def test_the_result_does_not_depend_on_segments_window_overlap_engine_or_arrival_order() -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    plain = expected_digests(law(2, lr=1e-2, **FORMS["decay"]), 8)
    base = Settings()
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (base, {"overlap": False}),
        (replace(base, segment_nbytes=65536, window=1), {"order": shuffled}),
        (replace(base, engine="python"), {}),
    ]
    for settings, options in variants:
        for result in run_ranks(2, lambda s, o=options: job(rank_of(s), 8, "decay", **o), settings=settings):
            assert result["digests"] == plain


def test_a_run_that_is_saved_goes_on_in_every_bit() -> None:
    def body(session: Session) -> None:
        rank, states = rank_of(session), []
        whole = job(rank, 12, "decay", watch=lambda o: states.append((o.state_dict(), o.rank_state_dict())))
        parameters = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in whole["parameters"][5]]
        names = [f"tensor.{number}" for number in range(len(parameters))]
        inner = sgd(parameters, **FORMS["decay"])
        optimizer = DistributedEFSGD(inner, zip(names, parameters, strict=True))
        optimizer.load_state_dict(states[5][0])
        assert optimizer.load_rank_state_dict(states[5][1])["rank_state"] == "loaded"
        for step in range(7, 13):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))
            optimizer.step()
            assert digest([p.detach().numpy() for p in parameters]) == whole["digests"][step - 1]
        assert state_digest(parameters, optimizer) == whole["state"]

    run_ranks(2, body)


@pytest.mark.parametrize("loaded", [False, True])
def test_it_goes_on_from_the_momentum_of_a_plain_sgd(loaded: bool) -> None:
    form = FORMS["Nesterov"]
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    plain = sgd(parameters, **form)
    for step in (1, 2):
        plain.zero_grad()
        backward(parameters, gradients(step, 0), range(len(parameters)))
        plain.step()
    simulation = law(2, lr=1e-2, **form)
    for x, parameter in zip(simulation.tensors, parameters, strict=True):
        x.param = parameter.detach().numpy().reshape(-1).copy()
        momentum = plain.state[parameter]["momentum_buffer"].numpy().reshape(-1)
        x.momenta = [momentum.copy() for _ in range(2)]
    expected = expected_digests(simulation, 4)

    def body(session: Session) -> None:
        mine = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        inner, saved = sgd(mine, **form), copy.deepcopy(plain.state_dict())
        if not loaded:
            inner.load_state_dict(saved)
        optimizer = DistributedEFSGD(inner)
        if loaded:
            optimizer.load_state_dict(saved)
        assert len(inner.state) == 0
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(mine, gradients(step, rank_of(session)), range(len(mine)))
            optimizer.step()
            assert digest([p.detach().numpy() for p in mine]) == expected[step - 1]

    run_ranks(2, body)


def test_a_state_of_another_optimizer_or_model_is_refused() -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = DistributedEFSGD(sgd([parameter], momentum=0.9))
        with pytest.raises(CheckpointError, match="is not of SGD: its group 0 has"):
            optimizer.load_state_dict(torch.optim.Adam([parameter]).state_dict())
        other = torch.nn.Parameter(torch.ones(4))
        plain = sgd([other], momentum=0.9)
        other.sum().backward()
        plain.step()
        with pytest.raises(CheckpointError, match=r"it has a momentum \(4,\), the parameter is \(3,\)"):
            optimizer.load_state_dict(plain.state_dict())

    run_ranks(1, body)


def test_a_non_finite_gradient_on_one_rank_raises_on_all_and_changes_nothing() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if step == 4 and rank == 1:
            result[0][69, 129] = float("inf")  # type: ignore[index]
        return result

    def body(session: Session) -> tuple[str, str]:
        seen: list[Any] = []

        def remember(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            if step == 4:
                seen.extend([state_digest(parameters, optimizer), parameters, optimizer])

        with pytest.raises(NonFiniteError, match=r"in step 4, on rank\(s\) \[1\]"):
            job(rank_of(session), 20, grads=grads, before_step=remember)
        return seen[0], state_digest(*seen[1:])

    for before, after in run_ranks(2, body):
        assert before == after


def test_a_learning_rate_of_zero_is_a_step_like_others() -> None:
    def still(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if step == 3 else 1e-2

    simulation = law(2, lr=lambda t: 0.0 if t == 3 else 1e-2, **FORMS["Nesterov"])
    expected = expected_digests(simulation, 6)
    for result in run_ranks(2, lambda s: job(rank_of(s), 6, before_step=still)):
        assert result["digests"] == expected


def test_what_cannot_be_wrapped_is_named() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3))]
        for wrong, text in (
            (torch.optim.Adam(parameters), "plain torch.optim.SGD in its place, and this is a Adam"),
            (Own(parameters, lr=0.1), "this is a Own with a step"),
            (sgd(parameters, momentum=0.9, dampening=0.1), "does not support dampening=0.1"),
            (sgd(parameters, maximize=True), "does not support maximize=True"),
        ):
            with pytest.raises(InvalidRequestError, match=text):
                DistributedEFSGD(wrong)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("lr", r"rank\(s\) \[0\] \(lr 0.1\); rank\(s\) \[1\] \(lr 0.2\)\. Give"),
        ("weight_decay", r"rank\(s\) \[0\] \(lr 0.1\); rank\(s\) \[1\] \(lr 0.1\)\. This lr is equal, so another"),
    ],
)
def test_rates_are_in_the_headers_of_gradients(setting: str, said: str) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        plain = torch.optim.SGD([parameter], 0.1, momentum=0.9)
        plain.param_groups[0][setting] = 0.1 * (1 + rank_of(session))
        optimizer = DistributedEFSGD(plain)
        parameter.grad = torch.ones(4)
        with pytest.raises(MismatchError, match=said):
            optimizer.step()

    run_ranks(2, body)


def test_a_momentum_that_differs_between_ranks_is_told() -> None:
    def body(session: Session) -> None:
        with pytest.raises(MismatchError):
            make = partial(sgd, momentum=0.9, nesterov=bool(rank_of(session)))
            job(rank_of(session), 2, make=make)

    run_ranks(2, body)


def test_a_learning_rate_that_is_not_a_number_is_named() -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(5))
        optimizer = DistributedEFSGD(sgd([parameter]))
        optimizer.param_groups[0]["lr"] = float("nan")
        parameter.grad = torch.ones(5)
        with pytest.raises(NonFiniteError, match="or if the learning rate is NaN or Inf"):
            optimizer.step()
        assert parameter.tolist() == [1.0] * 5

    run_ranks(2, body)
