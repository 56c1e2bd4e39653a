"""The tree of ranks by which announcements come to the coordinator and responses go to all, and what its nodes do.

In a small set every rank is a child of the coordinator. In a large one no rank has a message from each: a rank between
the coordinator and others joins their announcements into one (``Aggregator``). Decisions only, as in ``coordinator``.

An aggregate is a row of sections. Each is one announcement (``cache``) that several ranks have made: the ranges of
these ranks, the announcement's length, the announcement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ocomm.negotiation.cache import Announcement
from ocomm.negotiation.request import Kind, Reader, Request, Writer

_WIDTH = 16
#: Seconds that an announcement of some ranks waits for that of the others below the same node. Only reports of stalls
#: wait for it, because nothing is ready before all have asked.
HOLD_S = 0.25
#: Ranks that have made one announcement, as ascending ranges that do not touch.
Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Tree:
    """A rank's place in the tree. Ranks are positions in the set; the coordinator, rank 0, is the root.

    In base ``width``, a rank's parent is the rank with its lowest digit that is not 0 replaced by 0. So a subtree is a
    range of ranks, and has few hosts where hosts have consecutive ranks.
    """

    rank: int
    size: int
    width: int

    @staticmethod
    def of(rank: int, size: int, direct_peers: int) -> Tree:
        """Returns a tree in which no rank has more children than ``direct_peers``, or than a binary tree's root has."""
        if size - 1 <= direct_peers:
            return Tree(rank, size, max(size, 2))
        width = _WIDTH
        while width > 2 and _levels(size, width) * (width - 1) > direct_peers:
            width -= 1
        return Tree(rank, size, width)

    @property
    def parent(self) -> int:
        """-1 for the root."""
        if self.rank == 0:
            return -1
        step = self._step()
        return self.rank - self.rank // step % self.width * step

    @property
    def children(self) -> tuple[range, ...]:
        """The subtrees of the children, each of which begins with the child."""
        found = []
        step, end = 1, self._step() if self.rank else self.size
        while step < end:
            starts = range(self.rank + step, min(self.rank + step * self.width, self.size), step)
            found += [range(start, min(start + step, self.size)) for start in starts]
            step *= self.width
        return tuple(found)

    def _step(self) -> int:
        """The weight of the lowest digit of this rank that is not 0."""
        step = 1
        while self.rank // step % self.width == 0:
            step *= self.width
        return step


def _levels(size: int, width: int) -> int:
    levels = 0
    while width**levels < size:
        levels += 1
    return levels


@dataclass(slots=True)
class _Named:
    """A name that was asked for in full: by how many ranks, and what has not been passed on."""

    ranks: int = 0
    kept: list[tuple[Ranges, Request]] = field(default_factory=list)


class Aggregator:
    """Joins the announcements of a rank and of its children's subtrees into those that the rank sends to its parent.

    What one rank asks for is kept until all have asked, or for HOLD_S, and passed on once.
    """

    def __init__(self, rank: int, children: Sequence[range]) -> None:
        self._parts = (range(rank, rank + 1), *children)
        self._index: dict[Ranges, int] = {(part,): at for at, part in enumerate(self._parts)}
        self._size = sum(map(len, self._parts))
        self._epoch = 0
        self._asked = [0] * len(self._parts)  # mask of the ids of this epoch that each part has asked for
        self._sent = [0] * len(self._parts)  # what of these has been passed on before all parts had asked
        self._named: dict[str, _Named] = {}
        self._ready: list[tuple[Ranges, Announcement]] = []  # to be passed on as they are
        self._since_s: float | None = None  # when the oldest of what is kept came

    @property
    def is_holding(self) -> bool:
        """True if something has not been passed on."""
        return bool(self._ready) or self._since_s is not None

    def due_s(self, now_s: float) -> float:
        """Returns the seconds after which something must be passed on even if nothing more is heard."""
        if self._ready:
            return 0.0
        return 1.0 if self._since_s is None else max(0.0, self._since_s + HOLD_S - now_s)

    def add(self, ranges: Ranges, message: bytes, now_s: float) -> None:
        """Takes in an announcement that all these ranks have made, by themselves or in an aggregate."""
        announced = Announcement.read(message)
        if any(request.kind is Kind.JOIN for request in announced.requests):
            self._pass_all()  # what a rank asked for before it joined comes before
        if announced.epoch > self._epoch:
            self._pass_all()
            self._epoch = announced.epoch
            self._asked = [0] * len(self._parts)
            self._sent = [0] * len(self._parts)
        # A message is for two ranks only. Ranks that are still in an older epoch must not seem to be in this one.
        if announced.epoch < self._epoch or any(r.kind in (Kind.JOIN, Kind.MESSAGE) for r in announced.requests):
            self._ready.append((ranges, announced))
            return
        part = self._index.get(ranges)
        if part is not None:
            self._asked[part] |= announced.bits
            self._sent[part] &= ~announced.bits
        elif announced.bits:  # a child has waited for its other ranks already
            self._ready.append((ranges, Announcement(announced.epoch, announced.bits, ())))
        for request in announced.requests:
            named = self._named.setdefault(request.name, _Named())
            named.ranks += sum(map(len, ranges))
            named.kept.append((ranges, request))
        if self._since_s is None and self._keeps():
            self._since_s = now_s

    def forget(self, names: Iterable[str]) -> None:
        """Notes that these names were answered."""
        for name in names:
            named = self._named.get(name)
            if named is not None and not named.kept:
                del self._named[name]

    def take(self, now_s: float) -> bytes:
        """Returns the aggregate to be sent now; b"" for none. ``now_s`` is infinite if nothing may be kept."""
        if not self.is_holding:
            return b""
        if self._since_s is not None and now_s - self._since_s >= HOLD_S:
            self._pass_all()
        else:
            self._pass_complete()
        ready, self._ready = self._ready, []
        return write_aggregate(ready)

    def _keeps(self) -> bool:
        return any(asked & ~sent for asked, sent in zip(self._asked, self._sent, strict=True)) or any(
            named.kept for named in self._named.values()
        )

    def _pass_complete(self) -> None:
        """Passes on what all ranks have asked for."""
        complete = self._asked[0]
        for asked in self._asked:
            complete &= asked
        names = [name for name, named in self._named.items() if named.ranks >= self._size]
        if not complete and not names:
            return
        self._pass([asked & complete & ~sent for asked, sent in zip(self._asked, self._sent, strict=True)], names)
        self._asked = [asked & ~complete for asked in self._asked]
        self._sent = [sent & ~complete for sent in self._sent]
        for name in names:
            del self._named[name]
        if not self._keeps():
            self._since_s = None

    def _pass_all(self) -> None:
        """Passes on everything."""
        self._pass_complete()
        masks = [asked & ~sent for asked, sent in zip(self._asked, self._sent, strict=True)]
        self._pass(masks, list(self._named))
        self._sent = list(self._asked)
        self._since_s = None

    def _pass(self, masks: Sequence[int], names: Sequence[str]) -> None:
        """Passes on the ids of ``masks``, one of each part, and the requests for ``names``, few sections for all."""
        by_mask: dict[int, list[range]] = {}
        for part, mask in zip(self._parts, masks, strict=True):
            if mask:
                by_mask.setdefault(mask, []).append(part)
        by_request: dict[Request, list[range]] = {}
        for name in names:
            for ranges, request in self._named[name].kept:
                by_request.setdefault(request, []).extend(ranges)
            self._named[name].kept = []
        requests_of: dict[Ranges, list[Request]] = {}
        for request, found in by_request.items():
            requests_of.setdefault(_joined(found), []).append(request)
        for mask, found in by_mask.items():
            requests = requests_of.pop(_joined(found), [])
            self._ready.append((_joined(found), Announcement(self._epoch, mask, tuple(requests))))
        for ranges, requests in requests_of.items():
            self._ready.append((ranges, Announcement(self._epoch, 0, tuple(requests))))


def _joined(ranges: Iterable[range]) -> Ranges:
    """Returns the ranks of all ranges as ascending ranges that do not touch."""
    found: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return tuple(found)


def write_aggregate(sections: Iterable[tuple[Ranges, Announcement]]) -> bytes:
    writer = Writer()
    for ranges, announced in sections:
        message = announced.write()
        writer.numbers([end for each in ranges for end in (each.start, each.stop)])
        writer.pack("I", len(message))
        writer.parts.append(message)
    return writer.bytes()


def read_aggregate(message: bytes) -> Iterator[tuple[Ranges, bytes]]:
    """Yields the sections: ranks and their announcement. Raises ValueError if it cannot be read."""
    reader = Reader(message)
    while reader.at < len(message):
        ends = reader.numbers()
        (nbytes,) = reader.unpack("I")
        if len(ends) % 2 or not ends:
            raise ValueError(f"{len(ends)} ends of ranges")
        yield tuple(map(range, ends[::2], ends[1::2])), reader.take(nbytes)
