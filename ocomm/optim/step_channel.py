"""The channel of an optimizer's steps: its ranks, its deadlines, and what all messages of a step have in common."""

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
    """Bytes that a plan sends to other nodes, and to other ranks of this rank's node."""

    across: int
    intra_node: int


class StepChannel:
    """``channel`` of the optimizer ``name``, between the world ranks ``ranks``, which are on ``nodes``.

    ``rank`` is this rank's position among them. A plan may take ``timeout_s`` seconds, 0 for any time. ``direct`` and
    ``intra_node`` are those of ``collectives.staged.staged``.
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
        #: Flags of this rank's gradients, which the engine's thread sets.
        self.flags = np.zeros(1, np.uint32)
        #: Flags of all ranks, and the coordinator's announcement, as heard in the current step.
        self.heard_flags = np.zeros(1, np.uint32)
        self.announcement = np.zeros(1, np.int64)
        self._others = set(range(len(self.ranks))).difference(nodes.node_of(rank))

    def enter(self, memory: Memory) -> None:
        """Runs what all ranks run first if values travel between devices. Collective."""
        if self.direct or self.intra_node is not None:
            self.run(self.channel.prepare(entry(memory)), self.name)

    def segment_headers(self, contents: Sequence[tuple[int, int]], *, for_node: bool = False) -> SegmentHeaders:
        """Returns headers of segments with these signatures and numbers of tensors."""
        return SegmentHeaders(self.rank, contents, self.flags, self.heard_flags, self.announcement, for_node=for_node)

    def prepare(self, plan: Plan) -> tuple[Any, Sent]:
        """Returns a plan prepared for many submissions, and what it sends."""
        across = plan.bytes_sent_to(self._others)
        return self.channel.prepare(plan), Sent(across, plan.bytes_sent - across + plan.bytes_bridged)

    def run(self, prepared: Any, what: str) -> None:
        """Submits a plan and waits for its end; ``what`` names it. Raises the error with which it fails."""
        ticket = self.channel.submit(prepared, self.timeout_s, False)
        if wait(ticket, self.channel, self.ranks, self.watch, what) != State.DONE:
            raise self.explain(ticket, what)

    def explain(
        self, ticket: Ticket, what: str, mismatch: Callable[[], OcommError] | None = None, device: str = "the device"
    ) -> OcommError:
        """Returns the error of a plan that has failed, as ``collectives.outcome.explain`` does."""
        return explain(ticket, self.channel, self.ranks, what, self.timeout_s, mismatch=mismatch, device=device)

    def interrupt(self, error: BaseException) -> None:
        """Ends the channel on this rank, because ``error`` has interrupted it, and tells the other ranks."""
        self.channel.abandon()
        self.watch.interrupt(self.watch.name, f"was interrupted by {type(error).__name__}")

    def give_up(self, why: str) -> None:
        """Ends the node's bridge, because some rank may have been ready for a transfer that this rank will not make."""
        if self.intra_node is not None and self.intra_node.bridge is not None:
            self.intra_node.bridge.end(f"{self.name} has failed: {why}")
