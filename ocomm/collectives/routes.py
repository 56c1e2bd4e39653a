"""How the workers of a slice reach each other: directly, or in two hops across groups of nodes.

Directly, each of N workers has N - 1 messages per phase; with two hops it has about 2 sqrt(N). A message goes to the
relay: a member of the sender's own group, each of which relays to equally many receivers (``Nodes.relayed``). The relay
sends on what its whole group has for that receiver. Relays do not change messages, so servers average the same bits in
the same order either way. The price is that half of the exchange, the alltoall, crosses the network twice
(docs/decisions/0006-hierarchical-exchange.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from ocomm.collectives.plan import Copy, Message, Stage
from ocomm.compression.layout import MessageLayout
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import ALIGNMENT, HOST, Bytes, Memory
from ocomm.types import Nodes


def after(members: Sequence[int], position: int) -> list[int]:
    """Returns the other members, starting after this one, so that not all members send to the first one first."""
    return [*members[position + 1 :], *members[:position]]


def arrange(hosts: Sequence[str], hierarchical: bool | Literal["auto"], direct_peers: int) -> Nodes:
    """Decides how the ranks on these hosts exchange compressed values; ``hosts[r]`` is the host of rank r.

    With ``"auto"`` the form is hierarchical if there are several hosts with several ranks each; with True, if there are
    several hosts and any of them has several ranks. Else every rank is a node. Two hops are used if a worker has more
    than ``direct_peers`` others. The result depends on the hosts alone, so it is the same on all ranks. Raises
    InvalidRequestError for other values of ``hierarchical``, and for True if there can be no hierarchical form.
    """
    nodes = Nodes.of_hosts(hosts)
    if hierarchical not in (True, False, "auto"):
        raise InvalidRequestError(f"hierarchical must be True, False or 'auto', got {hierarchical!r}")
    if hierarchical is True and (len(nodes.members) == 1 or nodes.is_flat):
        have = f"all {nodes.ranks} are on host '{hosts[0]}'" if len(nodes.members) == 1 else "every rank has its own"
        raise InvalidRequestError(
            f"hierarchical=True needs ranks on several hosts, and several on one of them; {have}. Leave it at 'auto'."
        )
    wanted = nodes.slices > 1 and len(nodes.members) > 1 if hierarchical == "auto" else hierarchical
    members = nodes.members if wanted else Nodes.flat(len(hosts)).members
    return Nodes(members, math.isqrt(len(members)) if len(members) - 1 > direct_peers else 1)


def vote_groups(nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of ranks in which votes are exchanged: nodes, or all ranks of a group of nodes."""
    if nodes.groups == 1 and not nodes.is_flat:
        return nodes.members
    return tuple(tuple(sorted(r for k in group for r in nodes.members[k])) for group in nodes.node_groups)


class Route:
    """The messages of one segment between this rank and the other workers of its slice; none if it has no slice.

    ``send`` is this rank's packed buffer. ``rows`` are the workers' messages for this rank, in the order of their
    nodes; they are valid when the stages of ``scatter`` are over.
    """

    def __init__(self, layout: MessageLayout, send: Bytes, memory: Memory = HOST) -> None:
        self._memory = memory
        self.layout = layout
        self.nodes = layout.nodes
        self.send = send
        self.memory: list[Bytes] = []
        self.rows: list[Bytes] = []
        if not layout.workers:
            return
        self.me = layout.workers.index(layout.rank)
        own = layout.message_nbytes[layout.rank]
        if self.nodes.groups == 1:
            self.rows = self._new_rows(own, len(layout.workers))
            self.rows[self.me] = self.message(self.me)
            return
        self.number = next(k for k, group in enumerate(self.nodes.node_groups) if self.me in group)
        self.group = self.nodes.node_groups[self.number]
        self.position = self.group.index(self.me)
        self._arrange_two_hops(own)

    def _new_rows(self, nbytes: int, count: int) -> list[Bytes]:
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._memory.staging(room * count)
        self.memory.append(memory)
        return [memory[k * room : k * room + nbytes] for k in range(count)]

    def message(self, node: int, packed: Bytes | None = None) -> Bytes:
        """Returns the message to the worker in ``node``; in another packed buffer, the message from it."""
        layout = self.layout
        rank = layout.workers[node]
        start = layout.message_start[rank]
        return (self.send if packed is None else packed)[start : start + layout.message_nbytes[rank]]

    # Two hops. Nodes and groups are numbered; `group` and `position` are this rank's.

    def _through(self, node: int, packed: Bytes) -> Bytes:
        """Returns the messages in a packed buffer for which this node of the group is the relay: they are adjacent."""
        layout = self.layout
        behind = self.nodes.relayed(self.number, self.group.index(node))
        first, last = layout.workers[behind[0]], layout.workers[behind[-1]]
        return packed[layout.message_start[first] : layout.message_start[last] + layout.message_nbytes[last]]

    def _arrange_two_hops(self, own: int) -> None:
        layout, nodes = self.layout, self.nodes
        behind = nodes.relayed(self.number, self.position)
        sizes = [layout.message_nbytes[layout.workers[node]] for node in behind]
        # From each member of the group: its messages for the nodes behind this rank, in that order.
        self.gathered = {node: self._new_rows(sum(sizes), 1)[0] for node in self.group if node != self.me}
        # To each of these nodes: the messages of the whole group.
        self.bundles = {
            node: self._new_rows(size * len(self.group), 1)[0]
            for node, size in zip(behind, sizes, strict=True)
            if node != self.me
        }
        # From the relay for this rank in each other group: its members' messages.
        self.incoming = {
            nodes.relay(number, self.me): self._new_rows(own * len(group), 1)[0]
            for number, group in enumerate(nodes.node_groups)
            if number != self.number
        }
        starts = dict(zip(behind, accumulate(sizes, initial=0), strict=False))
        self.parts = {
            (node, to): memory[starts[to] : starts[to] + size]
            for node, memory in self.gathered.items()
            for to, size in zip(behind, sizes, strict=True)
        }
        rows: dict[int, Bytes] = {self.me: self.message(self.me)}
        for node in self.gathered:
            rows[node] = self.parts[node, self.me]
        others = [group for group in nodes.node_groups if group is not self.group]
        for group, memory in zip(others, self.incoming.values(), strict=True):
            for k, node in enumerate(group):
                rows[node] = memory[k * own : (k + 1) * own]
        self.rows = [rows[node] for node in range(len(layout.workers))]

    def _to(self, node: int, buffer: Bytes) -> Message:
        return Message(self.layout.workers[node], buffer)

    # Stages

    def _empty(self) -> list[Stage]:
        return [Stage() for _ in range(1 if self.nodes.groups == 1 else 2)]

    def scatter(self) -> list[Stage]:
        """Returns the stages that send every worker's messages to their owners. The first stage has no computation
        yet.
        """
        if not self.layout.workers:
            return self._empty()
        if self.nodes.groups == 1:
            others = after(range(len(self.layout.workers)), self.me)
            sends = [self._to(node, self.message(node)) for node in others]
            return [Stage([], sends, [self._to(node, self.rows[node]) for node in others])]
        mates = after(self.group, self.position)
        sends = [self._to(node, self._through(node, self.send)) for node in mates]
        inside = Stage([], sends, [self._to(node, self.gathered[node]) for node in mates])
        across = Stage()
        for to, bundle in self.bundles.items():
            for k, node in enumerate(self.group):
                part = self.message(to) if node == self.me else self.parts[node, to]
                across.compute.append(Copy(part, bundle[k * part.nbytes : (k + 1) * part.nbytes]))
            across.sends.append(self._to(to, bundle))
        across.receives = [self._to(node, memory) for node, memory in self.incoming.items()]
        return [inside, across]

    def gather(self, result: Bytes) -> list[Stage]:
        """Returns the stages that send every owner's averages, in their places in ``result``, to all workers of the
        slice.
        """
        layout = self.layout
        if not layout.workers:
            return self._empty()
        payload = {node: self.message(node, result)[layout.header_nbytes :] for node in range(len(layout.workers))}
        if self.nodes.groups == 1:
            others = after(range(len(layout.workers)), self.me)
            sends = [self._to(node, payload[self.me]) for node in others] if payload[self.me].nbytes else []
            return [Stage([], sends, [self._to(node, payload[node]) for node in others if payload[node].nbytes])]
        across = Stage([], [], [self._to(node, payload[node]) for node in self.bundles if payload[node].nbytes])
        if payload[self.me].nbytes:
            across.sends = [self._to(node, payload[self.me]) for node in self.incoming]
        mates = after(self.group, self.position)
        sends = [self._to(node, self._through(self.me, result)) for node in mates]
        return [across, Stage([], sends, [self._to(node, self._through(node, result)) for node in mates])]
