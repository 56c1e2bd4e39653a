"""bfloat16 and float16 parameters: whatever happens to them, a float32 run with the same gradients is their law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.session import Session
from tests.frontends.every_kind import KINDS
from tests.frontends.onebit_jobs import SHAPES, gradients, initial
from tests.worlds import run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Of the tensors of ``SHAPES``.
MIXED = (BF16, FP16, FP32, BF16)


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


class Pair:
    """An optimizer of low-precision parameters, and its law: the same over float32 ones that begin at the same values."""

    def __init__(
        self, kind: str, dtypes: Sequence[torch.dtype] = MIXED, inner: dict[str, Any] | None = None, **options: Any
    ) -> None:
        arrays = [torch.from_numpy(array) for array in initial()]
        self.low = [torch.nn.Parameter(a.to(dtype)) for a, dtype in zip(arrays, dtypes, strict=True)]
        self.law = [torch.nn.Parameter(p.detach().float().clone()) for p in self.low]
        self.optimizer = KINDS[kind].wrap(self.low, inner, **options)
        self.twin = KINDS[kind].wrap(self.law, inner, **{**options, "overlap": False})

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
    assert a.dtype == b.dtype and a.shape == b.shape
    return a.detach().numpy().tobytes() == b.detach().numpy().tobytes() if a.dtype is FP32 else (
        torch.equal(a.detach().view(torch.int16), b.detach().view(torch.int16))
    )


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
