"""By what the gradients of a step are multiplied, from the norms that the ranks have agreed on."""

from __future__ import annotations

import math

import pytest
import torch

from ocomm.training.clipping import Clipping, clip_factor


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e30])
def test_the_factor_is_that_of_torchs_clipping(norm: float) -> None:
    parameter = torch.zeros(1, dtype=torch.float64)
    parameter.grad = torch.full((1,), norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert clip_factor(norm, 1.0) * norm == pytest.approx(parameter.grad.item(), rel=1e-6)


def test_gradients_wait_for_the_norm_of_their_own_step() -> None:
    clipping = Clipping(1.0, by_previous=False)
    for norm in (2.0, 4.0):
        assert clipping.begin(True) == 1.0 and clipping.needs_round
        assert clipping.factor(norm) == clip_factor(norm, 1.0)
        clipping.norm = norm


def test_the_norm_of_the_last_step_is_used_once_there_is_one() -> None:
    clipping = Clipping(1.0, by_previous=True)
    assert clipping.begin(True) == 1.0 and clipping.needs_round
    clipping.norm = 2.0
    assert clipping.begin(True) == clip_factor(2.0, 1.0) and not clipping.needs_round


@pytest.mark.parametrize("by_previous", [False, True])
def test_a_step_whose_average_is_clipped_has_no_factor(by_previous: bool) -> None:
    clipping = Clipping(1.0, by_previous)
    clipping.norm = 2.0
    assert clipping.begin(False) == 1.0
    assert not clipping.is_on and not clipping.needs_round


@pytest.mark.parametrize("norm", [None, math.inf, math.nan])
def test_a_norm_that_is_not_finite_changes_no_gradient(norm: float | None) -> None:
    assert Clipping(1.0, by_previous=False).factor(norm) == 1.0


def test_without_a_limit_nothing_is_clipped() -> None:
    assert Clipping(None, by_previous=False).factor(1e9) == 1.0
