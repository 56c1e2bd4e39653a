"""bfloat16 and float16 parameters: whatever happens to them, a float32 run with the same gradients is their law."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError
from ocomm.session import Session
from ocomm_torch.functions import broadcast_parameters
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.every_kind import KINDS, whole_state
from tests.frontends.onebit_jobs import gradients, initial
from tests.tiers import alternating
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: nothing here is of the network")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Of the tensors of ``SHAPES``.
MIXED = (BF16, FP16, FP32, BF16)


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


class Pair:
    """An optimizer of low-precision parameters, and its law: the same over float32 ones which begin where they do."""

    def __init__(
        self, kind: str, dtypes: Sequence[torch.dtype] = MIXED, inner: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.low = self.parameters(dtypes)
        self.law = [torch.nn.Parameter(p.detach().float().clone()) for p in self.low]
        self.optimizer = KINDS[kind].wrap(self.low, inner, **options)
        self.twin = KINDS[kind].wrap(self.law, inner, **{**options, "overlap": False})

    @staticmethod
    def parameters(dtypes: Sequence[torch.dtype], seed: int = 5) -> list[torch.nn.Parameter]:
        arrays = [torch.from_numpy(array) for array in initial(seed=seed)]
        return [torch.nn.Parameter(a.to(dtype)) for a, dtype in zip(arrays, dtypes, strict=True)]

    def backward(self, step: int, rank: int, passes: int = 1, without: Sequence[int] = ()) -> None:
        """Chosen gradients, rounded to each parameter's type."""
        self.optimizer.zero_grad()
        for k in range(passes):
            for index, grad in reversed(list(enumerate(gradients(step + 1000 * k, rank)))):
                if index not in without:
                    parameter = self.low[index]
                    (parameter * torch.from_numpy(grad).to(parameter.dtype)).sum().backward()

    def feed_the_twin(self) -> None:
        for low, law in zip(self.low, self.law, strict=True):
            law.grad = None if low.grad is None else low.grad.float()

    def step(self) -> None:
        self.feed_the_twin()
        self.optimizer.step()
        self.twin.step()

    def must_be_equal(self) -> None:
        for index, (low, law) in enumerate(zip(self.low, self.law, strict=True)):
            master = self.optimizer._masters.stepped[index]
            assert master.dtype is FP32
            assert same_bits(master, law), f"tensor {index}"
            assert same_bits(low, law.to(low.dtype)), f"tensor {index}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype
    bits = torch.int32 if a.dtype is FP32 else torch.int16
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def load(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_the_parameters_of_a_float32_run_with_the_same_gradients(kind: str, ranks: int) -> None:
    def body(session: Session) -> list[list[int]]:
        pair = Pair(kind)
        for step in range(1, 9):
            pair.backward(step, rank_of(session))
            pair.step()
            pair.must_be_equal()
        assert pair.optimizer.compression_report()["redone_steps"] == 0
        return [p.detach().float().numpy().tobytes() for p in pair.low]

    results = run_ranks(ranks, body)
    if "local" not in kind:
        assert results[0] == results[-1]


@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "0/1 Adam, local steps", "Lion"])
def test_ranks_of_one_host_add_up_their_widened_gradients(kind: str) -> None:
    def body(session: Session) -> None:
        pair = Pair(kind)
        for step in range(1, 7):
            pair.backward(step, rank_of(session))
            pair.step()
            pair.must_be_equal()
        assert pair.optimizer.compression_report()["form"] == "hierarchical"

    run_ranks(4, body, hosts=["a", "a", "b", "b"])


def test_a_model_converted_to_bfloat16_learns() -> None:
    def body(session: Session) -> tuple[float, float]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(BF16)
        optimizer = DistributedOneBitAdam(
            torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), freeze_step=20
        )
        broadcast_parameters(model.state_dict(), 0)
        generator = torch.Generator().manual_seed(rank_of(session))
        losses = []
        for _ in range(100):
            x = torch.randn(64, 8, generator=generator).to(BF16)
            loss = torch.nn.functional.mse_loss(model(x).float(), (x[:, :1] * x[:, 1:2]).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert {p.dtype for p in model.parameters()} == {BF16}
        return float(np.mean(losses[:5])), float(np.mean(losses[-5:]))

    for first, last in run_ranks(2, body):
        assert last < 0.4 * first


class TestEveryWayOfUsingThem:
    @pytest.mark.parametrize("kind", ["1-bit Adam, dense", "1-bit Adam, compressed", "0/1 Adam, local steps"])
    @pytest.mark.parametrize(
        ("inner", "options"),
        [
            ({"weight_decay": 0.1, "foreach": False}, {"overlap": False}),
            ({"weight_decay": 0.1, "fused": True}, {"verify": "full"}),
            ({}, {"max_grad_norm": 0.5}),
            ({}, {"max_grad_norm": 0.5, "clip": "previous", "verify": "version"}),
            ({}, {"backward_passes_per_step": 2}),
        ],
        ids=["coupled decay", "coupled decay, overlap", "exact clipping", "previous norm", "two passes"],
    )
    def test_options(self, kind: str, inner: dict[str, Any], options: dict[str, Any]) -> None:
        def body(session: Session) -> None:
            pair = Pair(kind, inner=inner, **options)
            pair.twin.backward_passes_per_step = 1
            for step in range(1, 9):
                pair.backward(step, rank_of(session), options.get("backward_passes_per_step", 1))
                pair.step()
                pair.must_be_equal()
            report = pair.optimizer.compression_report()
            assert report["redone_steps"] == 0
            assert report["overlap"] == options.get("overlap", True)

        run_ranks(2, body)

    @pytest.mark.parametrize("kind", KINDS)
    def test_frozen_parameters_and_gradients_that_are_missing(self, kind: str) -> None:
        def body(session: Session) -> None:
            rank = rank_of(session)
            pair = Pair(kind)
            for step in range(1, 9):
                without = {3: [0], 5: [0, 3], 6: [1] if rank else []}.get(step, [])
                pair.low[3].requires_grad_(step != 4)
                pair.backward(step, rank, without=[*without, *([3] if step == 4 else [])])
                pair.step()
                pair.must_be_equal()

        run_ranks(2, body)

    def test_sparse_and_float32_gradients(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            for step in range(1, 7):
                pair.backward(step, rank_of(session), without=[0, 1, 3])
                for index in (0, 3):
                    grad = torch.from_numpy(gradients(step, rank_of(session))[index]).to(BF16)
                    pair.low[index].grad = grad.to_sparse()
                if hasattr(pair.low[1], "grad_dtype"):
                    pair.low[1].grad_dtype = FP32
                    pair.low[1].grad = torch.from_numpy(gradients(step, rank_of(session))[1])
                pair.feed_the_twin()
                for law in pair.law:
                    law.grad = None if law.grad is None else law.grad.to_dense()
                pair.optimizer.step()
                pair.twin.step()
                pair.must_be_equal()

        run_ranks(2, body)

    def test_the_wrapped_adam_has_a_bfloat16_state_already(self) -> None:
        def body(session: Session) -> None:
            low = [torch.nn.Parameter(torch.from_numpy(array).to(BF16)) for array in initial()]
            adam = torch.optim.Adam(low, lr=1e-2, foreach=False)
            for parameter, grad in zip(low, gradients(1, 0), strict=True):
                parameter.grad = torch.from_numpy(grad).to(BF16)
            adam.step()
            law = [torch.nn.Parameter(p.detach().float()) for p in low]
            plain = torch.optim.Adam(law, lr=1e-2, foreach=False)
            plain.load_state_dict(copy.deepcopy(adam.state_dict()))
            pair = Pair.__new__(Pair)
            pair.low, pair.law = low, law
            pair.optimizer, pair.twin = (DistributedOneBitAdam(inner, freeze_step=4) for inner in (adam, plain))
            for step in range(2, 9):
                pair.backward(step, rank_of(session))
                pair.step()
                pair.must_be_equal()
            assert pair.optimizer.compression_report()["stage"] == "compressed"

        run_ranks(2, body)

    def test_a_warm_start(self) -> None:
        def body(session: Session) -> None:
            law = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial()]
            adam = torch.optim.Adam(law, lr=1e-2, foreach=False)
            for step in (1, 2):
                for parameter, grad in zip(law, gradients(step, 0), strict=True):
                    parameter.grad = torch.from_numpy(grad)
                adam.step()
            pair = Pair("1-bit Adam, compressed", warm_start=adam.state_dict())
            for step in range(3, 7):
                pair.backward(step, rank_of(session))
                pair.step()
                pair.must_be_equal()

        run_ranks(2, body)


class TestAStepThatIsNotTaken:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_nan_on_one_rank_touches_nothing(self, kind: str) -> None:
        def body(session: Session) -> None:
            rank = rank_of(session)
            pair = Pair(kind)
            for step in range(1, 6):
                pair.backward(step, rank)
                pair.step()
            before = whole_state(pair.low, pair.optimizer)
            pair.backward(6, rank)
            if rank == 1:
                pair.low[0].grad[3, 7] = np.nan
            with pytest.raises(NonFiniteError, match="a gradient is NaN or Inf in step 6"):
                pair.optimizer.step()
            assert whole_state(pair.low, pair.optimizer) == before
            pair.must_be_equal()

        run_ranks(2, body)

    @pytest.mark.parametrize("verify", ["sampled", "full"])
    def test_a_gradient_that_changes_after_it_was_widened_is_exchanged_again(self, verify: str) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed", verify=verify)
            for step in range(1, 9):
                pair.backward(step, rank_of(session))
                if step == 6 and rank_of(session) == 1:
                    pair.low[0].grad.data.mul_(0.5)  # leaves the tensor's version as it is
                pair.step()
                pair.must_be_equal()
            assert pair.optimizer.compression_report()["redone_steps"] == 1

        run_ranks(2, body)


class TestGradScaler:
    @pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch < 2.10 has no Tensor.grad_dtype")
    @pytest.mark.parametrize(("kind", "unscale"), alternating(KINDS, [False, True]))
    def test_an_overflow_on_one_rank_skips_the_step_on_all_and_touches_nothing(self, kind: str, unscale: bool) -> None:
        def body(session: Session) -> list[float]:
            rank = rank_of(session)
            pair = Pair(kind, [FP16, FP16, FP32, BF16])
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scales = []
            for step in range(1, 10):
                pair.optimizer.zero_grad()
                for index, grad in reversed(list(enumerate(gradients(step, rank)))):
                    parameter = pair.low[index]
                    grad[..., 0] *= 1e-5  # lost in float16 once the scale is divided out
                    loss = (parameter * torch.from_numpy(grad).to(parameter.dtype)).sum()
                    if index == 1 and (step, rank) in ((1, 0), (4, 1), (7, 0)):
                        loss = loss * 1e4
                    scaler.scale(loss).backward()
                before = whole_state(pair.low, pair.optimizer)
                scaled = [parameter.grad.float() for parameter in pair.low]
                for law, grad in zip(pair.law, scaled, strict=True):
                    law.grad = grad / scaler.get_scale()
                if unscale:
                    scaler.unscale_(pair.optimizer)
                scaler.step(pair.optimizer)
                scaler.update()
                if step in (1, 4, 7):
                    assert whole_state(pair.low, pair.optimizer) == before
                else:
                    pair.twin.step()
                pair.must_be_equal()
                scales.append(scaler.get_scale())
            return scales

        results = run_ranks(2, body)
        assert results[0] == results[1] == [512.0] * 3 + [256.0] * 3 + [128.0] * 3


class TestWhatTheUserWrites:
    @pytest.mark.parametrize("kind", KINDS)
    def test_parameters_are_broadcast_after_the_wrap(self, kind: str) -> None:
        def body(session: Session) -> None:
            rank = rank_of(session)
            pair = Pair(kind)
            with torch.no_grad():
                for low, law in zip(pair.low, pair.law, strict=True):
                    low += rank
                    law.copy_(low)
            for parameters in (pair.low, pair.law):
                broadcast_parameters(parameters, 0)
            for step in range(1, 5):
                pair.backward(step, rank)
                pair.step()
                pair.must_be_equal()

        run_ranks(2, body)

    def test_what_is_written_after_a_sync_of_local_steps_is_where_the_next_interval_starts(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("0/1 Adam, local steps")
            syncs = 0
            for step in range(1, 13):
                pair.backward(step, rank_of(session))
                pair.step()
                pair.must_be_equal()
                report = pair.optimizer.compression_report()
                assert not syncs or all(parameters[0][0, 0] > 900 for parameters in (pair.low, pair.law))
                if step >= 6 and not syncs and report["synced"]:
                    syncs = report["syncs"]
                    for parameters in (pair.low, pair.law):
                        parameters[0].data[0, 0] = 1000.0
            assert report["syncs"] > syncs > 0

        run_ranks(2, body)

    @pytest.mark.parametrize("how", ["in place", "through data", "numpy", "another tensor"])
    def test_written_elements_count_and_the_others_keep_what_only_masters_have(self, how: str) -> None:
        def write(tensor: torch.Tensor) -> None:
            if how == "in place":
                with torch.no_grad():
                    tensor[1].zero_()
            elif how == "through data":
                tensor.data[1] = 0.0
            elif how == "numpy":
                bits = tensor.detach()
                (bits.view(torch.int16) if bits.dtype in (BF16, FP16) else bits).numpy()[1] = 0
            else:
                tensor.data = torch.cat([tensor.data[:1], torch.zeros_like(tensor.data[:1]), tensor.data[2:]])

        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            for step in range(1, 9):
                if step in (2, 6):
                    for index in (0, 1):
                        write(pair.low[index])
                        write(pair.law[index])
                pair.backward(step, rank_of(session))
                pair.step()
                pair.must_be_equal()
                lost = pair.law[0].to(BF16).float() != pair.law[0]
                assert lost[2:].float().mean() > 0.9

        run_ranks(2, body)

    def test_a_write_between_backward_and_step_counts_where_the_decay_has_read_the_master(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed", inner={"weight_decay": 0.1})
            for step in range(1, 9):
                pair.backward(step, rank_of(session))
                if step == 6:
                    for parameters in (pair.low, pair.law):
                        with torch.no_grad():
                            parameters[0].fill_(1000.0)
                pair.step()
                pair.must_be_equal()
            assert pair.optimizer.compression_report()["redone_steps"] == 1

        run_ranks(2, body)

    def test_another_type_is_an_error(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            pair.low[0].data = pair.low[0].data.float()
            message = (
                r"parameter 'parameter.0.0' is float32 now, and was bfloat16 when it was wrapped\. .* wrap a new Adam"
            )
            with pytest.raises(InvalidRequestError, match=message):
                pair.optimizer.state_dict()

        run_ranks(1, body)

    @pytest.mark.parametrize(
        ("dtype", "message"),
        [
            (torch.bfloat16, "parameter 'weight' is bfloat16 now, and was float32 when it was wrapped"),
            (torch.float64, "parameter 'weight' is torch.float64; DistributedEFSGD needs"),
        ],
    )
    def test_a_model_that_gets_another_type_between_steps_is_an_error(self, dtype: torch.dtype, message: str) -> None:
        def body(session: Session) -> None:
            model = torch.nn.Linear(5, 7)
            for parameter in model.parameters():
                torch.nn.init.ones_(parameter)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = hvd.DistributedEFSGD(inner, model.named_parameters())
            for step in range(2):
                if step == 1:
                    model.to(dtype)
                optimizer.zero_grad()
                model(torch.ones(8, 5, dtype=model.weight.dtype)).square().sum().backward()
                with pytest.raises(InvalidRequestError, match=message) if step else contextlib.nullcontext():
                    optimizer.step()

        run_ranks(2, body)

    def test_another_type_on_another_rank_is_an_error(self) -> None:
        def body(session: Session) -> None:
            dtype = (BF16, FP16)[rank_of(session)]
            message = (
                r"rank\(s\) \[0\] registered tensor 'parameter.0.1' \(4097,\) bfloat16 .*; rank\(s\) \[1\] .* float16"
            )
            with pytest.raises(MismatchError, match=message):
                KINDS["Lion"].wrap(Pair.parameters([BF16, dtype, FP32, FP32]))

        run_ranks(2, body)


class TestCheckpoints:
    @pytest.mark.parametrize(("kind", "parameters_first"), alternating(KINDS, [True, False]))
    def test_a_resumed_run_is_the_same_in_every_bit(self, kind: str, parameters_first: bool, tmp_path: Path) -> None:
        """At step 5, between two syncs of 0/1 Adam with local steps."""

        def body(session: Session) -> None:
            rank = rank_of(session)
            pair = Pair(kind)
            for step in range(1, 6):
                pair.backward(step, rank)
                pair.step()
            saved = {
                "parameters": [p.detach() for p in pair.low],
                "optimizer": pair.optimizer.state_dict(),
                "rank": pair.optimizer.rank_state_dict(),
            }
            path = tmp_path / f"{rank}.pt"
            torch.save(saved, path)
            saved = torch.load(path, weights_only=True)
            low, law = pair.low, pair.law
            pair.low = Pair.parameters(MIXED, seed=rank)
            in_ddp = [(f"module.parameter.0.{number}", p) for number, p in enumerate(pair.low)]
            pair.optimizer = KINDS[kind].wrap(pair.low, named_parameters=in_ddp if parameters_first else None)
            if parameters_first:
                load(pair.low, saved["parameters"])
            pair.optimizer.load_state_dict(saved["optimizer"])
            if not parameters_first:
                load(pair.low, saved["parameters"])
            assert pair.optimizer.load_rank_state_dict(saved["rank"])["rank_state"] == "loaded"
            for step in range(6, 11):
                pair.backward(step, rank)
                pair.step()
                pair.must_be_equal()
            assert law is pair.law and low is not pair.low

        run_ranks(2, body)

    def test_going_back_within_a_run(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            rank, history = rank_of(session), {}
            saved: Any = None
            for step in [*range(1, 9), *range(5, 9)]:
                if step == 5 and saved is None:
                    saved = [p.detach().clone() for p in pair.low], pair.optimizer.state_dict()
                    ranks = pair.optimizer.rank_state_dict()
                elif step == 5:
                    load(pair.low, saved[0])
                    pair.optimizer.load_state_dict(saved[1])
                    pair.optimizer.load_rank_state_dict(ranks)
                pair.backward(step, rank)
                pair.optimizer.step()
                now = whole_state(pair.low, pair.optimizer)
                assert history.setdefault(step, now) == now

        run_ranks(2, body)

    @pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "0/1 Adam"])
    def test_a_plain_adam_loads_the_state_and_gives_one_from_which_masters_start_anew(self, kind: str) -> None:
        def body(session: Session) -> None:
            rank = rank_of(session)
            pair = Pair(kind)
            for step in range(1, 6):
                pair.backward(step, rank)
                pair.step()
            state = pair.optimizer.state_dict()
            assert state["ocomm"]["masters"].keys() == {"parameter.0.0", "parameter.0.1", "parameter.0.3"}
            assert same_bits(state["ocomm"]["masters"]["parameter.0.0"], pair.law[0])
            adam = torch.optim.Adam(pair.low)
            adam.load_state_dict(state)
            assert adam.state[pair.low[0]]["exp_avg"].dtype is BF16
            pair.optimizer.load_state_dict(adam.state_dict())
            for low, law in zip(pair.low, pair.law, strict=True):
                law.data.copy_(low)
            widened = torch.optim.Adam(pair.law)
            widened.load_state_dict(copy.deepcopy(adam.state_dict()))
            pair.twin.load_state_dict(widened.state_dict())
            for step in range(6, 9):
                pair.backward(step, rank)
                pair.step()
                pair.must_be_equal()

        run_ranks(2, body)

    def test_a_parameter_that_is_not_what_its_saved_master_rounds_to_counts(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            for step in range(1, 6):
                pair.backward(step, rank_of(session))
                pair.step()
            state, twin = pair.optimizer.state_dict(), pair.twin.state_dict()
            for parameters in (pair.low, pair.law):
                parameters[0].data[3] = 0.25
            pair.optimizer.load_state_dict(state)
            pair.twin.load_state_dict(twin)
            pair.must_be_equal()

        run_ranks(1, body)

    def test_a_state_of_other_types_is_refused(self) -> None:
        def body(session: Session) -> None:
            pair = Pair("1-bit Adam, compressed")
            message = r"'parameter.0.0' \(70, 130\) float32 .* the optimizer has 'parameter.0.0' \(70, 130\) bfloat16"
            with pytest.raises(CheckpointError, match=message):
                pair.optimizer.load_state_dict(pair.twin.state_dict())

        run_ranks(1, body)


def test_the_report_says_what_masters_and_widened_gradients_take() -> None:
    def body(session: Session) -> None:
        pair = Pair("Lion", [BF16, FP32, FP16, FP32])
        pair.backward(1, 0)
        pair.step()
        memory = pair.optimizer.compression_report()["memory_bytes"]
        assert memory["masters"] == memory["widened_gradients"] == 4 * (70 * 130 + 33)
        memory = pair.twin.compression_report()["memory_bytes"]
        assert memory["masters"] == memory["widened_gradients"] == 0

    run_ranks(1, body)


def test_a_step_makes_no_new_tensors_for_gradients_or_masters() -> None:
    def body(session: Session) -> None:
        pair = Pair("Birder")
        places = set()
        for step in range(1, 5):
            pair.backward(step, 0)
            pair.step()
            places.add(tuple(pair.optimizer._driver.core.gradients["grad"][[0, 1, 3]].tolist()))
            places.add(tuple(pair.optimizer._driver.core.tensors["param"][[0, 1, 3]].tolist()))
        assert len(places) == 2

    run_ranks(1, body)
