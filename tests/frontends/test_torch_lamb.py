"""DistributedOneBitLamb against the plain simulation, against Adam, and against what can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import InvalidRequestError, MismatchError, SettingsError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import DistributedOneBitAdam, DistributedOneBitLamb, OneBitLamb
from tests.frontends.every_kind import whole_state
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.frontends.test_torch_birder import follow_schedule, lr_at
from tests.frontends.test_torch_lion import regression
from tests.frontends.test_torch_onebit import rank_of
from tests.oracle.onebit_lamb import Simulation
from tests.worlds import run_ranks

#: Several blocks of 64, a short last one, a block of less, a single element.
SMALL = ((20, 33), (130,), (33,), (1,))
WARMUP = 8


def adamw(parameters: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1, "foreach": False, **options})


def job(rank: int, steps: int, **options: Any) -> dict[str, Any]:
    settings = {"make": adamw, "wrap": DistributedOneBitLamb, "hash_state": whole_state, "freeze_step": WARMUP}
    return train(rank, steps, **{**settings, **options})


def uneven(step: int, rank: int) -> Sequence[np.ndarray | None]:
    """Some are missing on some ranks, some on all; one tensor comes late, and rows of another, of which some never do.

    Elements are of many sizes, and in the end all are larger.
    """
    nowhere = np.random.default_rng([23, step]).random(len(SMALL)) < 0.1
    here = np.random.default_rng([24, step, rank]).random(len(SMALL)) < 0.2
    found = gradients(step, rank, SMALL)
    assert found[0] is not None
    found[0][10 if step < 30 else 15 if step < 60 else 18 :] = 0.0
    nowhere[2] |= step < 20
    sizes = [10.0 ** (0.4 * np.sin(np.arange(np.prod(shape)).reshape(shape)) + 2 * (step >= 100)) for shape in SMALL]
    return [
        None if g is None or a or b else g * size.astype(np.float32)
        for g, size, a, b in zip(found, sizes, nowhere, here, strict=True)
    ]


def fresh_digest(parameters: Sequence[torch.Tensor], optimizer: Any) -> str:
    core = optimizer._driver.core
    return digest([core.fresh[core.flat_span(tensor)] for tensor in range(len(parameters))])


@pytest.mark.short("2-0.0")
@pytest.mark.parametrize(("ranks", "decay"), [pytest.param(1, 0.1, marks=pytest.mark.long), (2, 0.0), (4, 0.1)])
def test_it_equals_the_simulation_for_200_steps_on_all_ranks(ranks: int, decay: float) -> None:
    options: dict[str, Any] = {"block_size": 64, "mask_refresh": 5, "coeff_beta": 0.7, "factor_threshold": 0.05}
    options["variance_floor"] = 0.9
    bounds = {"min_coeff": 0.1, "max_coeff": 3.0, "factor_min": 0.6, "factor_max": 2.0}
    simulation = Simulation(
        initial(SMALL),
        ranks,
        freeze_step=WARMUP,
        lr=lr_at,
        weight_decay=decay,
        betas=(0.9, 0.99),
        coefficients=(0.1, 3.0),
        factors=(0.6, 2.0),
        **options,
    )
    expected = []
    for step in range(1, 201):
        simulation.step([uneven(step, rank) for rank in range(ranks)])
        expected.append(digest(simulation.params))
    trusts = list(simulation.trust.values())
    assert {0.6, 2.0} <= {factor for trust in trusts for factor in trust.factors}
    assert len(set(trusts[0].factors)) > 20, "not only the bounds"
    assert simulation.woken > 0 and simulation.tensors[0].mask.any()

    def body(session: Session) -> dict[str, Any]:
        def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
            return adamw(parameters, weight_decay=decay, betas=(0.9, 0.99))

        job_options = {"shapes": SMALL, "grads": uneven, "before_step": follow_schedule, "make": make}
        return job(rank_of(session), 200, hash_state=fresh_digest, **job_options, **options, **bounds)

    for result in run_ranks(ranks, body):
        assert result["digests"] == expected
        assert result["state"] == digest([trust.fresh for trust in trusts])
        report = result["report"]
        assert (report["stage"], report["woken_elements"]) == ("compressed", simulation.woken)
        assert list(report["factors"].values()) == [trust.factor for trust in trusts]
        assert report["trust_ratios"]["tensor.0"] == trusts[0].coefficient * trusts[0].factor


def test_with_the_bounds_as_they_are_by_default_it_equals_the_simulation_too() -> None:
    simulation = Simulation(initial(), 2, freeze_step=WARMUP, lr=1e-2, weight_decay=0.1)
    expected = []
    for step in range(1, 31):
        simulation.step([gradients(step, rank) for rank in range(2)])
        expected.append(digest(simulation.params))
    for result in run_ranks(2, lambda s: job(rank_of(s), 30)):
        assert result["digests"] == expected


def test_without_trust_ratios_it_is_one_bit_adam_but_for_rounding() -> None:
    bounds = {"min_coeff": 1.0, "max_coeff": 1.0, "factor_min": 1.0, "factor_max": 1.0}

    def body(session: Session) -> None:
        rank = rank_of(session)
        plain = {"make": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False), "hash_state": whole_state}
        lamb = job(rank, 16, **{**plain, **bounds})["parameters"]
        adam = train(rank, 16, wrap=DistributedOneBitAdam, freeze_step=WARMUP, **plain)["parameters"]
        for step in (WARMUP, 16):
            for ours, theirs in zip(lamb[step - 1], adam[step - 1], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)

    run_ranks(2, body)


def test_the_result_does_not_depend_on_fusion_segments_window_overlap_engine_kernels_or_arrival_order() -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    base = Settings()
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (base, {"overlap": False}),
        (base, {"order": shuffled}),
        (replace(base, segment_nbytes=1024, window=1), {"order": shuffled}),
        (replace(base, engine="python", kernels="reference"), {}),
    ]
    found = set()
    for settings, options in variants:
        results = run_ranks(2, lambda s, o=options: job(rank_of(s), 16, **o), settings=settings)
        found |= {tuple(result["digests"]) for result in results}
    assert len(found) == 1


@pytest.mark.parametrize("start", ["the beginning", "a warm start"])
def test_a_tensor_of_zeros_takes_plain_steps_until_it_has_a_norm(start: str) -> None:
    zeros = [np.zeros(130, np.float32)]
    generator = np.random.default_rng(3)
    warm = {"momentum": generator.normal(size=130), "variance": 1.0 + generator.random(130)}
    simulation = Simulation(zeros, 2, freeze_step=WARMUP, lr=1e-2)
    state = None
    if start == "a warm start":
        tensors = {name: torch.from_numpy(value.astype(np.float32)) for name, value in warm.items()}
        simulation.adopt(0, param=zeros[0], step=WARMUP, **{name: t.numpy() for name, t in tensors.items()})
        simulation.end_warmup()
        moments = {"exp_avg": tensors["momentum"], "exp_avg_sq": tensors["variance"]}
        plain = torch.optim.AdamW([torch.zeros(130)])
        state = {**plain.state_dict(), "state": {0: {"step": torch.tensor(float(WARMUP)), **moments}}}
    expected = []
    for step in range(1, 21):
        simulation.step([gradients(step, rank, ((130,),)) for rank in range(2)])
        expected.append(digest(simulation.params))

    def body(session: Session) -> list[str]:
        parameter = torch.nn.Parameter(torch.zeros(130))
        optimizer = DistributedOneBitLamb(adamw([parameter], weight_decay=0.0), freeze_step=WARMUP, warm_start=state)
        digests = []
        for step in range(1, 21):
            optimizer.zero_grad()
            backward([parameter], gradients(step, rank_of(session), ((130,),)), [0])
            optimizer.step()
            digests.append(digest([parameter.detach().numpy()]))
        assert (optimizer.compression_report()["dense_steps"] == 0) == (start == "a warm start")
        return digests

    assert run_ranks(2, body) == [expected, expected]


@pytest.mark.long  # minimizes; that every step is the simulation's is tested above
def test_it_trains_about_as_well_as_lamb_on_the_averaged_gradient() -> None:
    def body(session: Session) -> list[float]:
        return [
            regression(
                rank_of(session),
                lambda m, n=freeze_step: DistributedOneBitLamb(
                    torch.optim.Adam(m.parameters(), lr=3e-2), freeze_step=n
                ),
            )
            for freeze_step in (60, 1000)
        ]

    losses = run_ranks(3, body)
    assert losses[0] == losses[1] == losses[2]
    onebit, dense = losses[0]
    assert onebit < 1.2 * dense < 0.1, (onebit, dense)


def test_it_holds_a_fresh_variance_besides_what_one_bit_adam_holds() -> None:
    def body(session: Session) -> tuple[dict[str, int], dict[str, int]]:
        held = []
        for wrap in (DistributedOneBitLamb, DistributedOneBitAdam):
            result = train(rank_of(session), 10, wrap=wrap, hash_state=whole_state, freeze_step=4)
            held.append(result["report"]["memory_bytes"])
        return held[0], held[1]

    sizes = [int(np.prod(shape)) for shape in SHAPES]
    for lamb, adam in run_ranks(2, body):
        more = {name: nbytes - adam.get(name, 0) for name, nbytes in lamb.items()}
        assert 4 * sum(sizes) <= more.pop("fresh_variance") < 4 * sum(sizes) + 1024
        assert more.pop("scratch") == 4 * max(sizes)
        assert not any(more.values())


# What cannot be wrapped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_coeff": 0.0}, "need 0 < min_coeff <= max_coeff, got 0.0 and 10.0"),
        ({"max_coeff": 0.001}, "need 0 < min_coeff <= max_coeff, got 0.01 and 0.001"),
        ({"factor_min": 1.5}, "need 0 < factor_min <= 1 <= factor_max, got 1.5 and 4.0"),
        ({"factor_max": float("nan")}, "need 0 < factor_min <= 1 <= factor_max, got 0.5 and nan"),
        ({"coeff_beta": 1.0}, r"coeff_beta must be in \[0, 1\), got 1.0"),
        ({"factor_threshold": -0.1}, r"factor_threshold must be in \[0, 1\), got -0.1"),
    ],
)
def test_bounds_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError, match=message):
            DistributedOneBitLamb(adamw([torch.nn.Parameter(torch.zeros(4))]), **options)

    run_ranks(1, body)


def test_it_wraps_adam_and_nothing_else() -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(InvalidRequestError, match=r"wraps torch\.optim\.Adam or AdamW, not SGD"):
            DistributedOneBitLamb(torch.optim.SGD([parameter], lr=0.1))

    run_ranks(1, body)


def test_ranks_with_different_options_are_told() -> None:
    def body(session: Session) -> str:
        beta = (0.9, 0.8)[rank_of(session)]
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitLamb(adamw([torch.nn.Parameter(torch.zeros(4))]), coeff_beta=beta)
        return str(raised.value)

    for message in run_ranks(2, body):
        assert "rank(s) [0] registered coeff_beta=0.9; rank(s) [1] registered coeff_beta=0.8" in message


def test_the_short_name_is_the_same_class() -> None:
    assert OneBitLamb is DistributedOneBitLamb
