"""The laws of all kinds of programs: those that once failed, and some that are drawn."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.programs import KINDS
from tests.programs.laws import check, law
from tests.programs.regressions import FOUND


def needed(kind: str) -> Any:
    """Returns the module of a kind, if there are the packages that it needs."""
    module = importlib.import_module(f"tests.programs.{kind}")
    for package in getattr(module, "NEEDS", ()):
        pytest.importorskip(package, reason=f"no {package}: make .venv/.installed-trainers installs it")
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_programs_leave_what_their_oracle_leaves(kind: str) -> None:
    if count := needed(kind).FEW:
        law(kind, count)()


@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind in FOUND for n in range(len(FOUND[kind]))])
def test_a_program_that_once_failed_does_not(kind: str, number: int) -> None:
    needed(kind)
    check(kind, FOUND[kind][number])
