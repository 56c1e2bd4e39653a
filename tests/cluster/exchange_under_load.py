"""A rank that times a 24-segment exchange while its main thread is busy; prints JSON (see test_exchange_under_load)."""

from __future__ import annotations

import json
import pickle
import statistics
import threading
import zlib
from collections.abc import Callable

import numpy as np
import torch

from ocomm import session as sessions
from ocomm.collectives import dense
from ocomm.collectives.engine import State
from ocomm.collectives.scratch import aligned
from ocomm.types import DType, Nodes, ReduceOp

ROUNDS = 15
torch.set_num_threads(1)
sessions.initialize()
session = sessions.current()
topology = session.require_topology()
channel = session.open_channel(0, "load", 1, "load")
data = aligned(24 << 20)
context = dense.Context(topology.rank, topology.size, 1 << 20, aligned, Nodes.flat(topology.size))
plan = dense.allreduce(context, [data], [data], [data.nbytes], DType.FLOAT32, ReduceOp.AVERAGE)
prepared = channel.prepare(plan)
assert len(plan.segments) == 24

big = [str(number) for number in range(400_000)]
weight = torch.randn(256, 256, requires_grad=True)
inputs = torch.randn(64, 256)


def pure_python() -> None:
    total = 0
    for number in range(20_000):
        total += number * number


def torch_step() -> None:
    ((inputs @ weight).relu() ** 2).mean().backward()


def burn(stop: threading.Event) -> None:
    """A CPU-bound thread outside the GIL, so that every case has two busy threads per rank."""
    block = bytes(1 << 20)
    while not stop.is_set():
        zlib.crc32(block)


def timed(work: Callable[[], object] | None) -> float:
    session.reduce(0, "barrier", np.zeros(1, np.float32), ReduceOp.SUM)
    stop = threading.Event()
    burner = threading.Thread(target=burn, args=(stop,))
    if work is None:
        burner.start()
    ticket = channel.submit(prepared, 60.0, False)
    while work is not None and ticket.state < State.DONE:
        work()
    assert ticket.wait(60.0) == State.DONE
    stop.set()
    if work is None:
        burner.join()
    return sum(ticket.seconds)


CASES = {"idle": None, "python": pure_python, "pickle": lambda: pickle.dumps(big), "torch": torch_step}
# In turn, so that whatever else the machine does meets all cases alike.
rounds = [{name: timed(work) for name, work in CASES.items()} for _ in range(ROUNDS)][1:]
if topology.rank == 0:
    print("RESULT " + json.dumps({name: statistics.median(r[name] for r in rounds) for name in CASES}))
