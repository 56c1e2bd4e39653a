"""The channel of an optimizer's steps: its ranks, its deadlines, and what all messages of a step say alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ocomm.collectives.bridge import IntraNode
from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.collectives.outcome import explain
from ocomm.collectives.plan import Plan
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.collectives.staged import entry
from ocomm.collectives.waiting import Watch, wait
from ocomm.errors import OcommError
from ocomm.kernels.base import Memory
from ocomm.types import Nodes


class Sent(NamedTuple):
    """Bytes which a plan sends to other nodes, and to other ranks of this rank's node."""

    across: int
    intra_node: int


class StepChannel:
    """``channel`` of the optimizer ``name``, between the world ranks ``ranks``, which are on ``nodes``.

    ``rank`` is this rank's place among them. A plan may take ``timeout_s`` seconds, 0 for any time. ``direct``,
    ``intra_node``: see ``staged``.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        ranks: Sequence[int],
        rank: int,
        nodes: Nodes,
        watch: Watch,
        timeout_s: float,
        *,
        direct: bool = False,
        intra_node: IntraNode | None = None,
    ) -> None:
        self.name = name
        self.channel = channel
        self.ranks = tuple(ranks)
        self.rank = rank
        self.nodes = nodes
        self.watch = watch
        self.timeout_s = timeout_s
        self.direct = direct
        self.intra_node = intra_node
        #: Flags of this rank's gradients; the engine's thread sets them.
        self.flags = np.zeros(1, np.uint32)
        #: Flags of all ranks, and what the coordinator announces, as heard in the step under way.
        self.heard_flags = np.zeros(1, np.uint32)
        self.announcement = np.zeros(1, np.int64)
        self._others = set(range(len(self.ranks))).difference(nodes.node_of(rank))

    def enter(self, memory: Memory) -> None:
        """What all ranks run first where values travel between devices. Collective."""
        if self.direct or self.intra_node is not None:
            self.run(self.channel.prepare(entry(memory)), self.name)

    def segment_headers(self, contents: Sequence[tuple[int, int]], *, for_node: bool = False) -> SegmentHeaders:
        """Headers of segments with these signatures and numbers of tensors."""
        return SegmentHeaders(self.rank, contents, self.flags, self.heard_flags, self.announcement, for_node=for_node)

    def prepare(self, plan: Plan) -> tuple[Any, Sent]:
        """A plan that is made ready to be submitted many times, and what it sends."""
        across = plan.bytes_sent_to(self._others)
        return self.channel.prepare(plan), Sent(across, plan.bytes_sent - across + plan.bytes_bridged)

    def run(self, prepared: Any, what: str) -> None:
        """Sends a plan on its way and waits for its end; ``what`` names it. Raises what it has failed with."""
        ticket = self.channel.submit(prepared, self.timeout_s, False)
        if wait(ticket, self.channel, self.ranks, self.watch, what) != State.DONE:
            raise self.explain(ticket, what)

    def explain(
        self, ticket: Ticket, what: str, mismatch: Callable[[], OcommError] | None = None, device: str = "the device"
    ) -> OcommError:
        """The error of a plan that has failed; see ``collectives.outcome.explain``."""
        return explain(ticket, self.channel, self.ranks, what, self.timeout_s, mismatch=mismatch, device=device)

    def give_up(self, why: str) -> None:
        """Some rank may have been ready for a transfer that this one will not make now."""
        if self.intra_node is not None and self.intra_node.bridge is not None:
            self.intra_node.bridge.end(f"{self.name} has failed: {why}")
