"""Tensors whose elements are not at their address.

Subclasses are refused by name, instead of steps that change nothing. Views whose memory holds their negatives, as
autograd makes them for a conjugate, are taken for what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map

import ocomm_torch as hvd
from ocomm.errors import InvalidRequestError
from tests.frontends.every_kind import KINDS
from tests.worlds import run_ranks


class Pair(torch.Tensor):
    """A tensor with a shape and a dtype, whose elements are in another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*tree_map(lambda x: x.inner if isinstance(x, Pair) else x, args), **(kwargs or {}))
        return tree_map(lambda x: Pair(x) if isinstance(x, torch.Tensor) else x, found)


@pytest.fixture(scope="module")
def sharded() -> Iterator[Callable[[], torch.nn.Parameter]]:
    """Makes parameters as ``fully_shard`` does, in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    yield lambda: torch.nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh))
    dist.destroy_process_group()


def refusal(call: Callable[[], Any]) -> str:
    def body(session: Any) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            call()
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    return first


WRAPPERS = {name: kind.wrap for name, kind in KINDS.items()} | {
    "DistributedOptimizer": lambda parameters, **options: hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), **options
    )
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_lone_dtensor_is_refused_with_its_name_and_the_cause(wrap: Any, sharded: Any) -> None:
    def call() -> None:
        weight = sharded()
        wrap([weight], named_parameters=[("head.weight", weight)])

    said = refusal(call)
    for words in ("parameter 'head.weight' is a DTensor", "local tensor", "fully_shard"):
        assert words in said


@pytest.mark.parametrize("name", ["Lion", "DistributedOptimizer", "DistributedDiLoCo"])
def test_a_rank_s_part_of_a_module_in_fsdp1_is_refused_with_the_cause(name: str) -> None:
    def diloco(parameters: Any, **options: Any) -> Any:
        return hvd.DistributedDiLoCo(torch.optim.SGD(parameters, lr=0.1), **options)

    def call() -> None:
        weight = FlatParameter(torch.ones(5))
        {**WRAPPERS, "DistributedDiLoCo": diloco}[name]([weight], named_parameters=[("all", weight)])

    assert "'all' is a flat parameter of FullyShardedDataParallel" in refusal(call)


@pytest.mark.parametrize("wrap", [WRAPPERS["Lion"], WRAPPERS["DistributedOptimizer"]], ids=["Lion", "dense"])
def test_any_other_parameter_without_memory_of_its_own_is_refused(wrap: Any) -> None:
    def call() -> None:
        weight = Pair(torch.ones(5, 3)).requires_grad_()
        wrap([weight], named_parameters=[("head.weight", weight)])

    assert "parameter 'head.weight' is a Pair, whose elements are not at an address of its own" in refusal(call)


def test_a_gradient_without_memory_of_its_own_is_not_taken_for_no_gradient() -> None:
    def call() -> None:
        weight = torch.nn.Parameter(torch.ones(5, 3))
        optimizer = WRAPPERS["Lion"]([weight], named_parameters=[("head.weight", weight)])
        weight.grad = Pair(torch.ones(5, 3))
        optimizer.step()

    assert "gradient of 'head.weight' is a Pair" in refusal(call)


def test_a_collective_refuses_a_tensor_without_memory_of_its_own(sharded: Any) -> None:
    assert "x': it is a DTensor" in refusal(lambda: hvd.allreduce(sharded(), name="x"))
    assert "y': it is a Pair" in refusal(lambda: hvd.broadcast_(Pair(torch.ones(2)), 0, name="y"))


def negated(values: torch.Tensor) -> torch.Tensor:
    """The same values, as a view of memory that holds their negatives."""
    return torch._neg_view(-values)


class Negated(torch.autograd.Function):
    """Changes nothing; its gradient is such a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return negated(grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*WRAPPERS, "DistributedOptimizer, int8"])
def test_gradients_that_are_negated_views_have_their_sign(name: str, dtype: torch.dtype) -> None:
    wrap, options = WRAPPERS[name.removesuffix(", int8")], {}
    if name.endswith("int8"):
        options = {"compression": hvd.Compression.int8}

    def train(is_view: bool) -> Any:
        def body(session: Any) -> tuple[list[float], bool]:
            weight = torch.nn.Parameter(torch.ones(70, dtype=dtype))
            optimizer = wrap([weight], **options)
            had_view = False
            for step in range(5):
                optimizer.zero_grad()
                used = Negated.apply(weight) if is_view else weight
                (used * torch.arange(step - 30, step + 40).to(dtype)).sum().backward()
                had_view |= weight.grad.is_neg()
                optimizer.step()
            return weight.tolist(), had_view

        weights, had_view = zip(*run_ranks(2, body), strict=True)
        # Autograd copies a gradient that Python still refers to, in some steps.
        assert any(had_view) == is_view or name.startswith("DistributedOptimizer")
        return weights

    assert train(True) == train(False)


def test_collectives_take_negated_views() -> None:
    def body(session: Any) -> list[Any]:
        mine = torch.arange(1.0, 4.0) * (hvd.rank() + 1)
        view = negated(mine)
        hvd.allreduce_(view, op=hvd.Sum)
        root = negated(mine)
        hvd.broadcast_(root, 1)
        found = hvd.allreduce(negated(mine), op=hvd.Sum), view, root, hvd.allgather(negated(mine))
        return [tensor.tolist() for tensor in found]

    total, of_one = [3.0, 6.0, 9.0], [2.0, 4.0, 6.0]
    assert run_ranks(2, body) == [[total, total, of_one, [1.0, 2.0, 3.0, *of_one]]] * 2
