"""Dense steps in 16, 8 and 4 bits of each optimizer that has any: the plain simulations, and what can go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import MismatchError, NonFiniteError, SettingsError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import DistributedOneBitAdam, DistributedOneBitLamb, DistributedZeroOneAdam
from tests.frontends import test_torch_device as devices
from tests.frontends import test_torch_hierarchical as hierarchical
from tests.frontends.every_kind import whole_state
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.frontends.test_torch_device import on_devices as on_devices
from tests.frontends.test_torch_lamb import SMALL, adamw, uneven
from tests.frontends.test_torch_masters import Pair
from tests.frontends.test_torch_onebit import rank_of
from tests.frontends.test_torch_resume import Run
from tests.frontends.test_torch_zero_one import SHORT, sparse
from tests.frontends.test_torch_zero_one import state_digest as zero_one_state
from tests.oracle import onebit_adam, onebit_lamb, zero_one_adam
from tests.oracle.clipping import Clipping
from tests.tiers import few
from tests.worlds import run_ranks

BITS = (16, 8, 4)
MATRIX = few(
    [(bits, ranks) for bits in BITS for ranks in (1, 2, 4)],
    lambda bits, ranks: ranks == 2,
)
#: Without blocks of 4096 a tensor of a few elements has several.
BLOCKS: dict[str, Any] = {"block_size": 64}


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


def onebit_digests(bits: int, ranks: int, steps: int, warmup: int) -> list[str]:
    """torch's Adam on the coded averages up to ``warmup``, then the simulation."""
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    optimizer = adam(parameters)
    simulation = onebit_adam.Simulation(initial(), ranks, freeze_step=warmup, lr=1e-2, dense_bits=bits)
    codes = [x.codes for x in simulation.tensors]
    digests = []
    for step in range(1, warmup + 1):
        each = [gradients(step, rank) for rank in range(ranks)]
        for number, (parameter, of) in enumerate(zip(parameters, codes, strict=True)):
            assert of is not None
            average = of.average([np.asarray(g[number]).reshape(-1) for g in each])
            parameter.grad = torch.from_numpy(average.reshape(parameter.shape))
        optimizer.step()
        digests.append(digest([p.detach().numpy() for p in parameters]))
    for index, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        moments = {"momentum": state["exp_avg"].numpy(), "variance": state["exp_avg_sq"].numpy()}
        simulation.adopt(index, param=parameter.detach().numpy(), step=warmup, **moments)
    simulation.end_warmup()
    for step in range(warmup + 1, steps + 1):
        simulation.step([gradients(step, rank) for rank in range(ranks)])
        digests.append(digest(simulation.params))
    return digests


@pytest.mark.parametrize(("bits", "ranks"), MATRIX)
def test_one_bit_adam_equals_torchs_adam_on_coded_averages_and_then_the_simulation(bits: int, ranks: int) -> None:
    expected = onebit_digests(bits, ranks, 20, 10)
    for result in run_ranks(ranks, lambda s: train(rank_of(s), 20, freeze_step=10, dense_bits=bits)):
        assert result["digests"] == expected
        assert (result["report"]["dense_steps"], result["report"]["compressed_steps"]) == (10, 10)


def lamb_job(rank: int, steps: int, bits: int, **options: Any) -> dict[str, Any]:
    job = {
        "make": adamw,
        "wrap": DistributedOneBitLamb,
        "hash_state": whole_state,
        "freeze_step": 12,
        "mask_refresh": 5,
    }
    return train(rank, steps, **{**job, "shapes": SMALL, "grads": uneven, "dense_bits": bits, **BLOCKS, **options})


def lamb_digests(bits: int, ranks: int, steps: int, **settings: Any) -> tuple[list[str], Any]:
    usual = {"freeze_step": 12, "lr": 1e-2, "weight_decay": 0.1, "mask_refresh": 5, "dense_bits": bits, **BLOCKS}
    simulation = onebit_lamb.Simulation(initial(SMALL), ranks, **{**usual, **settings})
    digests = []
    for step in range(1, steps + 1):
        simulation.step([uneven(step, rank) for rank in range(ranks)])
        digests.append(digest(simulation.params))
    return digests, simulation


@pytest.mark.parametrize(("bits", "ranks"), MATRIX)
def test_one_bit_lamb_equals_the_simulation_where_gradients_are_late_or_missing(bits: int, ranks: int) -> None:
    expected, simulation = lamb_digests(bits, ranks, 80)
    assert simulation.woken > 0 and simulation.tensors[2].late, "a tensor has its own warm-up after the others'"
    for result in run_ranks(ranks, lambda s: lamb_job(rank_of(s), 80, bits)):
        assert result["digests"] == expected
        assert result["report"]["memory_bytes"]["dense_error"] == 0, "the errors end with the last warm-up"


@pytest.mark.parametrize(("bits", "ranks"), MATRIX)
def test_zero_one_adam_equals_the_simulation_with_refreshes_between_syncs_too(bits: int, ranks: int) -> None:
    options = {**SHORT, "mask_refresh": 5, "var_freeze_step": 25, "dense_bits": bits}
    job = {"make": adam, "wrap": DistributedZeroOneAdam, "hash_state": zero_one_state, "grads": sparse}
    simulation = zero_one_adam.Simulation(initial(), ranks, lr=1e-2, **options)
    expected: list[list[str]] = [[] for _ in range(ranks)]
    for step in range(1, 51):
        simulation.step([sparse(step, rank) for rank in range(ranks)])
        for rank in range(ranks):
            expected[rank].append(digest(simulation.params_of(rank)))
    results = run_ranks(ranks, lambda s: train(rank_of(s), 50, **job, **options))
    assert [result["digests"] for result in results] == expected


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_do_not_depend_on_segments_window_engine_overlap_or_arrival(ranks: int) -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    def job(session: Session, **options: Any) -> Any:
        return train(rank_of(session), 12, freeze_step=8, dense_bits=4, hash_state=whole_state, **options)

    plain = run_ranks(ranks, lambda s: job(s, overlap=False))
    variants: list[tuple[Settings, dict[str, Any]]] = [
        (replace(Settings(), segment_nbytes=2048, window=1), {"order": shuffled}),
        (replace(Settings(), engine="python"), {}),
    ]
    for settings, options in variants:
        results = run_ranks(ranks, lambda s, o=options: job(s, **o), settings=settings)
        assert [r["digests"] for r in results] == [r["digests"] for r in plain]
        assert [r["state"] for r in results] == [r["state"] for r in plain]


# Nodes, clipping, gradients that are not finite or change


@pytest.mark.parametrize("kind", ["1-bit LAMB", "0/1 Adam"])
def test_nodes_add_up_before_they_send_codes(kind: str) -> None:
    shared: dict[str, Any] = {"dense_bits": 8, **hierarchical.MASKS}
    if kind == "0/1 Adam":
        own, simulation, wrap = hierarchical.SCHEDULE, zero_one_adam.Simulation, DistributedZeroOneAdam
    else:
        own, simulation, wrap = {"freeze_step": 10}, onebit_lamb.Simulation, DistributedOneBitLamb
    usual = {"lr": 1e-2, **own, **shared, **BLOCKS}
    law, order = hierarchical.in_nodes("aabab", simulation, **usual)
    expected = []
    for step in range(1, 31):
        law.step([hierarchical.grads(step, rank) for rank in order])
        # Between syncs of 0/1 Adam the nodes differ.
        expected.append([digest(p) for p in ([law.params_of(0), law.params_of(1)] if "0/1" in kind else [law.params])])
    results = hierarchical.on("aabab", 30, wrap, make=adam, **own, **shared)
    for rank, result in enumerate(results):
        node = 0 if rank in (0, 1, 3) else 1
        assert result["digests"] == [digests[min(node, len(digests) - 1)] for digests in expected]


@pytest.mark.parametrize("kind", ["1-bit LAMB", "0/1 Adam"])
def test_what_is_clipped_is_the_average_that_has_come_back(kind: str) -> None:
    norm = 3.0
    options: dict[str, Any] = {"dense_bits": 8, "mask_refresh": 5}
    if kind == "0/1 Adam":
        law: Any = zero_one_adam.Simulation(
            initial(SMALL), 2, lr=1e-2, clipping=Clipping(norm, previous=False), **SHORT, **options, **BLOCKS
        )
        job = {"make": adam, "wrap": DistributedZeroOneAdam, "hash_state": zero_one_state, **SHORT}
    else:
        settings = {"freeze_step": 12, "lr": 1e-2, "weight_decay": 0.1, "clipping": Clipping(norm, previous=False)}
        law = onebit_lamb.Simulation(initial(SMALL), 2, **settings, **options, **BLOCKS)
        job = {"make": adamw, "wrap": DistributedOneBitLamb, "hash_state": whole_state, "freeze_step": 12}
    expected: list[list[str]] = [[], []]
    for step in range(1, 31):
        law.step([uneven(step, rank) for rank in range(2)])
        for rank in range(2):
            expected[rank].append(digest(law.params_of(rank) if kind == "0/1 Adam" else law.params))
    job |= {"shapes": SMALL, "grads": uneven, "max_grad_norm": norm, **options, **BLOCKS}
    results = run_ranks(2, lambda s: train(rank_of(s), 30, **job))
    assert [result["digests"] for result in results] == expected


@pytest.mark.parametrize("bits", few(BITS, [16, 4]))
def test_a_gradient_that_is_not_finite_raises_on_all_ranks_and_changes_nothing(bits: int) -> None:
    def body(session: Session) -> tuple[str, str, str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        optimizer = DistributedOneBitAdam(adam(parameters), freeze_step=50, dense_bits=bits)
        for step in (1, 2, 3):
            found = gradients(step, rank)
            if step == 3 and rank == 1:
                found[0][3, 5] = np.inf  # type: ignore[index]
            optimizer.zero_grad()
            backward(parameters, found, range(len(parameters)))
            before = whole_state(parameters, optimizer)
            if step == 3:
                with pytest.raises(NonFiniteError) as raised:
                    optimizer.step()
            else:
                optimizer.step()
        return before, whole_state(parameters, optimizer), str(raised.value)

    for before, after, message in run_ranks(2, body):
        assert before == after
        assert "a gradient is NaN or Inf in step 3, on rank(s) [1]; " in message


def test_a_gradient_that_changes_after_backward_is_sent_again_with_the_same_errors() -> None:
    def halve(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        if step == 5:
            for parameter in parameters:
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def halved(step: int, rank: int) -> list[np.ndarray | None]:
        return [g * np.float32(0.5) if step == 5 and g is not None else g for g in gradients(step, rank)]

    job = {"freeze_step": 8, "dense_bits": 4, "hash_state": whole_state}
    results = run_ranks(2, lambda s: train(rank_of(s), 12, before_step=halve, **job))
    expected = run_ranks(2, lambda s: train(rank_of(s), 12, grads=halved, **job))
    for result, other in zip(results, expected, strict=True):
        assert result["report"]["redone_steps"] == 1
        assert (result["digests"], result["state"]) == (other["digests"], other["state"])


# Options, reports, saved states


def test_ranks_that_disagree_are_told_both_numbers() -> None:
    def body(session: Session) -> str:
        parameters = [torch.nn.Parameter(torch.zeros(5))]
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitAdam(adam(parameters), dense_bits=(32, 8)[rank_of(session)])  # type: ignore[arg-type]
        return str(raised.value)

    for message in run_ranks(2, body):
        assert "dense_bits=32" in message and "dense_bits=8" in message


@pytest.mark.parametrize("bits", [2, 64, True, "8", None, 8.5])
def test_other_numbers_of_bits_are_refused(bits: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError, match="dense_bits must be 32, 16, 8 or 4, got "):
            DistributedZeroOneAdam(adam([torch.nn.Parameter(torch.zeros(5))]), dense_bits=bits)

    run_ranks(1, body)


@pytest.mark.parametrize(("bits", "each"), [(32, 4.0), (16, 2.0), (8, 1 + 4 / 128), (4, 0.5 + 4 / 128)])
def test_the_report_counts_the_bytes_of_the_formula(bits: int, each: float) -> None:
    shapes = ((512, 256), (4096,))
    job = {"shapes": shapes, "freeze_step": 50, "dense_bits": bits, "hash_state": lambda *_: ""}
    job["grads"] = lambda step, rank: gradients(step, rank, shapes)
    reports = [result["report"] for result in run_ranks(2, lambda s: train(rank_of(s), 3, **job))]
    formula = 2 * (1 / 2) * each * (512 * 256 + 4096)
    for report in reports:
        assert (report["dense_steps"], report["dense_bits"]) == (3, bits)
        # Headers: one for each of two messages of a segment, and the vote's.
        assert formula <= report["last_bytes_sent"] <= formula * 1.02 + 100
        assert report["bytes_dense"] == 3 * 4 * (512 * 256 + 4096)


def test_an_automatic_freeze_comes_at_the_same_step_on_all_ranks() -> None:
    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2, betas=(0.9, 0.8), foreach=False)

    job = {"make": make, "freeze_step": "auto", "dense_bits": 8, "grads": lambda step, rank: gradients(step % 3, rank)}
    results = run_ranks(2, lambda s: train(rank_of(s), 24, **job))
    assert results[0]["digests"] == results[1]["digests"]
    assert 10 < results[0]["report"]["freeze_step"] < 24 and results[0]["report"]["compressed_steps"] > 0


@pytest.mark.parametrize("kind", few(["1-bit Adam", "1-bit LAMB", "0/1 Adam"], ["1-bit LAMB", "0/1 Adam"]))
@pytest.mark.parametrize("stop", [3, 9])
def test_a_run_that_is_saved_with_its_dense_errors_goes_on_in_every_bit(kind: str, stop: int) -> None:
    def body(session: Session) -> None:
        rank = rank_of(session)
        whole = Run(kind, rank, dense_bits=4)
        whole.train(1, 14)
        first = Run(kind, rank, dense_bits=4)
        first.train(1, stop)
        saved = first.save()
        dense = saved["rank"]["worker"]["dense_error"]
        assert dense.any() if stop < 6 or kind == "0/1 Adam" else dense.numel() == 0
        again = Run(kind, rank, saved["values"], dense_bits=4)
        again.optimizer.load_state_dict(saved["optimizer"])
        again.optimizer.load_rank_state_dict(saved["rank"])
        assert again.train(stop + 1, 14) == whole.digests[stop:]
        assert whole_state(again.parameters, again.optimizer) == whole_state(whole.parameters, whole.optimizer)

    run_ranks(2, body)


def test_a_run_goes_on_with_other_bits_and_rank_0_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> tuple[list[str], str]:
        rank, told = rank_of(session), []
        saved = None
        for bits in (32, 4, 16, 8, 32):
            run = Run("1-bit LAMB", rank, saved and saved["values"], dense_bits=bits)
            if saved is not None:
                run.optimizer.load_state_dict(saved["optimizer"])
                run.optimizer.load_rank_state_dict(saved["rank"])
            first = 1 + run.optimizer.compression_report()["step"]
            told += run.train(first, first)
            saved = run.save()
        return told, caplog.text

    (first, said), (second, _) = run_ranks(2, body)
    assert first == second
    assert "resumed with other options: dense_bits 32 -> 4" in said


def test_errors_of_fewer_ranks_are_redistributed() -> None:
    def saved(session: Session) -> dict[str, Any]:
        run = Run("1-bit LAMB", rank_of(session), dense_bits=4)
        run.train(1, 3)
        return run.save()

    states = run_ranks(3, saved)

    def body(session: Session) -> tuple[list[str], str, np.ndarray]:
        run = Run("1-bit LAMB", rank_of(session), states[0]["values"], dense_bits=4)
        run.optimizer.load_state_dict(states[0]["optimizer"])
        told = run.optimizer.load_rank_state_dict([state["rank"] for state in states])
        worker = run.optimizer._driver.core.dense_codes.errors.worker.copy()
        return run.train(4, 8), told["rank_state"], worker

    first, second = run_ranks(2, body)
    mean = np.mean([state["rank"]["worker"]["dense_error"].numpy().astype(np.float64) for state in states], axis=0)
    for digests, how, worker in (first, second):
        assert (digests, how) == (first[0], "re-sharded")
        np.testing.assert_array_equal(worker, mean.astype(np.float32))


# Parameters of other types, or on devices


@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "0/1 Adam"])
def test_masters_of_a_bfloat16_model_are_the_parameters_of_a_float32_run(kind: str) -> None:
    def body(session: Session) -> None:
        pair = Pair(kind, dense_bits=8)
        for step in range(1, 9):
            pair.backward(step, rank_of(session))
            pair.step()
            pair.must_be_equal()

    run_ranks(2, body)


@pytest.mark.parametrize("bits", few(BITS, [8]))
@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "0/1 Adam"])
def test_ranks_with_and_without_a_device_train_what_ranks_without_do(kind: str, bits: int, on_devices: Any) -> None:
    def job(session: Session) -> Any:
        return devices.trained(kind, rank_of(session), 8, dense_bits=bits)

    expected = run_ranks(3, job)
    made = on_devices([0, 1])
    assert run_ranks(3, job) == expected
    assert all(device.counts["launch"] for device in made.values())


def test_codes_travel_from_device_to_device(on_devices: Any) -> None:
    def job(session: Session) -> Any:
        return devices.trained("0/1 Adam", rank_of(session), 8, dense_bits=8)

    expected = run_ranks(2, job)
    on_devices([0, 1], reached=[0, 1])
    assert run_ranks(2, job) == expected
