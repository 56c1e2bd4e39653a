"""Memory stays flat over many steps, with and without names, whatever is called."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ocomm
from ocomm.session import Session
from tests.worlds import MPI_SIZE, run_ranks


def data_nbytes() -> int:
    """What this process has for data, and not what of it is resident: a machine takes some away and gives it back."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.skipif(MPI_SIZE not in (0, 2), reason="one process, or two ranks of an MPI job")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_ten_thousand_steps_leave_memory_as_it_was() -> None:
    def body(session: Session) -> int:
        array = np.ones(1000, np.float32)

        def steps(count: int) -> None:
            for _ in range(count):
                named = ocomm.allreduce_async_(array, name="w", op=ocomm.Max)
                unnamed = ocomm.allgather_async(array[:3])
                ocomm.synchronize(named)
                ocomm.synchronize(unnamed)

        steps(2000)
        before = data_nbytes()
        steps(8000)
        return data_nbytes() - before

    # 8,000 steps of 2 tensors: what was kept of each would be seen at 130 bytes.
    assert max(run_ranks(MPI_SIZE or 1, body)) < 2 << 20
