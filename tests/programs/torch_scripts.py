"""What scripts of Torch do between steps, for the kinds of programs that train with one of ocomm's optimizers."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ocomm import session as sessions
from ocomm.types import Settings
from tests import worlds
from tests.faults import world
from tests.worlds import MPI_SIZE

#: Seconds after which a rank that waits gives up on the others.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "20"))


def on(rank: int | None) -> str:
    """Returns where something is done, in words; None: on all ranks."""
    return "" if rank is None else f" on rank {rank}"


@dataclass(frozen=True)
class Freeze:
    at: int
    thaw: bool = False

    def __str__(self) -> str:
        return f"p[{self.at}].requires_grad_({self.thaw})"


@dataclass(frozen=True)
class Hyper:
    """A hyperparameter is set, on all ranks alike."""

    what: str
    value: float

    def __str__(self) -> str:
        return f"group[{self.what!r}] = {self.value}"


@dataclass(frozen=True)
class Write:
    """A parameter gets another value; ``rank`` None: on all ranks alike."""

    at: int
    how: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"p[{self.at}] = other values, by {self.how}{on(self.rank)}"


@dataclass(frozen=True)
class Perturb:
    """All parameters are changed for one backward pass, and put back before the step."""

    how: str
    own: bool = False

    def __str__(self) -> str:
        return f"every p += noise{' of this rank' if self.own else ''}, by {self.how}, until step()"


@dataclass(frozen=True)
class Reload:
    """The state is saved and loaded, into the same optimizer or a new one."""

    new: bool = False

    def __str__(self) -> str:
        return f"save and load the state, into {'a new' if self.new else 'the same'} optimizer"


@dataclass(frozen=True)
class Edit:
    """A gradient is halved; ``rank`` None: on all ranks."""

    at: int
    how: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"p[{self.at}].grad *= 0.5, by {self.how}{on(self.rank)}"


@dataclass(frozen=True)
class Steps:
    """A program: how its optimizer is made, and what each step does."""

    setup: Any
    steps: tuple[Any, ...]
    seed: int = 0

    def __str__(self) -> str:
        texts = [f"step {number}:\n{step}" for number, step in enumerate(self.steps)]
        return "\n".join([str(self.setup), *texts])


def noise(seed: int, shape: Sequence[int], *where: Any) -> torch.Tensor:
    """Returns random numbers, the same for the same place in the program with this seed."""
    number = random.Random(f"{seed} {where}").getrandbits(40)
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number))


#: The loss scale of ``scaler``.
SCALE = 8.0


def scaler() -> torch.amp.GradScaler:
    """Returns a GradScaler that has begun, so that it works where a rank's batch needs no parameter."""
    made = torch.amp.GradScaler("cpu", init_scale=SCALE)
    made.scale(torch.ones(()))
    return made


class Model:
    """Parameters ``p`` and their ``optimizer`` on one rank."""

    p: list[torch.nn.Parameter]
    optimizer: Any

    def set_hyper(self, event: Hyper, factor: float = 1.0) -> None:
        for group in self.optimizer.param_groups:
            if event.what == "lr":
                group["lr"] = event.value * factor
            elif event.what == "decay":
                group["weight_decay"] = event.value
            elif "betas" in group:
                group["betas"] = (event.value, group["betas"][1])
            elif "momentum" in group:
                group["momentum"] = event.value

    def write(self, event: Write, values: torch.Tensor) -> None:
        p = self.p[event.at]
        if event.how == "copy_":
            with torch.no_grad():
                p.copy_(values)
        elif event.how == "data":
            p.data.copy_(values)
        elif event.how == "numpy" and p.dtype is torch.float32:
            p.detach().numpy()[...] = values.numpy()
        else:
            # In the same layout: Torch's fused optimizers add a gradient of another one to the wrong elements.
            p.data = torch.empty_like(p).copy_(values)

    def freeze(self, event: Freeze) -> None:
        self.p[event.at].requires_grad_(event.thaw)
        if not event.thaw:
            self.p[event.at].grad = None

    @torch.no_grad()
    def perturb(self, how: str, noise: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Adds ``noise`` to the parameters, and returns what puts them back."""
        kept = [p.detach().clone() for p in self.p]
        memory = [p.data for p in self.p]
        for p, added in zip(self.p, noise, strict=True):
            if how == "add_":
                p.add_(added.to(p.dtype))
            elif how == "data":
                p.data.add_(added.to(p.dtype))
            else:
                p.data = p.data + added.to(p.dtype)

        @torch.no_grad()
        def restore() -> None:
            for p, values, old in zip(self.p, kept, memory, strict=True):
                if how == "add_":
                    p.copy_(values)
                elif how == "data":
                    p.data.copy_(values)
                else:
                    p.data = old

        return restore

    def edit(self, event: Edit) -> None:
        grad = self.p[event.at].grad
        if grad is None:
            return
        if event.how == "mul_":
            grad.mul_(0.5)
        elif event.how == "data":
            grad.data.mul_(0.5)
        elif event.how == "numpy" and grad.dtype is torch.float32:
            grad.numpy()[...] *= 0.5
        else:
            self.p[event.at].grad = grad * 0.5

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.p]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits; a NaN equals every other one."""
    numbers = [tensor.detach().where(~tensor.isnan(), 0).contiguous().reshape(-1) for tensor in (found, wanted)]
    return torch.equal(found.isnan(), wanted.isnan()) and torch.equal(*(each.view(torch.uint8) for each in numbers))


def alike(found: Any, wanted: Any) -> bool:
    """Returns whether two states are the same, down to the bits of their tensors."""
    if isinstance(found, torch.Tensor):
        return same(found, wanted)
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)


def raised_by(call: Callable[..., Any], *args: Any) -> type[Exception] | None:
    """Calls ``call(*args)``. Returns the class of what is raised, and prints the traceback for a program that fails."""
    try:
        call(*args)
    except Exception as error:
        traceback.print_exc()
        return type(error)
    return None


def run_ranks(setup: Any, workload: Callable[[int], Any], **settings: Any) -> list[Any]:
    """Runs ``workload(rank)`` on every rank.

    Args:
        setup: Has ``ranks``, ``slots`` (ranks per host; 0: all on one), ``engine`` and ``segment_nbytes``.
        workload: Called in a thread per rank or, under mpirun, in each process, with its session current.
        settings: Further ones of ``Settings``.

    Returns:
        What each rank returned.

    Raises:
        AssertionError: A rank hangs, or a law does not hold on it.
        Exception: Another error of a rank, if there is no AssertionError.
    """
    chosen = Settings(
        segment_nbytes=setup.segment_nbytes,
        engine=setup.engine,
        stall_check_s=PATIENCE_S / 4,
        stall_shutdown_s=PATIENCE_S,
        **settings,
    )
    hosts = [f"host{rank // setup.slots}" for rank in range(setup.ranks)] if setup.slots else []
    found: list[Any] = [None] * setup.ranks

    def on_a_rank(_: Any) -> Any:
        rank = sessions.current().require_topology().rank
        found[rank] = workload(rank)
        return found[rank]

    if MPI_SIZE:
        return worlds.run_ranks(setup.ranks, on_a_rank, chosen, hosts=hosts)
    done = world.run(
        on_a_rank,
        setup.ranks,
        chosen,
        native=setup.engine == "native",
        hosts=hosts,
        deadline_s=3 * PATIENCE_S,
    )
    assert not done.stuck, f"{done.stuck} hang"
    if done.error is not None:
        raise done.error
    return found
