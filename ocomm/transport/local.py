"""N ranks as N threads of one process: a network for tests and debuggers, and for a job of one rank.

A ``Fabric`` is the wire. Sends copy, so they are over at once; receives are matched in the order they were posted, when
they are tested.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ocomm.errors import HorovodInternalError
from ocomm.types import Bytes


class Fabric:
    """What the ranks of one local job share. Owns all messages under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.arrivals = [threading.Event() for _ in range(size)]
        # (communicator, source, dest, tag), world ranks -> payloads in order
        self.messages: dict[tuple[Hashable, int, int, int], deque[bytes]] = defaultdict(deque)
        # Receives that are posted and not over, by the same keys
        self.posted: dict[tuple[Hashable, int, int, int], deque[_Receive]] = defaultdict(deque)
        # (communicator, dest, tag) -> sources in order of arrival, for probe
        self.order: dict[tuple[Hashable, int, int], deque[int]] = defaultdict(deque)
        self.aborted: int | None = None

    def endpoint(self, rank: int) -> LocalTransport:
        """Returns the communicator of all ranks for ``rank``."""
        return LocalTransport(self, ("world",), tuple(range(self.size)), rank)


@dataclass(slots=True, eq=False)
class _Receive:
    buffer: Bytes
    key: tuple[Hashable, int, int, int]


class LocalTransport:
    """The ``base.Transport`` between threads of one process."""

    def __init__(self, fabric: Fabric, identity: tuple[Hashable, ...], members: tuple[int, ...], rank: int) -> None:
        self.fabric = fabric
        self.identity = identity
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.arrival = fabric.arrivals[members[rank]]
        self._children = 0
        self._subsets: dict[tuple[int, ...], int] = defaultdict(int)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> None:
        me, peer = self.members[self.rank], self.members[dest]
        with self.fabric.lock:
            self.fabric.messages[self.identity, me, peer, tag].append(buffer.tobytes())
            self.fabric.order[self.identity, peer, tag].append(self.rank)
        self.fabric.arrivals[peer].set()

    def irecv(self, buffer: Bytes, source: int, tag: int) -> _Receive:
        key = (self.identity, self.members[source], self.members[self.rank], tag)
        request = _Receive(buffer, key)
        with self.fabric.lock:
            self.fabric.posted[key].append(request)
        return request

    def test(self, request: _Receive | None) -> bool:
        if self.fabric.aborted is not None:
            raise HorovodInternalError(f"the job was aborted with code {self.fabric.aborted}")
        if request is None:
            return True
        key = request.key
        _, sender, me, tag = key
        source = self.members.index(sender)
        with self.fabric.lock:
            waiting, posted = self.fabric.messages.get(key), self.fabric.posted[key]
            if not waiting or posted[0] is not request:
                return False
            payload = waiting.popleft()
            posted.popleft()
            if not waiting:
                del self.fabric.messages[key]
            if not posted:
                del self.fabric.posted[key]
            order = self.fabric.order[self.identity, me, tag]
            order.remove(source)
            if not order:
                del self.fabric.order[self.identity, me, tag]
        if len(payload) != request.buffer.nbytes:
            raise HorovodInternalError(
                f"a message from rank {source} has {len(payload)} bytes, expected {request.buffer.nbytes}"
            )
        request.buffer[:] = np.frombuffer(payload, np.uint8)
        return True

    def probe(self, tag: int) -> tuple[int, int] | None:
        me = self.members[self.rank]
        with self.fabric.lock:
            order = self.fabric.order.get((self.identity, me, tag))
            if not order:
                return None
            source = order[0]
            return source, len(self.fabric.messages[self.identity, self.members[source], me, tag][0])

    def duplicate(self) -> LocalTransport:
        self._children += 1
        return LocalTransport(self.fabric, (*self.identity, self._children), self.members, self.rank)

    def duplicated(self, request: LocalTransport) -> LocalTransport:
        return request

    def subset(self, ranks: Sequence[int]) -> LocalTransport:
        members = tuple(self.members[r] for r in ranks)
        self._subsets[members] += 1
        identity = (*self.identity, "subset", members, self._subsets[members])
        return LocalTransport(self.fabric, identity, members, list(ranks).index(self.rank))

    def abort(self, code: int) -> None:
        self.fabric.aborted = code
        for event in self.fabric.arrivals:
            event.set()

    def close(self) -> None:
        pass
