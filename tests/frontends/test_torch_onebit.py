"""DistributedOneBitAdam against torch's Adam, against the plain simulation, and against what can go wrong."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.api import join
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError, PeerError
from ocomm.session import Session
from ocomm.telemetry.log import NOTICE
from ocomm.types import Settings
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, state_digest, train
from tests.oracle.onebit_adam import Simulation
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

ADAMS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "Adam with coupled decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
}


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def averaged(step: int, ranks: int, shapes: Any = SHAPES) -> list[np.ndarray]:
    """The dense average as docs/algorithms.md defines it: rank order, float32."""
    each = [gradients(step, rank, shapes) for rank in range(ranks)]
    result = []
    for parts in zip(*each, strict=True):
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        result.append(total * np.float32(1 / ranks))
    return result


def plain_adam(make: Any, steps: int, ranks: int) -> tuple[list[torch.Tensor], torch.optim.Optimizer, list[str]]:
    """torch's own optimizer on the averaged gradients of ``ranks`` ranks."""
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    optimizer = make(parameters)
    digests = []
    for step in range(1, steps + 1):
        for parameter, grad in zip(parameters, averaged(step, ranks), strict=True):
            parameter.grad = torch.from_numpy(grad)
        optimizer.step()
        digests.append(digest([p.detach().numpy() for p in parameters]))
    return parameters, optimizer, digests


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ADAMS)
def test_it_equals_torchs_adam_bit_for_bit_up_to_the_freeze(kind: str, ranks: int) -> None:
    results = run_ranks(ranks, lambda s: train(rank_of(s), 8, make=ADAMS[kind], freeze_step=8))
    _, _, expected = plain_adam(ADAMS[kind], 8, ranks)
    for result in results:
        assert result["digests"] == expected


def simulate_after_adam(kind: str, steps: int, warmup: int, ranks: int) -> list[str]:
    """Digests after every step: torch's Adam up to ``warmup``, then the simulation."""
    parameters, optimizer, digests = plain_adam(ADAMS[kind], warmup, ranks)
    group = optimizer.param_groups[0]
    simulation = Simulation(
        initial(),
        ranks,
        freeze_step=warmup,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        decoupled=kind == "AdamW",
    )
    for index, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        simulation.adopt(
            index,
            param=parameter.detach().numpy(),
            momentum=state["exp_avg"].numpy(),
            variance=state["exp_avg_sq"].numpy(),
            step=warmup,
        )
    simulation.end_warmup()
    for step in range(warmup + 1, steps + 1):
        simulation.step([gradients(step, rank) for rank in range(ranks)])
        digests.append(digest(simulation.params))
    return digests


@pytest.mark.short("-3")
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("kind", ADAMS)
def test_after_the_freeze_it_equals_the_simulation_on_all_ranks_after_every_step(kind: str, ranks: int) -> None:
    steps = 200 if (kind, ranks) == ("Adam", 4) and not MPI_SIZE else 40
    results = run_ranks(ranks, lambda s: train(rank_of(s), steps, make=ADAMS[kind], freeze_step=5))
    expected = simulate_after_adam(kind, steps, 5, ranks)
    for result in results:
        assert result["digests"] == expected


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_result_does_not_depend_on_fusion_segments_window_overlap_or_arrival_order(ranks: int) -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    plain = run_ranks(ranks, lambda s: train(rank_of(s), 20, freeze_step=6, overlap=False))
    base = Settings()
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (replace(base, fusion_threshold=1 << 20), {}),
        (replace(base, fusion_threshold=128 << 20), {"order": shuffled}),
        (replace(base, segment_nbytes=65536, window=1), {"order": shuffled}),
        (replace(base, engine="python"), {}),
    ]
    for settings, options in variants:
        results = run_ranks(ranks, lambda s, o=options: train(rank_of(s), 20, freeze_step=6, **o), settings=settings)
        for result in results:
            assert result["digests"] == plain[0]["digests"]


# What may happen between backward and step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("freeze_step", [4, 100], ids=["compressed", "dense"])
def test_a_non_finite_gradient_on_one_rank_raises_on_all_and_changes_nothing(
    overlap: bool, bad: float, freeze_step: int
) -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if step == 9 and rank == 1:
            result[0][3, 5] = bad
        return result

    def body(session: Session) -> tuple[str, str, str]:
        rank = rank_of(session)
        before: list[str] = []
        parameters_seen: list[Any] = []

        def remember(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            if step == 9:
                before.append(state_digest(parameters, optimizer))
                parameters_seen.extend([parameters, optimizer])

        with pytest.raises(NonFiniteError) as raised:
            train(rank, 20, grads=grads, before_step=remember, freeze_step=freeze_step, overlap=overlap)
        return before[0], state_digest(*parameters_seen), str(raised.value)

    for before, after, message in run_ranks(2, body):
        assert before == after
        assert "a gradient is NaN or Inf in step 9, on rank(s) [1]; " in message


def test_finite_gradients_whose_average_overflows_are_no_ranks_fault() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if step == 3:
            result[0][3, 5] = 3e38
        return result

    def body(session: Session) -> None:
        said = "in step 3 the gradients of all ranks are finite, but their average or its square overflows float32"
        with pytest.raises(NonFiniteError, match=said):
            train(rank_of(session), 4, grads=grads, freeze_step=100)

    run_ranks(2, body)


@pytest.mark.parametrize("freeze_step", [2, 100], ids=["compressed", "dense"])
def test_a_step_whose_average_overflows_leaves_nothing_behind(freeze_step: int) -> None:
    """Also where each rank's scale is finite and only that of their average is not."""

    def body(session: Session) -> None:
        rank = rank_of(session)
        shapes = (4097,), (1,)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        adam = torch.optim.Adam(parameters, lr=1e-2, betas=(0.0, 0.999))
        optimizer = DistributedOneBitAdam(adam, freeze_step=freeze_step, scale="l1")

        def step(number: int) -> None:
            optimizer.zero_grad()
            grads = gradients(number, rank, shapes)
            backward(parameters, grads if number != 5 else [grads[0], np.full(1, 3e38, np.float32)], (1, 0))
            optimizer.step()

        for number in range(1, 5):
            step(number)
        before = state_digest(parameters, optimizer)
        with pytest.raises(NonFiniteError, match="the gradients of all ranks are finite, but their average"):
            step(5)
        assert state_digest(parameters, optimizer) == before
        step(6)
        assert state_digest(parameters, optimizer) != before

    run_ranks(2, body)


def test_a_variance_that_has_overflowed_says_what_made_it_so() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if step == 2:
            result[0][3, 5] = 1e22
        return result

    def body(session: Session) -> None:
        with pytest.raises(NonFiniteError, match=r"variance is NaN or Inf after step 3, .* squares overflow float32"):
            train(rank_of(session), 4, grads=grads, freeze_step=3)

    run_ranks(2, body)


def clip_one_rank(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 1:
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def multiply_data(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 0:
        parameters[0].grad.data.mul_(0.25)


def write_through_numpy(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 1:
        parameters[1].grad.numpy()[...] *= 3.0


def second_backward(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 1:
        backward(parameters, gradients(100, rank), range(len(parameters)))


def new_gradient_object(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 0:
        parameters[2].grad = parameters[2].grad.clone() * 2


def other_memory(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step == 9 and rank == 1:
        grad = parameters[2].grad
        KEPT.append(grad.data)  # what was read stays as it was
        grad.data = grad.data * 2


def change_lr(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step >= 9:
        optimizer.param_groups[0]["lr"] = 1e-3


def change_betas(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if step >= 9:
        optimizer.param_groups[0]["betas"] = (0.8, 0.999)


KEPT: list[torch.Tensor] = []
CHANGES = [
    clip_one_rank,
    multiply_data,
    write_through_numpy,
    second_backward,
    new_gradient_object,
    other_memory,
    change_lr,
    change_betas,
]


@pytest.mark.parametrize("freeze_step", few([4, 100], [4]), ids=["compressed", "dense"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_backward_gives_what_no_overlap_gives(change: Any, freeze_step: int) -> None:
    def job(overlap: bool) -> list[Any]:
        return run_ranks(
            2,
            lambda s: train(rank_of(s), 14, before_step=change, freeze_step=freeze_step, overlap=overlap),
        )

    expected = job(False)
    found = job(True)
    assert expected[0]["digests"] == expected[1]["digests"]
    assert [r["digests"] for r in found] == [r["digests"] for r in expected]
    assert [r["state"] for r in found] == [r["state"] for r in expected]
    redone = {r["report"]["redone_steps"] for r in found}
    # Of the hyperparameters only betas and coupled decay go into what is compressed.
    assert redone == ({0} if change is change_lr else {1})


@pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's log is another process's")
def test_backward_passes_of_another_optimizer_are_told_and_keep_no_notice_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of a generator's loss in a GAN, whose gradients of the discriminator nobody uses."""

    def body(session: Session) -> Any:
        (parameter,) = parameters = [torch.nn.Parameter(torch.ones(40))]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters), [("p", parameter)], freeze_step=3)
        fresh = optimizer.state_dict()
        optimizer.load_state_dict(fresh)  # as Accelerate does
        assert optimizer.compression_report()["resumed"] is None
        for step in range(8):
            optimizer.zero_grad()
            (parameter * (1.0 + step + rank_of(session))).sum().backward()
            optimizer.step()
            parameter.sum().backward()
        return optimizer.compression_report()["compressed_steps"]

    with caplog.at_level(NOTICE, "ocomm"):
        assert run_ranks(2, body)[0] > 0
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "cleared" in line] == [
        "DistributedOneBitAdam: zero_grad() has cleared 3 steps that backward had begun. Their gradients were "
        "exchanged for nothing. Where a backward pass is for another optimizer, freeze the parameters of this one "
        "meanwhile: requires_grad_(False). For parameters that both have, make one optimizer with param groups of the "
        "two."
    ]
    assert [line for line in said if "the warm-up is over" in line]


def test_zero_grad_on_one_rank_skips_the_step_on_all() -> None:
    def body(session: Session) -> tuple[str, str, list[str]]:
        rank = rank_of(session)
        states = []

        def skip(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            if step == 9:
                states.append(state_digest(parameters, optimizer))
                if rank == 1:
                    optimizer.zero_grad()
                else:
                    optimizer.step()
                states.append(state_digest(parameters, optimizer))
                # a whole step follows in the loop: give it gradients
                optimizer.zero_grad()
                backward(parameters, gradients(50, rank), range(len(parameters)))

        result = train(rank, 14, before_step=skip, freeze_step=4)
        return states[0], states[1], result["digests"]

    results = run_ranks(2, body)
    for before, after, digests in results:
        assert before == after
        assert digests == results[0][2]


def test_an_exception_between_backward_and_step_skips_the_step_when_the_user_goes_on() -> None:
    def body(session: Session) -> list[str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=3)

        def explode(grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("hook")

        digests = []
        for step in range(1, 10):
            optimizer.zero_grad()
            before = state_digest(parameters, optimizer)
            try:
                handle = parameters[1].register_hook(explode) if step == 6 and rank == 1 else None
                backward(parameters, gradients(step, rank), [0, 1, 2, 3])
            except RuntimeError:
                handle.remove()
                optimizer.zero_grad()
                assert state_digest(parameters, optimizer) == before
                digests.append(before)
                continue
            optimizer.step()
            if step == 6:
                assert state_digest(parameters, optimizer) == before
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests[6:]

    results = run_ranks(2, body)
    assert results[0] == results[1]


def test_grad_scaler_skips_on_all_ranks_when_one_overflows_and_steps_otherwise() -> None:
    def body(session: Session) -> tuple[list[str], int]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2, fused=True), freeze_step=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        digests = []
        for step in range(1, 12):
            optimizer.zero_grad()
            for index in range(len(parameters)):
                grad = gradients(step, rank)[index]
                if step == 7 and rank == 1:
                    grad.reshape(-1)[0] = np.inf
                scaler.scale((parameters[index] * torch.from_numpy(grad)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        optimizer.zero_grad()
        return digests, optimizer.compression_report()["skipped_steps"]

    results = run_ranks(2, body)
    assert results[0] == results[1]
    digests, skipped = results[0]
    assert skipped == 1
    assert digests[6] == digests[5]
    assert len(set(digests)) == 10


# Schedules and gradients that are not the same everywhere


def test_a_gradient_missing_here_everywhere_and_back_again_leaves_replicas_equal() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        if 8 <= step < 11 and rank == 1:
            result[1] = None
        if 11 <= step < 14:
            result[1] = result[2] = None
        return result

    for freeze_step in (5, 100):
        results = run_ranks(3, lambda s, f=freeze_step: train(rank_of(s), 20, grads=grads, freeze_step=f))
        assert results[0]["digests"] == results[1]["digests"] == results[2]["digests"]
        history = results[0]["parameters"]
        assert np.array_equal(history[10][1], history[12][1]), "nobody had a gradient, but the parameter moved"
        assert not np.array_equal(history[8][1], history[9][1]), (
            "one rank had a gradient, but the parameter stood still"
        )
        assert not np.array_equal(history[13][1], history[14][1])


def test_the_automatic_freeze_is_decided_once_for_all_ranks_whatever_they_see() -> None:
    def perturb(optimizer: DistributedOneBitAdam) -> None:
        driver = optimizer._driver
        norm = driver.variance_norm
        driver.variance_norm = lambda t: norm(t) * (1 + 10 * driver.core.rank)  # type: ignore[method-assign]

    def body(session: Session) -> tuple[int | None, list[str]]:
        result = train(
            rank_of(session),
            40,
            grads=lambda step, rank: gradients(step % 3 + 1, rank),
            make=lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.9)),
            watch=lambda o: perturb(o) if o._driver.steps == 1 else None,
        )
        return result["report"]["freeze_step"], result["digests"]

    results = run_ranks(3, body)
    assert results[0][0] is not None and 20 < results[0][0] < 40
    assert results[0] == results[1] == results[2]


def test_a_never_touched_element_does_not_move() -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = gradients(step, rank)
        result[0][10:20] = 0.0
        return result

    results = run_ranks(2, lambda s: train(rank_of(s), 30, grads=grads, freeze_step=5, mask_refresh=7))
    assert np.array_equal(results[0]["parameters"][-1][0][10:20], initial()[0][10:20])
    # Three times in 25 compressed steps each of 2 ranks has sent half of a bit per element, and got the other half.
    bits = results[0]["report"]["bytes_sent_masks"] / 3 * 8
    assert sum(int(np.prod(shape)) for shape in SHAPES) <= bits < 1.1 * sum(int(np.prod(shape)) for shape in SHAPES)


def test_several_groups_schedulers_and_accumulation_keep_replicas_equal_and_live() -> None:
    def body(session: Session) -> tuple[list[str], float]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        inner = torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 1e-3, "weight_decay": 0.0}]
        )
        optimizer = DistributedOneBitAdam(inner, freeze_step=4, backward_passes_per_step=2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
        digests = []
        for step in range(1, 13):
            optimizer.zero_grad()
            for part in (0, 1):
                backward(parameters, gradients(2 * step + part, rank), [3, 2, 1, 0])
            optimizer.step()
            scheduler.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests, inner.param_groups[0]["lr"]

    results = run_ranks(2, body)
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(1e-3)


def test_max_grad_norm_clips_by_one_norm_for_all_ranks() -> None:
    def body(session: Session) -> list[str]:
        result = train(rank_of(session), 15, freeze_step=5, max_grad_norm=1.0)
        return result["digests"]

    results = run_ranks(2, body)
    assert results[0] == results[1]
    free = run_ranks(2, lambda s: train(rank_of(s), 15, freeze_step=5)["digests"])
    assert free[0][-1] != results[0][-1]


# State


def test_state_dict_loads_into_plain_adam_and_a_saved_run_goes_on_with_equal_replicas() -> None:
    def body(session: Session) -> tuple[str, str, bool]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=4)
        for step in range(1, 9):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            optimizer.step()
        saved = optimizer.state_dict()
        copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        plain = torch.optim.Adam(copies, lr=1e-2)
        plain.load_state_dict({key: value for key, value in saved.items() if key != "ocomm"})
        assert int(plain.state[copies[0]]["step"]) == 8
        resumed = DistributedOneBitAdam(torch.optim.Adam(copies, lr=1e-2), freeze_step=4)
        resumed.load_state_dict(saved)
        same = all(
            np.array_equal(resumed._driver.core.momentum(t), optimizer._driver.core.momentum(t)) for t in range(4)
        )
        for step in range(9, 12):
            resumed.zero_grad()
            backward(copies, gradients(step, rank), [3, 2, 1, 0])
            resumed.step()
        return digest([p.detach().numpy() for p in copies]), resumed.compression_report()["stage"], same

    results = run_ranks(2, body)
    assert results[0] == results[1]
    assert results[0][1:] == ("compressed", True)


# Bad input


def one_parameter(**options: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, **options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.optim.SGD([one_parameter()], lr=0.1),
            "DistributedOneBitAdam wraps torch.optim.Adam or AdamW, not SGD; use DistributedEFSGD for SGD: 1 bit per "
            "parameter from the first step on, at half of SGD's lr.",
        ),
        (
            lambda: torch.optim.Adagrad([one_parameter()]),
            "DistributedOneBitAdam wraps torch.optim.Adam or AdamW, not Adagrad; "
            "use DistributedOptimizer for other optimizers.",
        ),
        (
            lambda: torch.optim.Adam([one_parameter()], amsgrad=True),
            "DistributedOneBitAdam does not support amsgrad=True; leave it out.",
        ),
        (
            lambda: torch.optim.Adam([one_parameter()], maximize=True),
            "DistributedOneBitAdam does not support maximize=True; leave it out.",
        ),
        (
            lambda: torch.optim.Adam([one_parameter(dtype=torch.float64)]),
            "parameter 'parameter.0.0' is torch.float64; DistributedOneBitAdam needs torch.float32, bfloat16 or "
            "float16.",
        ),
        (
            lambda: torch.optim.Adam([one_parameter(device="meta"), one_parameter(device="meta")]),
            "parameter 'parameter.0.0' is on meta; ocomm trains parameters in the host's memory and on CUDA devices.",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused_by_name(make: Any, message: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            DistributedOneBitAdam(make())
        assert str(raised.value) == message

    run_ranks(1, body)


def test_different_models_on_two_ranks_are_an_error_that_names_the_tensor() -> None:
    def body(session: Session) -> None:
        shape = (3, 4) if rank_of(session) == 0 else (4, 3)
        weight = torch.nn.Parameter(torch.zeros(shape))
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitAdam(torch.optim.Adam([weight]), [("fc.weight", weight)])
        assert str(raised.value) == (
            "DistributedOneBitAdam: the ranks do not wrap the same optimizer: rank(s) [0] registered tensor "
            "'fc.weight' "
            "(3, 4) float32 order torch; rank(s) [1] registered tensor 'fc.weight' (4, 3) float32 order torch."
        )

    run_ranks(2, body)


def test_different_options_on_two_ranks_are_an_error_that_names_the_option() -> None:
    def body(session: Session) -> None:
        weight = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitAdam(torch.optim.Adam([weight]), freeze_step=10 + rank_of(session))
        assert str(raised.value) == (
            "DistributedOneBitAdam: the ranks do not wrap the same optimizer: rank(s) [0] registered freeze_step=10; "
            "rank(s) [1] registered freeze_step=11."
        )

    run_ranks(2, body)


def test_a_learning_rate_that_differs_between_ranks_is_an_error_on_all() -> None:
    def body(session: Session) -> str:
        def diverge(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            if step == 6:
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 + rank)

        with pytest.raises(MismatchError) as raised:
            train(rank_of(session), 8, before_step=diverge, freeze_step=3)
        return str(raised.value)

    assert (
        run_ranks(2, body)
        == [
            "DistributedOneBitAdam: lr, betas, eps or weight decay differ between ranks in step 6: "
            "rank(s) [0] (lr 0.01); "
            "rank(s) [1] (lr 0.02). Give all ranks the same optimizer settings and the same schedule."
        ]
        * 2
    )


def test_a_rank_one_step_ahead_is_caught() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)

        def run_ahead(optimizer: DistributedOneBitAdam) -> None:
            if rank == 1 and optimizer._driver.steps == 5:
                optimizer._stepper.step += 1

        with pytest.raises(MismatchError) as raised:
            train(rank, 8, watch=run_ahead, freeze_step=3, overlap=False)
        return str(raised.value)

    assert (
        run_ranks(2, body)
        == [
            "DistributedOneBitAdam: the ranks are not at the same step: rank(s) [0] are at step 6; "
            "rank(s) [1] are at step 7. "
            "Call step() equally often everywhere."
        ]
        * 2
    )


@pytest.mark.parametrize("shape", [(2,), (4,)])  # a parameter of two rows could be taken for a pair
def test_parameters_in_the_place_of_pairs_with_names_are_refused(shape: tuple[int, ...]) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(shape))
        with pytest.raises(InvalidRequestError, match=r"named_parameters should be a sequence of tuples \(name, param"):
            DistributedOneBitAdam(torch.optim.Adam([parameter]), [parameter])

    run_ranks(1, body)


def test_parameters_that_were_not_named_are_refused() -> None:
    def body(session: Session) -> None:
        first, second = one_parameter(), one_parameter()
        with pytest.raises(InvalidRequestError) as raised:
            DistributedOneBitAdam(torch.optim.Adam([first, second]), [("first", first)])
        assert str(raised.value) == (
            "named_parameters was specified, but one or more model parameters were not named. "
            "The first is number 1 of group 0, of shape (4,)."
        )

    run_ranks(1, body)


def test_a_rank_that_ends_a_step_early_is_named_by_the_others_within_seconds() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)
        if rank == 1:
            train(rank, 5, freeze_step=3)
            return ""
        with pytest.raises(PeerError) as raised:
            train(rank, 6, freeze_step=3)
        return str(raised.value)

    said = run_ranks(2, body)[0]
    assert said.startswith(
        "DistributedOneBitAdam: step 6 cannot end: rank 1 has shut down. All ranks must take equally "
    )


def test_a_rank_that_joins_while_others_step_is_told_how_to_stop_together() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)
        if rank == 1:
            train(rank, 2, freeze_step=1)
            with pytest.raises(PeerError):
                join()
            return ""
        with pytest.raises(PeerError) as raised:
            train(rank, 3, freeze_step=1)
        session.shutdown(failed=True, why="raised PeerError")
        return str(raised.value)

    assert run_ranks(2, body)[0] == (
        "DistributedOneBitAdam: step 3 cannot end: rank 1 has joined. All ranks must take equally many steps; join() "
        "does not step a 1-bit optimizer for a rank that has no more batches. Stop all ranks after the smallest "
        "number, "
        "int(allreduce(torch.tensor(len(loader)), op=Min)), or use DistributedSampler, which gives all ranks equally "
        "many samples."
    )


def test_buckets_are_on_their_way_before_step_is_called() -> None:
    shapes = ((400, 300), (300, 300), (200, 300))

    def body(session: Session) -> tuple[list[int], int]:
        posted = []

        def look(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            posted.append(len(optimizer._stepper.buckets.posted_tensors))

        def grads(step: int, rank: int) -> list[np.ndarray | None]:
            return gradients(step, rank, shapes)

        result = train(rank_of(session), 6, shapes=shapes, grads=grads, before_step=look, freeze_step=3)
        assert result["report"]["redone_steps"] == 0
        off = train(rank_of(session), 6, shapes=shapes, grads=grads, freeze_step=3, overlap=False)
        assert off["digests"] == result["digests"]
        return posted, off["report"]["dense_steps"]

    # The first step looks at the order of arrival and exchanges nothing early.
    assert run_ranks(2, body)[0] == ([0, 3, 3, 3, 3, 3], 3)


def test_buckets_follow_the_order_in_which_rank_0s_gradients_arrive() -> None:
    def body(session: Session) -> list[int]:
        rank = rank_of(session)
        order = [1, 3, 0, 2] if rank == 0 else [0, 1, 2, 3]
        found: list[int] = []

        def watch(optimizer: DistributedOneBitAdam) -> None:
            found[:] = optimizer._stepper.flows.order

        train(rank, 3, order=lambda step, rank: order, watch=watch)
        return found

    assert run_ranks(2, body) == [[1, 3, 0, 2], [1, 3, 0, 2]]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_has_one_exchange_and_a_vote_however_many_buckets_leave_one_by_one(overlap: bool) -> None:
    shapes = ((300, 500),) * 4

    def body(session: Session) -> tuple[list[list[int]], list[int], int]:
        posted: list[list[int]] = []
        plans: list[int] = []
        assert session.engine is not None

        def order(step: int, rank: int) -> Iterator[int]:
            posted.append([])
            # As the first step had it, but for the ranks' second and third gradient: a bucket waits for those before.
            for tensor in (3, 1, 2, 0) if rank == 1 and step > 1 else (3, 2, 1, 0):
                yield tensor
                posted[-1].append(optimizers[0]._stepper.buckets.posted)

        def watch(optimizer: Any) -> None:
            plans.append(session.engine.counters()["plans"])

        optimizers: list[Any] = []

        def wrap(*arguments: Any, **options: Any) -> Any:
            optimizers.append(DistributedOneBitAdam(*arguments, **options))
            return optimizers[0]

        settings: dict[str, Any] = {"shapes": shapes, "grads": lambda s, r: gradients(s, r, shapes), "freeze_step": 2}
        watched = train(rank_of(session), 5, order=order, watch=watch, wrap=wrap, overlap=overlap, **settings)
        assert watched["digests"] == train(rank_of(session), 5, overlap=False, **settings)["digests"]
        return posted, plans, optimizers[0]._stepper.buckets.posted

    for rank, (posted, plans, last) in enumerate(run_ranks(2, body)):
        in_turn = [1, 1, 3, 4] if rank == 1 else [1, 2, 3, 4]
        assert posted == [[0] * 4, *[in_turn if overlap else [0] * 4] * 4]
        assert last == 4
        assert {after - before for before, after in pairwise(plans[1:])} == {2}


def test_a_bucket_is_exchanged_while_others_wait_for_their_gradients() -> None:
    shapes = ((300, 500),) * 4

    def body(session: Session) -> list[int]:
        sent: list[int] = []
        engine = session.engine
        assert engine is not None

        def order(step: int, rank: int) -> Iterator[int]:
            for tensor in (3, 2, 1, 0):
                before = engine.counters()["messages_sent"]
                yield tensor
                if step == 5 and tensor:
                    end = time.monotonic() + 20
                    while engine.counters()["messages_sent"] < before + 2 and time.monotonic() < end:
                        time.sleep(0.001)
                    sent.append(engine.counters()["messages_sent"] - before)

        train(
            rank_of(session), 5, order=order, shapes=shapes, grads=lambda s, r: gradients(s, r, shapes), freeze_step=2
        )
        return sent

    # To the owner, and the owner's averages.
    assert run_ranks(2, body) == [[2, 2, 2]] * 2


def test_an_optimizer_that_is_dropped_takes_its_buffers_and_hooks_with_it() -> None:
    def body(session: Session) -> tuple[bool, list[int]]:
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=2)
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), [3, 2, 1, 0])
            optimizer.step()
        core = weakref.ref(optimizer._driver.core)
        del optimizer
        end = time.monotonic() + 20
        while core() is not None and time.monotonic() < end:
            gc.collect()  # does nothing while another thread does it
        return core() is None, [len(p._post_accumulate_grad_hooks or ()) for p in parameters]

    for freed, hooks in run_ranks(2, body):
        assert freed
        assert hooks == [0, 0, 0, 0]
