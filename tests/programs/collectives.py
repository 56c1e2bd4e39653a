"""Scripts that call the collectives of ocomm, ocomm_torch and ocomm_tf, held to what NumPy makes of the same values.

Values are small whole numbers and factors are powers of two, so every result is exact in every dtype, and results are
compared as numbers are: with ``==``. Each rank makes a call with the framework and in the form that it likes. A call
that no rank may make is refused on all ranks by one class. A call in which one rank differs from the others is a
MismatchError on all ranks of the set. Neither changes an argument, and the job goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf
import torch
from hypothesis import strategies as st

import ocomm
import ocomm_tf
import ocomm_torch
from ocomm import session as sessions
from ocomm.errors import InvalidRequestError, MismatchError, OcommError, PeerError, UnsupportedError
from ocomm.types import Settings
from ocomm_tf import engine
from tests.faults import world
from tests.programs import torch_distributed
from tests.programs.torch_distributed import PATIENCE_S, REAL, SHAPES, WHOLE

# TensorFlow runs the graphs of all ranks in one pool, where each rank may wait.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
FEW = 12
FRAMEWORKS: dict[str, Any] = {"numpy": ocomm, "torch": ocomm_torch, "tf": ocomm_tf, "graph": ocomm_tf}
REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
BY_ROWS = ("allgather", "grouped_allgather", "alltoall", "reducescatter", "grouped_reducescatter")
WITH_ROOT = ("broadcast", "broadcast_object")
WHATS = ("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
#: Calls that NumPy does not have.
GROUPS = ("grouped_allgather", "grouped_reducescatter")
#: Calls that no other is under way with: most of them wait.
LONE = ("barrier", "broadcast_object", "allgather_object", "sparse")
OPS: dict[str, Any] = {
    "Average": np.add,
    "Sum": np.add,
    "Min": np.minimum,
    "Max": np.maximum,
    "Product": np.multiply,
}
OF_BOOL: dict[str, Any] = {"Sum": np.maximum, "Min": np.minimum, "Max": np.maximum, "Product": np.minimum}
#: The rows that a sparse call may add to, and the length of each.
SPARSE_SHAPE = (6, 3)


@dataclass(frozen=True)
class Way:
    """How a rank makes its calls. ``form`` is how tensors lie in memory or, in a graph, whether it knows their
    shapes.
    """

    framework: str = "numpy"
    form: str = "plain"
    in_place: bool = False
    asynchronous: bool = False

    def __str__(self) -> str:
        words = [self.framework, self.form, *["in place"] * self.in_place, *["async"] * self.asynchronous]
        return " ".join(words)


@dataclass(frozen=True)
class Call:
    """A collective of the set ``members``, with a tensor of each of ``shapes``. ``root`` is a position in the set.
    ``uneven``: first dimensions differ between ranks, or a rank sends another number of rows to each.
    """

    what: str
    dtype: str = "float32"
    shapes: tuple[tuple[int, ...], ...] = ((3,),)
    name: str = ""
    members: int = 0
    op: str = "Sum"
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    uneven: bool = False

    def __str__(self) -> str:
        words = [f"{self.what} '{self.name}' of {self.dtype} {' '.join(map(str, self.shapes))}"]
        if self.what in REDUCTIONS or self.what == "sparse":
            words.append(f"by {self.op} with factors {self.factors}")
        if self.what in WITH_ROOT:
            words.append(f"with root {self.root}")
        return " ".join([*words, *["uneven"] * self.uneven, f"in set {self.members}"])

    @property
    def is_refused(self) -> bool:
        """Whether no rank may make this call."""
        if self.what in REDUCTIONS:
            if "scatter" in self.what and self.op not in ("Average", "Sum"):
                return True
            if self.dtype == "bool" and (self.op == "Average" or self.factors != (1.0, 1.0)):
                return True
        return self.what in BY_ROWS and () in self.shapes

    def fails(self, joined: Sequence[int]) -> bool:
        """Whether the call is refused, or needs data of ranks that have joined; these are positions in the set."""
        if self.is_refused:
            return True
        match self.what:
            case "broadcast" | "broadcast_object":
                return self.root in joined
            case "alltoall":
                return bool(joined) and self.shapes[0][0] > 0
            case "reducescatter" | "grouped_reducescatter":
                return bool(joined)
            case "allreduce" | "grouped_allreduce":
                return bool(joined) and self.factors[0] != 1 and self.op not in ("Average", "Sum")
        return False


@dataclass(frozen=True)
class Burst:
    """Calls that are under way at once, on ranks that do not wait for each; ``times`` one after the other. Those that
    have names are submitted in another order on each such rank.
    """

    calls: tuple[Call, ...]
    ways: tuple[Way, ...]
    times: int = 1

    def __str__(self) -> str:
        lines = [f"by {', '.join(map(str, self.ways))}, {self.times} times", *map(str, self.calls)]
        return "\n        ".join(lines)


@dataclass(frozen=True)
class Differ:
    """A call that the rank at position ``victim`` of the set makes otherwise."""

    call: Call
    ways: tuple[Way, ...]
    victim: int
    other: Call

    def __str__(self) -> str:
        return f"{Burst((self.call,), self.ways)}; at position {self.victim}: {self.other}"


@dataclass(frozen=True)
class Join:
    """The ranks at positions ``early`` of a set join at once, the others after their calls."""

    members: int
    early: tuple[int, ...]
    calls: tuple[Call, ...]
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        return f"join(set {self.members}), at positions {self.early} before: {Burst(self.calls, self.ways)}"


@dataclass(frozen=True)
class Remake:
    """A set is removed and added again. The rank at position ``alone`` has asked its set for something before."""

    members: int
    alone: int | None = None

    def __str__(self) -> str:
        before = "" if self.alone is None else f", while the rank at position {self.alone} waits for the others"
        return f"remove and add set {self.members}{before}"


Event = Burst | Differ | Join | Remake


@dataclass(frozen=True)
class Setup:
    ranks: int = 2
    #: Ranks per host; 0: all on one host.
    slots: int = 0
    engine: str = "python"
    fusion_threshold: int = 128 << 20
    group_fusion: bool = True
    cache_capacity: int = 1024
    segment_nbytes: int = 8 << 20
    window: int = 0
    #: Whether graphs have operations of ocomm.
    extension: bool = True


@dataclass(frozen=True)
class Program:
    setup: Setup
    #: The ranks of each set; set 0 has all.
    sets: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]
    seed: int = 0

    def __str__(self) -> str:
        lines = [f"{self.setup}, sets {list(map(list, self.sets))}", *(f"    {event}" for event in self.events)]
        return "\n".join(lines)

    def number(self, rank: int, other: int, *where: int) -> int:
        """Returns a number of rows for each pair of numbers."""
        return random.Random(f"{self.seed} {where} {rank} {other}").randrange(3)

    def splits(self, call: Call, sender: int, *where: int) -> list[int]:
        size = len(self.sets[call.members])
        if not call.uneven:
            return [call.shapes[0][0]] * size
        most = int(0 not in call.shapes[0][:1])
        return [most * self.number(sender, to, *where) for to in range(size)]

    def values(self, call: Call, position: int, *where: int) -> list[np.ndarray]:
        """Returns what the rank at a position of the set gives to a call."""
        size = len(self.sets[call.members])
        found = []
        for number, shape in enumerate(call.shapes):
            numbers = np.random.default_rng([self.seed, *where, position, number])
            if call.what == "alltoall" and shape:  # a row more than what is sent, where splits may say so
                shape = (sum(self.splits(call, position, *where)) + call.uneven, *shape[1:])
            elif call.uneven and shape and "allgather" in call.what:
                shape = (self.number(position, number, *where), *shape[1:])
            if call.dtype == "bool":
                found.append(numbers.integers(0, 2, shape).astype(np.float64))
                continue
            low = 0 if call.dtype.startswith("uint") else -2
            values = numbers.integers(low, 3, shape).astype(np.float64)
            # So that an average of floats is a whole number.
            found.append(values * size if call.op == "Average" and call.dtype in REAL else values)
        return found

    def expected(self, call: Call, me: int, joined: Sequence[int], *where: int) -> list[np.ndarray]:
        """Returns what a call leaves at position ``me`` of the set, where those at positions ``joined`` have joined."""
        size = len(self.sets[call.members])
        every = {k: self.values(call, k, *where) for k in range(size) if k not in joined}
        columns = list(zip(*every.values(), strict=True))
        match call.what:
            case "allreduce" | "grouped_allreduce":
                return [reduced(call, column, size) for column in columns]
            case "reducescatter" | "grouped_reducescatter":
                return [np.array_split(reduced(call, column, size), size)[me] for column in columns]
            case "broadcast":
                return every[call.root]
            case "alltoall":
                counts, parts = [0] * size, []
                for k in every:
                    splits = self.splits(call, k, *where)
                    first, counts[k] = sum(splits[:me]), splits[me]
                    parts.append(every[k][0][first : first + splits[me]])
                return [np.concatenate(parts), *[np.array(counts)] * call.uneven]
            case _:
                return [np.concatenate(column) for column in columns]


def reduced(call: Call, values: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Returns the reduction of what ranks of a set of ``size`` ranks have given."""
    combine = (OF_BOOL if call.dtype == "bool" else OPS)[call.op]
    # What is no whole number is rounded towards zero where the dtype has whole numbers only.
    store = np.trunc if call.dtype not in REAL else np.asarray
    before, after = call.factors
    total = functools.reduce(combine, [store(each * before) for each in values])
    return np.asarray(store(total * after / (size if call.op == "Average" else 1)))


# Drawing


@st.composite
def _ways(draw: st.DrawFn, ranks: int, frameworks: Sequence[str] = tuple(FRAMEWORKS)) -> tuple[Way, ...]:
    if draw(st.booleans()):
        frameworks = [draw(st.sampled_from(frameworks))]
    found = []
    for _ in range(ranks):
        framework = draw(st.sampled_from(frameworks))
        is_eager = framework in ("numpy", "torch")
        in_place = is_eager and draw(st.booleans())
        forms = [form for form in FORMS[framework] if not (in_place and form == "fixed")]
        found.append(Way(framework, draw(st.sampled_from(forms)), in_place, is_eager and draw(st.booleans())))
    return tuple(found)


@st.composite
def _calls(draw: st.DrawFn, sets: Sequence[Sequence[int]], members: int, name: str, frameworks: set[str]) -> Call:
    what = draw(st.sampled_from(WHATS if "numpy" in frameworks else (*WHATS, *GROUPS)))
    shape = st.sampled_from(SHAPES)
    count = draw(st.integers(1, 3)) if what.startswith("grouped") else 1
    dtypes = [*WHOLE, *REAL, *["uint16"] * ("torch" not in frameworks)]
    factor = st.sampled_from([1.0, 1.0, 0.5, 2.0])
    return Call(
        what,
        draw(st.sampled_from(dtypes)),
        tuple(draw(st.lists(shape, min_size=count, max_size=count))),
        name,
        members,
        draw(st.sampled_from(list(OPS))) if what in REDUCTIONS else "Sum",
        draw(st.tuples(factor, factor)) if what in REDUCTIONS else (1.0, 1.0),
        draw(st.integers(0, len(sets[members]) - 1)) if what in WITH_ROOT else 0,
        draw(st.booleans()) if what in ("allgather", "grouped_allgather", "alltoall") else False,
    )


@st.composite
def _bursts(draw: st.DrawFn, ranks: int, sets: Sequence[Sequence[int]]) -> Burst:
    ways = draw(_ways(ranks))
    frameworks = {way.framework for way in ways}
    count = draw(st.integers(1, 4))
    # Graphs name what has no name by its place in the graph.
    named = (len(frameworks) > 1 and "graph" in frameworks) or draw(st.booleans())
    names = draw(st.permutations("abcd"))[:count] if named else [""] * count
    calls = [draw(_calls(sets, draw(st.integers(0, len(sets) - 1)), name, frameworks)) for name in names]
    if refused := [call for call in calls if call.is_refused]:
        calls = refused[:1]
    return Burst(tuple(calls), ways, draw(st.integers(1, 3)))


@st.composite
def _lone(draw: st.DrawFn, ranks: int, sets: Sequence[Sequence[int]]) -> Burst:
    """A call that waits, or that is of one framework."""
    what = draw(st.sampled_from(LONE))
    members = draw(st.integers(0, len(sets) - 1))
    name = draw(st.sampled_from(["", "a", "b"]))
    root = draw(st.integers(0, len(sets[members]) - 1)) if what in WITH_ROOT else 0
    if what != "sparse":
        return Burst((Call(what, name=name, members=members, root=root),), draw(_ways(ranks)))
    way = replace(draw(_ways(1, ("torch", "tf", "graph")))[0], form="plain", in_place=False)
    dtype, op = draw(st.sampled_from(["float32", "float64"])), draw(st.sampled_from(["Average", "Sum"]))
    return Burst((Call(what, dtype, (SPARSE_SHAPE,), name, members, op),), (way,) * ranks)


@st.composite
def _differ(draw: st.DrawFn, ranks: int, sets: Sequence[Sequence[int]]) -> Event:
    ways = draw(_ways(ranks))
    frameworks = {way.framework for way in ways}
    members = draw(st.integers(0, len(sets) - 1))
    call = replace(draw(_calls(sets, members, draw(st.sampled_from("abcd")), frameworks)), uneven=False)
    others = [
        replace(call, shapes=tuple((*shape, 2) for shape in call.shapes)),
        replace(call, dtype=draw(st.sampled_from([dtype for dtype in (*WHOLE, *REAL) if dtype != call.dtype]))),
    ]
    if call.what in REDUCTIONS:
        others.append(replace(call, op=draw(st.sampled_from([op for op in OPS if op != call.op]))))
        others.append(replace(call, factors=(call.factors[0], 4.0)))
    if call.what in WITH_ROOT:
        others.append(replace(call, root=(call.root + 1) % len(sets[members])))
    other = draw(st.sampled_from(others))
    if call.is_refused or other.is_refused or len(sets[members]) == 1:
        return Burst((call,), ways)
    return Differ(call, ways, draw(st.integers(0, len(sets[members]) - 1)), other)


@st.composite
def _joins(draw: st.DrawFn, ranks: int, sets: Sequence[Sequence[int]]) -> Join:
    ways = draw(_ways(ranks))
    frameworks = {way.framework for way in ways}
    members = draw(st.integers(0, len(sets) - 1))
    positions = range(len(sets[members]))
    early = tuple(sorted(draw(st.sets(st.sampled_from(positions), max_size=len(positions) - 1))))
    objects = st.sampled_from(["broadcast_object", "allgather_object"])
    calls = [
        Call(draw(objects), name=name, members=members, root=draw(st.sampled_from(positions)))
        if draw(st.integers(0, 4)) == 0
        else draw(_calls(sets, members, name, frameworks))
        for name in draw(st.permutations("abcd"))[: draw(st.integers(0, 3))]
    ]
    return Join(members, early, tuple(calls), ways)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to six events."""
    ranks = draw(st.sampled_from([1, 2, 2, 3, 4, 4]))
    some = st.sets(st.integers(0, ranks - 1), min_size=1, max_size=max(ranks - 1, 1)).map(
        lambda each: tuple(sorted(each))
    )
    more = draw(st.lists(some, max_size=2, unique=True)) if ranks > 1 else []
    sets = (tuple(range(ranks)), *more)
    bursts = _bursts(ranks, sets)
    event: st.SearchStrategy[Event] = st.one_of(
        bursts, bursts, bursts, _lone(ranks, sets), _differ(ranks, sets), _joins(ranks, sets)
    )
    if more:
        members = st.integers(1, len(more))
        event |= members.flatmap(
            lambda each: st.builds(Remake, st.just(each), st.none() | st.integers(0, len(sets[each]) - 1))
        )
    setup = Setup(
        ranks,
        draw(st.sampled_from([0, 1, 2])),
        draw(st.sampled_from(["python", "native"])),
        draw(st.sampled_from([0, 64, 4096, 128 << 20])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 1, 3, 1024])),
        draw(st.sampled_from([64, 1000, 1 << 14, 8 << 20])),
        draw(st.sampled_from([0, 1, 2])),
        draw(st.sampled_from([True, True, False])),
    )
    return Program(setup, sets, tuple(draw(st.lists(event, min_size=1, max_size=6))), draw(st.integers(0, 1 << 16)))


# Tensors


def _spread(array: np.ndarray) -> np.ndarray:
    """Every second element of other memory, from its second element on."""
    memory = np.zeros((*array.shape, 2), array.dtype)
    memory[..., 1] = array
    return memory[..., 1]


def _offset(array: np.ndarray) -> np.ndarray:
    """An array whose elements are not aligned."""
    memory: np.ndarray = np.ndarray(array.shape, array.dtype, np.zeros(array.nbytes + 1, np.uint8).data, 1)
    memory[...] = array
    return memory


def _fixed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda array: array,
    "transposed": lambda array: np.array(array, order="F"),
    "spread": _spread,
    "offset": _offset,
    "reversed": lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    "swapped": lambda array: array.astype(array.dtype.newbyteorder()) if array.dtype.kind in "iuf" else array,
    "fixed": _fixed,
}
FORMS: dict[str, Sequence[str]] = {
    "numpy": tuple(ARRAYS),
    "torch": torch_distributed.FORMS,
    "tf": ("plain",),
    "graph": ("plain", "of any shape"),
}


def tensor_of(values: np.ndarray, dtype: str, way: Way) -> Any:
    if way.framework == "torch":
        return torch_distributed.tensor_of(values, dtype, way.form)
    array = np.array(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    return ARRAYS[way.form](array) if way.framework == "numpy" else tf.convert_to_tensor(array)


def numbers_of(tensor: Any) -> tuple[str, np.ndarray]:
    """Returns the dtype's name and the values."""
    if isinstance(tensor, torch.Tensor):
        return str(tensor.dtype).removeprefix("torch."), torch_distributed.numbers_of(tensor)
    array = tensor.numpy() if isinstance(tensor, tf.Tensor) else tensor  # a number, where it has no dimension
    return tensor.dtype.name, np.asarray(array).astype(np.float64)


# Running


@dataclass(frozen=True)
class Mine:
    """A call of this rank, what it gives, and what it must get."""

    call: Call
    tensors: list[Any]
    #: The rows for each rank, in an uneven alltoall.
    splits: list[int] | None
    given: list[np.ndarray]
    expected: list[np.ndarray]
    says: str

    def check(self, results: list[Any], in_place: bool) -> None:
        if in_place:
            assert all(a is b for a, b in zip(results, self.tensors, strict=True)), f"{self.says} is not in place"
        else:
            self.check_unchanged()
        dtypes = [self.call.dtype] * len(self.call.shapes) + ["int32"] * (self.splits is not None)
        for result, dtype, wanted in zip(results, dtypes, self.expected, strict=True):
            self._compare("result", result, dtype, wanted)

    def check_unchanged(self) -> None:
        for tensor, given in zip(self.tensors, self.given, strict=True):
            self._compare("argument", tensor, self.call.dtype, given)

    def _compare(self, what: str, tensor: Any, dtype: str, wanted: np.ndarray) -> None:
        name, found = numbers_of(tensor)
        assert name == dtype and found.shape == wanted.shape and np.array_equal(found, wanted), (
            f"{self.says}: {what} {name}{list(found.shape)} has {found.reshape(-1)[:6]}, "
            f"expected {dtype}{list(wanted.shape)} with {wanted.reshape(-1)[:6]}"
        )


class Script:
    """The script of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.sets = [ocomm.global_process_set, *(ocomm.add_process_set(ranks) for ranks in program.sets[1:])]
        self.random = random.Random(f"{program.seed} {rank}")

    def position(self, members: int) -> int | None:
        """Returns this rank's position in a set; None if it is not there."""
        ranks = self.program.sets[members]
        return ranks.index(self.rank) if self.rank in ranks else None

    def run(self) -> None:
        for number, event in enumerate(self.program.events):
            match event:
                case Burst():
                    self.burst(number, event)
                case Differ():
                    self.differ(number, event)
                case Join():
                    self.join(number, event)
                case Remake():
                    self.remake(event)

    def remake(self, event: Remake) -> None:
        ranks, members = self.program.sets[event.members], self.sets[event.members]
        handle = None
        if event.alone is not None and event.alone == self.position(event.members) and len(ranks) > 1:
            handle = ocomm.allreduce_async(np.ones(3), name="alone", process_set=members)
        assert ocomm.remove_process_set(members) and not ocomm.remove_process_set(members)
        if handle is not None:
            with raises(InvalidRequestError, str(event)):
                ocomm.synchronize(handle)
        self.sets[event.members] = ocomm.add_process_set(ranks)

    def join(self, number: int, event: Join) -> None:
        me, ranks = self.position(event.members), self.program.sets[event.members]
        if me is None:
            return
        if me not in event.early:
            for k, call in enumerate(event.calls):
                self.burst(number, Burst((call,), event.ways), event.early, k)
        last = ocomm.join(process_set=self.sets[event.members])
        late = [rank for k, rank in enumerate(ranks) if k not in event.early]
        waits = any(not call.is_refused for call in event.calls)
        assert last in (late if waits else ranks), f"{event}: rank {last} has joined last"
        every = ocomm.allgather_object(last, process_set=self.sets[event.members])
        assert every == [last] * len(ranks), f"{event}: the last ones to join are {every}"

    def differ(self, number: int, event: Differ) -> None:
        me, way = self.position(event.call.members), event.ways[self.rank]
        if me is not None:
            mine = self.prepare(event.other if me == event.victim else event.call, way, (), number)
            with raises(MismatchError, f"{event}, on rank {self.rank}"):
                self.results([mine], way, None)
            mine.check_unchanged()

    def burst(self, number: int, event: Burst, joined: Sequence[int] = (), part: int = 0) -> None:
        way = event.ways[self.rank]
        calls = [(k, call) for k, call in enumerate(event.calls) if self.position(call.members) is not None]
        graph = None
        for again in range(event.times if calls else 0):
            where = (number, part, again)
            first = calls[0][1]
            fails = UnsupportedError if first.is_refused else PeerError
            expects = (
                raises(fails, f"{event}, on rank {self.rank}") if first.fails(joined) else contextlib.nullcontext()
            )
            if first.what in LONE:
                with expects:
                    self.lone(first, way, joined, *where)
                continue
            every = [self.prepare(call, way, joined, *where, k) for k, call in calls]
            results: list[list[Any]] = []
            with expects:
                if way.framework == "graph" and graph is None:
                    graph = self.graph(every, way)
                results = self.results(every, way, graph)
            for mine, found in zip(every, results or [None] * len(every), strict=True):
                mine.check_unchanged() if found is None else mine.check(found, is_in_place(mine.call, way))

    def prepare(self, call: Call, way: Way, joined: Sequence[int], *where: int) -> Mine:
        """Returns a call of this rank with its tensors."""
        me = self.position(call.members)
        assert me is not None
        given = self.program.values(call, me, *where)
        return Mine(
            call,
            [tensor_of(each, call.dtype, way) for each in given],
            self.program.splits(call, me, *where) if call.uneven and call.what == "alltoall" else None,
            given,
            [] if call.fails(joined) else self.program.expected(call, me, joined, *where),
            f"{call} on rank {self.rank}, {way}",
        )

    def results(self, every: Sequence[Mine], way: Way, graph: Any) -> list[list[Any]]:
        """Makes calls and returns the results of each."""
        if way.framework == "graph":
            return [listed(found) for found in (graph or self.graph(every, way))(*arguments(every))]
        if not way.asynchronous:
            return [listed(self.make(mine.call, way, mine.tensors, mine.splits)) for mine in every]
        order = list(range(len(every)))
        if all(mine.call.name for mine in every):
            self.random.shuffle(order)
        handles = {k: self.make(every[k].call, way, every[k].tensors, every[k].splits) for k in order}
        found: dict[int, list[Any]] = {}
        self.random.shuffle(order)
        for k in order:
            while self.random.random() < 0.5 and not ocomm.poll(handles[k]):
                time.sleep(0)
            found[k] = listed(ocomm.synchronize(handles[k]))
            assert ocomm.synchronize(handles[k]) is None
        return [found[k] for k in range(len(every))]

    def graph(self, every: Sequence[Mine], way: Way) -> Any:
        """Returns a graph of calls; it takes their arguments."""

        def function(*given: Any) -> list[Any]:
            rest, found = list(given), []
            for mine in every:
                tensors = [rest.pop(0) for _ in mine.tensors]
                found.append(self.make(mine.call, way, tensors, rest.pop(0) if mine.splits is not None else None))
            return found

        signature = [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in arguments(every)]
        return tf.function(function, signature if way.form == "of any shape" else None, autograph=False)

    def make(self, call: Call, way: Way, tensors: Sequence[Any], splits: Any) -> Any:
        """Makes a call; returns its result, or a handle."""
        options: dict[str, Any] = {"name": call.name or None, "process_set": self.sets[call.members]}
        if call.what in REDUCTIONS:
            options |= {"op": getattr(ocomm, call.op), "prescale_factor": call.factors[0]}
            options["postscale_factor"] = call.factors[1]
        if call.what == "broadcast":
            options["root_rank"] = self.program.sets[call.members][call.root]
        if call.what == "alltoall":
            options["splits"] = splits
        name = call.what + "_async" * way.asynchronous + "_" * is_in_place(call, way)
        return getattr(FRAMEWORKS[way.framework], name)(tensors if "grouped" in call.what else tensors[0], **options)

    def lone(self, call: Call, way: Way, joined: Sequence[int], *where: int) -> None:
        """Makes a call of ``LONE`` and compares what it leaves."""
        hvd, members, ranks = FRAMEWORKS[way.framework], self.sets[call.members], self.program.sets[call.members]
        mine = {"rank": self.rank, "text": "x" * where[0] * self.rank}
        every = [{"rank": rank, "text": "x" * where[0] * rank} for rank in ranks]
        found: Any = None
        expected: Any = None
        match call.what:
            case "barrier":
                hvd.barrier(process_set=members)
            case "broadcast_object":
                found = hvd.broadcast_object(mine, ranks[call.root], name=call.name or None, process_set=members)
                expected = every[call.root]
            case "allgather_object":
                found = hvd.allgather_object(mine, name=call.name or None, process_set=members)
                expected = [each for k, each in enumerate(every) if k not in joined]
            case _:
                found, expected = self.sparse(call, way, *where)
        assert found == expected, f"{call} on rank {self.rank}, {way}: {found}, expected {expected}"

    def sparse(self, call: Call, way: Way, *where: int) -> tuple[Any, Any]:
        """Returns a sum of some rows, and what it must be."""
        total = np.zeros(SPARSE_SHAPE)
        given: dict[int, tuple[list[int], np.ndarray]] = {}
        for k in range(size := len(self.program.sets[call.members])):
            rows = [self.program.number(k, row, *where) for row in range(self.program.number(k, 9, *where))]
            given[k] = rows, self.program.values(call, k, *where)[0][: len(rows)]
            np.add.at(total, rows, given[k][1] / (size if call.op == "Average" else 1))
        rows, values = given[self.position(call.members) or 0]
        name, members, op = call.name or None, self.sets[call.members], getattr(ocomm, call.op)
        if way.framework == "torch":
            tensor = torch.sparse_coo_tensor(
                torch.tensor([rows], dtype=torch.int64),
                torch.from_numpy(values.astype(call.dtype)),
                SPARSE_SHAPE,
                check_invariants=True,
            )
            summed = ocomm_torch.sparse_allreduce_async(tensor, name, op, members)()
            return summed.to_dense().tolist(), total.tolist()

        def function(rows: Any, values: Any) -> Any:
            slices = tf.IndexedSlices(values, rows, tf.constant(SPARSE_SHAPE))
            return tf.convert_to_tensor(ocomm_tf.allreduce(slices, op=op, name=name, process_set=members))

        way_to_run = function if way.framework == "tf" else tf.function(function, autograph=False)
        dense = way_to_run(tf.constant(rows, tf.int32), tf.constant(values, call.dtype))
        return dense.numpy().tolist(), total.tolist()


def is_in_place(call: Call, way: Way) -> bool:
    return way.in_place and hasattr(FRAMEWORKS[way.framework], f"{call.what}_")


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def arguments(every: Sequence[Mine]) -> list[Any]:
    """Returns what the graph of some calls takes."""
    return [
        given
        for mine in every
        for given in (*mine.tensors, *([] if mine.splits is None else [tf.constant(mine.splits)]))
    ]


@contextlib.contextmanager
def raises(kind: type[Exception], says: str) -> Iterator[None]:
    """Expects an error of ocomm of the class ``kind``, or of TensorFlow with its name."""
    try:
        yield
    except (OcommError, tf.errors.OpError) as error:
        fits = isinstance(error, kind) or re.search(rf"\b{kind.__name__}: ", str(error))
        assert fits, f"{says}: expected {kind.__name__}, got {type(error).__name__}: {error}"
        return
    raise AssertionError(f"{says}: expected {kind.__name__}, got nothing")


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    setup = program.setup
    settings = Settings(
        engine=setup.engine,
        fusion_threshold=setup.fusion_threshold,
        group_fusion=setup.group_fusion,
        cache_capacity=setup.cache_capacity,
        segment_nbytes=setup.segment_nbytes,
        window=setup.window,
        stall_check_s=PATIENCE_S / 4,
        stall_shutdown_s=PATIENCE_S,
    )
    if not setup.extension:
        engine._problem = "the program says so"
    hosts = [f"host{rank // setup.slots}" for rank in range(setup.ranks)] if setup.slots else []

    def workload(_: Any) -> None:
        Script(program, sessions.current().require_topology().rank).run()

    done = world.run(
        workload, setup.ranks, settings, native=setup.engine == "native", hosts=hosts, deadline_s=3 * PATIENCE_S
    )
    if done.error is not None:
        raise done.error
    assert not done.stuck, f"{done.stuck} hang"
