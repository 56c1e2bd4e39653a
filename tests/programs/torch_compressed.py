"""Scripts that train with a compressed optimizer of Torch, held to their clean replay.

The clean replay is a script of the same steps without noise: gradients are set by hand just before ``step()``, nothing
overlaps, all is in the host's memory, no state is saved and loaded, no weight is changed and put back, and a step that
is given up is left out. The losses are linear in the parameters, so every gradient is known without autograd. After
each step both scripts have the same parameters, bit for bit, and at the end the same state. The simulations of
``tests/oracle`` have the same parameters, too (``oracles``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from ocomm.collectives import pipeline
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError, NonFiniteError
from ocomm.optim import flows
from ocomm_torch.compression import Compression
from ocomm_torch.memory import placement
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers import compressed
from tests.fake_device import FakeDevice
from tests.frontends.every_kind import KINDS, Kind, named_arrays
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import digest
from tests.programs import oracles
from tests.programs.torch_scripts import (
    PATIENCE_S,
    SCALE,
    Edit,
    Freeze,
    Hyper,
    Model,
    Perturb,
    Reload,
    Steps,
    Write,
    noise,
    run_ranks,
    same,
    scaler,
)

FEW = 25
#: A tensor of several blocks, one with a short last block, a vector, a scalar.
SHAPES = [(9, 7), (5, 9), (40,), ()]
COUNT = len(SHAPES)


def _in_codes(bits: str) -> Callable[..., Any]:
    return lambda inner, **options: DistributedOptimizer(inner, compression=getattr(Compression, bits), **options)


#: Optimizers that average gradients in codes: they know none of the options of compressed optimizers.
CODES = {
    "int8": Kind(_in_codes("int8"), functools.partial(torch.optim.SGD, momentum=0.9)),
    "int8, Adam": Kind(_in_codes("int8"), torch.optim.Adam),
    "int4": Kind(_in_codes("int4"), torch.optim.AdamW),
}
#: Which of them adds weight decay to gradients; the others take it from parameters.
COUPLED = ("1-bit Adam", "0/1 Adam", "EF-SGD", "int8")


@dataclass(frozen=True)
class Setup:
    """How the optimizer is made, on all ranks alike."""

    kind: str
    ranks: int = 2
    #: Ranks per host; 0: all on one host.
    slots: int = 0
    engine: str = "python"
    #: Which parameters are bfloat16.
    low: tuple[int, ...] = ()
    decay: float = 0.0
    #: Whether AdamW is wrapped, whose decay is taken from parameters, instead of Adam.
    decoupled: bool = False
    passes: int = 1
    block_size: int | str = 16
    overlap: bool = True
    verify: str = "full"
    dense_bits: int = 32
    shard_state: bool = False
    max_grad_norm: float | None = None
    clip: str = "exact"
    frozen: tuple[int, ...] = ()
    fused: bool = False
    #: Where parameters and state are: "host", "device" (a fake one), or "offload": parameters on it, state in the host.
    place: str = "host"
    free_gradients: bool = False
    #: The number of elements from which on a model has another bucket, and of bytes of a segment.
    bucket_numel: int = 32
    segment_nbytes: int = 64

    @property
    def is_in_codes(self) -> bool:
        return self.kind in CODES

    @property
    def has_local_steps(self) -> bool:
        return self.kind.startswith("0/1 Adam, local")

    @property
    def optimizer(self) -> Kind:
        kind = {**KINDS, **CODES}[self.kind]
        if self.kind.endswith(", compressed"):  # most programs have few steps
            kind = replace(kind, options={"freeze_step": 1})
        return replace(kind, inner=torch.optim.AdamW) if self.decoupled else kind

    def options(self, *, clean: bool) -> dict[str, Any]:
        if self.is_in_codes:
            return {"backward_passes_per_step": 1 if clean else self.passes}
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "overlap": self.overlap and not clean,
            "backward_passes_per_step": 1 if clean else self.passes,
            "verify": self.verify,
            "max_grad_norm": self.max_grad_norm,
            "clip": self.clip,
        }
        if self.dense_bits != 32:
            options["dense_bits"] = self.dense_bits
        if self.shard_state:
            options["shard_state"] = True
        if self.place == "offload" and not clean:
            options["offload"] = True
        if self.free_gradients and not clean:
            options["free_gradients"] = True
        return options

    @property
    def inner_options(self) -> dict[str, Any]:
        """Those of the wrapped optimizer."""
        return {"weight_decay": self.decay, "fused" if self.fused else "foreach": self.fused}

    def wrap(self, parameters: list[torch.nn.Parameter], *, clean: bool) -> Any:
        _wrapped.on_device = self.place != "host" and not clean
        return self.optimizer.wrap(parameters, self.inner_options, **self.options(clean=clean))


#: Whether the parameters that this rank wraps are on a device.
_wrapped = threading.local()


def _place(names: Any, parameters: Any, session: Any) -> Any:
    """Stands for ``ocomm_torch.memory.placement.placement``."""
    return FakePlacement(FakeDevice()) if _wrapped.on_device else placement.placement(names, parameters, session)


@dataclass(frozen=True)
class Put:
    """A gradient is set by hand, or dropped."""

    at: int
    rank: int
    drop: bool = False

    def __str__(self) -> str:
        return f"p[{self.at}].grad = {'None' if self.drop else 'a tensor'} on rank {self.rank}"


@dataclass(frozen=True)
class Finish:
    """0/1 Adam syncs what its local steps have added up."""

    def __str__(self) -> str:
        return "optimizer.finish()"


Event = Finish | Freeze | Hyper | Write | Perturb | Reload | Edit | Put


@dataclass(frozen=True)
class Step:
    """One step of the script.

    ``passes[rank][number]`` are the parameters that a backward pass needs, in the order of their gradients. ``end`` is
    how the step ends: "step", "closure"; "clear": all ranks clear their gradients; "skip": rank ``victim`` does; "nan":
    its last pass has a loss that is NaN; "disagree": it has another lr, which ends the script; "drop": a new
    optimizer takes the place of this one, which rank ``victim`` drops before the others' backward passes. ``scaled``:
    a GradScaler takes the step, and skips one with a NaN on all ranks.
    """

    passes: tuple[tuple[tuple[int, ...], ...], ...]
    zeros: bool = False
    before: tuple[Event, ...] = ()
    split: bool = False
    no_sync: bool = False
    between: tuple[Event, ...] = ()
    end: str = "step"
    victim: int = 0
    scaled: bool = False

    def __str__(self) -> str:
        lines = [f"optimizer.zero_grad(set_to_none={not self.zeros})", *map(str, self.before)]
        for rank, passes in enumerate(self.passes):
            for used in passes:
                lines.append(f"on rank {rank}: backward of p{list(used)}{', one by one' if self.split else ''}")
        if self.no_sync:
            lines.append("(all passes but the last inside no_sync())")
        lines += map(str, self.between)
        end = {
            "step": "optimizer.step()",
            "closure": "optimizer.step(closure)",
            "clear": "optimizer.zero_grad(), after skip() if a rank had no gradient",
            "skip": f"optimizer.zero_grad() on rank {self.victim}, step() on the others",
            "nan": f"(the last loss on rank {self.victim} is NaN) optimizer.step()",
            "drop": "optimizer = a new one over the same parameters",
            "disagree": f"another lr on rank {self.victim}; optimizer.step()",
        }
        by = " by scaler.step(optimizer)" if self.scaled else ""
        return "\n".join(f"    {line}" for line in [*lines, end[self.end] + by])


@dataclass(frozen=True)
class Program(Steps):
    setup: Setup
    steps: tuple[Step, ...]

    def noise(self, shape: tuple[int, ...], *where: Any) -> torch.Tensor:
        return noise(self.seed, shape, *where)

    def dtype(self, at: int) -> torch.dtype:
        return torch.bfloat16 if at in self.setup.low else torch.float32

    def parameters(self) -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(self.noise(s, "begin", i).to(self.dtype(i))) for i, s in enumerate(SHAPES)]
        for i in self.setup.frozen:
            made[i].requires_grad_(False)
        return made

    def all_begin(self, step: Step, parameters: list[torch.nn.Parameter]) -> bool:
        """Whether backward begins the step on all ranks, so that ``zero_grad()`` knows of it."""
        trained = {i for i, p in enumerate(parameters) if p.requires_grad}
        return all(
            bool(trained & set.intersection(*map(set, passes[-1:] if step.no_sync else passes)))
            for passes in step.passes
        )

    def may_refuse(self, step: Step) -> bool:
        """Whether the step may have to be exchanged again, with gradients that were released."""
        # Whether what is written before backward stays is known in ``step()``: until then masters do not have it.
        to_low = any(isinstance(event, Write) and event.at in self.setup.low for event in step.before)
        is_changed = bool(step.between) or to_low or any(isinstance(event, Perturb) for event in step.before)
        return self.setup.free_gradients and self.setup.place == "host" and is_changed

    def gradient(self, number: int, rank: int, a_pass: int, at: int) -> torch.Tensor:
        """The gradient of a backward pass with respect to parameter ``at``."""
        return self.noise(SHAPES[at], "gradient", number, rank, a_pass, at).to(self.dtype(at))


# Drawing


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    kind = draw(st.sampled_from([*KINDS, *CODES]))
    ranks, slots = draw(st.sampled_from([(2, 0), (2, 0), (3, 0), (4, 2), (4, 0)]))
    engine = draw(st.sampled_from(["python", "native"]))
    low = draw(st.sampled_from([(), (), (0,), (1, 2), (0, 1, 2, 3)]))
    coupled = kind.startswith(COUPLED)
    setup: dict[str, Any] = {
        "kind": kind,
        "ranks": ranks,
        "slots": slots,
        "engine": engine,
        "low": low,
        "decay": draw(st.sampled_from([0.0, 0.0, 0.25] if not coupled else [0.0, 0.25])),
        "decoupled": kind.startswith(("1-bit Adam", "0/1 Adam")) and draw(st.booleans()),
        "passes": draw(st.sampled_from([1, 1, 2])),
        "frozen": draw(st.sampled_from([(), (), (0,), (3,)])),
        # Torch's fused SGD fails where some parameters have no momentum yet.
        "fused": kind != "int8" and draw(st.booleans()),
        "bucket_numel": draw(st.sampled_from([32, 64, 1 << 17])),
        "segment_nbytes": draw(st.sampled_from([64, 200, 8 << 20])),
    }
    if kind not in CODES:
        setup["block_size"] = draw(st.sampled_from([16, 4096, "tensor"]))
        setup["overlap"] = draw(st.sampled_from([True, True, True, False]))
        setup["verify"] = draw(st.sampled_from(["full", "full", "sampled"]))
        if kind not in ("SoftSignSGD",) and not kind.startswith("0/1 Adam, local"):
            setup["max_grad_norm"] = draw(st.sampled_from([None, None, 0.5]))
            setup["clip"] = draw(st.sampled_from(["exact", "previous"]))
    if kind.startswith(("1-bit", "0/1")):
        setup["dense_bits"] = draw(st.sampled_from([32, 32, 16, 8, 4]))
    places = ["host", "host"]
    if kind not in CODES and "LAMB" not in kind and not slots:
        places.append("device")
    if kind.startswith(("1-bit", "0/1")) and not slots:
        places.append("offload")
    setup["place"] = draw(st.sampled_from(places))
    if kind.startswith("1-bit Adam") and not slots and setup["dense_bits"] == 32 and setup["place"] == "host":
        setup["shard_state"] = draw(st.booleans())
    if kind.startswith("1-bit Adam") and setup["place"] != "device" and setup["overlap"]:
        setup["free_gradients"] = draw(st.booleans())
    if setup.get("free_gradients"):
        setup["clip"] = "previous"
        if setup["place"] == "host":
            setup["max_grad_norm"] = None
    return Setup(**setup)


def _events(setup: Setup, between: bool) -> st.SearchStrategy[tuple[Event, ...]]:
    ats, ranks = st.integers(0, COUNT - 1), st.integers(0, setup.ranks - 1)
    whats = ["lr", "lr", "decay"] + (["beta"] if "Adam" in setup.kind or "LAMB" in setup.kind else [])
    values = {"lr": [0.02, 0.005], "decay": [0.0, 0.1], "beta": [0.8, 0.95]}
    hyper = st.sampled_from(whats).flatmap(lambda what: st.builds(Hyper, st.just(what), st.sampled_from(values[what])))
    write = st.builds(Write, ats, st.sampled_from(["copy_", "data", "numpy", "new data"]))
    kinds: list[st.SearchStrategy[Event]] = [hyper, write]
    if between:
        # With codes gradients are averages then, which a script changes on all ranks alike.
        where = st.none() if setup.is_in_codes else st.none() | ranks
        if not setup.free_gradients:
            kinds.append(st.builds(Edit, ats, st.sampled_from(["mul_", "data", "numpy", "new"]), where))
        if not setup.is_in_codes and not setup.free_gradients:
            kinds.append(st.builds(Put, ats, ranks, st.booleans()))
    else:
        kinds += [
            st.builds(Freeze, ats, st.booleans()),
            st.builds(Freeze, ats, st.booleans()),
            st.builds(Reload, st.booleans()),
        ]
        if setup.kind.startswith("0/1 Adam"):
            kinds.append(st.just(Finish()))
    found = st.lists(st.one_of(kinds), max_size=2).map(tuple)
    if between:
        return found
    perturbs = st.builds(Perturb, st.sampled_from(["add_", "data", "new data"]), st.booleans()).map(
        lambda event: (event,)
    )
    return st.builds(lambda first, last: (*first, *last), found, st.one_of(st.just(()), perturbs))


@st.composite
def _steps(draw: st.DrawFn, setup: Setup, last: bool) -> Step:
    everything = tuple(reversed(range(COUNT)))
    some = st.permutations(everything).flatmap(
        lambda order: st.integers(0, COUNT).map(lambda count: tuple(order[:count]))
    )
    whole = draw(st.booleans())
    used = st.just(everything) if whole else st.one_of(st.just(everything), some)
    no_sync = not setup.is_in_codes and setup.passes == 1 and draw(st.integers(0, 5)) == 0
    counts = [1, 2] if no_sync else [setup.passes]
    passes = tuple(tuple(draw(used) for _ in range(draw(st.sampled_from(counts)))) for _ in range(setup.ranks))
    if draw(st.integers(0, 3)) == 3:  # a rank whose batch needs no parameter
        absent = draw(st.integers(0, setup.ranks - 1))
        passes = tuple(tuple(() for _ in own) if rank == absent else own for rank, own in enumerate(passes))
    eventful = draw(st.integers(0, 2))
    before = draw(_events(setup, between=False)) if eventful else ()
    end = draw(st.sampled_from(["step"] * 7 + ["closure", "clear", "skip", "nan", "nan", "drop"]))
    if setup.is_in_codes and end in ("clear", "skip", "drop"):
        end = "step"  # backward waits for the other ranks
    if setup.has_local_steps and end == "drop":
        end = "step"  # ranks may have different parameters
    if last and draw(st.integers(0, 3)) == 0 and not setup.is_in_codes:
        end = "disagree"
    between = draw(_events(setup, between=True)) if eventful == 2 and end != "closure" else ()
    victim = draw(st.integers(0, setup.ranks - 1))
    if end == "nan":
        between = tuple(event for event in between if isinstance(event, (Hyper, Write)))
        passes = tuple((*own[:-1], everything) if rank == victim else own for rank, own in enumerate(passes))
    scaled = (
        end in ("step", "nan") and not setup.is_in_codes and not setup.free_gradients and draw(st.integers(0, 4)) == 0
    )
    if scaled:  # a GradScaler wants a gradient on every rank
        passes = tuple((*own[:-1], everything) for own in passes)
        between = tuple(event for event in between if not isinstance(event, Put))
    return Step(
        passes=passes,
        zeros=not setup.free_gradients and draw(st.integers(0, 3)) == 0,
        before=before,
        split=draw(st.booleans()),
        no_sync=no_sync,
        between=between,
        end=end,
        victim=victim,
        scaled=scaled,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to ten steps: what is compressed after three has some left."""
    setup = draw(_setups())
    count = draw(st.integers(1, 10))
    steps = [draw(_steps(setup, number == count - 1)) for number in range(count)]
    drops = [number for number, step in enumerate(steps) if step.end == "drop"]
    for number in drops[1:]:  # one takes seconds
        steps[number] = replace(steps[number], end="step")
    return Program(setup, tuple(steps), draw(st.integers(0, 1 << 16)))


# Running


@dataclass
class Script(Model):
    """A model and its optimizer on one rank."""

    program: Program
    rank: int
    clean: bool
    #: By step, set once rank ``victim`` has dropped its optimizer.
    dropped: list[threading.Event]
    p: list[torch.nn.Parameter] = field(init=False)
    optimizer: Any = field(init=False)
    #: What a clean replay has done, for the simulation, with the parameters after that.
    records: list[tuple[int, oracles.Record, list[torch.Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.p = self.program.parameters()
        self.optimizer = self.program.setup.wrap(self.p, clean=self.clean)
        self.record(0, oracles.Begun(self.values()))

    def record(self, number: int, record: oracles.Record) -> None:
        if self.clean:
            self.records.append((number, record, self.values()))

    def taken(self) -> oracles.Taken:
        """Returns what the step that comes is made from."""
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return oracles.Taken([None if p.grad is None else p.grad.detach().clone() for p in self.p], group)

    def reload(self, event: Reload) -> None:
        saved, own = self.optimizer.state_dict(), self.optimizer.rank_state_dict()
        if event.new:
            trained = [p.requires_grad for p in self.p]
            grads = [p.grad for p in self.p]
            self.p = [torch.nn.Parameter(p.detach().clone()) for p in self.p]
            self.optimizer = self.program.setup.wrap(self.p, clean=self.clean)
            for p, trains, grad in zip(self.p, trained, grads, strict=True):
                p.requires_grad_(trains)
                p.grad = grad
        self.optimizer.load_state_dict(saved)
        self.optimizer.load_rank_state_dict(own)

    def drop(self) -> None:
        """Drops optimizer and gradients. What is under way may go on."""
        del self.optimizer
        for p in self.p:
            p.grad = None
        gc.collect()

    def put(self, event: Put, number: int) -> None:
        p = self.p[event.at]
        if event.rank == self.rank and p.requires_grad:
            p.grad = None if event.drop else self.program.gradient(number, self.rank, 99, event.at)

    def state(self) -> dict[str, str]:
        """Returns hashes of what the next steps depend on, by name. Zeros count as what is not allocated yet."""
        saved = self.optimizer.state_dict()
        state = [saved["state"], saved["ocomm"]["core"], saved["ocomm"]["masters"]]
        own = self.optimizer._driver.core.rank_state()
        return {name: digest([array]) for name, array in named_arrays([state, own]) if array.any()}

    def apply(self, event: Event, number: int) -> None:
        """Applies what has an effect in the clean replay, too."""
        match event:
            case Finish():
                self.optimizer.finish()
                self.record(number, oracles.Finished())
            case Freeze():
                self.freeze(event)
            case Hyper():
                self.set_hyper(event)
            case Write():
                values = self.program.noise(SHAPES[event.at], "write", number, event.at)
                self.write(event, values.to(self.p[event.at].dtype))
                self.record(number, oracles.Written(event.at, self.p[event.at].detach().clone()))
            case Edit() if event.rank in (None, self.rank):
                self.edit(replace(event, how="mul_") if self.clean else event)
            case Put():
                self.put(event, number)

    # One step, as the script has it

    def noisy(self, number: int, step: Step) -> type[BaseException] | None:
        self.optimizer.zero_grad(set_to_none=not step.zeros)
        restores: list[Callable[[], None]] = []
        for event in step.before:
            if isinstance(event, Reload):
                self.reload(event)
            elif isinstance(event, Perturb):
                where = (number, self.rank) if event.own else (number,)
                values = [self.program.noise(shape, "perturb", *where, i) for i, shape in enumerate(SHAPES)]
                restores.append(self.perturb(event.how, values))
            else:
                self.apply(event, number)

        def closure() -> float:
            passes = step.passes[self.rank]
            for a_pass, used in enumerate(passes):
                hold = step.no_sync and a_pass < len(passes) - 1
                with self.optimizer.no_sync() if hold else contextlib.nullcontext():
                    self.backward(number, step, a_pass, used)
            return 0.0

        if step.end == "closure":

            def whole() -> float:
                closure()
                for restore in reversed(restores):
                    restore()
                return 0.0

            return self.stepped(step, number, whole)
        mine = step.victim == self.rank
        if step.end == "drop" and not mine:
            self.dropped[number].wait(PATIENCE_S)
        closure()
        for restore in reversed(restores):
            restore()
        if self.program.setup.is_in_codes and any(isinstance(event, Edit) for event in step.between):
            self.optimizer.synchronize()  # as a script must that uses gradients which a rank may lack
        for event in step.between:
            self.apply(event, number)
        if step.end == "drop":
            self.drop()
            if mine:
                self.dropped[number].set()
            self.optimizer = self.program.setup.wrap(self.p, clean=self.clean)
            return None
        if step.end == "clear" or (step.end == "skip" and mine):
            if step.end == "skip" or not self.program.all_begin(step, self.p):
                self.optimizer.skip()
            self.optimizer.zero_grad()
            return None
        if step.end == "disagree" and mine:
            self.set_hyper(Hyper("lr", 0.5))
        return self.stepped(step, number, None)

    def is_scaled(self, step: Step) -> bool:
        return step.scaled and any(p.requires_grad for p in self.p)

    def stepped(self, step: Step, number: int, closure: Callable[[], float] | None) -> type[BaseException] | None:
        """Takes the step, and returns what it raises."""
        try:
            if self.is_scaled(step):
                scaling = scaler()
                scaling.step(self.optimizer)
                scaling.update()
            else:
                self.optimizer.step(closure)
        except NonFiniteError as error:
            assert f"rank(s) [{step.victim}]" in str(error), f"step {number}: {error}"
            return type(error)
        except (HorovodInternalError, InvalidRequestError) as error:
            return type(error)
        return None

    def backward(self, number: int, step: Step, a_pass: int, used: tuple[int, ...]) -> None:
        terms = []
        is_last = a_pass == len(step.passes[self.rank]) - 1
        factor = float("nan") if step.end == "nan" and step.victim == self.rank and is_last else 1.0
        factor *= SCALE if self.is_scaled(step) else 1.0
        for i in used:
            if self.p[i].requires_grad:
                terms.append((self.p[i] * self.program.gradient(number, self.rank, a_pass, i)).sum().float() * factor)
        if step.split:
            for term in terms:
                term.backward()
        elif terms:
            torch.stack(terms).sum().backward()

    # The same step without what has no effect

    def replay(self, number: int, step: Step, is_refused: bool) -> None:
        for p in self.p:
            if step.zeros and p.grad is not None:
                p.grad = torch.zeros_like(p.grad)
            else:
                p.grad = None
        for event in step.before:
            self.apply(event, number)
        for a_pass, used in enumerate(step.passes[self.rank]):
            for i in used:
                if self.p[i].requires_grad:
                    new = self.program.gradient(number, self.rank, a_pass, i)
                    grad = self.p[i].grad
                    self.p[i].grad = new if grad is None else grad + new
        is_taken = step.end in ("step", "closure") and not is_refused
        taken = self.taken()
        if self.program.setup.is_in_codes and is_taken:
            self.optimizer.synchronize()
        for event in step.between:
            self.apply(event, number)
        if is_taken:
            now = self.taken()  # in codes gradients are averages by now
            taken = replace(now, gradients=taken.gradients) if self.program.setup.is_in_codes else now
            self.optimizer.step()
            self.record(number, taken)
        elif step.end == "clear" or (step.end == "skip" and step.victim == self.rank):
            for p in self.p:
                p.grad = None
        elif step.end == "drop":
            self.drop()
            self.optimizer = self.program.setup.wrap(self.p, clean=self.clean)
            self.record(number, oracles.Begun(self.values()))


def on_a_rank(program: Program, rank: int, dropped: list[threading.Event]) -> tuple[list[tuple[Any, bool, Any]], Any]:
    """Runs the script and its replay, step by step, and compares them. Returns what each step has raised, whether all
    ranks should have the same parameters after it, and these; and what the replay has recorded.
    """
    said: list[tuple[Any, bool, Any]] = []
    noisy, clean = (Script(program, rank, is_clean, dropped) for is_clean in (False, True))
    for number, step in enumerate(program.steps):
        before = noisy.values()
        raised = noisy.noisy(number, step)
        if step.end == "disagree":
            moves = raised is None and not any(p.requires_grad for p in noisy.p)
            assert raised is MismatchError or moves, f"step {number}: {raised} where ranks disagree"
            assert all(map(same, noisy.p, before)) or step.before or step.between, (
                f"step {number} has changed parameters"
            )
            return said, clean.records
        has_trained = any(p.requires_grad for p in noisy.p)
        expected = NonFiniteError if step.end == "nan" and has_trained and not step.scaled else None
        is_refused = raised is InvalidRequestError and program.may_refuse(step)
        assert raised is expected or is_refused, f"step {number}: raised {raised}, expected {expected}"
        clean.replay(number, step, is_refused)
        for i, (found, wanted) in enumerate(zip(noisy.p, clean.p, strict=True)):
            assert same(found, wanted), (
                f"step {number}: p[{i}] on rank {rank} is {found.detach().flatten()[:4].tolist()}, "
                f"in the replay {wanted.detach().flatten()[:4].tolist()}"
            )
        core = noisy.optimizer._driver.core
        said.append(
            (raised, core.is_synced, [p.detach().view(torch.uint8 if p.dim() else p.dtype).tolist() for p in noisy.p])
        )
    differing = sorted(name for name, _ in noisy.state().items() ^ clean.state().items())
    assert not differing, f"the states differ: {differing}"
    return said, clean.records


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    setup = program.setup
    compressed.placement = _place
    flows.BUCKET_NUMEL = setup.bucket_numel
    pipeline.SMALLEST_NBYTES = pipeline.SMALLEST_SHARE_NBYTES = 16
    dropped = [threading.Event() for _ in program.steps]
    ran = run_ranks(setup, lambda rank: on_a_rank(program, rank, dropped), replica_check_steps=2)
    said = [own for own, _ in ran]
    for number, found in enumerate(zip(*said, strict=True)):
        classes = [raised for raised, _, _ in found]
        assert len(set(classes)) == 1, f"step {number}: the ranks raised {classes}"
        if all(synced for _, synced, _ in found):
            assert all(values == found[0][2] for _, _, values in found), f"step {number}: replicas differ"
    if oracles.supports(program):
        oracles.compare(setup, [records for _, records in ran])
