"""``max_grad_norm`` of every compressed optimizer: by one norm for all ranks, of this step or of the one before."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.kernels import cpu_kernels
from ocomm.optim.checkpoint import add_checksum
from ocomm.optim.sketch import DEVIATION
from ocomm.session import Session
from ocomm.training import resume
from ocomm.types import Settings
from ocomm_torch.optimizers.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.every_kind import KINDS, whole_state
from tests.frontends.onebit_jobs import backward, digest, gradients, initial, train
from tests.oracle import birder, lion, onebit_adam, onebit_lamb, zero_one_adam
from tests.oracle.clipping import Clipping
from tests.tiers import alternating, few
from tests.worlds import run_ranks

STEPS = 30
MAX_NORM = 60.0
#: Dense steps of 1-bit Adam and LAMB.
WARMUP = 4
INTERVALS = {"local_step_start": 6, "local_step_doubling": 8, "local_step_clip": 4, "var_update_scaler": 4}


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def waves(step: int, rank: int) -> list[np.ndarray | None]:
    """Gradients whose norm is above the limit in some steps, below it in others; some are missing on a rank."""
    size = np.float32([0.1, 0.3, 1.0, 4.0, 0.5][step % 5])
    grads = [g * size if g is not None else None for g in gradients(step, rank)]
    if step % 7 == 0:
        grads[1] = None
    if (step + rank) % 6 == 0:
        grads[2] = None
    return grads


def averaged(step: int, ranks: int) -> list[np.ndarray | None]:
    """In rank order, float32; None where no rank has one."""
    found: list[np.ndarray | None] = []
    for parts in zip(*(waves(step, rank) for rank in range(ranks)), strict=True):
        if all(part is None for part in parts):
            found.append(None)
            continue
        shape = next(part.shape for part in parts if part is not None)
        total = np.zeros(shape, np.float32)
        for rank, part in enumerate(parts):
            part = np.zeros(shape, np.float32) if part is None else part
            total = part.copy() if rank == 0 else total + part
        found.append(total * np.float32(1 / ranks))
    return found


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, foreach=False)


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1)


def warm_up(ranks: int, steps: int) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, list[str]]:
    """Torch's Adam on averaged gradients that Torch has clipped."""
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    optimizer, digests = adam(list(parameters)), []
    for step in range(1, steps + 1):
        for parameter, grad in zip(parameters, averaged(step, ranks), strict=True):
            parameter.grad = None if grad is None else torch.from_numpy(grad)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=False)
        optimizer.step()
        digests.append(digest([p.detach().numpy() for p in parameters]))
    return parameters, optimizer, digests


def simulate_onebit(ranks: int, clipping: Clipping) -> list[str]:
    parameters, optimizer, digests = warm_up(ranks, WARMUP)
    simulation = onebit_adam.Simulation(
        initial(), ranks, freeze_step=WARMUP, lr=1e-2, weight_decay=0.1, clipping=clipping
    )
    for index, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        simulation.adopt(
            index,
            param=parameter.detach().numpy(),
            momentum=state["exp_avg"].numpy(),
            variance=state["exp_avg_sq"].numpy(),
            step=int(state["step"]),
        )
    simulation.end_warmup()
    return digests + steps_of(simulation, ranks, WARMUP)


def steps_of(simulation: Any, ranks: int, after: int = 0) -> list[str]:
    digests = []
    for step in range(after + 1, STEPS + 1):
        simulation.step([waves(step, rank) for rank in range(ranks)])
        digests.append(digest(simulation.params))
    return digests


def simulate_zero_one(ranks: int, clipping: Clipping) -> list[str]:
    return steps_of(
        zero_one_adam.Simulation(initial(), ranks, lr=1e-2, weight_decay=0.1, clipping=clipping, **INTERVALS), ranks
    )


def simulate_ratios(kind: Any) -> Callable[[int, Clipping], list[str]]:
    return lambda ranks, clipping: steps_of(
        kind(initial(), ranks, lr=1e-2, weight_decay=0.1, beta=0.9, clipping=clipping), ranks
    )


def simulate_lion(ranks: int, clipping: Clipping) -> list[str]:
    return steps_of(lion.Lion(initial(), ranks, lr=1e-2, weight_decay=0.1, clipping=clipping), ranks)


def simulate_lamb(ranks: int, clipping: Clipping) -> list[str]:
    settings: dict[str, Any] = {"freeze_step": WARMUP, "lr": 1e-2, "weight_decay": 0.1, "clipping": clipping}
    return steps_of(onebit_lamb.Simulation(initial(), ranks, **settings), ranks)


#: Optimizer, what it wraps, options, and the law.
LAWS: dict[str, tuple[Any, Any, dict[str, Any], Callable[[int, Clipping], list[str]]]] = {
    "1-bit Adam": (DistributedOneBitAdam, adam, {"freeze_step": WARMUP}, simulate_onebit),
    "1-bit LAMB": (DistributedOneBitLamb, adam, {"freeze_step": WARMUP}, simulate_lamb),
    "0/1 Adam": (DistributedZeroOneAdam, adam, INTERVALS, simulate_zero_one),
    "Birder": (DistributedBirder, sgd, {"beta": 0.9}, simulate_ratios(birder.Birder)),
    "SoftSignSGD": (DistributedSoftSignSGD, sgd, {"beta": 0.9}, simulate_ratios(birder.SoftSign)),
    "Lion": (DistributedLion, sgd, {}, simulate_lion),
}


@pytest.mark.short("1-bit Adam", "Lion")
@pytest.mark.parametrize("clip", ["exact", "previous"])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    few(itertools.product(LAWS, [1, 2, 3]), lambda kind, ranks: ranks == (3 if kind == "Lion" else 2)),
)
def test_every_bit_equals_the_simulation(kind: str, ranks: int, clip: str) -> None:
    wrapper, make, options, law = LAWS[kind]
    clipping = Clipping(MAX_NORM, previous=clip == "previous")
    expected = law(ranks, clipping)
    assert {f == 1.0 for f in clipping.factors} == {True, False}, "some steps must be clipped, others not"

    def body(session: Session) -> dict[str, Any]:
        return train(
            rank_of(session),
            STEPS,
            wrap=wrapper,
            make=make,
            grads=waves,
            hash_state=whole_state,
            max_grad_norm=MAX_NORM,
            clip=clip,
            **options,
        )

    variants: Sequence[Settings] = [Settings()]
    if ranks == 2:
        variants = [Settings(), replace(Settings(), engine="python", kernels="reference")]
    for settings in variants:
        results = run_ranks(ranks, body, settings=settings)
        # Between its syncs 0/1 Adam's ranks are not together; rank 0 is the one that the simulation shows.
        assert results[0]["digests"] == expected
        for result in results:
            assert result["report"]["redone_steps"] == 0
            assert result["report"]["grad_norm"] == pytest.approx(clipping.norm, rel=1e-12)
            if result["report"].get("synced", True):
                assert result["digests"][-1] == expected[-1]


@pytest.mark.parametrize(("kind", "ranks"), alternating(KINDS, [2, 1, 5, 3, 8]))
def test_the_factor_is_that_of_one_process_with_all_batches(kind: str, ranks: int) -> None:
    """Within five standard deviations of a sketch; on one rank but for rounding. In a warm-up that clips its average no
    factor is needed.
    """
    bound = 5 * DEVIATION if ranks > 1 else 1e-6

    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters, max_grad_norm=1.0)
        warmup = {"dense": 12, "compressed": 3}.get(kind.rpartition(", ")[2], 0)
        for step in range(1, 13):
            optimizer.zero_grad()
            backward(parameters, waves(step, rank_of(session)), range(4))
            optimizer.step()
            squares = sum(float(np.square(g.astype(np.float64)).sum()) for g in averaged(step, ranks) if g is not None)
            factor = optimizer._driver.core.gradient_scale
            assert factor == 1 if step <= warmup else abs(math.sqrt(squares) * factor - 1) < bound

    run_ranks(ranks, body)


def test_in_the_warm_up_it_equals_torch_on_the_averaged_gradients() -> None:
    _, _, expected = warm_up(2, 8)

    def body(session: Session) -> list[str]:
        options = {"max_grad_norm": MAX_NORM, "freeze_step": 100}
        return train(rank_of(session), 8, make=adam, grads=waves, **options)["digests"]

    assert run_ranks(2, body) == [expected, expected]


def test_a_tensor_in_its_own_warm_up_beside_compressed_ones_is_clipped_by_the_same_norm() -> None:
    def late(step: int, rank: int) -> list[np.ndarray | None]:
        grads = waves(step, rank)
        if step < 9:
            grads[3] = None
        return grads

    clipping = Clipping(MAX_NORM, previous=False)
    simulation = onebit_adam.Simulation(initial(), 2, freeze_step=WARMUP, lr=1e-2, clipping=clipping)
    for step in range(1, 20):
        simulation.step([late(step, rank) for rank in range(2)])

    def body(session: Session) -> list[np.ndarray]:
        result = train(rank_of(session), 19, grads=late, max_grad_norm=MAX_NORM, freeze_step=WARMUP)
        return result["parameters"][-1]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    # Its dense steps are Torch's, which differ from the simulation's in last bits.
    assert np.allclose(first[3], simulation.params[3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_with_the_previous_norm_exchange_and_backward_overlap(clip: str) -> None:
    def body(session: Session) -> tuple[list[int], int]:
        posted: list[int] = []

        def look(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            posted.append(len(optimizer._stepper.buckets.posted_tensors))

        result = train(rank_of(session), 8, before_step=look, freeze_step=3, max_grad_norm=1.0, clip=clip)
        return posted, result["report"]["redone_steps"]

    # The order of arrival is learnt in the first step; nothing is clipped before the exchange in the warm-up; the
    # first compressed step has no previous norm.
    compressed = [0, 0, 0, 0] if clip == "exact" else [4, 4, 4, 4]
    assert run_ranks(2, body)[0] == ([0, 4, 4, 0, *compressed], 0)


@pytest.mark.parametrize("clip", ["exact", "previous"])
@pytest.mark.parametrize("kind", few(KINDS, list(KINDS)[::3]))
def test_a_rank_that_drops_its_step_holds_up_nobody(kind: str, clip: str) -> None:
    def body(session: Session) -> tuple[str, int]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters, max_grad_norm=1.0, clip=clip)
        for step in range(1, 13):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            before = whole_state(parameters, optimizer)
            if (step, rank) in ((2, 0), (7, 1), (8, 1)):
                optimizer.zero_grad()
            else:
                optimizer.step()
            assert (whole_state(parameters, optimizer) == before) == (step in (2, 7, 8))
        return digest([p.detach().numpy() for p in parameters]), optimizer.compression_report()["skipped_steps"]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[1] == 3


@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_an_overflow_under_a_grad_scaler_is_skipped_by_all_and_does_not_become_the_norm(clip: str) -> None:
    def train_scaled(session: Session, overflow: bool) -> tuple[str, float, float | None]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS["1-bit Adam, compressed"].wrap(parameters, max_grad_norm=1.0, clip=clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(1, 11):
            bad = step == 7
            if bad and not overflow:
                continue
            optimizer.zero_grad()
            for index, grad in enumerate(gradients(step, rank)):
                if bad and rank == 1:
                    grad.reshape(-1)[0] = np.inf
                scaler.scale((parameters[index] * torch.from_numpy(grad)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        norm = optimizer.compression_report()["grad_norm"]
        return whole_state(parameters, optimizer), scaler.get_scale(), norm

    def body(session: Session) -> None:
        state, scale, norm = train_scaled(session, overflow=True)
        assert (state, 256.0, norm) == train_scaled(session, overflow=False)
        assert scale == 128.0

    run_ranks(2, body)


@pytest.mark.parametrize("clip", ["exact", "previous"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_reported_with_its_rank_and_changes_nothing(kind: str, clip: str) -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters, max_grad_norm=1.0, clip=clip)
        for step in range(1, 8):
            optimizer.zero_grad()
            grads = gradients(step, rank)
            if step == 7 and rank == 1:
                grads[0][3, 5] = np.nan
            backward(parameters, grads, [3, 2, 1, 0])
            before = whole_state(parameters, optimizer)
            if step < 7:
                optimizer.step()
                continue
            with pytest.raises(NonFiniteError, match="a gradient is NaN or Inf in step 7") as raised:
                optimizer.step()
            assert whole_state(parameters, optimizer) == before
        return str(raised.value)

    for message in run_ranks(2, body):
        if not kind.endswith(", dense"):
            assert "on rank(s) [1]" in message


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_the_user_has_clipped_on_all_ranks_are_exchanged_as_they_are(kind: str) -> None:
    def job(session: Session, by_user: bool) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = KINDS[kind].wrap(parameters)
        for step in range(1, 9):
            optimizer.zero_grad()
            grads = gradients(step, rank)
            if not by_user:
                clipped = [torch.nn.Parameter(torch.zeros(g.shape)) for g in grads if g is not None]
                for parameter, grad in zip(clipped, grads, strict=True):
                    parameter.grad = torch.from_numpy(grad)
                torch.nn.utils.clip_grad_norm_(clipped, 1.0)
                grads = [p.grad.numpy() for p in clipped]
            backward(parameters, grads, [3, 2, 1, 0])
            if by_user:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return whole_state(parameters, optimizer)

    def body(session: Session) -> None:
        assert job(session, by_user=True) == job(session, by_user=False)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": "last"}, "clip must be 'exact' or 'previous', got 'last'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be > 0 or None, got 0.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be > 0 or None, got nan"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be > 0 or None, got '1'"),
        ({"block_size": "x"}, "block_size must be a whole number or 'tensor', got 'x'"),
        ({"backward_passes_per_step": 1.5}, "backward_passes_per_step must be > 0, got 1.5"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            KINDS["Birder"].wrap([torch.nn.Parameter(torch.zeros(4))], **options)
        assert str(raised.value) == message

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("kind", "clip"),
    few(itertools.product(KINDS, ["exact", "previous"]), [("1-bit Adam, compressed", "previous"), ("Lion", "exact")]),
)
def test_a_saved_run_goes_on_with_the_norm_by_which_its_next_step_is_clipped(kind: str, clip: str) -> None:
    """In an optimizer of its own, and in the one that has gone on meanwhile."""

    def body(session: Session) -> list[list[str]]:
        rank, options = rank_of(session), {"max_grad_norm": MAX_NORM, "clip": clip}

        def go(parameters: list[torch.nn.Parameter], optimizer: Any, first: int, last: int) -> list[str]:
            found = []
            for step in range(first, last):
                optimizer.zero_grad()
                backward(parameters, waves(step, rank), range(4))
                optimizer.step()
                found.append(whole_state(parameters, optimizer))
            return found

        parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        optimizer = KINDS[kind].wrap(parameters, **options)
        go(parameters, optimizer, 0, 9)
        saved = copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict(), optimizer.rank_state_dict()))
        histories = [go(parameters, optimizer, 9, 16)]
        again = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        for where, resumed in ((parameters, optimizer), (again, KINDS[kind].wrap(again, **options))):
            for p, value in zip(where, saved[0], strict=True):
                p.data.copy_(value)
            resumed.load_state_dict(copy.deepcopy(saved[1]))
            resumed.load_rank_state_dict(copy.deepcopy(saved[2]))
            histories.append(go(where, resumed, 9, 16))
        return histories

    for straight, rolled_back, resumed in run_ranks(2, body):
        assert rolled_back == straight and resumed == straight


def test_a_state_of_a_release_that_clipped_by_the_ranks_own_norms_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial()]
        driver = KINDS["Birder"].wrap(parameters, max_grad_norm=1.0)._driver
        resume.say_changes(driver, {**driver.state([]), "norm": 2.0})

    run_ranks(2, body)
    assert [record.message for record in caplog.records if "clipped by the norm of the averaged" in record.message] == [
        "DistributedBirder: the state is of a release that clipped compressed steps by the root mean square of the "
        "ranks' norms. From now on they are clipped by the norm of the averaged gradient, as the warm-up is: on n "
        "ranks by up to sqrt(n) times less."
    ]


def test_options_may_be_numbers_of_numpy() -> None:
    numbers = {"block_size": np.int64(64), "max_grad_norm": np.float32(0.5), "backward_passes_per_step": np.int32(1)}

    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = KINDS["Birder"].wrap([parameter], **numbers)
        parameter.grad = torch.ones(4)
        optimizer.step()
        assert parameter.any()

    run_ranks(2, body)


def test_ranks_that_clip_differently_are_an_error_that_names_the_option() -> None:
    def body(session: Session) -> None:
        clip = ("exact", "previous")[rank_of(session)]
        with pytest.raises(MismatchError, match=r"rank\(s\) \[0\] registered clip='exact'; rank\(s\) \[1\]"):
            KINDS["Birder"].wrap([torch.nn.Parameter(torch.zeros(4))], max_grad_norm=1.0, clip=clip)

    run_ranks(2, body)


def test_ranks_that_do_not_know_the_same_norm_are_told_before_their_first_step() -> None:
    """One of them would clip by it, the other wait for a round in which the ranks make it."""

    def body(session: Session) -> str:
        rank = rank_of(session)

        def made() -> tuple[list[torch.nn.Parameter], Any]:
            parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
            return parameters, KINDS["Lion"].wrap(parameters, max_grad_norm=MAX_NORM, clip="previous")

        parameters, optimizer = made()
        for step in range(3):
            optimizer.zero_grad()
            backward(parameters, waves(step, rank), range(4))
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        again, resumed = made()
        for p, value in zip(again, parameters, strict=True):
            p.data.copy_(value.detach())
        if rank == 1:
            state = {key: value for key, value in saved["ocomm"].items() if key != "checksum"}
            saved["ocomm"] = add_checksum({**state, "norm_of_average": None}, cpu_kernels())
        resumed.load_state_dict(saved)
        with pytest.raises(MismatchError) as raised:
            backward(again, waves(3, rank), range(4))
            resumed.step()
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank(s) [1] hold a last norm of None to clip by" in first, first
