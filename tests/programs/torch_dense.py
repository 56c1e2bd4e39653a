"""Scripts that train with ``DistributedOptimizer`` of Torch, held to averaging by hand.

By hand, one process has a model and a plain optimizer for every rank. It adds up gradients without autograd, and puts
the average over the ranks that train together into ``.grad``. Gradients are whole numbers of eighths, and multiples of
the number of ranks where that is three: averages are exact in every order and in 16 bits. So each rank has, after each
step, the bits of its model by hand, and in the end the state of its optimizer. What is refused is refused by one class
on all ranks that train together.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import ocomm_torch as hvd
from ocomm.collectives import pipeline
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm_torch.optimizers import averaging
from tests.programs.torch_scripts import (
    SCALE,
    Edit,
    Freeze,
    Hyper,
    Model,
    Perturb,
    Reload,
    Steps,
    Write,
    alike,
    noise,
    raised_by,
    run_ranks,
    same,
    scaler,
)

FEW = 15
#: A kernel of a convolution, two matrices of which one is tall, a vector, a scalar; a script adds the last one.
SHAPES = [(3, 4, 2, 2), (5, 9), (40,), (), (4,)]
COUNT = len(SHAPES)
EVERYTHING = tuple(reversed(range(COUNT)))
INNERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "adam": functools.partial(torch.optim.Adam, lr=0.02),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
}
#: Ends of a step that use a GradScaler; "unscale" calls ``unscale_`` before gradients are changed.
SCALED = ("scaler", "unscale")


class Interrupted(Exception):
    """What a backward pass raises."""


class Interrupt(torch.autograd.Function):
    """The identity, without a backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Interrupted


@dataclass(frozen=True)
class Setup:
    """How the optimizer is made, on all ranks alike."""

    inner: str = "sgd"
    ranks: int = 2
    #: Ranks per host; 0: all on one host.
    slots: int = 0
    engine: str = "python"
    #: The ranks that train together; () for all. The others train alone.
    members: tuple[int, ...] = ()
    #: Which parameters are bfloat16, and which are used twice in each loss.
    low: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    channels_last: bool = False
    compression: str = "none"
    passes: int = 1
    sums: bool = False
    predivide: float = 1.0
    groups: int = 0
    named: bool = False
    decay: float = 0.0
    #: "foreach", "fused" or "": tensor by tensor.
    loop: str = ""
    #: Which optimizer a scheduler is made for: "wrapped", "distributed"; "" for none.
    schedule: str = ""
    #: Whether gradients of a matrix overflow in float16.
    large: bool = False
    bucket_nbytes: int = 1 << 20
    fusion_threshold: int = 1 << 20
    segment_nbytes: int = 8 << 20
    checks: int = 2

    @property
    def has_low(self) -> bool:
        return bool(self.low) or self.compression != "none"


@dataclass(frozen=True)
class Add:
    """The last parameter is added, to the distributed optimizer or to the one that it wraps."""

    wrapped: bool = False

    def __str__(self) -> str:
        return f"{'inner' if self.wrapped else 'optimizer'}.add_param_group(p[{COUNT - 1}])"


@dataclass(frozen=True)
class Replace:
    """A new optimizer takes the place of this one, over a process set of these ranks; () for all ranks. ``keep``: the
    old one lives on, as one in a cycle of references does.
    """

    members: tuple[int, ...] = ()
    keep: bool = False

    def __str__(self) -> str:
        old = ", and the old one lives on" if self.keep else ""
        return f"optimizer = a new one over the ranks {list(self.members) or 'of the job'}{old}"


@dataclass(frozen=True)
class Clip:
    def __str__(self) -> str:
        return "clip_grad_norm_(p, 0.5)"


Event = Add | Clip | Edit | Freeze | Hyper | Perturb | Reload | Replace | Write


@dataclass(frozen=True)
class Step:
    """One step of the script.

    ``passes[rank][number]`` are the parameters that a backward pass needs, in the order of their gradients. ``begins``
    says what gradients are before: "none", "zeros", "averages" (those of the last step). ``way`` is how they come:
    "backward", "split" (parameter by parameter), "set" (by hand, those of the last pass). ``end`` is how the step ends:

    "step", "closure", "synchronize", "scaler", "unscale";
    "give up": it is averaged and cleared;
    "raise": the last backward pass of rank ``victim`` raises, and all ranks give up;
    "too many": there is a further backward pass; "early": gradients are cleared before the step; "frozen": frozen
    parameters have gradients: each is refused;
    "disagree": rank ``victim`` has another lr, and what is refused is a further step; "join": it has no more data. Both
    end the script.

    ``bad``: a gradient of rank ``victim`` is NaN, or with a GradScaler all of its last pass overflow.
    """

    passes: tuple[tuple[tuple[int, ...], ...], ...]
    begins: str = "none"
    before: tuple[Event, ...] = ()
    way: str = "backward"
    no_sync: bool = False
    between: tuple[Event, ...] = ()
    end: str = "step"
    victim: int = 0
    bad: bool = False

    def __str__(self) -> str:
        lines = {
            "none": ["optimizer.zero_grad()"],
            "zeros": ["optimizer.zero_grad(set_to_none=False)"],
            "averages": [],
        }[self.begins]
        lines += map(str, self.before)
        way = {"backward": "backward", "split": "backward, one by one,", "set": "gradients set by hand"}[self.way]
        for rank, passes in enumerate(self.passes):
            lines += [f"on rank {rank}: {way} of p{list(used)}" for used in passes]
        if self.no_sync:
            lines.append("(all passes but the last inside no_sync())")
        if self.bad:
            lines.append(f"(on rank {self.victim} not finite)")
        lines += map(str, self.between)
        return "\n".join(f"    {line}" for line in [*lines, f"end: {self.end}, victim {self.victim}"])


@dataclass(frozen=True)
class Program(Steps):
    setup: Setup
    steps: tuple[Step, ...]

    def dtype(self, at: int) -> torch.dtype:
        return torch.bfloat16 if at in self.setup.low else torch.float32

    def parameters(self) -> list[torch.nn.Parameter]:
        values = [noise(self.seed, shape, "begin", i).to(self.dtype(i)) for i, shape in enumerate(SHAPES)]
        if self.setup.channels_last:
            values[0] = values[0].to(memory_format=torch.channels_last)
        return [torch.nn.Parameter(each, requires_grad=i not in self.setup.frozen) for i, each in enumerate(values)]

    def eighths(self, at: int, *where: Any) -> torch.Tensor:
        """Returns small whole numbers of eighths in the shape of parameter ``at``, none of which is a negative zero."""
        unit = 3 if self.setup.ranks == 3 else 1
        whole = (2 * noise(self.seed, SHAPES[at], *where, at)).round().clamp(-5, 5) + 0.0
        return (whole * unit / 8).to(self.dtype(at))


# Drawing


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    inner = draw(st.sampled_from(list(INNERS)))
    ranks, slots = draw(st.sampled_from([(2, 0), (2, 0), (3, 0), (4, 2), (4, 0)]))
    low = draw(st.sampled_from([(), (), (0,), (1, 2), (0, 1, 2, 3, 4)]))
    tied = draw(st.sampled_from([(), (), (1, 3), (0,)]))
    sums = draw(st.sampled_from([False, False, True]))
    compression = draw(st.sampled_from(["none", "none", "none", "fp16", "bf16"]))
    return Setup(
        inner=inner,
        ranks=ranks,
        slots=slots,
        engine=draw(st.sampled_from(["python", "native"])),
        members=draw(st.sampled_from([(), (), (), *_members(ranks)])),
        low=low,
        tied=tied,
        frozen=draw(st.sampled_from([(), (), (0,), (3,)])),
        channels_last=draw(st.booleans()),
        compression=compression,
        passes=draw(st.sampled_from([1, 1, 2])),
        sums=sums,
        predivide=1.0 if sums else draw(st.sampled_from([1.0, 1.0, 2.0])),
        groups=draw(st.sampled_from([0, 0, 2])),
        named=draw(st.booleans()),
        decay=draw(st.sampled_from([0.0, 0.25])),
        # Torch's fused SGD fails where some parameters have no momentum yet.
        loop=draw(st.sampled_from(["", "foreach"] if inner == "sgd" else ["", "foreach", "fused"])),
        schedule=draw(st.sampled_from(["", "", "wrapped", "distributed"])),
        large=compression == "fp16" and 1 not in tied and draw(st.booleans()),
        bucket_nbytes=draw(st.sampled_from([1, 100, 1 << 20])),
        fusion_threshold=draw(st.sampled_from([0, 200, 1 << 20])),
        segment_nbytes=draw(st.sampled_from([64, 200, 8 << 20])),
        checks=draw(st.sampled_from([2, 2, 64, 0])),
    )


def _members(ranks: int) -> list[tuple[int, ...]]:
    return {2: [(1,)], 3: [(0, 2), (1, 2)], 4: [(0, 3), (1, 2)]}[ranks]


def _hypers(setup: Setup) -> st.SearchStrategy[Hyper]:
    values = {"lr": [0.02, 0.005], "decay": [0.0, 0.1]}
    if setup.inner != "plain sgd":
        values["beta"] = [0.8, 0.5]
    return st.sampled_from(list(values)).flatmap(
        lambda what: st.builds(Hyper, st.just(what), st.sampled_from(values[what]))
    )


def _before(setup: Setup) -> st.SearchStrategy[tuple[Event, ...]]:
    ats = st.integers(0, COUNT - 1)
    freeze = st.builds(Freeze, ats, st.booleans())
    kinds: list[st.SearchStrategy[Any]] = [
        freeze,
        freeze,
        _hypers(setup),
        st.builds(Write, ats, st.sampled_from(["copy_", "data", "numpy", "new data"])),
        st.builds(Reload, st.booleans()),
        st.builds(Add, st.booleans()),
        st.builds(Replace, st.sampled_from([(), *_members(setup.ranks)]), st.booleans()),
    ]
    found = st.lists(st.one_of(kinds), max_size=2).map(tuple)
    perturb = st.builds(Perturb, st.sampled_from(["add_", "data", "new data"]), st.booleans())
    return st.builds(lambda first, last: (*first, *last), found, st.one_of(st.just(()), perturb.map(lambda e: (e,))))


@st.composite
def _steps(draw: st.DrawFn, setup: Setup, last: bool, before: Step | None) -> Step:
    some = st.permutations(EVERYTHING).flatmap(lambda order: st.integers(0, COUNT).map(lambda n: tuple(order[:n])))
    way = draw(st.sampled_from(["backward"] * 4 + ["split", "set"]))
    is_whole = way != "set" and draw(st.booleans())
    no_sync = way != "set" and setup.passes == 1 and draw(st.integers(0, 5)) == 0
    counts = [1, 2] if no_sync else [setup.passes] if is_whole or way == "set" else [setup.passes, setup.passes, 1]
    used = st.just(EVERYTHING) if is_whole else st.one_of(st.just(EVERYTHING), some)
    passes = tuple(tuple(draw(used) for _ in range(draw(st.sampled_from(counts)))) for _ in range(setup.ranks))
    ends = ["step"] * 4 + ["synchronize", "synchronize", "scaler", "unscale", "give up"]
    if way != "set":
        ends += ["closure", "raise"]
    if is_whole and not no_sync:
        ends += ["too many", "early"]
    ends += ["frozen"] + ["join"] * last + ["disagree"] * (last and setup.checks > 0)
    end = draw(st.sampled_from(ends))
    begins = ["none", "none", "zeros"]
    # A clipped average is no whole number of eighths, and several averages may be more than 16 bits have.
    if before is not None and not setup.has_low and Clip() not in before.between and end not in SCALED:
        begins.append("averages")
    between = draw(st.lists(_between(setup), max_size=2)) if draw(st.booleans()) else []
    if end in ("closure", "early", "frozen"):
        between = []  # there is no between, or its changes would complete the step
    is_averaged = is_whole or end in ("synchronize", "unscale", "give up")
    if not is_averaged:
        between = [
            event
            for event in between
            if isinstance(event, (Hyper, Write))
            or (isinstance(event, Edit) and _is_direct(event.at, setup, way, passes))
        ]
    return Step(
        passes=passes,
        begins=draw(st.sampled_from(begins)),
        before=draw(_before(setup)) if draw(st.booleans()) else (),
        way=way,
        no_sync=no_sync,
        between=tuple(between),
        end=end,
        victim=draw(st.integers(0, setup.ranks - 1)),
        bad=draw(st.integers(0, 3 if end in SCALED else 11)) == 0,
    )


def _between(setup: Setup) -> st.SearchStrategy[Any]:
    ats = st.integers(0, COUNT - 1)
    return st.one_of(
        _hypers(setup),
        st.just(Clip()),
        st.builds(Edit, ats, st.sampled_from(["mul_", "data", "numpy", "new"])),
        st.builds(Write, ats, st.sampled_from(["copy_", "data", "numpy", "new data"])),
    )


def _is_direct(at: int, setup: Setup, way: str, passes: Any) -> bool:
    """Returns whether the gradient of ``at`` is on its way on all ranks after backward, so that its use waits."""
    return way != "set" and all(len(own) >= setup.passes and all(at in used for used in own) for own in passes)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to eight steps."""
    setup = draw(_setups())
    steps: list[Step] = []
    for left in reversed(range(draw(st.integers(1, 8)))):
        steps.append(draw(_steps(setup, left == 0, steps[-1] if steps else None)))
    return Program(setup, tuple(steps), draw(st.integers(0, 1 << 16)))


# Running


def in_layout(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns ``gradient`` in the layout that backward gives it, on which depends how Torch rounds steps in 16 bits."""
    return torch.empty_like(p).copy_(gradient)


class Script(Model):
    """What a script does on one rank, with whatever optimizer ``wrap`` makes."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.setup, self.rank = program, program.setup, rank
        self.p = program.parameters()
        self.has_added = False
        self.members: tuple[int, ...] = ()
        self.scaler = scaler()
        #: Optimizers that were replaced.
        self.kept: list[Any] = []
        self.regroup(self.setup.members)
        self.make()

    def regroup(self, members: tuple[int, ...]) -> None:
        """From now on these ranks train together."""
        self.members = members

    def wrap(self, inner: torch.optim.Optimizer) -> Any:
        return inner

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks with which this one trains."""
        every = self.members or tuple(range(self.setup.ranks))
        return every if self.rank in every else (self.rank,)

    @property
    def is_together(self) -> bool:
        return len(self.group) > 1

    @property
    def known(self) -> list[int]:
        """The parameters that the optimizer has."""
        return list(range(COUNT if self.has_added else COUNT - 1))

    @property
    def trained(self) -> list[int]:
        return [i for i in self.known if self.p[i].requires_grad]

    def has_joined(self, step: Step) -> bool:
        """Whether this rank has no data for the step."""
        return step.end == "join" and self.rank == step.victim and len(self.group) == self.setup.ranks

    def disagrees(self, step: Step) -> bool:
        """Whether a rank of the group has another lr."""
        return step.end == "disagree" and self.is_together and step.victim in self.group and bool(self.trained)

    def gradient(self, number: int, a_pass: int, at: int) -> torch.Tensor:
        """The gradient of a backward pass of this rank with respect to parameter ``at``, without a factor."""
        step = self.program.steps[number]
        found = self.program.eighths(at, "gradient", number, self.rank, a_pass)
        if self.setup.large and at == 1:
            found *= 2.0**14
        passes = step.passes[self.rank]
        is_bad = step.bad and self.rank == step.victim and a_pass == len(passes) - 1
        if is_bad and step.end not in SCALED and at in passes[-1][:1]:
            found.view(-1)[0] = float("nan")
        return found

    def factor(self, number: int, a_pass: int) -> float:
        """What the loss of a backward pass of this rank is multiplied by: a loss scale, or infinity."""
        step = self.program.steps[number]
        if step.end not in SCALED:
            return 1.0
        is_last = a_pass == len(step.passes[self.rank]) - 1
        return float("inf") if step.bad and self.rank == step.victim and is_last else SCALE

    def make(self) -> None:
        """Makes the optimizer, and the scheduler."""
        groups: list[dict[str, Any]] = [{"params": self.p[:-1]}]
        if self.has_added:
            groups.append({"params": [self.p[-1]], "lr": 0.01})
        loop = {"fused": True} if self.setup.loop == "fused" else {"foreach": self.setup.loop == "foreach"}
        self.inner = INNERS[self.setup.inner](groups, weight_decay=self.setup.decay, **loop)
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
        scheduler = schedule(self.inner) if self.setup.schedule == "wrapped" else None
        self.optimizer = self.wrap(self.inner)
        self.scheduler = schedule(self.optimizer) if self.setup.schedule == "distributed" else scheduler

    def clear(self, step: Step) -> None:
        if step.begins != "averages":
            self.optimizer.zero_grad(set_to_none=step.begins == "none")

    def apply(self, event: Event, number: int) -> None:
        match event:
            case Add() if not self.has_added:
                self.has_added = True
                optimizer = self.inner if event.wrapped else self.optimizer
                optimizer.add_param_group({"params": [self.p[-1]], "lr": 0.01})
            case Clip():
                torch.nn.utils.clip_grad_norm_([self.p[i] for i in self.trained], 0.5)
            case Edit():
                self.edit(event)
            case Freeze():
                self.freeze(event)
            case Hyper():
                self.set_hyper(event)
            case Reload():
                self.reload(event)
            case Replace():
                self.kept += [self.optimizer] * event.keep
                self.optimizer = self.inner = self.scheduler = None
                if event.members != self.members:
                    self.regroup(event.members)
                self.make()
            case Write():
                values = noise(self.program.seed, SHAPES[event.at], "write", number, event.at)
                self.write(event, values.to(self.p[event.at].dtype))

    def reload(self, event: Reload) -> None:
        saved = copy.deepcopy([each.state_dict() for each in (self.optimizer, self.scheduler) if each is not None])
        if event.new:
            old, self.p = self.p, [torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in self.p]
            for p, q in zip(self.p, old, strict=True):
                p.grad = q.grad
            self.make()
        for each, state in zip((self.optimizer, self.scheduler), saved, strict=False):
            each.load_state_dict(state)

    def load(self, values: list[torch.Tensor]) -> None:
        """Overwrites the parameters."""
        for p, value in zip(self.p, values, strict=True):
            p.data.copy_(value)

    def finish(self, number: int) -> type[Exception] | None:
        """Does what follows after the gradients have come. Returns what is raised."""
        step = self.program.steps[number]
        raised: type[Exception] | None = None
        if step.end == "early":
            raised = raised_by(self.clear_early)
        elif step.end in ("synchronize", "give up", "raise", "too many"):
            self.synchronize()
        is_scaled = step.end in SCALED and (
            bool(self.trained) if self.is_together else any(self.p[i].grad is not None for i in self.known)
        )
        if is_scaled and step.end == "unscale":
            self.scaler.unscale_(self.optimizer)
        for event in step.between:
            self.apply(event, number)
        if is_scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update(SCALE)
            self.optimizer.zero_grad()
        elif step.end in ("give up", "raise", "too many"):
            self.optimizer.zero_grad()
        else:
            if step.end == "disagree" and self.rank == step.victim:
                self.set_hyper(Hyper("lr", 0.5))
            frozen = [self.p[i] for i in self.known if not self.p[i].requires_grad and step.end == "frozen"]
            for p in frozen:
                p.grad = torch.ones_like(p)
            raised = raised_by(self.step, step) or raised
            for p in frozen:
                p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        return raised

    def clear_early(self) -> None:
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        pass

    def step(self, step: Step) -> None:
        self.optimizer.step()

    def state(self) -> list[Any]:
        saved = self.optimizer.state_dict()
        return [saved["state"], [g["lr"] for g in saved["param_groups"]]]


class ByHand(Script):
    """The model and the plain optimizer for one rank."""

    def add_up(self, number: int) -> None:
        """Adds this rank's gradients to what is there."""
        step = self.program.steps[number]
        passes = list(enumerate(step.passes[self.rank]))
        for a_pass, used in passes[-1:] if step.way == "set" else passes:
            for i in [i for i in used if i in self.trained]:
                new = self.gradient(number, a_pass, i) * self.factor(number, a_pass)
                if step.way == "set" or self.p[i].grad is None:
                    self.p[i].grad = in_layout(self.p[i], new)
                else:
                    self.p[i].grad += new

    def clear_early(self) -> None:
        if self.is_together and self.trained:
            raise AssertionError
        super().clear_early()

    def step(self, step: Step) -> None:
        if step.end == "frozen" and self.is_together and len(self.trained) < len(self.known):
            raise InvalidRequestError
        super().step(step)
        if self.disagrees(step):
            raise MismatchError

    def refused(self, step: Step) -> type[Exception] | None:
        """Returns what backward raises."""
        if step.end == "raise" and self.rank == step.victim:
            return Interrupted
        return AssertionError if step.end == "too many" and self.is_together and self.trained else None


def average(scripts: list[ByHand], factor: float) -> None:
    """Makes each gradient of these ranks their sum, multiplied by ``factor``."""
    for i in scripts[0].trained:
        grads = [script.p[i].grad for script in scripts]
        total = sum((grad for grad in grads if grad is not None), torch.zeros(SHAPES[i], dtype=scripts[0].p[i].dtype))
        for script, grad in zip(scripts, grads, strict=True):
            if grad is None:
                grad = script.p[i].grad = torch.empty_like(script.p[i])
            grad.copy_(total * factor)


@dataclass
class Expected:
    """By rank: what a step raises, and what it leaves."""

    raised: list[type[Exception] | None]
    values: list[list[torch.Tensor]]


def by_hand(program: Program) -> tuple[list[Expected], list[Any]]:
    """Runs the program in one process; returns what each step leaves, and the states of all ranks at the end."""
    setup = program.setup
    scripts = [ByHand(program, rank) for rank in range(setup.ranks)]
    found = []
    for number, step in enumerate(program.steps):
        for script in scripts:
            script.clear(step)
        for event in step.before:
            for script in scripts:
                script.apply(event, number)
            if isinstance(event, Replace):
                for script in scripts:
                    script.load(scripts[script.group[0]].values())
        stepping = [script for script in scripts if not script.has_joined(step)]
        for script in stepping:
            script.add_up(number)
        for group in {script.group for script in scripts if script.is_together}:
            average([script for script in stepping if script.rank in group], 1.0 if setup.sums else 1 / len(group))
        raised: list[type[Exception] | None] = [None] * setup.ranks
        for script in stepping:
            raised[script.rank] = script.finish(number) or script.refused(step)
        found.append(Expected(raised, [script.values() for script in scripts]))
    return found, [script.state() for script in scripts]


class WithOcomm(Script):
    """The script with ``DistributedOptimizer``, on the rank whose thread runs it."""

    def regroup(self, members: tuple[int, ...]) -> None:
        if self.members:
            hvd.remove_process_set(self.process_set)
        super().regroup(members)
        self.process_set = hvd.add_process_set(members) if members else hvd.global_process_set

    def wrap(self, inner: torch.optim.Optimizer) -> Any:
        return hvd.DistributedOptimizer(
            inner,
            [(f"p{i}", self.p[i]) for i in self.known] if self.setup.named else None,
            compression=getattr(hvd.Compression, self.setup.compression),
            backward_passes_per_step=self.setup.passes,
            op=hvd.Sum if self.setup.sums else hvd.Average,
            gradient_predivide_factor=self.setup.predivide,
            groups=self.setup.groups or None,
            process_set=self.process_set,
        )

    def take(self, number: int) -> type[Exception] | None:
        """Takes a step; returns what is raised."""
        step = self.program.steps[number]
        self.clear(step)
        restores: list[Callable[[], None]] = []
        for event in step.before:
            self.apply(event, number)
            if isinstance(event, Replace) and self.is_together:
                named = {f"p{i}": p.data for i, p in enumerate(self.p)}
                hvd.broadcast_parameters(named, self.group[0], process_set=self.process_set)
            elif isinstance(event, Perturb):
                where = ("perturb", number, self.rank) if event.own else ("perturb", number)
                values = [noise(self.program.seed, shape, *where, i) for i, shape in enumerate(SHAPES)]
                restores.append(self.perturb(event.how, values))
        has_joined = self.has_joined(step)

        def closure() -> float:
            try:
                if not has_joined:
                    self.backward(number)
            finally:
                for restore in restores:
                    restore()
            return 0.0

        if step.end == "closure":
            self.optimizer.step(closure)
            if self.scheduler is not None:
                self.scheduler.step()
            return None
        refused = raised_by(closure)
        raised = refused if has_joined else self.finish(number) or refused
        if step.end == "join" and len(self.group) == self.setup.ranks:
            hvd.join()
        return raised

    def backward(self, number: int) -> None:
        step = self.program.steps[number]
        passes = step.passes[self.rank]
        if step.way == "set":
            last = len(passes) - 1
            for i in [i for i in passes[last] if i in self.trained]:
                self.p[i].grad = in_layout(self.p[i], self.gradient(number, last, i) * self.factor(number, last))
            return
        for a_pass, used in enumerate(passes):
            hold = step.no_sync and a_pass < len(passes) - 1
            with self.optimizer.no_sync() if hold else contextlib.nullcontext():
                self.one_pass(number, a_pass, used)
        if step.end == "too many":
            self.one_pass(number, 0, passes[-1])

    def one_pass(self, number: int, a_pass: int, used: tuple[int, ...]) -> None:
        step = self.program.steps[number]
        terms = []
        for i in [i for i in used if i in self.trained]:
            gradient = self.gradient(number, a_pass, i)
            if i in self.setup.tied:
                part = self.program.eighths(i, "part", number)
                terms.append(((self.p[i] * part).sum() + (self.p[i] * (gradient - part)).sum()).float())
            else:
                terms.append((self.p[i] * gradient).sum().float())
        if step.end == "raise" and self.rank == step.victim and a_pass == len(step.passes[self.rank]) - 1:
            terms.insert(len(terms) // 2, Interrupt.apply(torch.ones((), requires_grad=True)))
        losses = terms if step.way == "split" else [torch.stack(terms).sum()] if terms else []
        for loss in losses:
            (loss * self.factor(number, a_pass)).backward()

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def step(self, step: Step) -> None:
        with self.optimizer.skip_synchronize() if step.end == "synchronize" else contextlib.nullcontext():
            super().step(step)
        if self.disagrees(step):
            torch.stack([self.p[i].sum().float() for i in self.trained]).sum().backward()
            super().step(step)


def on_a_rank(program: Program, rank: int, expected: list[Expected], states: list[Any]) -> None:
    """Runs the script, and compares what each step leaves."""
    script = WithOcomm(program, rank)
    for number, at in enumerate(expected):
        raised = script.take(number)
        assert raised is at.raised[rank], f"step {number} on rank {rank}: raised {raised}, expected {at.raised[rank]}"
        for i, (found, wanted) in enumerate(zip(script.p, at.values[rank], strict=True)):
            assert same(found, wanted), (
                f"step {number}: p[{i}] on rank {rank} is {found.detach().flatten()[:4].tolist()}, "
                f"by hand {wanted.flatten()[:4].tolist()}"
            )
    assert alike(script.state(), states[rank]), "the states differ"


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    setup = program.setup
    averaging.FIRST_BUCKET_NBYTES = averaging.BUCKET_NBYTES = setup.bucket_nbytes
    pipeline.SMALLEST_NBYTES = pipeline.SMALLEST_SHARE_NBYTES = 16
    expected, states = by_hand(program)
    run_ranks(
        setup,
        lambda rank: on_a_rank(program, rank, expected, states),
        fusion_threshold=setup.fusion_threshold,
        replica_check_steps=setup.checks,
    )
