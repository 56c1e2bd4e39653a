"""A hook runs once per tensor and step inside backward, so it only counts; few of them open a step or post a bucket.

Held as numbers of calls, which are the same on every machine; docs/profile.md has the milliseconds.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ocomm.session import Session
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.worlds import run_ranks

STEPS = 6


def calls_of(function: Callable[[Any], Any], argument: Any) -> tuple[int, int]:
    """How many functions in Python, and how many in C, a call calls, itself among them."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        # That a lock is entered by ``with`` is a call in C from Python 3.14 on only.
        calls[event] += getattr(argument, "__name__", "") != "__enter__"

    previous = sys.getprofile()
    gc.disable()  # it would call what others have left
    sys.setprofile(count)
    try:
        function(argument)
    finally:
        sys.setprofile(previous)
        gc.enable()
    return calls["call"], calls["c_call"] - 1  # the other is setprofile


def last_step(tensors: int, numel: int) -> list[tuple[int, int, int]]:
    """Of each hook of the last of some steps, no longer warming up: calls in Python, in C, and the buckets posted."""

    def body(session: Session) -> list[tuple[int, int, int]]:
        parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(tensors)]
        gradients = [torch.randn(numel) for _ in parameters]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters), freeze_step=2)
        hooks = [next(iter(p._post_accumulate_grad_hooks.values())) for p in parameters]
        for _ in range(STEPS):
            optimizer.zero_grad()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            found, posted = [], 0
            for hook, parameter in zip(reversed(hooks), reversed(parameters), strict=True):
                calls = calls_of(hook, parameter)
                now = optimizer._stepper.buckets.posted if optimizer._stepper.begun else 0
                found.append((*calls, now - posted))
                posted = now
            optimizer.step()
        return found

    return run_ranks(1, body)[0]


def test_a_hook_that_counts_makes_three_calls_at_2000_tensors() -> None:
    """Two in Python, ocomm's and the one that counts, and one in C, for the order of arrivals."""
    first, *counting, last = last_step(2000, 64)
    assert set(counting) == {(2, 1, 0)}
    # It asks no parameter where it lies: step() does, and compressing without a coupled decay reads none.
    assert first[0] <= 39 and first[1] <= 28 and first[2] == 0
    assert last[0] <= 12 and last[2] == 1


def test_a_bucket_is_posted_with_seven_calls_in_python_and_few_in_c() -> None:
    """Three in C per gradient: is it contiguous, is it negated, where is it. The engine is called once."""
    per_bucket = 3
    first, *others = last_step(8 * per_bucket, 1 << 16)
    posting = [found for found in others if found[2]]
    assert {found for found in others if not found[2]} == {(2, 1, 0)}
    assert first[0] <= 46 and first[1] <= 63
    assert [posted for _, _, posted in posting] == [1] * 8
    assert posting[0][0] <= 12 and posting[0][1] <= 9 + 3 * per_bucket  # it submits the plan
    assert all(python <= 7 and c <= 4 + 3 * per_bucket for python, c, _ in posting[1:])


def test_a_segment_costs_step_six_calls_in_python() -> None:
    """Those that move parameters. What looks at the averages is in the plan, which C runs."""

    def step(numel: int) -> tuple[int, int]:
        def body(session: Session) -> tuple[int, int]:
            parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(4)]
            gradients = [torch.randn(numel) for _ in parameters]
            for gradient in gradients:
                gradient[0] = 0  # so that an element is masked
            optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters), freeze_step=2)
            for _ in range(STEPS):
                optimizer.zero_grad()
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                calls, _ = calls_of(lambda _: optimizer.step(), None)
            return calls, len(optimizer._stepper.flows.flows[0].segments)

        return run_ranks(1, body)[0]

    (few_calls, few), (many_calls, many) = step(1 << 17), step(1 << 20)
    assert many >= 2 * few
    assert many_calls - few_calls <= 6 * (many - few)
