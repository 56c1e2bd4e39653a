"""Growth of what a process uses is found, and noise is none."""

from __future__ import annotations

import os
import random

import pytest

from tests.cluster.usage import Usage, growth


def seen(**per_step: float) -> list[Usage]:
    """Of 100,000 steps: a warm-up that takes 20 MB, then noise of an allocator, and what is kept of each step."""
    draw = random.Random(1)
    found = []
    for step in range(1000, 100_001, 1000):
        values = {"rss": 60e6 + min(step, 20_000) * 1e3, "descriptors": 20, "threads": 4, "files": draw.choice([4, 6])}
        values["rss"] += draw.uniform(0, 100e3)
        found.append(Usage(step, **{what: int(value + per_step.get(what, 0) * step) for what, value in values.items()}))
    return found


def too_much(usages: list[Usage]) -> list[str]:
    return [each.what for each in growth(usages) if each.is_too_much]


def test_a_warm_up_and_noise_are_no_growth() -> None:
    assert too_much(seen()) == []


@pytest.mark.parametrize("what, per_step", [("rss", 64), ("descriptors", 1e-4), ("threads", 1e-4), ("files", 1e-4)])
def test_what_is_kept_of_each_step_is_found(what: str, per_step: float) -> None:
    assert too_much(seen(**{what: per_step})) == [what]


def test_the_usage_of_this_process_can_be_read() -> None:
    usage = Usage.now(3, os.getpid(), 2)
    assert usage.rss > 1 << 20 and usage.descriptors > 2 and usage.threads >= 1
    assert Usage.of(usage.text()) == usage
