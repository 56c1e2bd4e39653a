"""The 1-bit allreduce on up to 1,024 ranks in one thread: its bits, and how many messages a rank sends.

Nothing here has a session or a thread per rank: each rank's engine is asked in turn to move what it can.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.scale import DIRECT_PEERS, PARAMETERS, WATCH, Negotiation, exchange, messages_of, nodes_of
from ocomm.collectives.engine import State
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.collectives.python_engine import PythonChannel, PythonEngine
from ocomm.kernels import cpu_kernels
from ocomm.transport.local import Fabric
from ocomm.types import Nodes
from tests.oracle.hierarchical import Simulation
from tests.tiers import few
from tests.worlds import MPI_SIZE

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="about one process")


class Rank:
    def __init__(self, fabric: Fabric, rank: int, nodes: Nodes, numel: int) -> None:
        self.arrival: threading.Event = fabric.arrivals[rank]
        self.engine = PythonEngine(cpu_kernels(), self.arrival)
        self.channel: PythonChannel = self.engine.open_channel(fabric.endpoint(rank), 2)
        self.allreduce = OneBitAllreduce(self.channel, "x", (numel,), rank, range(fabric.size), nodes, 1 << 20, WATCH)


def drive(ranks: Sequence[Rank], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One call on all ranks. Fails, and does not hang, if no rank can move and one is not done."""
    tickets = [rank.allreduce.begin(value, 0.0) for rank, value in zip(ranks, values, strict=True)]
    while any(ticket.state < State.DONE for ticket in tickets):
        called = [rank for rank in ranks if rank.arrival.is_set()]
        assert called, "every rank waits for another"
        for rank in called:
            rank.arrival.clear()
            while rank.channel.step():
                pass
    return [rank.allreduce.finish(ticket, 0.0) for rank, ticket in zip(ranks, tickets, strict=True)]


@pytest.mark.parametrize(("count", "per_node"), few([(64, 1), (256, 8), (256, 1), (1024, 8)], [(64, 1), (256, 8)]))
def test_every_rank_has_the_bits_of_the_simulation(count: int, per_node: int) -> None:
    numel = 2 * 4096 + 77
    nodes = nodes_of(count, per_node)
    assert nodes.groups == (math.isqrt(count // per_node) if count // per_node - 1 > DIRECT_PEERS else 1)
    fabric = Fabric(count)
    ranks = [Rank(fabric, rank, nodes, numel) for rank in range(count)]
    law = Simulation(nodes.members, numel)
    for call in range(2 if count < 1024 else 1):
        values = [np.random.default_rng([call, rank]).normal(size=numel).astype(np.float32) for rank in range(count)]
        expected = law.step(values).tobytes()
        assert {result.tobytes() for result in drive(ranks, values)} == {expected}, f"call {call}"


@pytest.mark.parametrize("which", [0, -1])
def test_messages_per_rank_grow_with_the_root_of_the_number_of_nodes(which: int) -> None:
    """The table of docs/scale.md. Flat is what everybody would send directly, on a host each."""
    for ranks in (8, 64, 256, 1024):
        rank, hosts = range(ranks)[which], ranks // 8
        assert messages_of(rank, nodes_of(ranks, 1, ranks)) == (2 * (ranks - 1), ranks - 1)
        if hosts > 1:
            assert messages_of(rank, nodes_of(ranks, 8, ranks)) == (2 * (hosts - 1), hosts - 1)
        group = math.isqrt(ranks)
        if group**2 == ranks:
            assert messages_of(rank, nodes_of(ranks, 1, 7)) == (4 * (group - 1), 2 * (group - 1))
    exchange, vote = messages_of(range(1024)[which], nodes_of(1024, 8))
    assert exchange <= 5 * math.sqrt(128) + 1 and vote <= 128


def test_no_rank_has_more_messages_of_negotiation_in_a_large_job_than_in_a_small_one() -> None:
    costs = {}
    for size in (64, 300):
        job = Negotiation(size, DIRECT_PEERS)
        for _ in range(3):
            found = job.step()
        costs[size] = [max(cost.messages for cost in found), max(cost.nbytes for cost in found)]
    assert all(large <= small for small, large in zip(*costs.values(), strict=True)), costs


@pytest.mark.parametrize("size", [65, 128, 512, 2048, 3000, 4096])
def test_an_exchange_of_many_ranks_sends_few_messages_and_not_much_more_than_twice_a_bit(size: int) -> None:
    """Whether the number of hosts is a square or not; and what is said of it beforehand is right, but for headers."""
    small, large = exchange(64), exchange(size)
    assert large["messages"] <= 6 * math.sqrt(size)
    assert large["bytes_per_parameter"] <= 1.6 * small["bytes_per_parameter"]
    payload = PARAMETERS / 8 + 4 * PARAMETERS / 4096
    told = nodes_of(size, 1).exchange_nbytes(payload, 0) / PARAMETERS
    assert large["bytes_per_parameter"] == pytest.approx(told, rel=0.1)
