"""Sharded dense steps of 1-bit Adam: in every bit the plain law and the unsharded run; memory, bytes, saved states."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError, PeerError, SettingsError
from ocomm.session import Session
from ocomm_torch import DistributedOneBitAdam
from tests.frontends.every_kind import whole_state
from tests.frontends.onebit_jobs import backward, digest, gradients, initial, train
from tests.frontends.test_torch_onebit import rank_of
from tests.oracle.dense_adam import DenseAdam
from tests.oracle.onebit_adam import Simulation
from tests.tiers import few
from tests.worlds import MPI_SIZE, PATIENT, run_ranks

STEPS, WARMUP = 14, 8


def late(step: int, rank: int) -> list[np.ndarray | None]:
    """A tensor that no rank uses now and then, one that one rank uses, and one that is used late."""
    result = gradients(step, rank)
    if step % 4 == 0:
        result[1] = None
    if step % 3 == rank:
        result[3] = None
    if step < 5:
        result[2] = None
    return result


class InOwnArithmetic(DistributedOneBitAdam):
    """Takes unsharded dense steps in ocomm's arithmetic, as ranks do whose own Adams round differently."""

    def implementation(self) -> str:
        return f"rank {self.process_set.rank()}"


#: The wrapped optimizer, and what the law has of it.
CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}, {}),
    "coupled decay": (torch.optim.Adam, {"weight_decay": 0.1}, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}, {"decoupled": True}),
}


def law(ranks: int, grads: Callable[[int, int], Sequence[Any]], case: str, warmup: int = WARMUP) -> list[str]:
    """Digests of the parameters after each step: the dense law, and the simulation of what follows the freeze."""
    _, inner, more = CASES[case]
    dense = DenseAdam(initial(), ranks, lr=1e-2, **inner, **more)
    digests = []
    for step in range(1, warmup + 1):
        dense.step([grads(step, rank) for rank in range(ranks)])
        digests.append(digest(dense.params))
    simulation = Simulation(initial(), ranks, freeze_step=warmup, lr=1e-2, **inner, **more)
    for k, param in enumerate(dense.params):
        moments = {"momentum": dense.momenta[k], "variance": dense.variances[k]}
        simulation.adopt(k, param=param, step=dense.steps[k], **moments)
    simulation.end_warmup()
    for step in range(warmup + 1, STEPS + 1):
        simulation.step([grads(step, rank) for rank in range(ranks)])
        digests.append(digest(simulation.params))
    return digests


@pytest.mark.parametrize(
    ("ranks", "case"),
    few([(n, c) for n in (1, 2, 4) for c in CASES], [(1, "AdamW"), (2, "coupled decay"), (4, "Adam")]),
)
def test_it_equals_plain_adam_and_then_the_simulation_in_every_bit(ranks: int, case: str) -> None:
    make, inner, _ = CASES[case]
    for grads in (gradients, late):

        def body(session: Session, grads: Any = grads) -> dict[str, Any]:
            options = {"freeze_step": WARMUP, "shard_state": True, "hash_state": whole_state, "grads": grads}
            return train(rank_of(session), STEPS, make=lambda p: make(p, lr=1e-2, **inner), **options)

        expected = law(ranks, grads, case)
        for result in run_ranks(ranks, body):
            assert result["digests"] == expected
            assert (result["report"]["dense_steps"], result["report"]["compressed_steps"]) == (8, 6)


def test_two_hops_and_other_segments_change_no_bit() -> None:
    settings = replace(PATIENT, direct_peers=1, segment_nbytes=1 << 12)
    options: dict[str, Any] = {"freeze_step": WARMUP, "shard_state": True, "hash_state": lambda *_: ""}
    expected = law(4, late, "Adam")
    for result in run_ranks(4, lambda s: train(rank_of(s), STEPS, grads=late, **options), settings=settings):
        assert result["digests"] == expected


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"freeze_step": "auto"}], ids=["", "clip", "auto"])
def test_it_equals_the_unsharded_run_in_the_same_arithmetic(options: dict[str, Any]) -> None:
    job = {
        "freeze_step": WARMUP,
        "block_size": 64,
        "mask_refresh": 3,
        "hash_state": lambda *_: "",
        "make": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.8), weight_decay=0.1),
        **options,
    }

    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        result = late(step % 3 + 1, rank)
        result[2] = None if step < 14 else gradients(step, rank)[2]  # a warm-up of its own
        return result

    def body(session: Session, wrap: Any, **more: Any) -> dict[str, Any]:
        return train(rank_of(session), 32, grads=grads, wrap=wrap, **job, **more)

    whole = run_ranks(2, lambda s: body(s, InOwnArithmetic))
    shards = run_ranks(2, lambda s: body(s, DistributedOneBitAdam, shard_state=True))
    assert whole[0]["report"]["freeze_step"] == shards[0]["report"]["freeze_step"]
    assert whole[0]["report"]["stage"] == shards[0]["report"]["stage"] == "compressed"
    for one, other in zip(whole, shards, strict=True):
        assert one["digests"] == other["digests"]


def test_a_bfloat16_model_has_the_masters_of_the_unsharded_run() -> None:
    def body(session: Session, wrap: Any, **options: Any) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p).to(torch.bfloat16)) for p in initial()]
        optimizer = wrap(torch.optim.Adam(parameters, lr=1e-3), freeze_step=4, **options)
        for step in range(1, 8):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            optimizer.step()
        masters = optimizer.state_dict()["ocomm"]["masters"]
        return digest([masters[name].numpy() for name in sorted(masters)])

    whole = run_ranks(2, lambda s: body(s, InOwnArithmetic))
    assert whole == run_ranks(2, lambda s: body(s, DistributedOneBitAdam, shard_state=True))


# Memory and bytes

LARGE = ((512, 1024),)


def large(step: int, rank: int) -> list[np.ndarray | None]:
    return [np.full(LARGE[0], 1.0 + step + rank, np.float32)]


@pytest.mark.parametrize("ranks", few([2, 4], [4]))
def test_the_warm_up_needs_8_over_n_bytes_for_m_and_v_and_sends_the_same_bytes(ranks: int) -> None:
    def body(session: Session, shard_state: bool) -> dict[str, Any]:
        options = {"shapes": LARGE, "grads": large, "freeze_step": 50, "hash_state": lambda *_: ""}
        return train(rank_of(session), 3, shard_state=shard_state, **options)["report"]

    numel = 512 * 1024
    whole, shards = (run_ranks(ranks, lambda s, on=on: body(s, on)) for on in (False, True))
    for before, now in zip(whole, shards, strict=True):
        held = now["memory_bytes"]
        assert held["averages"] == 0 and before["memory_bytes"]["averages"] == 4 * numel
        assert held["sharded_moments"] == 8 * numel / ranks and held["sharded_average"] == 4 * numel / ranks
        # With parameter and gradient: 28 bytes, and less than 13.2 on 4 ranks.
        assert 4 + 4 + 8 + sum(before["memory_bytes"].values()) / numel > 26
        assert 4 + 4 + sum(held.values()) / numel < (13.2 if ranks == 4 else 15.2)
        # The same but for headers, as segments are cut a little differently.
        assert abs(now["last_bytes_sent"] - before["last_bytes_sent"]) < 1000 < now["last_bytes_sent"]
        assert now["last_bytes_sent"] > now["bytes_dense"] / 3


def test_after_the_freeze_nothing_of_the_shards_is_held_and_moments_cost_one_dense_step() -> None:
    job = {"shapes": LARGE, "grads": large, "hash_state": lambda *_: "", "shard_state": True, "freeze_step": 2}

    def body(session: Session, steps: int) -> dict[str, Any]:
        return train(rank_of(session), steps, **job)["report"]

    (warm, _), (frozen, _) = (run_ranks(2, lambda s, n=n: body(s, n)) for n in (1, 2))
    moments = frozen["bytes_sent"] - warm["bytes_sent"] - frozen["last_bytes_sent"]
    assert abs(moments - 4 * 512 * 1024) < 1000  # half of m and half of v, to one other rank
    assert frozen["memory_bytes"]["sharded_moments"] == 0
    assert run_ranks(2, lambda s: body(s, 3))[0]["memory_bytes"]["sharded_average"] == 0


# Steps that are not taken


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({1: np.nan}, "a gradient is NaN or Inf in step 4, on rank(s) [1]; "),
        ({1: np.inf}, "a gradient is NaN or Inf in step 4, on rank(s) [1]; "),
        ({0: 3e38, 1: 3e38}, "in step 4 the gradients of all ranks are finite, but their average"),
    ],
    ids=["nan", "inf", "the average overflows"],
)
def test_a_step_that_some_rank_cannot_take_changes_nothing_on_any(bad: dict[int, float], said: str) -> None:
    def body(session: Session) -> tuple[list[str], str, str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=100, shard_state=True)
        digests, message, state = [], "", ""
        for step in range(1, 7):
            optimizer.zero_grad()
            grads = gradients(step, rank)
            if step == 4 and rank in bad:
                grads[0][3, 5] = bad[rank]  # type: ignore[index]
            backward(parameters, grads, [3, 2, 1, 0])
            if step == 4:
                state = whole_state(parameters, optimizer)
                with pytest.raises(NonFiniteError) as raised:
                    optimizer.step()
                assert whole_state(parameters, optimizer) == state
                message = str(raised.value)
            else:
                optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests, message, state

    results = run_ranks(2, body)
    assert results[0][0] == results[1][0] and len(set(results[0][0])) == 5
    assert said in results[0][1]


def test_a_step_that_one_rank_skips_is_skipped_and_one_that_changed_is_exchanged_again() -> None:
    def body(session: Session) -> tuple[list[str], int, int]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        inner = torch.optim.Adam(parameters, lr=1e-2)
        optimizer = DistributedOneBitAdam(inner, freeze_step=100, shard_state=True, max_grad_norm=1.0)
        digests = []
        for step in range(1, 8):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            before = whole_state(parameters, optimizer)
            if step == 3 and rank == 1:
                optimizer.zero_grad()  # instead of step()
            else:
                if step == 5 and rank == 0:
                    parameters[0].grad.data.mul_(0.5)
                optimizer.step()
            assert (whole_state(parameters, optimizer) == before) == (step == 3)
            digests.append(digest([p.detach().numpy() for p in parameters]))
        report = optimizer.compression_report()
        return digests, report["skipped_steps"], report["redone_steps"]

    results = run_ranks(2, body)
    assert results[0] == results[1] and results[0][1:] == (1, 1)
    dense = DenseAdam(initial(), 2, lr=1e-2, max_grad_norm=1.0)
    for step in (1, 2, 4, 5, 6, 7):
        each = [gradients(step, rank) for rank in range(2)]
        if step == 5:
            each[0][0] *= np.float32(0.5)  # type: ignore[operator]
        dense.step(each)
        assert digest(dense.params) == results[0][0][step - 1]


@pytest.mark.skipif(MPI_SIZE > 0, reason="a rank that raises ends the others' process")
def test_a_rank_that_fails_after_the_vote_frees_the_others_and_they_cannot_go_on() -> None:
    heard: list[str] = []

    def body(session: Session) -> None:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=9, shard_state=True)
        if rank == 1:

            def fail(*_: Any) -> None:
                raise ZeroDivisionError

            optimizer._driver.core.sharded.update = fail
        backward(parameters, gradients(1, rank), [3, 2, 1, 0])
        if rank == 1:
            optimizer.step()
        with pytest.raises(PeerError):
            optimizer.step()
        with pytest.raises(PeerError) as raised:
            optimizer.step()
        heard.append(str(raised.value))

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, body)
    assert "rank 1 raised ZeroDivisionError" in heard[0] and "may be of two steps: load a saved state." in heard[0]


# Saved states


class Run:
    """A model and its optimizer, as in a script."""

    def __init__(self, session: Session, saved: Any = None, **options: Any) -> None:
        self.rank = rank_of(session)
        values = initial() if saved is None else saved["values"]
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(value))) for value in values]
        names = [f"layer.{number}" for number in range(len(self.parameters))]
        inner = torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=0.1)
        wrap = options.pop("wrap", DistributedOneBitAdam)
        options = {"freeze_step": WARMUP, "block_size": 64, **options}
        self.optimizer = wrap(inner, zip(names, self.parameters, strict=True), **options)

    def train(self, first: int, last: int, ranks: int) -> list[str]:
        """Steps ``first`` to ``last``, on gradients of which any number of ranks has the same mean."""
        digests = []
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            each = [gradients(step, part) for part in range(self.rank * 4 // ranks, (self.rank + 1) * 4 // ranks)]
            grads = [sum(parts[1:], parts[0]) / np.float32(len(parts)) for parts in zip(*each, strict=True)]
            backward(self.parameters, grads, [2, 0, 3, 1])
            self.optimizer.step()
            digests.append(digest([p.detach().numpy() for p in self.parameters]))
        return digests

    def save(self) -> dict[str, Any]:
        """What a checkpoint has, after a way through ``torch.save``."""
        file = io.BytesIO()
        torch.save([self.optimizer.state_dict(), self.optimizer.rank_state_dict()], file)
        file.seek(0)
        replicated, own = torch.load(file, weights_only=True)
        values = [p.detach().numpy().copy() for p in self.parameters]
        return {"values": values, "optimizer": replicated, "rank": own}


SHARDED, WHOLE = {"shard_state": True}, {"wrap": InOwnArithmetic}


@pytest.mark.parametrize("stop", few([5, 8, 9, 11], [5]))
@pytest.mark.parametrize(
    ("before", "after"),
    [(SHARDED, SHARDED), (SHARDED, WHOLE), (WHOLE, SHARDED)],
    ids=["sharded", "to whole", "to sharded"],
)
def test_a_run_goes_on_where_it_was_with_and_without_shards(before: Any, after: Any, stop: int) -> None:
    def body(session: Session) -> tuple[list[str], list[str]]:
        run = Run(session, **before)
        run.train(1, stop, 2)
        saved = run.save()
        expected = run.train(stop + 1, STEPS, 2)
        again = Run(session, saved, **after)
        again.optimizer.load_state_dict(saved["optimizer"])
        again.optimizer.load_rank_state_dict(saved["rank"])
        return expected, again.train(stop + 1, STEPS, 2)

    for expected, found in run_ranks(2, body):
        assert found == expected


def test_a_warm_up_that_is_shorter_now_ends_when_its_shards_have_come() -> None:
    def body(session: Session, wrap: Any, **options: Any) -> list[str]:
        run = Run(session, wrap=wrap, **options)
        run.train(1, 5, 2)
        saved = run.save()
        again = Run(session, saved, wrap=wrap, freeze_step=4, **options)
        again.optimizer.load_state_dict(saved["optimizer"])
        again.optimizer.load_rank_state_dict(saved["rank"])
        assert again.optimizer.compression_report()["stage"] == "compressed"
        return again.train(6, 8, 2)

    whole = run_ranks(2, lambda s: body(s, InOwnArithmetic))
    assert whole == run_ranks(2, lambda s: body(s, DistributedOneBitAdam, shard_state=True))


@pytest.mark.skipif(MPI_SIZE > 0, reason="two numbers of ranks")
@pytest.mark.parametrize("after", [SHARDED, WHOLE], ids=["sharded", "whole"])
@pytest.mark.parametrize(("ranks", "then"), few([(4, 2), (2, 4), (1, 2)], [(4, 2)]))
def test_m_and_v_move_to_another_number_of_ranks(ranks: int, then: int, after: Any) -> None:
    def first(session: Session) -> dict[str, Any]:
        run = Run(session, **SHARDED)
        run.train(1, 5, ranks)
        return run.save()

    saved = run_ranks(ranks, first)

    def second(session: Session, **options: Any) -> tuple[list[str], str]:
        run = Run(session, saved[0], **options)
        run.optimizer.load_state_dict(saved[0]["optimizer"])
        report = run.optimizer.load_rank_state_dict([one["rank"] for one in saved])
        return run.train(6, STEPS, then), report["rank_state"]

    found = run_ranks(then, lambda s: second(s, **after))
    assert len({tuple(digests) for digests, _ in found}) == 1
    assert {how for _, how in found} == {"re-sharded"}
    # The same as if the moments had been put together by hand: in a run without shards on the same ranks.
    assert found == run_ranks(then, lambda s: second(s, **(WHOLE if after is SHARDED else SHARDED)))


def test_m_and_v_cannot_begin_at_zero() -> None:
    def body(session: Session) -> list[str]:
        run = Run(session, **SHARDED)
        run.train(1, 3, 2)
        saved = run.save()
        assert list(saved["optimizer"]["state"][0]) == ["step"]
        said = []
        for attempt in (None, None if run.rank else saved["rank"], "step"):
            again = Run(session, saved, **SHARDED)
            again.optimizer.load_state_dict(saved["optimizer"])
            with pytest.raises(CheckpointError) as raised:
                if attempt == "step":
                    again.train(4, 4, 2)
                else:
                    again.optimizer.load_rank_state_dict(attempt)
            said.append(str(raised.value))
        with pytest.raises(InvalidRequestError, match="needs whole m and v"):
            run.optimizer.dense_state_dict()
        return said

    for said in run_ranks(2, body):
        assert "cannot begin at zero" in said[0] and "cannot begin at zero" in said[1]
        assert "load_rank_state_dict was not called after load_state_dict" in said[2]


def test_a_plain_adam_that_loads_a_sharded_state_fails_instead_of_beginning_at_zero() -> None:
    def body(session: Session) -> None:
        run = Run(session, **SHARDED)
        run.train(1, 3, 2)
        state = {key: value for key, value in run.optimizer.state_dict().items() if key != "ocomm"}
        parameters = [torch.nn.Parameter(p.detach().clone()) for p in run.parameters]
        plain = torch.optim.AdamW(parameters)
        plain.load_state_dict(state)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(KeyError, match="exp_avg"):
            plain.step()

    run_ranks(2, body)


# Refused


def test_what_cannot_be_sharded_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    def refused(session: Session, **options: Any) -> str:
        with pytest.raises(InvalidRequestError) as raised:
            Run(session, shard_state=True, **options)
        return str(raised.value)

    def off(session: Session, **options: Any) -> bool:
        return Run(session, shard_state="auto", **options).optimizer._driver.is_sharded

    for said in run_ranks(2, lambda s: refused(s, dense_bits=8)):
        assert "shard_state=True, but dense_bits is 8, and parameters need 32 bits" in said
    hosts = ["a", "a", "b", "b"]
    if not MPI_SIZE:
        assert "hierarchical" in run_ranks(4, refused, hosts=hosts)[0]
    with caplog.at_level(logging.WARNING, logger="ocomm"):
        assert run_ranks(2, off) == [True, True]
        assert not caplog.records
        assert run_ranks(2, lambda s: off(s, dense_bits=8)) == [False, False]
    if not MPI_SIZE:  # rank 0 says it
        assert "shard_state='auto' is off, because dense_bits is 8" in caplog.text
        assert run_ranks(1, off) == [False]


def test_ranks_must_agree_and_other_values_are_refused() -> None:
    def differ(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            Run(session, shard_state=(True, False)[rank_of(session)])
        return str(raised.value)

    assert all("shard_state=True" in said for said in run_ranks(2, differ))

    def wrong(session: Session) -> None:
        with pytest.raises(SettingsError, match="shard_state must be True, False or 'auto', got 'yes'"):
            Run(session, shard_state="yes")

    run_ranks(2, wrong)
