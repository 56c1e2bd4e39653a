"""Compression.fp16: what is too large for it is reduced in its own type, on all ranks, and never becomes infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

#: Per rank: a gradient which only rank 1 cannot send in half precision, and one that all can.
LARGE, SMALL = ([3.0, -1.0, 60000.0], [1e6, 7.0, 60000.0]), ([0.5, 0.25], [1.5, -0.25])


def gradients_of(parameters: list[Any], rank: int) -> Any:
    """A loss whose gradients are those of this rank."""
    return sum((p * torch.tensor(values[rank])).sum() for p, values in zip(parameters, (LARGE, SMALL), strict=True))


def make_parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("op", "options"),
    [(hvd.Average, {}), (hvd.Average, {"groups": 1}), (hvd.Average, {"gradient_predivide_factor": 2.0}), (hvd.Sum, {})],
    ids=["average", "group", "predivided", "sum"],
)
def test_the_optimizer_gets_what_it_would_get_without_compression(op: int, options: dict[str, Any]) -> None:
    def body(session: Session) -> list[list[float]]:
        parameters = make_parameters()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.5), compression=hvd.Compression.fp16, op=op, **options
        )
        gradients_of(parameters, hvd.rank()).backward()
        optimizer.step()
        return [p.grad.tolist() for p in parameters]

    factor = 0.5 if op == hvd.Average else 1.0
    expected = [[factor * (a + b) for a, b in zip(*values, strict=True)] for values in (LARGE, SMALL)]
    assert run_ranks(2, body) == [expected] * 2


def test_two_optimizers_whose_gradients_come_in_different_orders_do_not_wait_for_each_other() -> None:
    def body(session: Session) -> list[list[float]]:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(f"p{k}", p)], compression=hvd.Compression.fp16)
            for k, p in enumerate(parameters)
        ]
        # The order in which a backward pass reaches them is that of the forward pass, from its end.
        first, second = parameters if hvd.rank() == 0 else parameters[::-1]
        (1e6 * (first * torch.ones(3)).sum() + 1e6 * (second * torch.ones(3)).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        return [p.tolist() for p in parameters]

    assert run_ranks(2, body) == [[[1.0 - 1e6] * 3] * 2] * 2


def test_a_rank_without_a_gradient_of_what_others_send_in_a_bucket_does_not_wait_for_ever() -> None:
    """It sends what it has not in another bucket, and only the other one has overflowed."""

    def body(session: Session) -> list[list[float]]:
        parameters = make_parameters()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            list(zip("ab", parameters, strict=True)),
            compression=hvd.Compression.fp16,
        )
        loss = (1e6 * parameters[0]).sum()
        if hvd.rank() == 0:
            loss = loss + parameters[1].sum()
        loss.backward()
        optimizer.step()
        return [p.grad.tolist() for p in parameters]

    assert run_ranks(2, body) == [[[1e6] * 3, [0.5] * 2]] * 2


def test_what_was_infinite_before_stays_so() -> None:
    def body(session: Session) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=hvd.Compression.fp16)
        (parameter * torch.tensor([1.0, float("inf") if hvd.rank() else 1.0, 2.0])).sum().backward()
        optimizer.synchronize()
        return parameter.grad.tolist()

    assert run_ranks(2, body) == [[1.0, float("inf"), 2.0]] * 2


def test_adasum_of_large_steps() -> None:
    def body(session: Session) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), compression=hvd.Compression.fp16, op=hvd.Adasum
        )
        (parameter * torch.tensor([[1e6, 0.0], [0.0, 1e6]][hvd.rank()])).sum().backward()
        optimizer.step()
        return parameter.tolist()

    assert run_ranks(2, body) == [[-1e6, -1e6]] * 2


CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "allreduce sum": lambda x: hvd.allreduce(x, name="x", op=hvd.Sum, compression=hvd.Compression.fp16) / 2,
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x], name="g", compression=hvd.Compression.fp16)[1],
    "reducescatter": lambda x: hvd.allgather(hvd.reducescatter(x, name="x", compression=hvd.Compression.fp16)),
    "grouped_reducescatter": lambda x: hvd.allgather(
        hvd.grouped_reducescatter([x, x], compression=hvd.Compression.fp16)[0]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_right_too_and_differentiable(call: str) -> None:
    def body(session: Session) -> tuple[list[float], list[float]]:
        x = torch.tensor([1e6, 2.0, 3.0, 4.0] if hvd.rank() else [2.0, 2.0, 3.0, 60000.0], requires_grad=True)
        found = CALLS[call](x)
        found.sum().backward()
        assert CALLS[call](torch.full((4,), 2.0)).tolist() == [2.0] * 4
        return found.tolist(), x.grad.tolist()

    values = [(1e6 + 2.0) / 2, 2.0, 3.0, 30002.0]
    for found, gradient in run_ranks(2, body):
        assert found == values and gradient[0] == gradient[-1] != 0
