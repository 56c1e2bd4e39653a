"""Run by pytest under mpirun: rank 1 never comes (see test_a_hanging_rank)."""

from __future__ import annotations

import threading

import numpy as np

from ocomm.session import Session
from ocomm.types import ReduceOp
from tests.worlds import MPI_SIZE, run_ranks


def wait_forever() -> None:
    threading.Event().wait()


def test_rank_1_hangs() -> None:
    def body(session: Session) -> None:
        if session.require_topology().rank == 1:
            wait_forever()
        session.reduce(0, "x", np.ones(1, np.float32), ReduceOp.SUM)

    run_ranks(MPI_SIZE or 2, body, timeout_s=3600.0)  # only the others' patience can end it
