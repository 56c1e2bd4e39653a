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
        self._known: dict[str, tuple[Request, int]] = {}  # with its bit

    def enter(self, epoch: int) -> None:
        """The coordinator speaks in this epoch; an older one's ids are void."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._known.clear()

    def learn(self, name: str, number: int, request: Request) -> None:
        """The coordinator has remembered ``request`` under ``number``."""
        self._known[name] = request, 1 << number

    def announcement(self, requests: Sequence[Request]) -> bytes:
        """The message that announces ``requests``: bits for known ones, the others in full."""
        bits = 0
        full: list[Request] = []
        known = self._known
        for request in requests:  # without a call: there are hundreds in every step
            name = request.name
            if name in known:
                asked, bit = known[name]
                if asked is request or asked == request:
                    bits |= bit
                    continue
                known[name] = request, bit
            full.append(request)
        nbytes = (bits.bit_length() + 7) // 8
        writer = Writer()
        writer.pack("III", self.epoch, nbytes, len(full))
        writer.parts.append(bits.to_bytes(nbytes, "little"))
        for request in full:
            write_request(writer, request)
        return writer.bytes()


@dataclass(slots=True)
class _Epoch:
    """Ids are bit numbers of masks."""

    ids: dict[str, int]
    requests: list[dict[int, Request]]  # by rank
    answered: dict[str, list[Request]] = field(default_factory=dict)  # in rank order, as they were when they agreed
    groups: dict[str, int] = field(default_factory=dict)  # masks of the members with an id


class CoordinatorCache:
    """The coordinator's side: what every rank last asked under each id."""

    def __init__(self, ranks: int, capacity: int) -> None:
        self.capacity = capacity
        self.epoch = 0
        self.hits = 0
        #: Mask of the ids of this epoch under which all ranks ask for the same: a bit says all that has to be checked.
        #: A group's members are in it together.
        self.agreed = 0
        #: Counts the changes of what the ids stand for.
        self.version = 0
        self._ranks = ranks
        self._heard = [0] * ranks  # the newest epoch in which each rank has spoken
        self._epochs = {0: _Epoch({}, [{} for _ in range(ranks)])}
        self._seen: OrderedDict[str, None] = OrderedDict()

    def read(self, rank: int, message: bytes) -> tuple[int, list[Request]]:
        """An announcement: the mask of what is asked for under ids of this epoch, and the other requests."""
        epoch, bits, full = _parse(message)
        self._heard[rank] = epoch
        for old in [e for e in self._epochs if e < min(self._heard)]:
            del self._epochs[old]
        known = self._epochs[epoch]
        self.hits += bits.bit_count()
        for request in full:
            number = known.ids.get(request.name)
            if number is not None:
                known.requests[rank][number] = request
                if epoch == self.epoch:
                    self._doubt(number)
        if epoch == self.epoch:
            return bits, full
        return 0, [known.requests[rank][number] for number in numbers_of(bits)] + full

    def requests_of(self, rank: int, mask: int, epoch: int) -> list[Request]:
        """What a rank asks for under the ids of a mask."""
        return [self._epochs[epoch].requests[rank][number] for number in numbers_of(mask)]

    def heard(self, rank: int, message: bytes) -> list[Request]:
        """All requests of an announcement that has not been read yet."""
        epoch, bits, full = _parse(message)
        return self.requests_of(rank, bits, epoch) + full

    def with_groups(self, mask: int) -> int:
        """A mask of this epoch and what is in a group with it."""
        for members in self._epochs[self.epoch].groups.values():
            if members & mask:
                mask |= members
        return mask

    def whole_groups(self, mask: int) -> int:
        """What of a mask of this epoch is in no group, or in it with its whole group."""
        for members in self._epochs[self.epoch].groups.values():
            if members & mask != members:
                mask &= ~members
        return mask

    def number_of(self, name: str) -> int:
        """The id of a name in this epoch, -1 for none."""
        return self._epochs[self.epoch].ids.get(name, -1)

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
        """All ranks ask for the same under this id, as long as they do not say something else."""
        mask = 1 << number
        if request.group:
            groups = self._epochs[self.epoch].groups
            mask = groups[request.group] = groups.get(request.group, 0) | mask
            if mask.bit_count() > request.group_size:  # one name for several groups
                self._doubt(number)
                groups[request.group] = mask
            if mask.bit_count() != request.group_size:
                return
        self.version += 1
        self.agreed |= mask

    def _doubt(self, number: int) -> None:
        """A rank has asked for something else under this id."""
        mask = 1 << number
        groups = self._epochs[self.epoch].groups
        for group in [group for group, members in groups.items() if members & mask]:
            mask |= groups.pop(group)
        self.version += 1
        self.agreed &= ~mask

    def has_answered(self, name: str, requests: Sequence[Request | None]) -> bool:
        """Whether these requests, in rank order, are those with which the name got its id: then they agree."""
        return self._epochs[self.epoch].answered.get(name) == requests

    def agreeing(self, mask: int) -> list[tuple[Request, ...]]:
        """The requests under ids that are agreed upon, in rank order."""
        numbers = numbers_of(mask)
        by_rank = [[asked[number] for number in numbers] for asked in self._epochs[self.epoch].requests]
        return list(zip(*by_rank, strict=True))


def numbers_of(mask: int) -> list[int]:
    """The numbers of the bits of a mask, ascending."""
    data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    return [at * 8 + bit for at, byte in enumerate(data) if byte for bit in _BITS[byte]]


_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def _parse(message: bytes) -> tuple[int, int, list[Request]]:
    """Epoch, bits and full requests of an announcement."""
    reader = Reader(message)
    epoch, nbits, nfull = reader.unpack("III")
    bits = int.from_bytes(message[reader.at : reader.at + nbits], "little")
    reader.at += nbits
    return epoch, bits, [read_request(reader) for _ in range(nfull)]
