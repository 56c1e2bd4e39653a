"""The coordinator of one process set: decides which tensors are ready and which requests are wrong. Decisions only.

It has no thread, clock or network: messages and times come in as arguments, responses go out as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ocomm.negotiation.cache import Announcement, CoordinatorCache
from ocomm.negotiation.call_order import CallOrder
from ocomm.negotiation.fusion import fuse
from ocomm.negotiation.request import REGISTERED, Fault, Kind, Request, Response, TensorMemory
from ocomm.types import ReduceOp

#: The name of every rank's request to join.
JOIN_NAME = "join"
#: How a rank is said to have left in order.
SHUT_DOWN = "has shut down"
#: What to do where others still wait for a rank that left in order.
EQUAL_CALLS = (
    "All ranks must make the same calls. Give them equally many batches: DistributedSampler does for Torch, "
    "fit(dataset.repeat(), steps_per_epoch=...) for Keras, with MetricAverageCallback before EarlyStopping. Or call "
    "join() on each rank after its last batch."
)
#: Follows an optimizer's name in the name of the exchange that compares the ranks' states at the beginning.
FIRST_STEP = ": first step, or first after load_state_dict()"
#: The remedy if only some ranks begin anew.
LOADED_ALONE = (
    "If a rank has begun anew alone, because it has loaded a state or caught an error, out of memory for instance: do "
    "so on all ranks, or broadcast the state"
)
_ANSWERS = 256  # how many answers are remembered


@dataclass(slots=True)
class _Pending:
    """A name that some ranks have asked for."""

    first_s: float
    requests: dict[int, Request] = field(default_factory=dict)  # by rank, in order of arrival
    is_settled: bool = False  # all ranks have asked or joined

    def ordered(self, ranks: int) -> list[Request | None]:
        """Returns the requests in rank order, None for a rank that has joined."""
        return list(map(self.requests.get, range(ranks)))


@dataclass(frozen=True, slots=True)
class Stall:
    """A tensor that some ranks have submitted and others have not, for longer than a limit."""

    name: str
    waited_s: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """Collects requests until all ranks have asked, checks them, and fuses what is ready.

    ``ranks`` are the world ranks of the set, for messages to people; all other rank numbers are positions in the set.
    """

    def __init__(
        self, ranks: Sequence[int], fusion_threshold: int, cache_capacity: int, group_fusion: bool = True
    ) -> None:
        self.ranks = tuple(ranks)
        self.fusion_threshold = fusion_threshold
        self.group_fusion = group_fusion
        self.cache = CoordinatorCache(len(ranks), cache_capacity)
        # Requests under ids on which all ranks agree are kept as bits, as long as nothing goes wrong. All others are
        # kept by name, in ``_pending``; ``_name`` moves bits there. A name, or a group, is never in both.
        self._asked = [0] * len(ranks)  # mask of the ids that each rank has asked for
        self._bits = 0  # the union of these masks
        self._since: list[tuple[float, int]] = []  # (time, mask of the ids that were asked for first at that time)
        self._epoch = 0  # the epoch of the ids
        self._late = 0  # a rank that others had to wait for
        self._answers: dict[tuple[int, int, int], list[Response]] = {}
        self._pending: dict[str, _Pending] = {}
        self._named: int | None = 0  # mask of pending names' ids and of their groups'; None: unknown
        self._ready: list[str] = []
        self._groups: dict[str, list[str]] = {}
        self._absent: dict[int, str] = {}  # rank -> why it will never ask again
        self._joined: list[int] = []  # ranks without more data, in the order in which they joined
        self._news: list[Response] = []
        self._bridge_is_asked_for = False
        self._order = CallOrder()
        self._released: dict[int, dict[int, int]] = {}  # channel -> rank -> segments it has run there, -1 if it failed

    def receive(self, ranks: Sequence[int], message: bytes, now_s: float) -> None:
        """Takes in an announcement that all these ranks have made.

        Raises ValueError, and changes nothing, if it cannot be read.
        """
        announced = Announcement.read(message)
        self.cache.check(ranks, announced)
        self.cache.hear(ranks, announced)
        self._name(self._bits & ~self.cache.agreed)
        counted = 0
        if announced.epoch == self.cache.epoch and not self._joined and not self._absent:
            counted = announced.bits & self.cache.agreed & ~self._ids_by_name()
        if counted:
            self._count(ranks, counted, now_s)
        by_name = announced.bits & ~counted
        if not by_name and not announced.requests:
            return
        for rank in ranks:
            for request in [*self.cache.requests_of(rank, by_name, announced.epoch), *announced.requests]:
                if request.kind is Kind.JOIN:
                    self._join(rank)
                else:
                    self._ask(rank, request, now_s)

    def heard(self, rank: int, message: bytes) -> list[Request]:
        """Returns all requests of an announcement of ``rank`` that has not been received yet. Raises ValueError if it
        cannot be read.
        """
        announced = Announcement.read(message)
        self.cache.check([rank], announced)
        return [*self.cache.requests_of(rank, announced.bits, announced.epoch), *announced.requests]

    def _count(self, ranks: Sequence[int], bits: int, now_s: float) -> None:
        self._epoch = self.cache.epoch
        for rank in ranks:
            self._asked[rank] |= bits
        if new := bits & ~self._bits:
            self._bits |= new
            self._since.append((now_s, new))

    def _ask(self, rank: int, request: Request, now_s: float) -> None:
        pending = self._pending.get(request.name)
        if pending is None:
            pending = self._pending[request.name] = _Pending(now_s)
            self._named = None
        pending.requests[rank] = request
        if self._joined or request.kind is Kind.MESSAGE or len(pending.requests) == len(self.ranks):
            self._settle(request.name, pending)

    def _forget(self, name: str) -> _Pending:
        self._named = None
        return self._pending.pop(name)

    def _ids_by_name(self) -> int:
        if self._named is None:
            self._named = 0
            for name in self._pending:
                if (number := self.cache.number_of(name)) >= 0:
                    self._named |= 1 << number
            self._named = self.cache.with_groups(self._named)
        return self._named

    def _name(self, mask: int) -> None:
        """Moves the requests under these ids, and under those of their groups, to the requests that are kept by
        name.
        """
        mask &= self._bits
        if not mask:
            return
        if self._epoch == self.cache.epoch:
            mask = self.cache.with_groups(mask)
        found = [
            (rank, request, since_s)
            for since_s, new in self._since
            for rank, asked in enumerate(self._asked)
            for request in self.cache.requests_of(rank, asked & new & mask, self._epoch)
        ]
        self._clear(mask)
        for rank, request, since_s in found:
            self._ask(rank, request, since_s)

    def _clear(self, mask: int) -> None:
        self._asked = [asked & ~mask for asked in self._asked]
        self._bits &= ~mask
        self._since = [(since_s, new & ~mask) for since_s, new in self._since if new & ~mask]

    def _join(self, rank: int) -> None:
        """Notes that the rank takes part in everything that the others ask for from now on."""
        self._name(self._bits)
        self._joined.append(rank)
        self._news.append(Response(Kind.JOIN, (), sizes=((rank,),)))
        for name, pending in self._pending.items():
            self._settle(name, pending)

    def _settle(self, name: str, pending: _Pending) -> None:
        """Makes a name ready if all ranks have asked or joined, unless its group is not ready."""
        if pending.is_settled or self._missing(pending):
            return
        pending.is_settled = True
        first = next(iter(pending.requests.values()))
        group, size = first.group, first.group_size
        # If ranks do not agree on the group, ``decide`` tells them.
        if not group or any(r.group != group or r.group_size != size for r in pending.requests.values()):
            self._ready.append(name)
            return
        members = self._groups.setdefault(group, [])
        members.append(name)
        if len(members) == size:
            self._ready += self._groups.pop(group)

    def _missing(self, pending: _Pending) -> list[int]:
        """Returns the ranks that must ask for it, and have neither asked nor joined."""
        if len(pending.requests) == len(self.ranks):
            return []
        first = next(iter(pending.requests.values()))
        asked = pending.requests.keys() if first.kind is Kind.MESSAGE else {*pending.requests, *self._joined}
        return [rank for rank in first.askers(len(self.ranks)) if rank not in asked]

    def release(self, rank: int, channel: int, segments: int) -> None:
        """Notes that the rank has released a channel, on which it has run ``segments`` segments to their end; -1 if it
        failed there.

        Once all ranks have released the channel they are told to close it. Its communicator may be freed if all have
        run the same segments: then every message that was sent has been received.
        """
        said = self._released.setdefault(channel, {})
        said[rank] = segments
        if len(said) == len(self.ranks):
            del self._released[channel]
            is_empty = set(said.values()) == {segments} and segments >= 0
            self._news.append(Response(Kind.CLOSE, (), sizes=((channel, int(is_empty)),)))

    def remove(self, rank: int, why: str) -> None:
        """Notes that the rank has left: what waits for it fails, now and later."""
        self._name(self._bits)
        self._absent[rank] = why

    def decide(self) -> list[Response]:
        """Returns what all ranks are to do now, in this order."""
        responses, self._news = self._news, []
        responses += self._answer_bits()
        if self._ready:
            responses += self._answer_names()
        responses += self._news  # consequences of what has just been answered
        self._news = []
        if len(self._joined) == len(self.ranks):
            responses.append(Response(Kind.JOIN, (JOIN_NAME,), sizes=((self._joined[-1],),), cache_ids=(-1,)))
            self._joined.clear()
        if self._absent:
            responses += self._fail_orphans()
        return responses

    def _answer_bits(self) -> list[Response]:
        """Answers what all ranks have asked for under ids on which they agree."""
        ready = self._bits & self._asked[self._late]
        if not ready:
            return []
        for rank, asked in enumerate(self._asked):
            ready &= asked
            if not ready:
                self._late = rank
                return []
        ready = self.cache.whole_groups(ready)
        if not ready:
            return []
        self._clear(ready)
        key = ready, self.cache.version, self.fusion_threshold
        answers = self._answers.get(key)
        if answers is None:
            asked_for = self.cache.agreeing(ready)
            sizes_of = {o[0].name: _sizes(o) for o in asked_for if o[0].kind is not Kind.ALLREDUCE}
            answers = [response for response, _ in self._fused(list(map(self._agreed, asked_for)), sizes_of)]
            if len(self._answers) >= _ANSWERS:
                self._answers.clear()
            self._answers[key] = answers
        return answers

    def _fused(
        self, requests: Sequence[Request], sizes_of: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[Response, list[Request]]]:
        """Yields fused responses with their requests. ``sizes_of`` has what ranks must know about a name, () for
        nothing.
        """
        for group in fuse(requests, self.fusion_threshold, self.group_fusion):
            names = tuple([request.name for request in group])
            sizes = tuple(sizes_of[name] for name in names if sizes_of.get(name)) if sizes_of else ()
            yield Response(group[0].kind, names, sizes=sizes, bridged=group[0].memory is TensorMemory.BRIDGED), group

    def _agreed(self, ordered: Sequence[Request | None]) -> Request:
        """Returns the request that stands for those of all ranks.

        Its memory is the host's if one rank has the tensor there. If all ranks have copies of device tensors, bridging
        would help: the first time, the ranks are told to open a bridge.
        """
        first = ordered[0] or next(request for request in ordered if request is not None)
        if first.memory is TensorMemory.HOST:
            return first
        memories = {TensorMemory.HOST if request is None else request.memory for request in ordered}
        if memories == {TensorMemory.BRIDGED}:
            return first
        if TensorMemory.HOST not in memories and not self._bridge_is_asked_for:
            self._bridge_is_asked_for = True
            self._news.append(Response(Kind.BRIDGE, ()))
        return replace(first, memory=TensorMemory.HOST)

    def _answer_names(self) -> list[Response]:
        """Answers what all ranks have asked for by name, with an error if their requests do not fit."""
        responses: list[Response] = []
        ordered_of: dict[str, list[Request | None]] = {}
        for name in self._ready:
            if name in self._pending:
                ordered_of[name] = self._pending[name].ordered(len(self.ranks))
                self._order.note(ordered_of[name])
        for name, ordered in ordered_of.items():
            if name not in self._pending:  # it has failed with its group
                continue
            if self.cache.has_answered(name, ordered):  # these requests were checked before
                continue
            if error := find_mismatch(ordered, self.ranks) or find_disorder(ordered, self.ranks, self._order):
                responses += self._fail(name, error, Fault.MISMATCH)
            elif error := find_missing(ordered, self.ranks):
                responses += self._fail(name, error, Fault.LEFT)
        healthy: list[Request] = []
        incomplete: dict[str, Request] = {}
        sizes_of: dict[str, tuple[int, ...]] = {}
        number_of: dict[str, tuple[int, int]] = {}  # (epoch, id)
        for name in self._ready:
            if name in self._pending:
                ordered = ordered_of[name]
                self._forget(name)
                sizes_of[name] = _sizes(ordered)
                asked = [request for request in ordered if request is not None]
                number = -1
                if len(asked) == len(ordered):
                    number = self.cache.assign(name, asked)
                else:
                    incomplete[name] = asked[0]
                number_of[name] = self.cache.epoch, number
                healthy.append(self._agreed(ordered))
        self._ready.clear()
        if self._epoch != self.cache.epoch:  # the ids stand for something else
            self._name(self._bits)
            self._named = None
        for response, group in self._fused(healthy, sizes_of):
            # Ranks read all ids of one message in the newest epoch: those given before it began are void.
            numbered = [number_of[name] for name in response.names]
            numbers = tuple(number if epoch == self.cache.epoch else -1 for epoch, number in numbered)
            templates = tuple(group) if any(name in incomplete for name in response.names) else ()
            responses.append(replace(response, cache_ids=numbers, templates=templates))
        return responses

    def _fail(self, name: str, error: str, fault: Fault) -> list[Response]:
        """Gives up on a name, and on all names of its group."""
        requests = list(self._forget(name).requests.values())
        responses = [_failure(requests[0].kind, name, error, fault)]
        for group in {request.group for request in requests if request.group}:
            self._groups.pop(group, None)
            for other, pending in list(self._pending.items()):
                member = next((request for request in pending.requests.values() if request.group == group), None)
                if member is not None:
                    self._forget(other)
                    text = f"tensor '{other}': its group '{group}' cannot go on: {error}"
                    responses.append(_failure(member.kind, other, text, fault))
        return responses

    def _fail_orphans(self) -> list[Response]:
        """Fails names that can never become ready, because a rank that has not asked for them has left."""
        responses = []
        if self._joined:
            reasons = "; ".join(f"rank {self.ranks[rank]} {why}" for rank, why in self._absent.items())
            text = f"join() cannot end: {reasons}. All ranks must join."
            responses.append(Response(Kind.JOIN, (JOIN_NAME,), text, Fault.LEFT, cache_ids=(-1,)))
            self._joined.clear()
        for name in list(self._pending):
            if name not in self._pending:  # it has failed with its group
                continue
            missing = self._missing(self._pending[name])
            gone = [rank for rank in self._absent if rank in missing]
            if gone:
                reasons = "; ".join(f"rank {self.ranks[rank]} {self._absent[rank]}" for rank in gone)
                advice = f" {EQUAL_CALLS}" if SHUT_DOWN in map(self._absent.get, gone) else ""
                responses += self._fail(name, f"tensor '{name}': {reasons}.{advice}", Fault.LEFT)
        return responses

    def stalled(self, now_s: float, after_s: float) -> list[Stall]:
        """Returns the names that some ranks asked for at least ``after_s`` seconds ago and others have not asked
        for.
        """
        self._name(self._bits)
        found = []
        for name, pending in self._pending.items():
            if now_s - pending.first_s >= after_s and not pending.is_settled:
                ready = tuple(self.ranks[r] for r in sorted(pending.requests))
                missing = tuple(self.ranks[r] for r in self._missing(pending))
                found.append(Stall(name, now_s - pending.first_s, ready, missing))
        return found

    def waited_for(self, rank: int) -> list[str]:
        """Returns the names that ``rank``, a position in the set, has asked for and others have not."""
        self._name(self._bits)
        return [name for name, pending in self._pending.items() if rank in pending.requests]

    def fail_stalled(
        self, stalls: Sequence[Stall], where: Mapping[int, str] | None = None, why: str = ""
    ) -> list[Response]:
        """Gives up on names: every rank that asked for one gets an error, whose text ends with ``why``."""
        texts = [describe_stalls([stall], self, where or {}) + why for stall in stalls]  # before any stall is forgotten
        responses = []
        for stall, text in zip(stalls, texts, strict=True):
            if stall.name in self._pending:
                responses += self._fail(stall.name, text, Fault.STALL)
        return responses


def _failure(kind: Kind, name: str, error: str, fault: Fault) -> Response:
    return Response(kind, (name,), error, fault, cache_ids=(-1,))


def describe_stalls(stalls: Sequence[Stall], coordinator: Coordinator, where: Mapping[int, str] | None = None) -> str:
    """Returns the stall report of tensors that have the same ranks: who waits for whom, what the missing ranks wait for
    instead, and at which line of user code.
    """
    stall = max(stalls, key=lambda each: each.waited_s)
    names = [each.name for each in stalls]
    who, it = ("tensor", "it") if len(names) == 1 else ("tensors", "them")
    text = (
        f"{who} {_names(names)}: {_ranks(stall.ready)} submitted {it} {stall.waited_s:.0f} s ago, "
        f"{_ranks(stall.missing)} did not."
    )
    instead = []
    for rank in stall.missing:
        waited_for = coordinator.waited_for(coordinator.ranks.index(rank))
        line = (where or {}).get(rank, "")
        if waited_for:
            instead.append(f"rank {rank} waits for {_names(waited_for)} instead" + (f", at {line}" if line else ""))
        elif line:
            instead.append(f"rank {rank} is at {line}")
    text += " " + "; ".join(instead) + "." if instead else ""
    if any(".noname." in name for name in names):
        text += " Calls without a name are numbered in their order: one more on one rank shifts the rest. Pass name=."
    if any(name.endswith(FIRST_STEP) for name in names):
        text += f" {LOADED_ALONE}."
    return text


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _shape(request: Request) -> str:
    return f"shape {request.shape} {request.dtype.label}"


def _row_shape(request: Request) -> str:
    return f"shape (*, {', '.join(map(str, request.shape[1:]))}) {request.dtype.label}"


def _registration(request: Request) -> str:
    return request.detail + (f" (digest {request.digest:016x})" if request.digest else "")


#: What must agree, the most important first: (its name in messages, how to show it, for which kinds).
_SAME: list[tuple[str, Callable[[Request], object], set[Kind]]] = [
    ("operation", lambda r: r.kind.name.lower(), set(Kind)),
    ("dtype", lambda r: r.dtype.label, set(Kind)),
    ("shape", _shape, {Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.MESSAGE}),
    ("shape", _row_shape, {Kind.ALLGATHER, Kind.ALLTOALL}),
    ("element order", lambda r: r.order, set(Kind)),
    ("reduction", lambda r: r.op.label, {Kind.ALLREDUCE, Kind.REDUCESCATTER}),
    ("prescale and postscale", lambda r: (r.prescale, r.postscale), {Kind.ALLREDUCE, Kind.REDUCESCATTER}),
    ("root rank", lambda r: r.root, {Kind.BROADCAST, Kind.MESSAGE}),
    ("destination", lambda r: r.splits, {Kind.MESSAGE}),
    ("group", lambda r: f"'{r.group}' of {r.group_size}" if r.group else "none", set(Kind)),
    ("registration", _registration, set(REGISTERED)),
]


def find_mismatch(requests: Sequence[Request | None], ranks: Sequence[int]) -> str:
    """Returns a sentence about what the requests of all ranks disagree on; "" if they agree.

    Requests are in rank order, None for a rank that has joined, which agrees with everything.
    """
    asked = [(rank, request) for rank, request in zip(ranks, requests, strict=True) if request is not None]
    first = asked[0][1]
    for what, show, kinds in _SAME:
        if first.kind not in kinds:
            continue
        values: dict[object, list[int]] = {}
        for rank, request in asked:
            shown = show(request)
            if what == "root rank" and 0 <= request.root < len(ranks):
                shown = ranks[request.root]  # users give the root as a world rank
            values.setdefault(shown, []).append(rank)
        if len(values) > 1:
            said = ", ".join(f"{_ranks(who)} submitted {value}" for value, who in values.items())
            hint = "" if what != "operation" else " Give different operations different names."
            if first.is_automatic and len(lines := _lines(asked)) > 1:
                hint = f" {_UNNAMED}: {_called(lines)}. Pass name=."
            return f"tensor '{first.name}': mismatched {what}: {said}.{hint}"
    if first.kind in (Kind.ALLGATHER, Kind.ALLTOALL) and not first.shape:
        return f"tensor '{first.name}': {first.kind.name.lower()} needs at least one dimension; reshape it to (1,)."
    if first.kind == Kind.BROADCAST and not 0 <= first.root < len(ranks):
        return f"tensor '{first.name}': there is no root rank {first.root} in a set of {len(ranks)} ranks."
    if first.kind == Kind.ALLTOALL:
        for rank, request in asked:
            wrong = len(request.splits) != len(ranks) or min(request.splits) < 0
            if wrong or sum(request.splits) != request.shape[0]:
                return (
                    f"tensor '{first.name}': rank {rank} submitted splits {request.splits} for {request.shape[0]} "
                    f"rows; they must be {len(ranks)} counts, one for each rank, that add up to the rows."
                )
    if first.kind == Kind.REDUCESCATTER and first.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return f"tensor '{first.name}': reducescatter supports Sum and Average, not {first.op.label}."
    return ""


_UNNAMED = "Calls without a name belong together by their order"


def _lines(asked: Sequence[tuple[int, Request]]) -> dict[str, list[int]]:
    """Returns the ranks that called from each line."""
    lines: dict[str, list[int]] = {}
    for rank, request in asked:
        lines.setdefault(request.detail, []).append(rank)
    return lines


def _called(lines: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{_ranks(who)} called from {line or 'an unknown line'}" for line, who in lines.items())


def find_disorder(requests: Sequence[Request | None], ranks: Sequence[int], order: CallOrder) -> str:
    """Returns a sentence about ranks whose calls without a name come in different orders; "" if they do not."""
    crossed = order.crossed(requests)
    if crossed is None:
        return ""
    pair, names = crossed
    one, other = (requests[rank] for rank in pair)
    assert one is not None and other is not None
    return (
        f"tensor '{one.name}': calls without a name come in different orders on {_ranks([ranks[r] for r in pair])}. "
        f"{_UNNAMED}: rank {ranks[pair[0]]} called from {one.detail or 'an unknown line'}, rank {ranks[pair[1]]} from "
        f"{other.detail or 'an unknown line'}, and with {_names(names)} it was the other way round, so that results "
        "would mix different tensors. Call in the same order on all ranks, or pass name=."
    )


def find_missing(requests: Sequence[Request | None], ranks: Sequence[int]) -> str:
    """Returns a sentence about why an operation is not possible without the ranks that have joined; "" if it is
    possible.
    """
    joined = [rank for rank, request in zip(ranks, requests, strict=True) if request is None]
    if not joined:
        return ""
    first = next(request for request in requests if request is not None)
    if first.kind is Kind.MESSAGE:  # the others are not asked
        return ""
    who = f"{_ranks(joined)} {'has' if len(joined) == 1 else 'have'} joined"
    match first.kind:
        case Kind.BROADCAST if requests[first.root] is None:
            why = f"rank {ranks[first.root]}, the root, has joined"
        case Kind.ALLTOALL if any(
            request is not None and any(request.splits[ranks.index(rank)] for rank in joined) for request in requests
        ):
            why = f"{who}, and nobody would take the rows for it; pass splits that send it none"
        case Kind.REDUCESCATTER:
            why = f"{who}, and its part of the result would be lost; use allreduce"
        case Kind.BARRIER | Kind.DUPLICATE if first.detail:
            why = f"{who}, and all ranks must agree on this"
        case Kind.CHANNEL:
            why = f"{who}, and a 1-bit optimizer needs all ranks"
        case Kind.ALLREDUCE if first.prescale != 1 and first.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            why = f"{who}, and with a prescale factor {first.op.label} has no element that changes nothing"
        case _:
            return ""
    return f"tensor '{first.name}': {first.kind.name.lower()} is not possible: {why}."


def _sizes(requests: Sequence[Request | None]) -> tuple[int, ...]:
    """Returns what differs between ranks and all must know: first dimensions (allgather) or the table of splits
    (alltoall).
    """
    kind = next(request for request in requests if request is not None).kind
    if kind is Kind.ALLGATHER:
        return tuple(request.shape[0] if request is not None else 0 for request in requests)
    if kind is Kind.ALLTOALL:
        return tuple(
            rows for request in requests for rows in (request.splits if request is not None else (0,) * len(requests))
        )
    return ()
