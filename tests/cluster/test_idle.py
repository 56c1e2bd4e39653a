"""What the background thread costs: next to nothing while idle, little beside a thread that computes."""

from __future__ import annotations

from ocomm.types import Settings
from tests.cluster.test_failures import mpirun, pytestmark  # noqa: F401 -- the same need for an mpirun

# Wakeups, not processor time: that of one wakeup differs by a factor of two with what else the machine does.
IDLE = """
import glob
rank = started()

def wakeups():
    lines = [line for file in glob.glob("/proc/self/task/*/status") for line in open(file)]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

time.sleep(0.5)
before, begin = wakeups(), time.perf_counter()
time.sleep(5.0)
say(f"{(wakeups() - before) / (time.perf_counter() - begin):.1f}")
"""


def test_the_threads_of_an_idle_rank_wake_as_often_as_one_that_sleeps_for_idle_ms() -> None:
    ended = mpirun(2, IDLE)
    assert ended.code == 0, ended.stderr
    rates = [float(text) for text in ended.said]
    assert len(rates) == 2
    # Torch and MPI may have threads of their own that wake now and then.
    assert max(rates) <= 1.25 * 1e3 / Settings().idle_ms, rates
