"""``DistributedOptimizer`` with ``Compression.int8`` and ``int4``: any optimizer on averages in codes."""

from __future__ import annotations

import contextvars
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError
from ocomm.optim import low_bit
from ocomm.optim.verdict import StepOutcome
from ocomm.session import Session
from ocomm.types import Settings
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial
from tests.frontends.test_torch_onebit import rank_of
from tests.oracle.dense_codes import DenseCodes
from tests.worlds import PATIENCE_S, run_ranks

COMPRESSIONS = {8: hvd.Compression.int8, 4: hvd.Compression.int4}
Parameters = list[torch.nn.Parameter]


def sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


def adam(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def muon(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=1e-2)


MATRICES = ((70, 130), (33, 5))


def uneven(step: int, rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray | None]:
    """Gradients of which one is missing on one rank, one on all ranks, and one is zero for a while."""
    result = gradients(step, rank, shapes)
    if step % 3 == rank:
        result[0] = None
    if step % 4 == 0:
        result[1] = None
    if step < 4:
        result[-1] = np.zeros(shapes[-1], np.float32)
    return result


class Simulation:
    """The wrapped optimizer on the averages of ``tests.oracle.dense_codes``, in one process."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], ranks: int, bits: int, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(shapes)]
        self.optimizer = make(self.parameters)
        self.codes = []
        for parameter in self.parameters:
            numel = parameter.numel()
            blocks = [slice(start, min(start + 4096, numel)) for start in range(0, numel, 4096)]
            self.codes.append(DenseCodes(numel, ranks, bits, blocks, 0.8 if bits == 4 else 0.0))

    def step(self, each: Sequence[list[np.ndarray | None]]) -> str:
        for number, (parameter, codes) in enumerate(zip(self.parameters, self.codes, strict=True)):
            local = [own[number] for own in each]
            parameter.grad = None
            if any(gradient is not None for gradient in local):
                flat = [np.zeros(parameter.numel(), np.float32) if g is None else g.reshape(-1) for g in local]
                parameter.grad = torch.from_numpy(codes.average(flat).reshape(parameter.shape))
        self.optimizer.step()
        return digest([p.detach().numpy() for p in self.parameters])


def wrapped(make: Callable[..., torch.optim.Optimizer], parameters: Parameters, bits: int, **options: Any) -> Any:
    names = [f"tensor.{number}" for number in range(len(parameters))]
    named = list(zip(names, parameters, strict=True))
    return hvd.DistributedOptimizer(make(parameters), named, compression=COMPRESSIONS[bits], **options)


def job(
    session: Session,
    bits: int,
    steps: int = 12,
    make: Callable[..., torch.optim.Optimizer] = sgd,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **options: Any,
) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(shapes)]
    optimizer = wrapped(make, parameters, bits, **options)
    digests = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(parameters, uneven(step, rank_of(session), shapes), range(len(shapes) - 1, -1, -1))
        optimizer.step()
        digests.append(digest([p.detach().numpy() for p in parameters]))
    return {"digests": digests, "report": optimizer.compression_report(), "state": optimizer.rank_state_dict()}


@pytest.mark.parametrize(
    ("bits", "ranks", "make"),
    [(8, 1, sgd), (8, 2, sgd), (4, 2, adam), (4, 4, sgd), (8, 2, muon)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_wrapped_optimizer_steps_on_the_averages_of_the_simulation(bits: int, ranks: int, make: Any) -> None:
    shapes = MATRICES if make is muon else SHAPES
    simulation = Simulation(make, ranks, bits, shapes)
    expected = [simulation.step([uneven(step, rank, shapes) for rank in range(ranks)]) for step in range(1, 13)]
    for result in run_ranks(ranks, lambda s: job(s, bits, make=make, shapes=shapes)):
        assert result["digests"] == expected


def test_errors_in_4_bits_are_zeroed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "RESET", 5)
    simulation = Simulation(sgd, 2, 4, SHAPES)
    for codes in simulation.codes:
        codes.reset = 5
    expected = [simulation.step([uneven(step, rank) for rank in range(2)]) for step in range(1, 13)]
    for result in run_ranks(2, lambda s: job(s, 4)):
        assert result["digests"] == expected


def test_bits_do_not_depend_on_segments_engine_order_or_overlap() -> None:
    """A backward pass of all tensors at once waits at its end, one of each tensor in ``step()``."""

    def at_once(session: Session) -> list[str]:
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial()]
        optimizer = wrapped(sgd, parameters, 4)
        order = np.random.default_rng(rank_of(session)).permutation(len(SHAPES)).tolist()
        digests = []
        for step in range(1, 9):
            optimizer.zero_grad()
            grads = gradients(step, rank_of(session))
            sum((parameters[n] * torch.from_numpy(grads[n])).sum() for n in order).backward()
            assert optimizer._stepper.overlapping or step == 1
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests

    simulation = Simulation(sgd, 3, 4, SHAPES)
    expected = [simulation.step([gradients(step, rank) for rank in range(3)]) for step in range(1, 9)]
    assert run_ranks(3, at_once) == [expected] * 3
    for settings in (replace(Settings(), segment_nbytes=2048, window=1), replace(Settings(), engine="python")):
        assert run_ranks(3, at_once, settings=settings) == [expected] * 3


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_on_the_wire_are_those_of_the_formula(bits: int) -> None:
    shapes = ((300, 1000), (1000,), (100,))
    ranks, steps = 4, 3
    numels = [int(np.prod(shape)) for shape in shapes]
    lengths = [min(4096, numel - start) for numel in numels for start in range(0, numel, 4096)]
    payload = sum(-(-bits * length // 8) + 4 * -(-length // 128) for length in lengths)

    def body(session: Session) -> tuple[int, int]:
        """Bytes of the steps after the first, as the engine has counted them, and as the report says."""
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(shapes)]
        optimizer = wrapped(sgd, parameters, bits)
        assert session.engine is not None
        before = 0, 0
        for step in range(1 + steps):
            if step == 1:
                before = session.engine.counters()["bytes_sent"], optimizer.compression_report()["bytes_sent"]
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session), shapes), range(len(shapes)))
            optimizer.step()
        report = optimizer.compression_report()
        assert report["dense_bits"] == bits
        return session.engine.counters()["bytes_sent"] - before[0], report["bytes_sent"] - before[1]

    formula = ranks * steps * 2 * (ranks - 1) / ranks * payload
    for sent in zip(*run_ranks(ranks, body), strict=True):
        assert formula <= sum(sent) <= 1.02 * formula


def alike(model: torch.nn.Module) -> None:
    """Gives a model the same parameters on all ranks, which are threads of one process, with one generator of Torch."""
    generator = np.random.default_rng(3)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(0.3 * generator.normal(size=tuple(parameter.shape))).float()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 40), torch.nn.Linear(40, 3)
        alike(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss_of(model: torch.nn.Module, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng([rank, step]).normal(size=(8, 6))).to(dtype)
    return model(x).float().square().mean()


def all_equal(values: list[Any]) -> bool:
    return all(digest([v.numpy() for v in value]) == digest([v.numpy() for v in values[0]]) for value in values)


def test_gradients_are_averages_when_backward_returns() -> None:
    def body(session: Session) -> Any:
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank_of(session), step).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            seen.append([*[p.grad.clone() for p in model.parameters()], norm])
            optimizer.step()
        assert optimizer.compression_report()["redone_steps"] == 0, "clipping changes averages, not what is sent"
        return [value for values in seen for value in values] + [p.detach() for p in model.parameters()]

    results = run_ranks(2, body)
    assert all_equal(results)


def test_a_use_of_a_gradient_waits_where_backward_has_not_reached_every_parameter() -> None:
    def body(session: Session) -> Any:
        model, rank = Net(), rank_of(session)
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0:
                model.last(torch.ones(1, 40)).sum().backward()
            else:
                loss_of(model, rank, step).backward()
            model.last.weight.grad.clamp_(-0.01, 0.01)
            assert model.first.weight.grad is not None, "another rank has a gradient"
            optimizer.step()
        return [p.detach() for p in model.parameters()] + [p.grad for p in model.parameters()]

    assert all_equal(run_ranks(2, body))


def test_gradients_are_averages_after_a_backward_pass_that_raised_on_all_ranks() -> None:
    def explode(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("hook")

    def body(session: Session) -> Any:
        model, norms = Net(), []
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        handle = model.first.weight.register_hook(explode)
        with pytest.raises(RuntimeError, match="hook"):
            loss_of(model, rank_of(session)).backward()
        handle.remove()
        with pytest.raises(AssertionError, match="a backward pass that raised"):
            optimizer.zero_grad()
        optimizer.synchronize()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank_of(session), step).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
        return norms

    assert all_equal(run_ranks(2, body))


@pytest.mark.parametrize("kind", ["bfloat16", "channels last"])
def test_several_backward_calls_of_a_step_give_what_one_gives(kind: str) -> None:
    """Where a bucket is read in a later call, and gradients of an earlier one have to be copied."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    shapes = ((3, 2, 2, 2), (5, 4, 2, 2), (2, 2, 2, 2))

    def body(session: Session, calls: Sequence[Sequence[int]]) -> str:
        rank = rank_of(session)
        tensors = [torch.from_numpy(array).to(dtype) for array in initial(shapes)]
        if kind == "channels last":
            tensors = [tensor.to(memory_format=torch.channels_last) for tensor in tensors]
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        optimizer = wrapped(sgd, parameters, 8)
        for step in range(1, 5):
            wanted = [torch.from_numpy(array).to(dtype) for array in gradients(step, rank, shapes)]
            for call in calls:
                torch.stack([(parameters[index] * wanted[index]).sum() for index in call]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.compression_report()["overlap"]
        return digest([p.detach().float().contiguous().numpy() for p in parameters])

    def run(calls: Sequence[Sequence[int]]) -> list[str]:
        return run_ranks(2, lambda session: body(session, calls))

    assert run(((0, 1), (2,))) == run(((0, 1, 2),))


def test_a_backward_call_after_a_use_of_gradients_says_what_made_the_averages() -> None:
    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = wrapped(sgd, parameters, 8)
        parameters[0].sum().backward()
        assert parameters[0].grad is not None
        parameters[0].grad.norm()
        with pytest.raises(AssertionError, match=r"gradient of 'tensor\.1' .* used, .* between two backward calls"):
            parameters[1].sum().backward()
        assert optimizer.compression_report()["step"] == 1

    run_ranks(2, body)


def test_several_optimizers_whose_gradients_come_in_other_orders_do_not_wait_crosswise() -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)
        parts = [Net(), Net()]
        optimizers = [
            hvd.DistributedOptimizer(sgd(list(part.parameters())), compression=hvd.Compression.int4) for part in parts
        ]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(part, rank, step) for part in parts]
            sum(losses if rank else losses[::-1]).backward()
            for part in parts:
                torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for part in parts for p in part.parameters()]

    assert all_equal(run_ranks(2, body))


def test_optimizers_of_two_threads_do_not_disturb_each_other() -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)
        parts = [Net(), Net()]
        optimizers = [
            hvd.DistributedOptimizer(sgd(list(part.parameters())), compression=hvd.Compression.int8) for part in parts
        ]
        both_have_begun = threading.Barrier(2, timeout=PATIENCE_S)

        def wait_for_both(grad: torch.Tensor) -> None:
            both_have_begun.wait()

        def train(which: int) -> None:
            part, optimizer = parts[which], optimizers[which]
            part.first.weight.register_hook(wait_for_both)
            for step in range(10):
                optimizer.zero_grad()
                loss_of(part, rank, step).backward()
                optimizer.step()

        with ThreadPoolExecutor(2) as pool:
            for trained in [pool.submit(contextvars.copy_context().run, train, (which + rank) % 2) for which in (0, 1)]:
                trained.result()
        return [p.detach() for part in parts for p in part.parameters()]

    assert all_equal(run_ranks(2, body))


def test_synchronize_and_skip_synchronize_as_in_horovod() -> None:
    def body(session: Session) -> Any:
        model = Net()
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        loss_of(model, rank_of(session)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank_of(session)).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        before = [p.tolist() for p in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, rank_of(session)).backward()
        optimizer.synchronize()
        optimizer.zero_grad()  # leaves the step out
        assert [p.tolist() for p in model.parameters()] == before and optimizer.outcome is StepOutcome.SKIP
        loss_of(model, rank_of(session)).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        found = [p.detach().clone() for p in model.parameters()]
        loss_of(model, rank_of(session)).backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, rank_of(session)).backward()
        return found

    assert all_equal(run_ranks(2, body))


def test_passes_of_a_step_are_summed_before_they_are_sent() -> None:
    def body(session: Session, passes: int) -> Any:
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            sgd(list(model.parameters())), compression=hvd.Compression.int8, backward_passes_per_step=passes
        )
        for step in range(3):
            optimizer.zero_grad()
            if passes == 1:
                sum(loss_of(model, rank_of(session), 2 * step + k) for k in range(2)).backward()
            else:
                for k in range(2):
                    loss_of(model, rank_of(session), 2 * step + k).backward()
            optimizer.step()
        assert optimizer.compression_report()["dense_steps"] == 3
        return [p.detach() for p in model.parameters()]

    once, twice = run_ranks(2, lambda s: body(s, 1)), run_ranks(2, lambda s: body(s, 2))
    assert all_equal(twice)
    for a, b in zip(once[0], twice[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_state_is_refused_by_another_class_under_the_names_that_users_know() -> None:
    def body(session: Session) -> None:
        model = Net()
        optimizer = hvd.DistributedOptimizer(adam(list(model.parameters())), compression=hvd.Compression.int8)
        loss_of(model, rank_of(session), 0).backward()
        optimizer.step()
        state = optimizer.state_dict()
        other = hvd.DistributedOneBitAdam(torch.optim.Adam(Net().parameters()))
        words = "is of DistributedOptimizer with compression, the optimizer is DistributedOneBitAdam. Resume"
        with pytest.raises(CheckpointError, match=words):
            other.load_state_dict(state)
        words = "is of DistributedOneBitAdam, the optimizer is DistributedOptimizer with compression. Resume"
        with pytest.raises(CheckpointError, match=words):
            optimizer.load_state_dict(other.state_dict())

    run_ranks(1, body)


def test_a_run_that_stops_goes_on_in_every_bit() -> None:
    def body(session: Session) -> Any:
        rank, model = rank_of(session), Net()
        optimizer = hvd.DistributedOptimizer(adam(list(model.parameters())), compression=hvd.Compression.int4)

        def train(model: Net, optimizer: Any, steps: range) -> list[str]:
            found = []
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                found.append(digest([p.detach().numpy() for p in model.parameters()]))
            return found

        train(model, optimizer, range(6))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), optimizer.rank_state_dict()], file)
        on = train(model, optimizer, range(6, 12))
        file.seek(0)
        parameters, state, own = torch.load(file, weights_only=True)
        again = Net()
        again.load_state_dict(parameters)
        resumed = hvd.DistributedOptimizer(adam(list(again.parameters())), compression=hvd.Compression.int4)
        resumed.load_state_dict(state)
        assert resumed.awaits_rank_state
        assert resumed.load_rank_state_dict(own)["rank_state"] == "loaded"
        assert train(again, resumed, range(6, 12)) == on

        plain = torch.optim.AdamW(again.parameters())
        plain.load_state_dict({key: value for key, value in state.items() if key != "ocomm"})
        from_plain = hvd.DistributedOptimizer(adam(list(Net().parameters())), compression=hvd.Compression.int8)
        from_plain.load_state_dict(plain.state_dict())
        return on

    first, second = run_ranks(2, body)
    assert first == second


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank() -> None:
    def body(session: Session) -> Any:
        rank, model = rank_of(session), Net()
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            before = [p.detach().clone() for p in model.parameters()], optimizer.rank_state_dict()["worker"]
            (loss * (float("nan") if step == 3 and rank == 1 else 1.0)).backward()
            if step != 3:
                optimizer.step()
                continue
            assert not all(bool(p.grad.isfinite().all()) for p in model.parameters()), "on every rank"
            with pytest.raises(NonFiniteError, match=r"rank\(s\) \[1\]"):
                optimizer.step()
            after = [p.detach() for p in model.parameters()], optimizer.rank_state_dict()["worker"]
            assert digest([p.numpy() for p in before[0]]) == digest([p.numpy() for p in after[0]])
            assert all(bool((before[1][name] == after[1][name]).all()) for name in after[1])
        return [p.detach() for p in model.parameters()]

    assert all_equal(run_ranks(2, body))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("clips", [False, True])
def test_a_grad_scaler_unscales_averages_of_which_a_rank_has_no_gradient(
    clips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> list[list[float]]:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), compression=hvd.Compression.int8)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        used = parameters[1:2] if rank_of(session) else parameters[:2]
        scaler.scale(torch.cat([4 * p for p in used]).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        scaler.step(optimizer)
        return [p.tolist() for p in parameters]

    assert run_ranks(2, body) == [[[-1.0] * 3, [-3.0] * 3, [1.0] * 3]] * 2
    assert not [record for record in caplog.records if "this rank had none" in record.getMessage()]


def test_a_grad_scaler_skips_on_all_ranks_and_goes_on() -> None:
    def body(session: Session) -> Any:
        rank, model = rank_of(session), Net()
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (float("inf") if step == 2 and rank == 0 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        assert optimizer.compression_report()["step"] == 5
        return [p.detach() for p in model.parameters()]

    assert all_equal(run_ranks(2, body))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_masters(dtype: torch.dtype) -> None:
    def body(session: Session) -> Any:
        model = Net().to(dtype)
        optimizer = hvd.DistributedOptimizer(adam(list(model.parameters())), compression=hvd.Compression.int8)
        before = loss_of(model, rank_of(session), 0, dtype).item()
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, rank_of(session), step % 2, dtype).backward()
            optimizer.step()
        assert loss_of(model, rank_of(session), 0, dtype).item() < before
        masters = optimizer.state_dict()["ocomm"]["masters"]
        for parameter, master in zip(model.parameters(), masters.values(), strict=True):
            assert parameter.dtype is dtype and torch.equal(master.to(dtype), parameter.detach())
        return [p.detach().float() for p in model.parameters()]

    assert all_equal(run_ranks(2, body))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch < 2.10 has no Tensor.grad_dtype")
def test_a_grad_scaler_has_float32_averages_of_float16_parameters_of_which_a_rank_has_no_gradient() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.ones(300, dtype=torch.float16)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), compression=hvd.Compression.int8)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            used = parameters[:1] if step and rank_of(session) else parameters
            scaler.scale(torch.cat([p * 1e-3 for p in used]).sum()).backward()
            scaler.unscale_(optimizer)
            assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in parameters)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().float() for p in parameters]

    results = run_ranks(2, body)
    assert all_equal(results)
    for found, expected in zip(results[0], (1 - 3e-3, 1 - 2e-3), strict=True):
        torch.testing.assert_close(found, torch.full((300,), expected), rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_travel_dense_also_for_sparse_adam(dtype: torch.dtype) -> None:
    def body(session: Session) -> Any:
        table = torch.nn.Embedding(50, 4, sparse=True)
        alike(table)
        table.to(dtype)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(table.parameters()), lr=0.1), compression=hvd.Compression.int8
        )
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([rank_of(session), 7 + step])).square().sum().backward()
            optimizer.step()
        return [table.weight.detach().float()]

    assert all_equal(run_ranks(2, body))


def test_channels_last_frozen_and_unnamed_parameters() -> None:
    def body(session: Session) -> Any:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
        alike(model)
        model.to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=hvd.Compression.int8)
        for step in range(4):
            model[0].bias.requires_grad_(step != 1)
            optimizer.zero_grad()
            x = torch.from_numpy(np.random.default_rng([rank_of(session), step]).normal(size=(2, 3, 8, 8))).float()
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all_equal(run_ranks(2, body))


def test_a_process_set_and_ranks_outside_it() -> None:
    def body(session: Session) -> Any:
        rank, model = rank_of(session), Net()
        pair = hvd.add_process_set([0, 2])
        optimizer = hvd.DistributedOptimizer(
            sgd(list(model.parameters())), compression=hvd.Compression.int8, process_set=pair
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    results = run_ranks(3, body)
    assert all_equal([results[0], results[2]]) and not all_equal(results)


@pytest.mark.parametrize("other", ["int4", "none", "bf16"])
def test_another_compression_on_one_rank_is_named(other: str) -> None:
    def body(session: Session) -> str:
        model = Net()
        compression = getattr(hvd.Compression, other if rank_of(session) else "int8")
        with pytest.raises(MismatchError) as found:
            optimizer = hvd.DistributedOptimizer(sgd(list(model.parameters())), compression=compression)
            loss_of(model, rank_of(session)).backward()
            optimizer.step()
        return str(found.value)

    for message in run_ranks(2, body):
        assert "DistributedOptimizer" in message and "compression" in message


@pytest.mark.parametrize(
    ("setting", "told"),
    [("lr", r"\[0\] \(lr 0\.1\); rank\(s\) \[1\] \(lr 0\.05\)"), ("momentum", "so another of these differs")],
)
def test_other_settings_on_one_rank_are_told_in_the_step_after_that(setting: str, told: str) -> None:
    def body(session: Session) -> None:
        model = Net()
        settings = {"lr": 0.1, "momentum": 0.9}
        settings[setting] -= 0.05 * rank_of(session)
        inner = torch.optim.SGD(model.parameters(), **settings)
        optimizer = hvd.DistributedOptimizer(inner, compression=hvd.Compression.int8)
        loss_of(model, rank_of(session)).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.param_groups[0].update(lr=0.01, momentum=0.0)  # what differed in a step is told after it
        loss_of(model, rank_of(session)).backward()
        with pytest.raises(MismatchError, match=rf"of the step before differ between ranks in step 2: .*{told}"):
            optimizer.step()

    run_ranks(2, body)


def test_what_cannot_be_had_with_codes_is_named() -> None:
    def body(session: Session) -> None:
        model = Net()
        int8 = hvd.Compression.int8

        def wrap(inner: torch.optim.Optimizer, **options: Any) -> Any:
            return hvd.DistributedOptimizer(inner, compression=int8, **options)

        inner = sgd(list(model.parameters()))
        for options, name in (
            ({"op": hvd.Sum}, "op=Sum"),
            ({"op": hvd.Adasum}, "op=Adasum"),
            ({"groups": 2}, "groups"),
        ):
            with pytest.raises(InvalidRequestError, match=name):
                wrap(inner, **options)
        with pytest.raises(InvalidRequestError, match="closure"):
            wrap(torch.optim.LBFGS(model.parameters()))
        with pytest.raises(InvalidRequestError, match=r"float64.*DistributedOptimizer needs"):
            wrap(sgd([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]))
        with pytest.raises(InvalidRequestError, match="DistributedOptimizer"):
            hvd.allreduce(torch.ones(3), name="x", compression=int8)
        with pytest.raises(InvalidRequestError, match="leave compression="):
            hvd.DistributedOneBitAdam(adam(list(model.parameters())), compression=int8)
        optimizer = wrap(inner)
        with pytest.raises(InvalidRequestError, match="cannot be added"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(InvalidRequestError, match=r"step\(\) of the SGD"):
            inner.step()
        with pytest.raises(InvalidRequestError, match="leave DistributedOptimizer out"):
            hvd.DistributedOptimizer(optimizer)

    run_ranks(1, body)


def test_ranks_of_a_host_add_up_before_they_send_codes() -> None:
    results = run_ranks(4, lambda s: job(s, 8), hosts=["a", "a", "b", "b"])
    assert all(result["digests"] == results[0]["digests"] for result in results)
    assert results[0]["report"]["form"] == "hierarchical"


def test_ranks_that_round_differently_are_told_and_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        model, rank = Net(), rank_of(session)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, foreach=bool(rank))
        optimizer = hvd.DistributedOptimizer(inner, compression=hvd.Compression.int8)
        for step in range(70):  # parameters are compared within 64
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step == 0 and rank:
                model.first.weight.data[0, 0] += 1e-6
        if rank == 0:  # which says it, under mpirun in a process of its own
            assert [r for r in caplog.records if "round differently" in r.message and "not compared" in r.message]

    run_ranks(2, body)


def test_an_optimizer_goes_on_in_a_new_job_with_its_errors() -> None:
    """As after ``shutdown`` and ``init`` of an elastic job."""

    def body(session: Session) -> list[str]:
        def train(model: Net, optimizer: Any, steps: range) -> list[str]:
            found = []
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, rank_of(session), step).backward()
                optimizer.step()
                found.append(digest([p.detach().numpy() for p in model.parameters()]))
            return found

        model, other = Net(), Net()
        straight = hvd.DistributedOptimizer(adam(list(other.parameters())), compression=hvd.Compression.int4)
        expected = train(other, straight, range(8))
        optimizer = hvd.DistributedOptimizer(adam(list(model.parameters())), compression=hvd.Compression.int4)
        found = train(model, optimizer, range(4))
        optimizer._runtime = None  # another job's
        optimizer.reconnect()
        assert found + train(model, optimizer, range(4, 8)) == expected
        return expected

    first, second = run_ranks(2, body)
    assert first == second
