"""The response cache: a request that was made before, word for word, is one bit of a bit vector.

When the coordinator answers a name for the second time, it gives the name an id and tells all ranks in the response.
From then on a rank whose request is unchanged sends the id's bit; a changed request travels in full and replaces the
remembered one. When the ids are used up the coordinator starts a new epoch: all ids become void, but bits of older
epochs are understood until every rank has sent an announcement in a newer one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ocomm.negotiation.request import Kind, Reader, Request, Writer, read_request, write_request


class Announcement(NamedTuple):
    """What a rank asks for: ids of an epoch, as the bits of a mask, and other requests in full."""

    epoch: int
    bits: int
    requests: Sequence[Request]

    @staticmethod
    def read(message: bytes) -> Announcement:
        """Raises ValueError for anything else."""
        reader = Reader(message)
        epoch, nbits, nfull = reader.unpack("III")
        bits = int.from_bytes(reader.take(nbits), "little")
        if nbits != (bits.bit_length() + 7) // 8:
            raise ValueError(f"{nbits} bytes of ids where {bits.bit_length()} bits are enough")
        requests = [read_request(reader) for _ in range(nfull)]
        reader.end()
        return Announcement(epoch, bits, requests)

    def write(self) -> bytes:
        nbytes = (self.bits.bit_length() + 7) // 8
        writer = Writer()
        writer.pack("III", self.epoch, nbytes, len(self.requests))
        writer.parts.append(self.bits.to_bytes(nbytes, "little"))
        for request in self.requests:
            write_request(writer, request)
        return writer.bytes()


class RankCache:
    """One rank's side of the cache: the ids of its requests. Every kind of operation is cached."""

    def __init__(self) -> None:
        self.epoch = 0
        self._known: dict[str, tuple[Request, int]] = {}  # name -> (request, its bit)

    def enter(self, epoch: int) -> None:
        """Notes the epoch of the coordinator's message; ids of an older one become void."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._known.clear()

    def learn(self, name: str, number: int, request: Request) -> None:
        """Notes that the coordinator has remembered ``request`` under the id ``number``."""
        self._known[name] = request, 1 << number

    def announcement(self, requests: Sequence[Request]) -> bytes:
        """Returns the message that announces ``requests``: bits for known ones, the others in full."""
        bits = 0
        full: list[Request] = []
        known = self._known
        for request in requests:  # no function is called here, because every step has hundreds of requests
            name = request.name
            if name in known:
                asked, bit = known[name]
                if asked is request or asked == request:
                    bits |= bit
                    continue
                known[name] = request, bit
            full.append(request)
        return Announcement(self.epoch, bits, full).write()


@dataclass(slots=True)
class _Epoch:
    """The ids of one epoch, which are bit numbers of masks."""

    ids: dict[str, int]
    requests: list[dict[int, Request]]  # of each rank, by id
    answered: dict[str, list[Request]] = field(default_factory=dict)  # in rank order, when they last agreed
    groups: dict[str, int] = field(default_factory=dict)  # masks of the members with an id


class CoordinatorCache:
    """The coordinator's side of the cache: each rank's last request under each id."""

    def __init__(self, ranks: int, capacity: int) -> None:
        self.capacity = capacity
        self.epoch = 0
        self.hits = 0
        #: Mask of the ids of this epoch under which all ranks ask for the same, so that a bit needs no further check.
        #: It has all members of a group, or none.
        self.agreed = 0
        #: Counts the changes of the requests that ids stand for.
        self.version = 0
        self._ranks = ranks
        self._heard = [0] * ranks  # the newest epoch of each rank's announcements
        self._epochs = {0: _Epoch({}, [{} for _ in range(ranks)])}
        self._seen: OrderedDict[str, None] = OrderedDict()

    def check(self, ranks: Sequence[int], announced: Announcement) -> None:
        """Raises ValueError if this is no announcement that all these ranks can have made."""
        epoch, bits, requests = announced
        if not all(0 <= rank < self._ranks for rank in ranks):
            raise ValueError(f"an announcement of ranks {list(ranks)} of {self._ranks}")
        newest = max(self._heard[rank] for rank in ranks)
        if epoch not in self._epochs or epoch < newest:
            raise ValueError(f"epoch {epoch} after {newest}, and the newest is {self.epoch}")
        if bits >> len(self._epochs[epoch].ids):
            raise ValueError(f"id {bits.bit_length() - 1} in epoch {epoch}, which has {len(self._epochs[epoch].ids)}")
        for request in requests:
            ends = (request.root, *request.splits) if request.kind is Kind.MESSAGE else (0, 0)
            if len(ends) != 2 or not all(0 <= end < self._ranks for end in ends):
                raise ValueError(f"message {request.name!r} from rank {request.root} to {request.splits}")

    def hear(self, ranks: Sequence[int], announced: Announcement) -> None:
        """Takes in an announcement that all these ranks have made, and that was checked."""
        if any(self._heard[rank] != announced.epoch for rank in ranks):
            for rank in ranks:
                self._heard[rank] = announced.epoch
            for old in [epoch for epoch in self._epochs if epoch < min(self._heard)]:
                del self._epochs[old]
        known = self._epochs[announced.epoch]
        self.hits += announced.bits.bit_count() * len(ranks)
        for request in announced.requests:
            number = known.ids.get(request.name)
            if number is not None:
                for rank in ranks:
                    known.requests[rank][number] = request
                if announced.epoch == self.epoch:
                    self._doubt(number)

    def requests_of(self, rank: int, mask: int, epoch: int) -> list[Request]:
        """Returns the requests of a rank under the ids of a mask."""
        return [self._epochs[epoch].requests[rank][number] for number in numbers_of(mask)]

    def with_groups(self, mask: int) -> int:
        """Returns a mask of this epoch with all ids that share a group with one of its ids."""
        for members in self._epochs[self.epoch].groups.values():
            if members & mask:
                mask |= members
        return mask

    def whole_groups(self, mask: int) -> int:
        """Returns those ids of a mask of this epoch that have no group, or whose whole group is in the mask."""
        for members in self._epochs[self.epoch].groups.values():
            if members & mask != members:
                mask &= ~members
        return mask

    def number_of(self, name: str) -> int:
        """Returns the id of a name in this epoch, -1 for none."""
        return self._epochs[self.epoch].ids.get(name, -1)

    def assign(self, name: str, requests: Sequence[Request]) -> int:
        """Returns the id of a name that has just been answered, -1 for none, and remembers its requests, which are in
        rank order.
        """
        if self.capacity == 0:
            return -1
        current = self._epochs[self.epoch]
        number = current.ids.get(name)
        if number is None:
            # A name that comes only once, such as an automatic one, is not worth an id.
            if name not in self._seen:
                self._seen[name] = None
                if len(self._seen) > 4 * self.capacity:
                    self._seen.popitem(last=False)
                return -1
            if len(current.ids) >= self.capacity:
                self.epoch += 1
                self.agreed = 0
                current = self._epochs[self.epoch] = _Epoch({}, [{} for _ in range(self._ranks)])
            number = current.ids[name] = len(current.ids)
        if current.answered.get(name) != requests:
            self._doubt(number)
            current.answered[name] = list(requests)
            for rank, request in enumerate(requests):
                current.requests[rank][number] = request
        if not self.agreed >> number & 1:
            self._trust(number, requests[0])
        return number

    def _trust(self, number: int, request: Request) -> None:
        """Notes that all ranks ask for the same under this id, until one of them asks for something else."""
        mask = 1 << number
        if request.group:
            groups = self._epochs[self.epoch].groups
            mask = groups[request.group] = groups.get(request.group, 0) | mask
            if mask.bit_count() > request.group_size:  # several groups have the same name
                self._doubt(number)
                groups[request.group] = mask
            if mask.bit_count() != request.group_size:
                return
        self.version += 1
        self.agreed |= mask

    def _doubt(self, number: int) -> None:
        """Notes that a rank has asked for something else under this id."""
        mask = 1 << number
        groups = self._epochs[self.epoch].groups
        for group in [group for group, members in groups.items() if members & mask]:
            mask |= groups.pop(group)
        self.version += 1
        self.agreed &= ~mask

    def has_answered(self, name: str, requests: Sequence[Request | None]) -> bool:
        """Returns True if these requests, in rank order, are those with which the name got its id, so that they
        agree.
        """
        return self._epochs[self.epoch].answered.get(name) == requests

    def agreeing(self, mask: int) -> list[tuple[Request, ...]]:
        """Returns, for ids under which all ranks agree, the requests in rank order."""
        numbers = numbers_of(mask)
        by_rank = [[asked[number] for number in numbers] for asked in self._epochs[self.epoch].requests]
        return list(zip(*by_rank, strict=True))


def numbers_of(mask: int) -> list[int]:
    """Returns the numbers of the bits of a mask, ascending."""
    data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    return [at * 8 + bit for at, byte in enumerate(data) if byte for bit in _BITS[byte]]


_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
