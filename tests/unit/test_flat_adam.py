"""Dense Adam steps of all tensors by one call: every bit is that of a step of each tensor by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.kernels import cpu_kernels
from ocomm.kernels.reference import ReferenceKernels
from ocomm.optim.adam import DenseAdam, FlatAdam
from ocomm.optim.core import Group

SHAPES = ((70, 130), (4097,), (), (0,), (33,))
KERNELS = {"cpu": cpu_kernels, "reference": ReferenceKernels}


class Counted:
    """Kernels that count their calls of ``adam_step``."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.calls = kernels, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name == "adam_step"
        return getattr(self.kernels, name)


class Both:
    """The same parameters stepped by a ``FlatAdam``, and by a ``DenseAdam`` for each tensor."""

    def __init__(self, kernels: Any, block_size: Any = 4096) -> None:
        self.layout = Layout([TensorSpec(f"t{n}", s) for n, s in enumerate(SHAPES)], 1, block_size)
        self.kernels = Counted(kernels)
        self.flat = FlatAdam(self.layout, 0, self.kernels)  # type: ignore[arg-type]
        self.each = [DenseAdam.fresh(int(numel)) for numel in self.layout.numels]
        random = np.random.default_rng(3)
        self.parameters = [random.normal(size=int(n)).astype(np.float32) for n in self.layout.numels]
        self.copies = [p.copy() for p in self.parameters]
        self.averages = np.zeros(self.layout.flat_numel, np.float32)

    def step(self, number: int, tensors: list[int], groups: list[Group], factor: float = 1.0) -> None:
        self.averages[:] = np.random.default_rng([4, number]).normal(size=self.averages.size)
        addresses = np.array([p.ctypes.data for p in self.parameters], np.uint64)
        self.flat.update(tensors, self.averages, addresses, groups, factor)
        for group in groups:
            for tensor in set(group.tensors.tolist()) & set(tensors):
                grad = self.averages[self.layout.flat_span(tensor)][: self.copies[tensor].size] * np.float32(factor)
                self.each[tensor].update(self.kernels.kernels, self.copies[tensor], grad, group)

    def must_be_equal(self) -> None:
        for tensor, (a, b) in enumerate(zip(self.parameters, self.copies, strict=True)):
            assert a.tobytes() == b.tobytes(), f"tensor {tensor}"
            found, law = self.flat.moments(tensor), self.each[tensor]
            if found is None:
                assert law.step == 0
                continue
            assert found[0].tobytes() == law.momentum.tobytes() and found[1].tobytes() == law.variance.tobytes()
            assert found[2] == law.step


def groups() -> list[Group]:
    return [
        Group(np.array([0, 3, 4]), 1e-2, (0.9, 0.99), 1e-6, coupled_decay=0.1),
        Group(np.array([1, 2]), 3e-3, (0.8, 0.999), 1e-8, decoupled_decay=0.2),
    ]


@pytest.mark.parametrize("block_size", [4096, 32, "tensor"])
@pytest.mark.parametrize("kind", KERNELS)
def test_all_tensors_together_have_the_bits_of_each_alone(kind: str, block_size: Any) -> None:
    both = Both(KERNELS[kind](), block_size)
    for number, factor in enumerate([1.0, 0.37, 1.0, 0.9]):
        both.step(number, [0, 1, 2, 3, 4], groups(), factor)
        both.must_be_equal()


@pytest.mark.parametrize("kind", KERNELS)
def test_tensors_that_begin_late_or_pause_have_step_counts_of_their_own(kind: str) -> None:
    both = Both(KERNELS[kind]())
    for number, tensors in enumerate([[0, 1], [0], [0, 1, 2, 4], [2, 4], [0, 1, 2, 3, 4]]):
        both.step(number, tensors, groups())
        both.must_be_equal()


def test_a_step_is_one_call_per_group_of_equal_step_counts() -> None:
    both = Both(cpu_kernels())
    for number in range(3):
        both.kernels.calls = 0
        addresses = np.array([p.ctypes.data for p in both.parameters], np.uint64)
        both.flat.update([0, 1, 2, 3, 4], both.averages, addresses, groups(), 1.0)
        assert both.kernels.calls == 2, number


def test_moments_that_were_released_begin_again_as_zeros() -> None:
    both = Both(cpu_kernels())
    for number in range(3):
        both.step(number, [0, 1], groups())
    found = both.flat.moments(0)
    assert found is not None
    borrowed, values = found[0], found[0].copy()
    assert not both.flat.release(0) and both.flat.moments(0) is None
    both.each[0] = DenseAdam.fresh(int(both.layout.numels[0]))
    assert np.array_equal(borrowed, values), "who has taken it over reads it until its first compressed step"
    both.step(3, [1], groups())
    assert np.array_equal(borrowed, values)
    both.step(4, [0, 1], groups())
    both.must_be_equal()
    assert both.flat.release(1) is False and both.flat.release(0) is True


def test_moments_are_adopted_and_counted() -> None:
    both = Both(cpu_kernels())
    random = np.random.default_rng(9)
    for tensor in (1, 2):
        momentum, variance = (random.random(int(both.layout.numels[tensor])).astype(np.float32) for _ in range(2))
        both.flat.adopt(tensor, momentum, variance, 7)
        both.each[tensor] = DenseAdam(momentum.copy(), variance.copy(), 7)
    both.must_be_equal()
    both.step(0, [0, 1, 2], groups())
    both.must_be_equal()
    assert both.flat.advance(4)[2] == 1 and both.flat.advance(4)[2] == 2
