"""The laws of all kinds of programs: those that once failed, and some that are drawn."""

from __future__ import annotations

import importlib

import pytest

from tests.programs import KINDS
from tests.programs.laws import check, law
from tests.programs.regressions import FOUND


@pytest.mark.parametrize("kind", KINDS)
def test_programs_leave_what_their_oracle_leaves(kind: str) -> None:
    law(kind, importlib.import_module(f"tests.programs.{kind}").FEW)()


@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind in FOUND for n in range(len(FOUND[kind]))])
def test_a_program_that_once_failed_does_not(kind: str, number: int) -> None:
    check(kind, FOUND[kind][number])
