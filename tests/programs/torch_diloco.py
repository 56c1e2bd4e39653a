"""Scripts that train with ``DistributedDiLoCo`` of Torch, held to the plain simulation.

The simulation is ``tests.oracle.diloco``, whose local steps are those of plain optimizers of Torch, one for each rank.
After each step every rank has the bits of its model there, and in the end its optimizer's state; inside
``evaluation_parameters()`` all ranks have the anchors. What is refused is refused by one class on all ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import ocomm_torch as hvd
from ocomm.collectives import pipeline
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.optim import flows
from tests.oracle import diloco as oracle
from tests.oracle.dense_codes import bfloat16
from tests.programs.torch_scripts import (
    SCALE,
    Hyper,
    Model,
    Reload,
    Steps,
    Write,
    alike,
    noise,
    on,
    raised_by,
    run_ranks,
    same,
    scaler,
)

FEW = 8
SHAPES = [(9, 7), (5, 9), (40,), ()]
COUNT = len(SHAPES)
EVERYTHING = tuple(range(COUNT))
#: The parameters of each fragment, by the number of fragments: runs of about equal numbers of elements.
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 3: [[0], [1], [2, 3]]}
#: The index of the model's buffer in the simulation, after those of parameters; and its number of elements.
BUFFER, BUFFER_NUMEL = COUNT, 6
INNERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.02),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
}


@dataclass(frozen=True)
class Setup:
    """How the optimizer is made, on all ranks alike."""

    inner: str = "sgd"
    ranks: int = 2
    #: Ranks per host; 0: all on one host.
    slots: int = 0
    hierarchical: bool = False
    engine: str = "python"
    low: bool = False
    buffer: bool = False
    decay: float = 0.0
    sync_every: int = 3
    fragments: int = 1
    outer: tuple[float, float] = (0.9, 0.6)
    bits: int = 32
    delay: int = 0
    mix: float = 0.0
    block_size: int = 4096
    bucket_numel: int = 1 << 17
    segment_nbytes: int = 8 << 20

    @property
    def nodes(self) -> list[int] | None:
        return [self.slots] * (self.ranks // self.slots) if self.hierarchical else None


@dataclass(frozen=True)
class Spoil:
    """An element of a parameter becomes NaN on one rank."""

    at: int
    rank: int

    def __str__(self) -> str:
        return f"p[{self.at}][0] = nan{on(self.rank)}"


@dataclass(frozen=True)
class Finish:
    def __str__(self) -> str:
        return "optimizer.finish()"


@dataclass(frozen=True)
class Reset:
    """All ranks load the state of rank 0 into a new optimizer, and no rank states."""

    def __str__(self) -> str:
        return "a new optimizer loads rank 0's state, and no rank states"


@dataclass(frozen=True)
class Replace:
    """A new optimizer over the same parameters, which all ranks get from rank 0."""

    def __str__(self) -> str:
        return "optimizer = a new one, after broadcast_parameters()"


Event = Finish | Hyper | Reload | Replace | Reset | Spoil | Write


@dataclass(frozen=True)
class Step:
    """One step of the script.

    ``used[rank]`` are the parameters that have a gradient. ``end`` is how the step is made: "step", "closure",
    "scaler"; "skip": rank ``victim`` skips it; "disagree": a step, after which that rank has another lr and all finish,
    which ends the script. ``bad``: a gradient of rank ``victim`` is not finite.
    """

    used: tuple[tuple[int, ...], ...]
    before: tuple[Event, ...] = ()
    end: str = "step"
    victim: int = 0
    bad: bool = False

    def __str__(self) -> str:
        lines = [*map(str, self.before)]
        lines += [f"on rank {rank}: gradients of p{list(used)}" for rank, used in enumerate(self.used)]
        if self.bad:
            lines.append(f"(on rank {self.victim} not finite)")
        return "\n".join(f"    {line}" for line in [*lines, f"end: {self.end}, victim {self.victim}"])


@dataclass(frozen=True)
class Program(Steps):
    setup: Setup
    steps: tuple[Step, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.setup.low else torch.float32

    def noise(self, at: int, *where: Any) -> torch.Tensor:
        """Random numbers in the shape of parameter ``at``, the same for the same place in the program."""
        return noise(self.seed, SHAPES[at], *where, at).to(self.dtype)


# Drawing


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    ranks, slots = draw(st.sampled_from([(1, 0), (2, 0), (2, 0), (3, 0), (4, 2), (4, 0)]))
    fragments = draw(st.sampled_from([1, 1, 2, 3]))
    period = draw(st.sampled_from([1, 2, 3]))
    return Setup(
        inner=draw(st.sampled_from(list(INNERS))),
        ranks=ranks,
        slots=slots,
        hierarchical=bool(slots) and draw(st.booleans()),
        engine=draw(st.sampled_from(["python", "native"])),
        low=draw(st.integers(0, 3)) == 0,
        buffer=draw(st.booleans()),
        decay=draw(st.sampled_from([0.0, 0.25])),
        sync_every=period * fragments,
        fragments=fragments,
        outer=draw(st.sampled_from([(0.9, 0.6), (1.0, 0.0), (0.7, 0.9)])),
        bits=draw(st.sampled_from([32, 8, 4, 1])),
        delay=draw(st.integers(0, period - 1)),
        mix=draw(st.sampled_from([0.0, 0.0, 0.25])),
        block_size=draw(st.sampled_from([16, 4096])),
        bucket_numel=draw(st.sampled_from([32, 64, 1 << 17])),
        segment_nbytes=draw(st.sampled_from([64, 200, 8 << 20])),
    )


@st.composite
def _before(draw: st.DrawFn, setup: Setup, is_first: bool) -> tuple[Event, ...]:
    ats, ranks = st.integers(0, COUNT - 1), st.integers(0, setup.ranks - 1)
    hypers = [Hyper("lr", 0.01), Hyper("lr", 0.002), Hyper("decay", 0.1)]
    # Before the first step all ranks have the same parameters.
    where = st.none() if is_first else st.none() | ranks
    kinds: list[st.SearchStrategy[Any]] = [
        st.sampled_from(hypers),
        st.builds(Write, ats, st.sampled_from(["copy_", "data", "numpy", "new data"]), where),
        st.builds(Reload, st.booleans()),
        st.just(Finish()),
        st.just(Reset()),
    ]
    if not is_first:
        kinds.append(st.builds(Spoil, ats, ranks))
    found = draw(st.lists(st.one_of(kinds), max_size=2))
    return (*found, Replace()) if draw(st.integers(0, 5)) == 5 else tuple(found)


@st.composite
def _steps(draw: st.DrawFn, setup: Setup, is_first: bool, is_last: bool) -> Step:
    some = st.one_of(st.just(EVERYTHING), st.sets(st.sampled_from(EVERYTHING)).map(lambda found: tuple(sorted(found))))
    ends = ["step"] * 5 + ["closure", "scaler", "skip"] + ["disagree"] * (is_last and setup.ranks > 1)
    return Step(
        used=tuple(draw(some) for _ in range(setup.ranks)),
        before=draw(_before(setup, is_first)) if draw(st.booleans()) else (),
        end=draw(st.sampled_from(ends)),
        victim=draw(st.integers(0, setup.ranks - 1)),
        bad=draw(st.integers(0, 7)) == 0,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to twelve steps."""
    setup = draw(_setups())
    count = draw(st.integers(1, 12))
    steps = tuple(draw(_steps(setup, number == 0, number == count - 1)) for number in range(count))
    return Program(setup, steps, draw(st.integers(0, 1 << 16)))


# Running


class Script(Model):
    """What a script does on one rank, with whatever optimizer ``wrap`` makes."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.setup, self.rank = program, program.setup, rank
        self.p = [torch.nn.Parameter(program.noise(i, "begin")) for i in EVERYTHING]
        self.buffer = torch.zeros(BUFFER_NUMEL)
        self.scaler = scaler()
        self.make()

    def wrap(self, inner: torch.optim.Optimizer) -> Any:
        return inner

    def make(self) -> None:
        self.inner = INNERS[self.setup.inner](self.p, weight_decay=self.setup.decay)
        self.optimizer = self.wrap(self.inner)

    def renew(self) -> None:
        """Makes new parameters with the same values and gradients, and an optimizer for them."""
        self.p = [torch.nn.Parameter(p.detach().clone()) for p in self.p]
        self.make()

    def apply(self, event: Hyper | Spoil | Write, number: int) -> None:
        if isinstance(event, Hyper):
            self.set_hyper(event)
        elif event.rank not in (None, self.rank):
            return
        elif isinstance(event, Write):
            where = ("write", number) if event.rank is None else ("write", number, self.rank)
            self.write(event, self.program.noise(event.at, *where))
        else:
            self.p[event.at].data.view(-1)[0] = float("nan")

    def gradients(self, number: int) -> None:
        """Sets the gradients, and what the model does with its buffer."""
        step = self.program.steps[number]
        scale = SCALE if step.end == "scaler" else 1.0
        for i in step.used[self.rank]:
            self.p[i].grad = self.program.noise(i, "gradient", number, self.rank) * scale
        if step.bad and self.rank == step.victim and step.used[self.rank]:
            self.p[step.used[self.rank][0]].grad.view(-1)[0] = float("inf")
        self.buffer += noise(self.program.seed, self.buffer.shape, "buffer", number, self.rank)

    def local(self, number: int) -> None:
        """Takes the step, without a sync if nothing is wrapped."""
        step = self.program.steps[number]
        self.optimizer.zero_grad()

        def closure() -> float:
            self.gradients(number)
            return 0.0

        if step.end == "closure":
            self.step(closure)
            return
        closure()
        if step.end == "scaler" and step.used[self.rank]:
            try:
                self.scaler.step(self.optimizer)
            finally:  # a sync may be refused
                self.scaler.update(SCALE)
        elif step.end == "skip" and self.rank == step.victim:
            self.skip()
        else:
            self.step(None)

    def step(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            closure()
        if all(p.grad.isfinite().all() for p in self.p if p.grad is not None):
            self.optimizer.step()

    def skip(self) -> None:
        pass

    def inner_state(self) -> Any:
        return self.optimizer.state_dict()["state"]


class Simulation(oracle.DiLoCo):
    """The ranks' models between syncs, and the schedule of the syncs; ``scripts`` are the local steps."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        setup, self.scripts = scripts[0].setup, scripts
        self.has_buffer = False
        self.under_way: int | None = None
        self.synced_at = [0] * setup.fragments
        #: Whether the first parameters are anchors, and whether the sync that is under way has been posted.
        self.is_begun = self.is_posted = False
        values = _flat(scripts[0])
        super().__init__(
            [value.reshape(shape) for value, shape in zip(values, [*SHAPES, (BUFFER_NUMEL,)], strict=True)],
            setup.ranks,
            FRAGMENTS[setup.fragments],
            sync_every=setup.sync_every,
            lr=setup.outer[0],
            momentum=setup.outer[1],
            bits=setup.bits,
            delay=setup.delay,
            mix=setup.mix,
            block_size=setup.block_size,
            nodes=setup.nodes,
            rounded=bfloat16 if setup.low else lambda x: x,
        )
        self.codes[BUFFER] = None

    def read(self) -> None:
        self.thetas = [_flat(script) for script in self.scripts]

    def write(self) -> None:
        for script, theta in zip(self.scripts, self.thetas, strict=True):
            for tensor, values in zip([*script.p, script.buffer], theta, strict=True):
                tensor.data.copy_(torch.from_numpy(values).view(tensor.shape))

    def begin(self) -> None:
        """The first parameters become the anchors; a sync that a state has brought is posted."""
        self.read()
        self.is_posted = True
        if not self.is_begun:
            self.is_begun = True
            self.anchors[:COUNT] = [theta.copy() for theta in self.thetas[0][:COUNT]]

    def begin_sync(self, fragment: int) -> None:
        self.under_way = fragment
        self.deltas = self.measured(fragment)
        self.buffers = [theta[BUFFER].copy() for theta in self.thetas]

    def end_sync(self) -> None:
        fragment = self.under_way
        assert fragment is not None
        with_buffer = fragment == 0 and self.scripts[0].setup.buffer
        sent = [*self.deltas, *([self.buffers] if with_buffer else [])]
        if not all(np.isfinite(values).all() for local in sent for values in local):
            self.return_to_anchors()
            for script in self.scripts:
                script.forget()
            raise NonFiniteError("by hand")
        self.sync(fragment)
        if with_buffer:
            self.has_buffer = True
            self.anchors[BUFFER] = self.average(BUFFER, self.buffers)
            for theta in self.thetas:
                theta[BUFFER] = self.anchors[BUFFER].copy()
        self.under_way = None
        self.synced_at[fragment] = self.taken

    def return_to_anchors(self) -> None:
        count = COUNT + self.has_buffer
        for theta in self.thetas:
            theta[:COUNT] = [self.rounded(anchor.copy()) for anchor in self.anchors[:COUNT]]
            theta[COUNT:count] = [anchor.copy() for anchor in self.anchors[COUNT:count]]
        self.under_way = None
        self.synced_at = [self.taken] * len(self.fragments)

    def end_step(self) -> None:
        self.taken += 1
        target = self.taken + self.delay
        if target % self.period == 0:
            self.begin_sync((target // self.period - 1) % len(self.fragments))
        if self.under_way is not None and self.taken % self.period == 0:
            self.end_sync()

    @property
    def unfinished(self) -> list[int]:
        """The fragments that ``finish`` syncs, in order; the first is under way if one is."""
        count = len(self.fragments)
        order = [(self.taken // self.period + k) % count for k in range(count)]
        if self.under_way is not None:
            order = list(dict.fromkeys([self.under_way, *order]))
        return [fragment for fragment in order if self.synced_at[fragment] != self.taken]

    def finish_all(self) -> None:
        for fragment in self.unfinished:
            if self.under_way is None:
                self.begin_sync(fragment)
            self.end_sync()
        if self.taken:
            self.return_to_anchors()

    def reset(self) -> None:
        """Each rank goes on from the anchors, without errors."""
        under_way, synced_at, codes = self.under_way, self.synced_at, Simulation(self.scripts).codes
        if self.taken:
            self.return_to_anchors()
        self.under_way, self.synced_at, self.codes, self.is_posted = under_way, synced_at, codes, False
        if under_way is not None:
            self.begin_sync(under_way)


class ByHand(Script):
    """The local steps of one rank."""

    def forget(self) -> None:
        """Forgets the optimizer's state if it is not finite."""
        values = [value for entry in self.inner.state.values() for value in entry.values()]
        if not all(value.isfinite().all() for value in values if isinstance(value, torch.Tensor)):
            self.inner.state.clear()


def _flat(script: Script) -> list[np.ndarray]:
    return [tensor.detach().float().numpy().reshape(-1).copy() for tensor in [*script.p, script.buffer]]


@dataclass
class Expected:
    """What the events and the step raise, and what the step leaves on each rank: tensors, anchors."""

    raised: list[type[Exception] | None]
    values: list[list[torch.Tensor]]
    anchors: list[torch.Tensor]


def by_hand(program: Program) -> tuple[list[Expected], list[Any]]:
    """Runs the program in one process; returns what each step leaves, and the states of all ranks at the end."""
    scripts = [ByHand(program, rank) for rank in range(program.setup.ranks)]
    simulation = Simulation(scripts)
    found = []
    for number, step in enumerate(program.steps):
        raised: list[type[Exception] | None] = []
        for event in step.before:
            match event:
                case Finish():
                    simulation.begin()
                    raised.append(raised_by(simulation.finish_all))
                    simulation.write()
                case Reload():
                    simulation.is_posted &= not event.new
                    is_refused = simulation.is_posted and simulation.under_way is not None
                    raised.append(InvalidRequestError if is_refused else None)
                case Reset():
                    simulation.read()
                    simulation.reset()
                    simulation.write()
                    state = copy.deepcopy(scripts[0].inner.state_dict())
                    for script in scripts:
                        script.make()
                        script.inner.load_state_dict(copy.deepcopy(state))
                    raised.append(None)
                case Replace():
                    for script in scripts:
                        for p, value in zip(script.p, scripts[0].values(), strict=True):
                            p.data.copy_(value)
                        script.make()
                    simulation = Simulation(scripts)
                    raised.append(None)
                case _:
                    for script in scripts:
                        script.apply(event, number)
                    raised.append(None)
        simulation.begin()
        for script in scripts:
            script.local(number)
        simulation.read()
        raised.append(raised_by(simulation.end_step))
        if step.end == "disagree":
            disagrees = bool(simulation.unfinished)
            simulation.return_to_anchors()
            raised.append(MismatchError if disagrees else None)
        simulation.write()
        rounded = [simulation.rounded(anchor.copy()) for anchor in simulation.anchors[:COUNT]]
        anchors = [torch.from_numpy(a).view(shape).to(program.dtype) for a, shape in zip(rounded, SHAPES, strict=True)]
        values = [[*script.values(), script.buffer.clone()] for script in scripts]
        found.append(Expected(raised, values, anchors))
    return found, [script.inner_state() for script in scripts]


class WithOcomm(Script):
    """The script with ``DistributedDiLoCo``, on the rank whose thread runs it."""

    def wrap(self, inner: torch.optim.Optimizer) -> Any:
        setup = self.setup
        return hvd.DistributedDiLoCo(
            inner,
            sync_every=setup.sync_every,
            fragments=setup.fragments,
            outer_lr=setup.outer[0],
            outer_momentum=setup.outer[1],
            bits=setup.bits,
            delay=setup.delay,
            mix=setup.mix,
            block_size=setup.block_size,
            hierarchical=setup.hierarchical,
            named_buffers=[("buffer", self.buffer)] if setup.buffer else None,
        )

    def step(self, closure: Callable[[], float] | None) -> None:
        self.optimizer.step(closure)

    def skip(self) -> None:
        self.optimizer.skip()

    def take(self, number: int) -> list[type[Exception] | None]:
        """Takes a step; returns what the events and the step raise."""
        step = self.program.steps[number]
        raised = [raised_by(self.apply, event, number) for event in step.before]
        raised.append(raised_by(self.local, number))
        if step.end == "disagree":
            if self.rank == step.victim:
                self.set_hyper(Hyper("lr", 0.5))
            raised.append(raised_by(self.optimizer.finish))
        return raised

    def apply(self, event: Event, number: int) -> None:
        match event:
            case Finish():
                self.optimizer.finish()
            case Reload():
                saved, own = copy.deepcopy(self.optimizer.state_dict()), self.optimizer.rank_state_dict()
                if event.new:
                    self.drop()
                    self.renew()
                self.optimizer.load_state_dict(saved)
                self.optimizer.load_rank_state_dict(own)
            case Reset():
                saved = hvd.broadcast_object(self.optimizer.state_dict(), 0)
                self.drop()
                self.make()
                self.optimizer.load_state_dict(saved)
                self.optimizer.load_rank_state_dict(None)
            case Replace():
                self.drop()
                hvd.broadcast_parameters({f"p{i}": p.data for i, p in enumerate(self.p)}, 0)
                self.make()
            case _:
                super().apply(event, number)

    def drop(self) -> None:
        """Drops the optimizer. A sync that is under way may go on."""
        self.optimizer = self.inner = None


def on_a_rank(program: Program, rank: int, expected: list[Expected], states: list[Any]) -> None:
    """Runs the script, and compares what each step leaves."""
    script = WithOcomm(program, rank)
    for number, at in enumerate(expected):
        raised = script.take(number)
        assert raised == at.raised, f"step {number} on rank {rank}: raised {raised}, expected {at.raised}"
        for i, (found, wanted) in enumerate(zip([*script.p, script.buffer], at.values[rank], strict=True)):
            assert same(found, wanted), (
                f"step {number}: tensor {i} on rank {rank} is {found.detach().flatten()[:4].tolist()}, "
                f"by hand {wanted.flatten()[:4].tolist()}"
            )
        with script.optimizer.evaluation_parameters():
            assert all(map(same, script.p, at.anchors)), f"step {number}: the anchors on rank {rank} differ"
    assert alike(script.inner_state(), states[rank]), "the states differ"


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    flows.BUCKET_NUMEL = program.setup.bucket_numel
    pipeline.SMALLEST_NBYTES = pipeline.SMALLEST_SHARE_NBYTES = 16
    expected, states = by_hand(program)
    run_ranks(program.setup, lambda rank: on_a_rank(program, rank, expected, states), replica_check_steps=2)
