"""What the background thread costs: next to nothing while idle, little beside a thread that computes."""

from __future__ import annotations

from tests.cluster.test_failures import mpirun, pytestmark  # noqa: F401 -- the same need for an mpirun

IDLE = """
import psutil
rank = started()
me = psutil.Process()
time.sleep(0.5)
before, begin = sum(me.cpu_times()[:2]), time.perf_counter()
time.sleep(5.0)
share = (sum(me.cpu_times()[:2]) - before) / (time.perf_counter() - begin)
say(f"{share:.4f}")
"""


def test_an_idle_rank_takes_at_most_four_percent_of_a_core() -> None:
    ended = mpirun(2, IDLE)
    assert ended.code == 0, ended.stderr
    shares = [float(text) for text in ended.said]
    assert len(shares) == 2
    assert max(shares) <= 0.04, shares
