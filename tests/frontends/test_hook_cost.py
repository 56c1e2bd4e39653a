"""A hook runs once per tensor and step inside backward, so it only counts.

Held as a number of calls, which is the same on every machine; docs/profile.md has the milliseconds.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from ocomm.session import Session
from ocomm_torch.onebit import DistributedOneBitAdam
from tests.worlds import run_ranks

TENSORS, STEPS = 2000, 6


def test_a_hook_makes_eight_calls_at_2000_tensors() -> None:
    """Three in Python and five in C per tensor; that buckets are posted, and where, adds a few per bucket."""

    def body(session: Session) -> list[Counter[str]]:
        parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(TENSORS)]
        gradients = [torch.randn(64) for _ in parameters]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters), freeze_step=2)
        hooks = [next(iter(p._post_accumulate_grad_hooks.values())) for p in parameters]
        steps = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            calls: Counter[str] = Counter()

            def count(frame: Any, event: str, argument: Any, calls: Counter[str] = calls) -> None:
                calls[event] += 1

            previous = sys.getprofile()
            sys.setprofile(count)
            try:
                for hook, parameter in zip(reversed(hooks), reversed(parameters), strict=True):
                    hook(parameter)
            finally:
                sys.setprofile(previous)
            optimizer.step()
            steps.append(calls)
        return steps

    last = run_ranks(1, body)[0][-1]  # no longer warming up
    assert last["call"] <= 3 * TENSORS + 200
    assert last["c_call"] <= 5 * TENSORS + 200
