"""channels_last parameters travel as they lie in memory; ranks and saved states are compared by how they do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError
from ocomm_torch.memory.order import MemoryOrder, is_dense
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.every_kind import KINDS
from tests.frontends.test_torch_unusual_use import run, values
from tests.worlds import run_ranks

#: As tensors lie in memory, and how axes are put to make them channels_last, channels_last_3d and contiguous ones.
SHAPES: tuple[tuple[int, ...], ...] = ((24, 5, 3, 7), (6, 2, 3, 2, 5), (4097,))
BACK: tuple[tuple[int, ...], ...] = ((0, 3, 1, 2), (0, 4, 1, 2, 3), (0,))
STEPS = 6

#: In the normal tier; the others are in the long one, where a case costs as much again.
SOME = ("1-bit Adam, compressed", "0/1 Adam, local steps", "Lion")

Parameters = list[torch.nn.Parameter]


def kinds(*dtypes: torch.dtype) -> list[Any]:
    """All, with every dtype if there are any."""
    return [
        pytest.param(kind, *chosen, id=f"{name} {dtype or ''}", marks=() if name in SOME else pytest.mark.long)
        for name, kind in KINDS.items()
        for dtype in dtypes or (None,)
        for chosen in [() if dtype is None else (dtype,)]
    ]


def arrays(*seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def parameters_of(reordered: bool, dtype: torch.dtype = torch.float32) -> Parameters:
    """The same memory; ``reordered``: seen as channels_last tensors."""
    plain = [torch.from_numpy(array).to(dtype) for array in arrays(5)]
    return [torch.nn.Parameter(t.permute(back) if reordered else t) for t, back in zip(plain, BACK, strict=True)]


def gradients_of(step: int, rank: int, reordered: bool, contiguous: bool = False) -> list[torch.Tensor]:
    shared, own = arrays(11, step), arrays(12, step, rank)
    plain = [torch.from_numpy(one + other) for one, other in zip(shared, own, strict=True)]
    if not reordered:
        return plain
    found = [gradient.permute(back) for gradient, back in zip(plain, BACK, strict=True)]
    return [gradient.contiguous() for gradient in found] if contiguous else found


def one_step(parameters: Parameters, optimizer: Any, step: int, rank: int, contiguous: bool = False) -> None:
    reordered = parameters[0].shape != SHAPES[0]
    optimizer.zero_grad()
    for parameter, gradient in zip(parameters, gradients_of(step, rank, reordered, contiguous), strict=True):
        if contiguous:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            (parameter * gradient.to(parameter.dtype)).sum().backward()
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    optimizer.step()


def memory(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The elements as they lie there."""
    return [MemoryOrder(tensor).flat(tensor.detach()).tolist() for tensor in tensors]


@pytest.mark.short("1-bit Adam, compressed", "Lion")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_optimizer_makes_of_channels_last_parameters_what_it_makes_of_the_same_memory(kind: Any) -> None:
    def trained(reordered: bool) -> Any:
        def body(rank: int) -> Any:
            parameters = parameters_of(reordered)
            optimizer = kind.wrap(parameters)
            for step in range(1, STEPS + 1):
                one_step(parameters, optimizer, step, rank)
            assert not optimizer._gradients.copies
            return memory(parameters)

        return run_ranks(2, lambda session: body(session.topology.rank))

    assert trained(True) == trained(False)


def test_gradients_leave_before_step_and_are_not_copied() -> None:
    def body(rank: int) -> list[int]:
        parameters = parameters_of(True)
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, foreach=False), freeze_step=2)
        for step in range(1, 5):
            one_step(parameters, optimizer, step, rank)
        optimizer.zero_grad()
        for parameter, gradient in zip(parameters, gradients_of(5, rank, True), strict=True):
            (parameter * gradient).sum().backward()
        posted = sorted(optimizer._stepper.buckets.posted_tensors)
        optimizer.step()
        return posted

    assert run(body) == [0, 1, 2]


@pytest.mark.parametrize("kind", kinds())
def test_gradients_in_another_order_than_their_parameters_are_right(kind: Any) -> None:
    def trained(contiguous: bool) -> str:
        def body(rank: int) -> Any:
            parameters = parameters_of(True)
            optimizer = kind.wrap(parameters)
            for step in range(1, STEPS + 1):
                one_step(parameters, optimizer, step, rank, contiguous and rank == 1)
            return memory(parameters)

        return str(run_ranks(2, lambda session: body(session.topology.rank)))

    assert trained(True) == trained(False)


def test_a_gradient_that_is_edited_after_backward_counts_as_it_is() -> None:
    def trained(early: bool) -> str:
        def body(rank: int) -> str:
            parameters = parameters_of(True)
            optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, foreach=False), freeze_step=2, verify="full")
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                for parameter, gradient in zip(parameters, gradients_of(step, rank, True), strict=True):
                    edited = gradient.clone()
                    edited[3] = 0.0
                    (parameter * (edited if early else gradient)).sum().backward()
                    assert parameter.grad is not None
                    parameter.grad.data[3].zero_()
                optimizer.step()
            return values(parameters)

        return run(body)

    assert trained(True) == trained(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_channels_last_parameters_of_16_bits_have_masters(dtype: torch.dtype) -> None:
    def trained(reordered: bool) -> Any:
        def body(rank: int) -> Any:
            parameters = parameters_of(reordered, dtype)
            optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2, foreach=False), freeze_step=3)
            for step in range(1, STEPS + 1):
                one_step(parameters, optimizer, step, rank)
                if step == 4:
                    with torch.no_grad():
                        parameters[0][7] = 0.5
                        parameters[0][7] = 0.25
            saved = optimizer.state_dict()["ocomm"]["masters"]
            masters = [saved[f"parameter.0.{number}"] for number in range(3)]
            for master, parameter in zip(masters, parameters, strict=True):
                assert torch.equal(master.to(dtype), parameter.detach())
            return memory(parameters)

        return run_ranks(2, lambda session: body(session.topology.rank))

    assert trained(True) == trained(False)


def adam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


@pytest.mark.parametrize(("kind", "dtype"), kinds(torch.float32, torch.bfloat16))
def test_a_saved_state_goes_on_in_every_bit(kind: Any, dtype: torch.dtype) -> None:
    def trained(saves: bool) -> Any:
        def body(rank: int) -> Any:
            parameters = parameters_of(True, dtype)
            optimizer = kind.wrap(parameters)
            saved = False
            for step in range(1, STEPS + 3):
                if saves and not saved and step > 4 and optimizer.compression_report().get("synced", True):
                    saved = True
                    state, own = optimizer.state_dict(), optimizer.rank_state_dict()
                    parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
                    optimizer = kind.wrap(parameters)
                    optimizer.load_state_dict(state)
                    optimizer.load_rank_state_dict(own)
                one_step(parameters, optimizer, step, rank)
            assert saved is saves
            return memory(parameters)

        return run_ranks(2, lambda session: body(session.topology.rank))

    assert trained(True) == trained(False)


def test_moments_are_saved_as_tensors_of_the_parameters_shape_which_plain_adams_of_both_formats_load() -> None:
    def body(rank: int) -> Any:
        parameters, contiguous = parameters_of(True), parameters_of(True)
        for parameter in contiguous:
            parameter.data = parameter.data.contiguous()
        same_memory = parameters_of(False)
        ours, theirs = (DistributedOneBitAdam(adam(p), freeze_step=3) for p in (parameters, same_memory))
        for step in range(1, STEPS + 1):
            one_step(parameters, ours, step, rank)
            one_step(same_memory, theirs, step, rank)
        state = ours.state_dict()
        for number, entry in theirs.state_dict()["state"].items():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state["state"][number][moment], entry[moment].permute(BACK[number]))
        for chosen in (parameters, contiguous):
            plain = adam(chosen)
            plain.load_state_dict(state)
            for parameter in chosen:
                parameter.grad = torch.ones_like(parameter)
            plain.step()

    run_ranks(2, lambda session: body(session.topology.rank))


@pytest.mark.parametrize("to_reordered", [True, False], ids=["to channels_last", "to contiguous"])
def test_the_state_of_a_plain_adam_of_the_other_format_is_taken_over(to_reordered: bool) -> None:
    """Warm-up steps on it equal those of DistributedOptimizer."""

    def body(rank: int) -> None:
        def made(reordered: bool) -> Parameters:
            found = parameters_of(True)
            for parameter in found:
                parameter.data = parameter.data if reordered else parameter.data.contiguous()
            return found

        before = made(not to_reordered)
        plain = adam(before)
        for parameter, gradient in zip(before, gradients_of(1, 0, True), strict=True):
            parameter.grad = gradient.clone()
        plain.step()
        state = plain.state_dict()
        results = []
        for distributed in (DistributedOptimizer, DistributedOneBitAdam):
            after = made(to_reordered)
            for parameter, old in zip(after, before, strict=True):
                parameter.data.copy_(old.data)
            inner = adam(after)
            inner.load_state_dict(copy.deepcopy(state))
            optimizer = distributed(inner)  # type: ignore[operator]
            for step in range(2, 5):
                one_step(after, optimizer, step, rank)
            results.append([p.detach().clone() for p in after])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)
        warm = DistributedOneBitAdam(adam(made(to_reordered)), warm_start=state)
        taken = warm.state_dict()["state"]
        assert all(torch.equal(taken[n]["exp_avg"], state["state"][n]["exp_avg"]) for n in taken)

    run_ranks(2, lambda session: body(session.topology.rank))


def test_a_state_of_the_other_format_is_refused_by_name() -> None:
    def body(rank: int) -> str:
        parameters = parameters_of(True)
        optimizer = DistributedOneBitAdam(adam(parameters), freeze_step=3)
        for step in range(1, 5):
            one_step(parameters, optimizer, step, rank)
        state = optimizer.state_dict()
        for parameter in parameters:
            parameter.data = parameter.data.contiguous()
        other = DistributedOneBitAdam(adam([torch.nn.Parameter(p.detach().clone()) for p in parameters]), freeze_step=3)
        with pytest.raises(CheckpointError) as raised:
            other.load_state_dict(state)
        return str(raised.value)

    message = run(body)
    assert "'parameter.0.0' (24, 7, 5, 3) float32 order channels_last" in message
    assert "'parameter.0.0' (24, 7, 5, 3) float32 order torch" in message


def test_ranks_of_different_formats_are_refused_by_name() -> None:
    def body(rank: int) -> str:
        parameters = parameters_of(True)
        if rank == 1:
            parameters[0].data = parameters[0].data.contiguous()
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitAdam(adam(parameters))
        return str(raised.value)

    message = run(body)
    assert "[0] registered tensor 'parameter.0.0' (24, 7, 5, 3) float32 order channels_last" in message
    assert "[1] registered tensor 'parameter.0.0' (24, 7, 5, 3) float32 order torch" in message


def test_a_format_that_changes_after_wrapping_is_refused_by_name() -> None:
    def body(rank: int) -> str:
        parameters = parameters_of(True)
        optimizer = DistributedOneBitAdam(adam(parameters))
        one_step(parameters, optimizer, 1, rank)
        parameters[0].data = parameters[0].data.contiguous()
        with pytest.raises(InvalidRequestError) as raised:
            optimizer.step()
        return str(raised.value)

    assert run(body).startswith(
        "the elements of parameter 'parameter.0.0' lie in memory in the order torch now, and lay in the order "
        "channels_last when it was wrapped"
    )


def test_a_convolutional_model_that_is_channels_last_trains_as_with_the_dense_optimizer() -> None:
    def trained(wrap: Any, memory_format: torch.memory_format) -> list[torch.Tensor]:
        def body(session: Any) -> list[torch.Tensor]:
            model = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3),
                torch.nn.ReLU(),
                torch.nn.Conv2d(8, 4, 3),
                torch.nn.Flatten(),
                torch.nn.Linear(64, 2),
            ).to(memory_format=memory_format)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.copy_(
                        torch.sin(torch.arange(float(parameter.numel())) + number).view(parameter.shape) / 5
                    )
            optimizer = wrap(adam(list(model.parameters())), model.named_parameters())
            generator = torch.Generator().manual_seed(session.topology.rank)
            for _ in range(4):
                images = torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=memory_format)
                optimizer.zero_grad()
                model(images).square().sum().backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        lock_step = run_ranks(2, body)
        assert all(map(torch.equal, *lock_step))
        return lock_step[0]

    dense = trained(DistributedOptimizer, torch.contiguous_format)
    for one, other in zip(trained(DistributedOneBitAdam, torch.channels_last), dense, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last), "channels_last"),
        (torch.zeros(4, 3, 1, 1).to(memory_format=torch.channels_last), "torch"),
        (torch.zeros(4, 3, 2, 1).to(memory_format=torch.channels_last), "axes.0.2.1.3"),
        (torch.zeros(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d), "channels_last_3d"),
        (torch.zeros(4, 3).t(), "axes.1.0"),
        (torch.zeros(()), "torch"),
        (torch.zeros(0, 3).t(), "torch"),
    ],
)
def test_orders_have_names_that_do_not_depend_on_strides_of_single_elements(tensor: torch.Tensor, name: str) -> None:
    order = MemoryOrder(tensor)
    assert is_dense(tensor) and order.name == name and order.has(tensor)
    counted = torch.arange(float(tensor.numel())).reshape(tensor.shape)
    arranged = order.arranged(counted)
    assert torch.equal(arranged, counted) and order.has(arranged)
    flat = order.flat(arranged)
    assert flat.data_ptr() == arranged.data_ptr()
    assert torch.equal(order.shaped(flat, tensor.shape), counted)


def test_a_tensor_with_gaps_or_with_elements_twice_is_not_dense() -> None:
    assert not is_dense(torch.zeros(4, 6)[:, ::2])
    assert not is_dense(torch.zeros(4, 1).expand(4, 3))
