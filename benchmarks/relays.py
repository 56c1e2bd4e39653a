"""The ranks between a job's ranks and their coordinator, in one process, which hand each other real messages at once.

``benchmarks.scale`` counts what each of them does; tests of the negotiation compare it with the coordinator alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ocomm.negotiation.coordinator import Coordinator
from ocomm.negotiation.request import Response
from ocomm.negotiation.tree import HOLD_S, Aggregator, Ranges, Tree, read_aggregate

T = TypeVar("T")


@dataclass
class Cost:
    """What one rank does for negotiation: messages that it sends and receives, their bytes, and processor time."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Relays:
    """What hands announcements to the coordinator of ``size`` ranks along a tree, and its responses back.

    ``costs`` counts for each rank; whoever begins a step replaces it by ``fresh_costs``.
    """

    def __init__(self, coordinator: Coordinator, size: int, direct_peers: int) -> None:
        self.coordinator = coordinator
        self.trees = [Tree.of(rank, size, direct_peers) for rank in range(size)]
        self.parents = [tree.parent for tree in self.trees]
        inner = [tree for tree in self.trees if tree.rank and tree.children]
        self.aggregators = {tree.rank: Aggregator(tree.rank, tree.children) for tree in inner}
        self.costs = self.fresh_costs()
        self.now_s = 0.0

    def fresh_costs(self) -> list[Cost]:
        return [Cost() for _ in self.trees]

    def announce(self, rank: int, message: bytes, now_s: float = 0.0) -> None:
        """Hands an announcement of ``rank`` on, as far as it goes before other ranks have announced, too."""
        self.now_s = now_s
        whose = (range(rank, rank + 1),)
        if rank == 0 or rank in self.aggregators:
            self._hear(rank, whose, message)
            self._pass(rank)
        else:
            self._count(rank, message)
            self._hear(self.parents[rank], whose, message)
            self._pass(self.parents[rank])

    def pass_all(self) -> None:
        """Hands everything on, as after the longest time for which a rank keeps something."""
        for rank in sorted(self.aggregators, reverse=True):
            self._pass(rank, wait_s=HOLD_S)
            assert not self.aggregators[rank].is_holding

    def answer(self, responses: Sequence[Response], message: bytes) -> None:
        """Hands the coordinator's responses to all ranks; ``message`` is how they travel."""
        names = [name for response in responses for name in response.names]
        for aggregator in self.aggregators.values():
            aggregator.forget(names)
        for rank in range(1, len(self.trees)):
            self._count(rank, message)

    def timed(self, rank: int, call: Callable[[], T]) -> T:
        """Returns the result of a call that ``rank`` makes, and counts its time."""
        begin = time.perf_counter()
        result = call()
        self.costs[rank].seconds += time.perf_counter() - begin
        return result

    def _count(self, rank: int, message: bytes) -> None:
        """Counts a message between a rank and its parent."""
        for end in (rank, self.parents[rank]):
            self.costs[end].messages += 1
            self.costs[end].nbytes += len(message)

    def _hear(self, rank: int, ranges: Ranges, message: bytes) -> None:
        if rank:
            self.timed(rank, lambda: self.aggregators[rank].add(ranges, message, self.now_s))
        else:
            ranks = ranges[0] if len(ranges) == 1 else [one for each in ranges for one in each]
            self.timed(0, lambda: self.coordinator.receive(ranks, message, self.now_s))

    def _pass(self, rank: int, wait_s: float = 0.0) -> None:
        if rank == 0:
            return
        aggregate = self.timed(rank, lambda: self.aggregators[rank].take(self.now_s + wait_s))
        if not aggregate:
            return
        self._count(rank, aggregate)
        for ranges, message in read_aggregate(aggregate):
            self._hear(self.parents[rank], ranges, message)
        self._pass(self.parents[rank], wait_s)
