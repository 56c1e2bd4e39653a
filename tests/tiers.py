"""Which cases of a matrix `make test` runs: one for each cause. `make test-long` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], keep: Callable[..., bool] | Iterable[Any]) -> list[Any]:
    """``values`` as parameters of a test, of which those that are not kept belong to the long tier.

    Args:
        values: of one parameter each, or tuples of several.
        keep: those that `make test` runs, or says of one whether it does.
    """
    values = list(values)
    if callable(keep):
        kept = [bool(keep(*value) if isinstance(value, tuple) else keep(value)) for value in values]
    else:
        wanted = list(keep)
        assert all(value in values for value in wanted), "no such case"
        kept = [value in wanted for value in values]
    return [
        value if short else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value, short in zip(values, kept, strict=True)
    ]


def alternating(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, of which `make test` runs one for each of ``first``, with each of ``second`` in turn."""
    first, second = list(first), list(second)
    return [
        pytest.param(a, b, marks=() if number % len(second) == place else pytest.mark.long)
        for number, a in enumerate(first)
        for place, b in enumerate(second)
    ]
