"""The response cache: a request made before, word for word, is one bit of a bit vector.

The coordinator gives an id to a name it answers for the second time, and tells everyone in the response. From then on
a rank whose request is unchanged sends the id's bit; a changed request travels in full and replaces the remembered one.
When the ids are used up the coordinator starts a new epoch: all ids are void, but bits of older epochs are understood
until every rank has spoken in a newer one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ocomm.negotiation.request import Reader, Request, Writer, read_request, write_request


class RankCache:
    """One rank's side: which of its requests the coordinator knows by number. Every kind of operation is cached."""

    def __init__(self) -> None:
        self.epoch = 0
        self._ids: dict[str, int] = {}
        self._known: dict[int, Request] = {}

    def enter(self, epoch: int) -> None:
        """The coordinator speaks in this epoch; an older one's ids are void."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._ids.clear()
            self._known.clear()

    def learn(self, name: str, number: int, request: Request) -> None:
        """The coordinator has remembered ``request`` under ``number``."""
        self._ids[name] = number
        self._known[number] = request

    def announcement(self, requests: Sequence[Request]) -> bytes:
        """The message that announces ``requests``: bits for known ones, the others in full."""
        bits = bytearray()
        full: list[Request] = []
        for request in requests:
            number = self._ids.get(request.name, -1)
            if number >= 0 and ((known := self._known[number]) is request or known == request):
                byte = number >> 3
                if byte >= len(bits):
                    bits.extend(bytes(byte + 1 - len(bits)))
                bits[byte] |= 1 << (number & 7)
            else:
                full.append(request)
                if number >= 0:
                    self._known[number] = request
        writer = Writer()
        writer.pack("III", self.epoch, len(bits), len(full))
        writer.parts.append(bytes(bits))
        for request in full:
            write_request(writer, request)
        return writer.bytes()


@dataclass(slots=True)
class _Epoch:
    ids: dict[str, int]
    requests: list[dict[int, Request]]  # by rank
    answered: dict[str, list[Request]] = field(default_factory=dict)  # in rank order, as they were when they agreed


class CoordinatorCache:
    """The coordinator's side: what every rank last asked under each id."""

    def __init__(self, ranks: int, capacity: int) -> None:
        self.capacity = capacity
        self.epoch = 0
        self.hits = 0
        self.misses = 0
        self._ranks = ranks
        self._heard = [0] * ranks  # the newest epoch in which each rank has spoken
        self._epochs = {0: _Epoch({}, [{} for _ in range(ranks)])}
        self._seen: OrderedDict[str, None] = OrderedDict()

    def read(self, rank: int, message: bytes) -> list[Request]:
        """The requests of an announcement."""
        reader = Reader(message)
        epoch, nbits, nfull = reader.unpack("III")
        bits = message[reader.at : reader.at + nbits]
        reader.at += nbits
        self._heard[rank] = epoch
        for old in [e for e in self._epochs if e < min(self._heard)]:
            del self._epochs[old]
        known = self._epochs[epoch]
        requests = [
            known.requests[rank][byte * 8 + bit]
            for byte, value in enumerate(bits)
            if value
            for bit in range(8)
            if value >> bit & 1
        ]
        self.hits += len(requests)
        for _ in range(nfull):
            request = read_request(reader)
            number = known.ids.get(request.name)
            if number is not None:
                known.requests[rank][number] = request
            requests.append(request)
        self.misses += nfull
        return requests

    def assign(self, name: str, requests: Sequence[Request]) -> int:
        """The id of a name that has just been answered, -1 for none. ``requests`` in rank order are remembered."""
        if self.capacity == 0:
            return -1
        current = self._epochs[self.epoch]
        number = current.ids.get(name)
        if number is None:
            # Names that come once (automatic ones) are not worth an id.
            if name not in self._seen:
                self._seen[name] = None
                if len(self._seen) > 4 * self.capacity:
                    self._seen.popitem(last=False)
                return -1
            if len(current.ids) >= self.capacity:
                self.epoch += 1
                current = self._epochs[self.epoch] = _Epoch({}, [{} for _ in range(self._ranks)])
            number = current.ids[name] = len(current.ids)
        if current.answered.get(name) != requests:
            current.answered[name] = list(requests)
            for rank, request in enumerate(requests):
                current.requests[rank][number] = request
        return number

    def has_answered(self, name: str, requests: Sequence[Request | None]) -> bool:
        """Whether these requests, in rank order, are those with which the name got its id: then they agree."""
        return self._epochs[self.epoch].answered.get(name) == requests
