"""Draws programs of a kind and says which of them fails, made as small as Hypothesis can."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from tests.programs import children


class Independent(HypothesisProvider):
    """Draws each program by itself. Hypothesis alone follows each with up to five that differ from it in one place."""


AVAILABLE_PROVIDERS[Independent.__name__] = f"{__name__}.{Independent.__name__}"


class ProgramFails(AssertionError):
    """A program does not do what it should; the message has its script and the line for ``regressions``."""


def check(kind: str, program: Any) -> None:
    """Raises ProgramFails if ``program`` fails."""
    failure = children.failure_of(kind, program)
    if failure is not None:
        raise ProgramFails(f"\n{failure}\nThe script:\n{program}\nThe line for regressions:\n    {program!r},\n")


def law(
    kind: str,
    count: int,
    seed: int | None = None,
    judge: Callable[[Any], None] | None = None,
    where: Callable[[Any], bool] = lambda program: True,
    shrinks: bool = True,
) -> Callable[[], None]:
    """Returns a function that checks ``count`` programs of ``kind``: the same ones each time or, with a ``seed``, those
    of that seed. ``judge`` takes the place of ``check``; ``where`` says which of the programs count; ``shrinks``,
    whether one that fails is made small.
    """

    def body(program: Any) -> None:
        if judge is None:
            check(kind, program)
        else:
            judge(program)

    strategy = importlib.import_module(f"tests.programs.{kind}").programs().filter(where)
    chosen = settings(
        max_examples=count,
        backend=Independent.__name__,
        derandomize=seed is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    drawn = chosen(given(strategy)(body))
    return drawn if seed is None else seeded(seed)(drawn)
