"""Random runs of Lightning's and Hugging Face's Trainers, held to loops by hand, and random elastic jobs, held to ranks
that nobody harms (``tests/programs``): real jobs.
"""

from __future__ import annotations

import importlib
import os
import secrets

import pytest

from tests.programs.laws import law
from tests.programs.trainer_jobs import survey

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "programs"), [("lightning", 250), ("huggingface", 100)])
def test_new_programs_leave_what_loops_by_hand_leave(kind: str, programs: int) -> None:
    for package in importlib.import_module(f"tests.programs.{kind}").NEEDS:
        pytest.importorskip(package, reason=f"no {package}: make .venv/.installed-trainers installs it")
    seed = secrets.randbits(32)
    again = f"again: python -m tests.programs.trainer_jobs {kind} --programs {programs} --seed {seed}"
    failures = survey(f"tests.programs.{kind}", programs, seed)
    assert not failures, "\n".join([*failures[:5], again])


@pytest.mark.timeout(1800)
def test_new_elastic_jobs_leave_what_ranks_without_harm_leave() -> None:
    law("elastic", 20, secrets.randbits(32))()
