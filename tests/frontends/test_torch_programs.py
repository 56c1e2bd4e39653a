"""A law for any script: whatever it does between steps, with ``DistributedOptimizer`` each rank has the parameters of
one process that averages the gradients of all ranks by hand.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import ocomm_torch as hvd
from ocomm.session import Session
from tests.tiers import few
from tests.worlds import run_ranks

SHAPES = [(5, 3), (7,), (1,), ()]
STEPS = 12
SCALE = 8.0
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02, eps=1e-3),
}


@dataclass(frozen=True)
class Step:
    """What a script does in one step, on all ranks but for ``used`` and ``overflows``."""

    #: How the step is made: "set" puts gradients into ``.grad`` by hand, "give up" averages them and clears them.
    way: str
    #: Whether each rank's backward passes need all parameters, and are as many as was announced.
    is_whole: bool
    #: The parameters that each backward pass of each rank needs: ``used[rank][number of the pass]``.
    used: list[list[set[int]]]
    #: What gradients are before backward: none, zeros, or the averages of the last step, which are added to.
    begins_with: str
    #: What is done before backward, after gradients were cleared.
    before: str
    #: What is done between backward and the step.
    between: str
    #: The rank whose gradients overflow under a GradScaler, if any.
    overflows: int | None

    @property
    def synchronizes(self) -> bool:
        """Whether the script calls ``synchronize()``, as it must before it uses gradients that a rank may lack."""
        return self.way == "synchronize" or (self.between == "clip" and not self.is_whole)


class Program:
    """A script, drawn by its number."""

    def __init__(self, number: int, size: int) -> None:
        draw = random.Random(number)
        self.number, self.size = number, size
        self.kind = draw.choice(list(OPTIMIZERS))
        self.passes = draw.choice([1, 1, 2])
        self.op = draw.choice([hvd.Average, hvd.Average, hvd.Sum])
        #: Whether the first parameter is frozen when the optimizer is wrapped.
        self.is_frozen = draw.random() < 0.7
        self.steps = [self._step(draw) for _ in range(STEPS)]

    def _step(self, draw: random.Random) -> Step:
        way = draw.choice(["step", "step", "closure", "synchronize", "give up", "set", "scaler"])
        is_whole = way != "set" and draw.random() < 0.5
        passes = self.passes if is_whole or draw.random() < 0.8 else 1
        everything = set(range(len(SHAPES) + 1))
        return Step(
            way=way,
            is_whole=is_whole,
            used=[
                [everything if is_whole else {i for i in everything if draw.random() < 0.5} for _ in range(passes)]
                for _ in range(self.size)
            ],
            begins_with="none" if way in ("closure", "scaler") else draw.choice(["none", "none", "zeros", "averages"]),
            before=draw.choice(["", "freeze", "thaw", "thaw", "add", "reload"]),
            between="" if way in ("closure", "give up") else draw.choice(["", "lr", "clip", "clip"]),
            overflows=draw.choice([None, None, 0, self.size - 1]) if way == "scaler" else None,
        )

    def parameters(self) -> list[torch.nn.Parameter]:
        shapes = [*SHAPES, (4,)]  # the last one is added by a script
        return [torch.nn.Parameter(self.noise(shape, "begin", i)) for i, shape in enumerate(shapes)]

    def noise(self, shape: Sequence[int], *where: Any) -> torch.Tensor:
        """Random numbers that are the same for the same place in the program."""
        seed = random.Random(f"{self.number} {where}").getrandbits(40)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Script:
    """The model and optimizer of a program, and what it does with them wherever it runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = program.parameters()
        self.parameters[0].requires_grad_(not program.is_frozen)
        self.inner: Any = OPTIMIZERS[program.kind](self.parameters[:-1])

    def trained(self) -> list[int]:
        """The parameters that the optimizer has and trains."""
        has = {id(p) for group in self.inner.param_groups for p in group["params"]}
        return [i for i, p in enumerate(self.parameters) if id(p) in has and p.requires_grad]

    def prepare(self, optimizer: Any, number: int) -> None:
        step = self.program.steps[number]
        if step.before == "freeze":
            frozen = self.parameters[number % (len(SHAPES) - 1)]  # never all: a GradScaler wants a gradient
            frozen.requires_grad_(False)
            frozen.grad = None
        elif step.before == "thaw":
            for p in self.parameters:
                p.requires_grad_(True)
        elif step.before == "add" and len(self.inner.param_groups) == 1:
            optimizer.add_param_group({"params": [self.parameters[-1]], "lr": 0.01})
        elif step.before == "reload" and step.begins_with != "averages":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def change(self, optimizer: Any, step: Step) -> None:
        """Makes the change between backward and the step."""
        if step.between == "lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        elif step.between == "clip":
            torch.nn.utils.clip_grad_norm_([self.parameters[i] for i in self.trained()], 0.5)

    def loss(self, number: int, rank: int, a_pass: int) -> torch.Tensor | None:
        """The loss of a backward pass; None if it needs nothing that is trained."""
        terms = []
        for i in sorted(self.program.steps[number].used[rank][a_pass] & {*self.trained()}):
            p = self.parameters[i]
            terms.append((p * self.program.noise(p.shape, number, rank, a_pass, i)).sum() + 0.1 * p.square().sum())
        return torch.stack(terms).sum() if terms else None

    def gradient(self, number: int, rank: int, a_pass: int, i: int) -> torch.Tensor:
        """The gradient of that loss with respect to parameter ``i``."""
        p = self.parameters[i].detach()
        return self.program.noise(p.shape, number, rank, a_pass, i) + 0.2 * p

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]


def on_a_rank(program: Program, session: Session) -> list[list[torch.Tensor]]:
    """Runs the program with ocomm, and returns the parameters after each step."""
    rank = session.require_topology().rank
    script = Script(program)
    optimizer: Any = hvd.DistributedOptimizer(script.inner, backward_passes_per_step=program.passes, op=program.op)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # makes it begin, also where the first batch of a rank needs no parameter
    seen = []
    for number, step in enumerate(program.steps):
        if step.begins_with != "averages":
            optimizer.zero_grad(set_to_none=step.begins_with == "none")
        script.prepare(optimizer, number)

        def closure(number: int = number, step: Step = step) -> float:
            for a_pass in range(len(step.used[rank])):
                loss = script.loss(number, rank, a_pass)
                if loss is not None:
                    loss = loss * float("inf") if rank == step.overflows else loss
                    (scaler.scale(loss) if step.way == "scaler" else loss).backward()
            return 0.0

        if step.way == "set":
            for i in script.trained():
                script.parameters[i].grad = script.gradient(number, rank, 0, i)
        elif step.way != "closure":
            closure()
        if step.way == "closure":
            optimizer.step(closure)
        elif step.way == "give up":
            optimizer.synchronize()
            optimizer.zero_grad()
        elif step.way == "scaler":
            scaler.unscale_(optimizer)
            script.change(optimizer, step)
            scaler.step(optimizer)
            scaler.update(SCALE)
            optimizer.zero_grad()
        elif step.synchronizes:
            optimizer.synchronize()
            script.change(optimizer, step)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            script.change(optimizer, step)
            optimizer.step()
        seen.append(script.values())
    return seen


def by_hand(program: Program) -> list[list[torch.Tensor]]:
    """Runs the program in one process, without ocomm and without autograd."""
    script = Script(program)
    grads: list[dict[int, torch.Tensor]] = [{} for _ in range(program.size)]  # by rank
    share = 1 / program.size if program.op == hvd.Average else 1.0
    seen = []
    for number, step in enumerate(program.steps):
        if step.begins_with == "none":
            grads = [{} for _ in grads]
        elif step.begins_with == "zeros":
            grads = [{i: torch.zeros_like(g) for i, g in own.items()} for own in grads]
        script.prepare(script.inner, number)
        trained = {*script.trained()}
        overflows = False
        for rank, own in enumerate(grads):
            for a_pass, used in enumerate([trained] if step.way == "set" else step.used[rank]):
                for i in used & trained:
                    new = script.gradient(number, rank, a_pass, i)
                    own[i] = new if step.way == "set" or i not in own else own[i] + new
                    overflows |= rank == step.overflows
        for i, p in enumerate(script.parameters):
            every = [own[i] for own in grads if i in own]
            p.grad = share * sum(every, torch.zeros(p.shape)) if i in trained else None
        if not overflows:
            script.change(script.inner, step)
            if step.way != "give up":
                script.inner.step()
        elif step.between == "lr":
            script.change(script.inner, step)
        kept = {i: script.parameters[i].grad.clone() for i in trained}
        grads = [{} if step.way in ("give up", "scaler") else {**kept} for _ in grads]
        seen.append(script.values())
    return seen


@pytest.mark.parametrize("number", few(range(400), range(24)))
def test_a_script_leaves_what_averaging_by_hand_does(number: int) -> None:
    program = Program(number, size=2 + number % 2)
    found = run_ranks(program.size, lambda session: on_a_rank(program, session))
    for at, expected in enumerate(by_hand(program)):
        for rank, steps in enumerate(found):
            where = f"step {at} on rank {rank}: {program.steps[at]}"
            assert all(map(torch.equal, steps[at], found[0][at])), where
            for mine, theirs in zip(steps[at], expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=where)
