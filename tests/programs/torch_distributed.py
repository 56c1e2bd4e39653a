"""Scripts that call torch.distributed with backend "ocomm", held to what NumPy makes of the same values.

Values are small whole numbers, so every sum and product is exact, and results are compared as numbers are: with ``==``.
A call that the backend refuses is refused on all ranks by one class, and the group goes on. A call in which one rank
differs from the others is a MismatchError on all ranks of the group, which can do nothing more; other groups go on.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import ocomm_torch.distributed  # noqa: F401 (registers the backend)
from ocomm import session as sessions
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.types import Settings
from tests.faults import world

FEW = 20
#: Seconds after which a rank that waits gives up on the others.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "20"))
SHAPES = [(), (0,), (1,), (3,), (2, 5), (4, 0), (40,), (3, 700), (30_000,)]
WHOLE = ("uint8", "int8", "int16", "int32", "int64", "bool")
REAL = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*WHOLE, *REAL, "complex64", "float8_e4m3fn")
BITWISE: dict[str, Any] = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
NUMBERS: dict[str, Any] = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
OF_BOOL: dict[str, Any] = {"SUM": np.maximum, "PRODUCT": np.minimum, "MIN": np.minimum, "MAX": np.maximum}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)
WITH_ROOT = ("reduce", "broadcast", "gather", "scatter")
#: Calls of which all ranks say the same, so that a rank that says something else is found out before data travel.
ALIKE = ("all_reduce", "reduce", "reduce_scatter_tensor", "broadcast", "all_gather_into_tensor", "barrier")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@dataclass(frozen=True)
class Call:
    """A collective of group ``group``. ``root`` is a rank of the group; ``forms`` are how tensors lie in memory, by
    rank of the group. ``uneven`` parts have another number of rows for each pair of ranks.
    """

    what: str
    group: int = 0
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    op: str = "SUM"
    root: int = 0
    forms: tuple[str, ...] = ("plain",)
    uneven: bool = False
    asynchronous: bool = False

    def __str__(self) -> str:
        words = [f"{self.what} of {self.dtype}{list(self.shape)}"]
        if self.what in REDUCTIONS:
            words.append(f"by {self.op}")
        if self.what in WITH_ROOT:
            words.append(f"with root {self.root}")
        if self.uneven:
            words.append("in uneven parts")
        words.append(f"in group {self.group}, tensors {' '.join(self.forms)}")
        return " ".join(words) + (", not waited for" if self.asynchronous else "")

    @property
    def is_refused(self) -> bool:
        """Whether Torch or the backend says that it does not have this reduction."""
        if self.what not in REDUCTIONS:
            return False
        if self.op in BITWISE:
            return self.dtype not in WHOLE
        if self.op == "PREMUL_SUM" or self.dtype == "float8_e4m3fn":
            return True
        if self.dtype == "complex64":
            return self.what != "all_reduce" or self.op not in ("SUM", "AVG")
        return self.dtype == "bool" and self.op not in OF_BOOL

    @property
    def reduction(self) -> Any:
        return {**BITWISE, **(OF_BOOL if self.dtype == "bool" else NUMBERS)}[self.op]


@dataclass(frozen=True)
class Differ:
    """A call that rank ``victim`` of the group makes otherwise."""

    call: Call
    victim: int
    other: Call

    @property
    def is_last(self) -> bool:
        """Whether a message may be longer than its receiver expects. MPI cannot go on then."""
        other = replace(self.other, root=self.call.root, op=self.call.op)
        return other != self.call or (self.call.op in NUMBERS) != (self.other.op in NUMBERS)

    def __str__(self) -> str:
        return f"{self.call}; on rank {self.victim} of the group: {self.other}"


@dataclass(frozen=True)
class Objects:
    what: str
    group: int = 0
    root: int = 0

    def __str__(self) -> str:
        return f"{self.what} in group {self.group} with root {self.root}"


@dataclass(frozen=True)
class Messages:
    """Messages (source, destination, tag) between ranks of a group. ``together``: by batch_isend_irecv."""

    group: int
    ends: tuple[tuple[int, int, int], ...]
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    forms: tuple[str, ...] = ("plain",)
    together: bool = False

    def __str__(self) -> str:
        how = "batch_isend_irecv" if self.together else "isend, irecv"
        ends = ", ".join(f"{source} to {to} with tag {tag}" for source, to, tag in self.ends)
        return f"{how} in group {self.group} of {self.dtype}{list(self.shape)}: {ends}; tensors {' '.join(self.forms)}"


@dataclass(frozen=True)
class Wait:
    """Waits for all calls under way. ``how``: "each", in an order of each rank's own; "last": only for the last one of
    each group; "barrier": for a barrier in each group; "future": for futures.
    """

    how: str = "each"

    def __str__(self) -> str:
        return f"wait: {self.how}"


@dataclass(frozen=True)
class Remake:
    """Destroys a group of some ranks, and makes it again."""

    group: int

    def __str__(self) -> str:
        return f"destroy_process_group(group {self.group}), and new_group"


Event = Call | Differ | Objects | Messages | Wait | Remake


@dataclass(frozen=True)
class Program:
    ranks: int
    engine: str
    #: The ranks of each group; group 0 has all.
    groups: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]
    segment_nbytes: int = 8 << 20
    seed: int = 0

    def __str__(self) -> str:
        setup = f"{self.ranks} ranks, engine {self.engine}, segments of {self.segment_nbytes} bytes"
        return "\n".join(
            [f"{setup}, groups {list(map(list, self.groups))}", *(f"    {event}" for event in self.events)]
        )

    def values(self, call: Any, shape: tuple[int, ...], *where: int) -> np.ndarray:
        """Numbers that the dtype has, the same for the same place in the program."""
        random_numbers = np.random.default_rng([self.seed, *where])
        if call.dtype == "bool":
            return random_numbers.integers(0, 2, shape).astype(bool)
        low = 0 if call.dtype == "uint8" else -2
        found = random_numbers.integers(low, 3, shape)
        if getattr(call, "op", "") == "AVG":
            found = found * len(self.groups[call.group])  # so that the average is a whole number
        if call.dtype in WHOLE:
            return found.astype(call.dtype)
        if call.dtype == "complex64":
            return found + 1j * random_numbers.permutation(found.reshape(-1)).reshape(shape)
        return found.astype(np.float64)


# Drawing


@st.composite
def _calls(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...], whats: Sequence[str]) -> Call:
    group = draw(st.integers(0, len(groups) - 1))
    size = len(groups[group])
    what = draw(st.sampled_from(whats))
    uneven = what in ("all_to_all", "all_to_all_single", "reduce_scatter") and draw(st.booleans())
    ops = [*NUMBERS, *BITWISE, "PREMUL_SUM"]
    return Call(
        what,
        group,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([shape for shape in SHAPES if shape or not uneven])),
        draw(st.sampled_from(ops)) if what in REDUCTIONS else "SUM",
        draw(st.integers(0, size - 1)) if what in WITH_ROOT else 0,
        tuple(draw(st.lists(st.sampled_from(FORMS), min_size=size, max_size=size))),
        uneven,
        draw(st.booleans()),
    )


@st.composite
def _differ(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...]) -> Event:
    call = replace(draw(_calls(groups, draw(st.sampled_from([ALIKE, ALIKE[:3]])))), asynchronous=False)
    # Torch itself refuses some reductions of complex tensors, on the rank that has them.
    call = replace(call, dtype="int32" if call.dtype == "complex64" else call.dtype)
    size = len(groups[call.group])
    if size == 1:
        return call
    others = {
        "what": replace(call, what=draw(st.sampled_from([what for what in ALIKE if what != call.what]))),
        "shape": replace(call, shape=(*call.shape, 2) if 0 not in call.shape else (2,)),
    }
    if call.what != "barrier":
        others["dtype"] = replace(call, dtype=draw(st.sampled_from(REAL if call.dtype in WHOLE else WHOLE)))
    if call.what in REDUCTIONS:
        others["op"] = replace(call, op=draw(st.sampled_from([op for op in (*NUMBERS, *BITWISE) if op != call.op])))
    if call.what in WITH_ROOT:
        others["root"] = replace(call, root=(call.root + 1) % size)
    if call.what == "barrier":
        del others["shape"]
    return Differ(call, draw(st.integers(0, size - 1)), others[draw(st.sampled_from(sorted(others)))])


@st.composite
def _messages(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...]) -> Event:
    group = draw(st.integers(0, len(groups) - 1))
    size = len(groups[group])
    if size == 1:
        return Wait()
    end = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), st.integers(0, 1)).map(
        lambda each: (each[0], (each[0] + each[1]) % size, each[2])
    )
    ends = tuple(draw(st.lists(end, min_size=1, max_size=4)))
    forms = tuple(draw(st.lists(st.sampled_from(FORMS), min_size=size, max_size=size)))
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    return Messages(group, ends, dtype, shape, forms, draw(st.booleans()))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to eight calls."""
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    some = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda each: tuple(sorted(each)))
    groups = (tuple(range(ranks)), *draw(st.lists(some, max_size=2)))
    places = st.integers(0, len(groups) - 1)
    event: st.SearchStrategy[Event] = st.one_of(
        _calls(groups, REDUCTIONS),
        _calls(groups, REDUCTIONS),
        _calls(groups, (*MOVES, "barrier")),
        _calls(groups, MOVES),
        _messages(groups),
        st.builds(Wait, st.sampled_from(["each", "last", "barrier", "future"])),
        st.tuples(st.sampled_from(OBJECTS), places).flatmap(
            lambda each: st.builds(
                Objects, st.just(each[0]), st.just(each[1]), st.integers(0, len(groups[each[1]]) - 1)
            )
        ),
    )
    if len(groups) > 1:
        event |= st.builds(Remake, st.integers(1, len(groups) - 1))
    events = tuple(draw(st.lists(event, min_size=1, max_size=8)))
    if draw(st.integers(0, 2)) == 0:
        at = draw(st.integers(0, len(events)))
        events = (*events[:at], draw(_differ(groups)), *events[at:])
    return Program(
        ranks,
        draw(st.sampled_from(["python", "native"])),
        groups,
        events,
        draw(st.sampled_from([256, 1 << 14, 8 << 20])),
        draw(st.integers(0, 1 << 16)),
    )


# Tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of other memory, from its second element on."""
    memory = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    memory[..., 1] = tensor
    return memory[..., 1]


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return memory.copy_(tensor)


def _lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory has other numbers, conjugated or negated, as views of complex tensors have."""
    if tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    is_real = tensor.is_floating_point() and tensor.element_size() > 1
    return torch._neg_view(-tensor) if is_real else tensor


def _trained(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() and tensor.element_size() > 1 else tensor


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": _plain,
    "transposed": _transposed,
    "spread": _spread,
    "offset": _offset,
    "lazy": _lazy,
    "trained": _trained,
}
FORMS = tuple(LAYOUTS)


def _form(event: Call | Messages, member: int) -> str:
    form = event.forms[member]
    # Torch itself refuses most conjugates.
    return "plain" if event.dtype == "complex64" and form == "lazy" else form


def tensor_of(values: np.ndarray, dtype: str, form: str) -> torch.Tensor:
    return LAYOUTS[form](torch.from_numpy(np.array(values)).to(getattr(torch, dtype)))


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found: np.ndarray = tensor.detach().to(wide).resolve_conj().resolve_neg().numpy()
    return found


# Running


def _op(name: str) -> Any:
    return dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


@dataclass(frozen=True)
class UnderWay:
    """A call that was started, and what it must leave."""

    group: int
    says: str
    work: Any
    tensors: list[torch.Tensor]
    expected: list[np.ndarray]

    def check(self) -> None:
        for number, (tensor, wanted) in enumerate(zip(self.tensors, self.expected, strict=True)):
            found = numbers_of(tensor)
            assert found.shape == wanted.shape and np.array_equal(found, wanted), (
                f"{self.says}: tensor {number} has {found.reshape(-1)[:6]}, expected {wanted.reshape(-1)[:6]}"
            )


class Script:
    """The script of one rank."""

    def __init__(self, program: Program, rank: int, store: dist.Store) -> None:
        self.program, self.rank, self.store = program, rank, store
        timeout = datetime.timedelta(seconds=PATIENCE_S)
        dist.init_process_group("ocomm", store=store, rank=rank, world_size=program.ranks, timeout=timeout)
        self.groups: list[Any] = [dist.group.WORLD]
        self.groups += [dist.new_group(list(ranks), timeout=timeout) for ranks in program.groups[1:]]
        self.timeout = timeout
        self.pending: list[UnderWay] = []
        #: Groups in which ranks have differed.
        self.dead: set[int] = set()
        #: The class of each refusal, by event.
        self.refused: dict[int, str] = {}
        self.random = random.Random(f"{program.seed} {rank}")

    def meet(self, number: int) -> None:
        """Waits until all ranks have come to an event that ends the job, so that it does not end what comes before."""
        if self.store.add(f"came to {number}", 1) == self.program.ranks:
            self.store.set(f"all came to {number}", "")
        self.store.wait([f"all came to {number}"], self.timeout)

    def run(self) -> None:
        for number, event in enumerate(self.program.events):
            group = event.call.group if isinstance(event, Differ) else getattr(event, "group", None)
            if isinstance(event, Differ) and event.is_last:
                self.meet(number)
            if group is not None and self.rank not in self.program.groups[group] and not isinstance(event, Remake):
                if isinstance(event, Differ) and event.is_last:
                    return
                continue
            match event:
                case Wait():
                    self.wait(event.how)
                case Remake():
                    self.remake(event)
                case Differ():
                    self.differ(number, event)
                    if event.is_last:
                        return
                case Call() | Objects() if group in self.dead:
                    with _raises(MismatchError, event):
                        self.start(number, event)
                case Call() if event.is_refused:
                    try:
                        self.start(number, event).work.wait()
                    except (InvalidRequestError, NotImplementedError, ValueError) as error:
                        self.refused[number] = type(error).__name__
                    else:
                        raise AssertionError(f"{event} is not refused")
                case _:
                    under_way = self.start(number, event)
                    if under_way.work is None:
                        under_way.check()
                    else:
                        self.pending.append(under_way)
        self.wait("each")

    def wait(self, how: str) -> None:
        pending, self.pending = self.pending, []
        if how == "barrier" or how == "last":
            last = {each.group: each for each in pending}
            for group, each in last.items():
                if how == "last":
                    each.work.wait()
                else:
                    dist.barrier(self.groups[group])
        else:
            order = pending[:]
            self.random.shuffle(order)
            for each in order:
                each.work.get_future().wait() if how == "future" else each.work.wait()
        for each in pending:
            each.check()

    def remake(self, event: Remake) -> None:
        ranks = self.program.groups[event.group]
        if self.rank in ranks:
            self.wait("each")
            dist.destroy_process_group(self.groups[event.group])
        self.dead.discard(event.group)
        self.groups[event.group] = dist.new_group(list(ranks), timeout=self.timeout)

    def differ(self, number: int, event: Differ) -> None:
        self.wait("each")
        members = self.program.groups[event.call.group]
        mine = event.other if members[event.victim] == self.rank else event.call
        self.dead.add(event.call.group)
        with _raises(MismatchError, event):
            work = self.start(number, mine).work
            if work is not None:
                work.wait()

    def start(self, number: int, event: Any) -> UnderWay:
        if isinstance(event, Objects):
            return self.objects(number, event)
        if isinstance(event, Messages):
            return self.messages(number, event)
        work, tensors, expected = self.collective(number, event)
        if not event.asynchronous:
            assert work is None, f"{event} returns {work}"
        return UnderWay(event.group, f"{event} on rank {self.rank}", work, tensors, expected)

    def collective(self, number: int, call: Call) -> tuple[Any, list[torch.Tensor], list[np.ndarray]]:
        members, group = self.program.groups[call.group], self.groups[call.group]
        size, me = len(members), members.index(self.rank)
        form, root = _form(call, me), members[call.root]
        options = {"group": group, "async_op": call.asynchronous}
        say = self.program.values

        def tensor(values: np.ndarray) -> torch.Tensor:
            return tensor_of(values, call.dtype, form)

        def blank(shape: tuple[int, ...]) -> torch.Tensor:
            return tensor(np.zeros(shape, bool if call.dtype == "bool" else np.float64))

        def reduced(values: list[np.ndarray]) -> np.ndarray:
            if call.is_refused:
                return values[0]
            total = values[0]
            for each in values[1:]:
                total = call.reduction(total, each)
            return np.asarray(total / size if call.op == "AVG" else total)

        def rows(sender: int, receiver: int) -> tuple[int, ...]:
            """The shape of what one rank sends another."""
            if not call.uneven:
                return call.shape
            several = random.Random(f"{self.program.seed} {number} {sender} {receiver}").randrange(3)
            return (several, *call.shape[1:])

        def dealt(sender: int, receiver: int) -> np.ndarray:
            return say(call, rows(sender, receiver), number, sender, receiver)

        def whole(parts: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([part if part.ndim else part.reshape(1) for part in parts])

        own = [say(call, call.shape, number, rank) for rank in range(size)]
        with_op = {"op": _op(call.op), **options}
        match call.what:
            case "barrier":
                return dist.barrier(**options), [], []
            case "all_reduce":
                mine = tensor(own[me])
                return dist.all_reduce(mine, **with_op), [mine], [reduced(own)]
            case "reduce":
                mine = tensor(own[me])
                return dist.reduce(mine, root, **with_op), [mine], [reduced(own) if me == call.root else own[me]]
            case "broadcast":
                mine = tensor(own[me])
                return dist.broadcast(mine, root, **options), [mine], [own[call.root]]
            case "all_gather":
                mine, parts = tensor(own[me]), [blank(call.shape) for _ in members]
                return dist.all_gather(parts, mine, **options), parts, own
            case "all_gather_into_tensor":
                result = blank(whole(own).shape)
                return dist.all_gather_into_tensor(result, tensor(own[me]), **options), [result], [whole(own)]
            case "gather":
                parts = [blank(call.shape) for _ in members] if me == call.root else None
                work = dist.gather(tensor(own[me]), parts, root, **options)
                return work, parts or [], own if parts else []
            case "scatter":
                result = blank(call.shape)
                given = [tensor(dealt(me, to)) for to in range(size)] if me == call.root else None
                return dist.scatter(result, given, root, **options), [result], [dealt(call.root, me)]
            case "all_to_all":
                results = [blank(rows(sender, me)) for sender in range(size)]
                given = [tensor(dealt(me, to)) for to in range(size)]
                return dist.all_to_all(results, given, **options), results, [dealt(k, me) for k in range(size)]
            case "all_to_all_single":
                given_parts = [dealt(me, to) for to in range(size)]
                got_parts = [dealt(k, me) for k in range(size)]
                splits: list[Any] = [None, None]
                if call.uneven:
                    splits = [[part.shape[0] for part in parts] for parts in (got_parts, given_parts)]
                result = blank(whole(got_parts).shape)
                work = dist.all_to_all_single(result, tensor(whole(given_parts)), *splits, **options)
                return work, [result], [whole(got_parts)]
            case "reduce_scatter":
                # Every rank sends as many rows to a rank as the others.
                shapes = [rows(0, to) for to in range(size)]
                table = [[say(call, shapes[to], number, k, to) for to in range(size)] for k in range(size)]
                result = blank(shapes[me])
                work = dist.reduce_scatter(result, [tensor(part) for part in table[me]], **with_op)
                return work, [result], [reduced([parts[me] for parts in table])]
            case _:
                shape = call.shape or (1,)
                table = [[say(call, shape, number, k, to) for to in range(size)] for k in range(size)]
                result = blank(shape)
                work = dist.reduce_scatter_tensor(result, tensor(whole(table[me])), **with_op)
                return work, [result], [reduced([parts[me] for parts in table])]

    def objects(self, number: int, event: Objects) -> UnderWay:
        members, group = self.program.groups[event.group], self.groups[event.group]
        root, is_root = members[event.root], members[event.root] == self.rank
        everything = [{"rank": rank, "event": "x" * (number * rank)} for rank in members]
        mine = everything[members.index(self.rank)]
        found: list[Any] = [None] * len(members)
        expected: list[Any] = everything
        match event.what:
            case "all_gather_object":
                dist.all_gather_object(found, mine, group=group)
            case "broadcast_object_list":
                found = list(everything) if is_root else found
                dist.broadcast_object_list(found, root, group=group)
            case "gather_object":
                dist.gather_object(mine, found if is_root else None, root, group=group)
                expected = everything if is_root else found
            case _:
                found, expected = [None], [mine]
                dist.scatter_object_list(found, everything if is_root else None, root, group=group)
        assert found == expected, f"{event} on rank {self.rank}: {found}, expected {expected}"
        return UnderWay(event.group, str(event), None, [], [])

    def messages(self, number: int, event: Messages) -> UnderWay:
        members, group = self.program.groups[event.group], self.groups[event.group]
        me = members.index(self.rank)
        received, expected, starts = [], [], []
        for k, (source, to, tag) in enumerate(event.ends):
            values = self.program.values(event, event.shape, number, k)
            if source == me:
                sent = tensor_of(values, event.dtype, _form(event, me))
                starts.append(dist.P2POp(dist.isend, sent, members[to], group, tag))
            elif to == me:
                got = tensor_of(np.zeros(event.shape, bool), event.dtype, _form(event, me))
                starts.append(dist.P2POp(dist.irecv, got, members[source], group, tag))
                received.append(got)
                expected.append(values)
        if event.together and starts:
            works = dist.batch_isend_irecv(starts)
        else:
            works = [each.op(each.tensor, each.peer, group, each.tag) for each in starts]
            self.random.shuffle(works)
        for work in works:
            work.wait()
        return UnderWay(event.group, f"{event} on rank {self.rank}", None, received, expected)


@contextlib.contextmanager
def _raises(kind: type[Exception], event: Event) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{event}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{event}: expected {kind.__name__}, got nothing")


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    warnings.simplefilter("ignore", FutureWarning)  # of names that later releases of Torch have changed
    dist.distributed_c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    settings = Settings(
        segment_nbytes=program.segment_nbytes,
        engine=program.engine,
        stall_check_s=PATIENCE_S / 4,
        stall_shutdown_s=PATIENCE_S,
    )
    store = dist.HashStore()
    refused: dict[int, dict[int, str]] = {}
    lock = threading.Lock()

    def workload(_: Any) -> None:
        rank = sessions.current().require_topology().rank
        script = Script(program, rank, store)
        script.run()
        with lock:
            refused[rank] = script.refused
        dist.destroy_process_group()

    done = world.run(workload, program.ranks, settings, native=program.engine == "native", deadline_s=3 * PATIENCE_S)
    ends_the_job = any(isinstance(event, Differ) and event.is_last for event in program.events)
    if done.error is not None and not (ends_the_job and len(refused) == program.ranks):
        raise done.error
    assert not done.stuck, f"{done.stuck} hang"
    for number, event in enumerate(program.events):
        classes = {said[number] for said in refused.values() if number in said}
        assert len(classes) <= 1, f"{event} is refused as {classes}"
