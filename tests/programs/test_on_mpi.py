"""Random programs whose ranks are processes of mpirun: what threads share, they do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import torch_compressed, torch_dense, torch_diloco
from tests.programs.laws import law
from tests.worlds import MPI_SIZE

KINDS = {"torch_compressed": torch_compressed, "torch_dense": torch_dense, "torch_diloco": torch_diloco}

pytestmark = pytest.mark.skipif(not MPI_SIZE, reason="runs under mpirun")


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # scripts are warned, as anywhere else
@pytest.mark.parametrize("kind", KINDS)
def test_programs_on_processes_leave_what_their_oracle_leaves(kind: str) -> None:
    """All ranks draw the same programs. One that fails ends the job, and is the last that was printed."""

    def judge(program: Any) -> None:
        print(f"{program!r},", flush=True)
        KINDS[kind].run(program)

    def fits(program: Any) -> bool:
        # A rank that drops its optimizer tells the others by an event of threads.
        return program.setup.ranks == MPI_SIZE and all(step.end != "drop" for step in program.steps)

    law(kind, 60, judge=judge, where=fits, shrinks=False)()
