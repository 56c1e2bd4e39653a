"""The data plane never needs the GIL: an exchange goes to its end while the main thread of each rank holds it."""

from __future__ import annotations

from tests.cluster.jobs import run_job

HOLD = """
import ctypes, sys
import numpy as np
from ocomm import bootstrap
from ocomm import session as sessions
from ocomm.collectives import dense
from ocomm.collectives.engine import State
from ocomm.collectives.scratch import aligned
from ocomm.types import DType, Nodes, ReduceOp

bootstrap.initialize()
session = sessions.current()
topology = session.require_topology()
channel = session.open_channel(0, "held", 1, "held")
data = aligned(24 << 16)  # little, to be over soon on a busy machine, too
context = dense.Context(topology.rank, topology.size, 1 << 16, aligned, Nodes.flat(topology.size))
plan = dense.allreduce(context, [data], [data], [data.nbytes], DType.FLOAT32, ReduceOp.AVERAGE)
prepared = channel.prepare(plan)
assert len(plan.segments) == 24
holding = ctypes.PyDLL(None)  # whose functions keep the GIL

ended = np.zeros(1, np.float32)  # ranks
for _ in range(50):
    session.reduce(0, "ended", ended, ReduceOp.SUM)
    if ended[0] == topology.size:
        break
    usual = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # nobody gets it for asking
    ticket = channel.submit(prepared, 60.0, False)
    for _ in range(40):
        if ticket.state >= State.DONE:
            break
        holding.usleep(10_000)
    ended[0] = ticket.state == State.DONE
    sys.setswitchinterval(usual)
    assert ticket.wait(60.0) == State.DONE
# Four times a second the background thread leaves the engine to look at its process sets, and then it does wait.
assert ended[0] == topology.size
"""


def test_an_exchange_of_many_segments_ends_while_the_main_threads_hold_the_gil() -> None:
    job = run_job(2, HOLD)
    assert job.returncode == 0, job.stderr
