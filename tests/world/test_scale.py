"""The 1-bit allreduce on up to 1,024 ranks in one thread: its bits, and how many messages a rank sends.

Nothing here has a session or a thread per rank: each rank's engine is asked in turn to move what it can.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ocomm.collectives.compressed import vote
from ocomm.collectives.engine import State
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.collectives.plan import Plan
from ocomm.collectives.python_engine import PythonChannel, PythonEngine
from ocomm.collectives.routes import arrange, vote_groups
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.collectives.waiting import Watch
from ocomm.kernels import cpu_kernels
from ocomm.transport.local import Fabric
from ocomm.types import Nodes, Settings
from tests.oracle.hierarchical import Simulation
from tests.worlds import MPI_SIZE

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="about one process")

WATCH = Watch(failure=lambda: None, departed=dict, stall_check_s=60.0)
DIRECT_PEERS = Settings().direct_peers


def nodes_of(ranks: int, per_node: int, direct_peers: int = DIRECT_PEERS) -> Nodes:
    """As a job on so many hosts arranges itself."""
    return arrange([f"host {rank // per_node}" for rank in range(ranks)], "auto", direct_peers)


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


@pytest.mark.parametrize(
    ("count", "per_node"), [(64, 1), (256, 8), (256, 1), pytest.param(1024, 8, marks=pytest.mark.long)]
)
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


def messages_of(rank: int, nodes: Nodes) -> tuple[int, int]:
    """Messages that leave this rank's node in one fused exchange in which every rank owns a part, and in its vote."""
    numel = 16 * nodes.ranks  # every owner a block
    engine = PythonEngine(cpu_kernels(), threading.Event())
    channel = engine.open_channel(Fabric(nodes.ranks).endpoint(rank), 1)
    exchange = OneBitAllreduce(channel, "x", (numel,), rank, range(nodes.ranks), nodes, 1 << 20, WATCH, block_size=16)
    (headers,) = SegmentHeaders(rank, [(0, 0)], *(np.zeros(1, kind) for kind in (np.uint32, np.uint32, np.int64)))
    plans = exchange._prepared[0], vote(rank, vote_groups(nodes), headers)
    return _leaving(plans[0], nodes.node_of(rank)), _leaving(plans[1], nodes.node_of(rank))


def _leaving(plan: Plan, node: Sequence[int]) -> int:
    (stages,) = plan.segments
    return sum(message.peer not in node for stage in stages for message in stage.sends)


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
