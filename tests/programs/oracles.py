"""The plain simulations of ``tests/oracle``, fed with the effective gradients of a program of ``torch_compressed``.

A clean replay holds a noisy program to what the same optimizer does without its noise. What the optimizer does wrong in
both is seen here: each step that was taken is made again, in NumPy, from what all ranks had in their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.oracle import birder, dense_adam, ef_sgd, lion, onebit_adam, onebit_lamb, zero_one_adam
from tests.oracle.clipping import Clipping
from tests.oracle.dense_codes import DenseCodes
from tests.programs.torch_scripts import Edit

F = np.float32
Array = np.ndarray


@dataclass(frozen=True)
class Taken:
    """A step that was taken: this rank's gradients, None for none, and the hyperparameters."""

    gradients: list[torch.Tensor | None]
    group: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A parameter has got other values, on all ranks alike."""

    at: int
    values: torch.Tensor


@dataclass(frozen=True)
class Finished:
    """0/1 Adam has synced what its local steps have added up."""


@dataclass(frozen=True)
class Begun:
    """A new optimizer over these parameters."""

    parameters: list[torch.Tensor]


Record = Taken | Written | Finished | Begun


class TorchAdam(onebit_adam.Simulation):
    """1-bit Adam whose dense steps are those of Torch's own Adam, ``inner``, or of sharded moments."""

    def __init__(self, params: Sequence[Array], ranks: int, *, inner: Callable[..., Any], **settings: Any) -> None:
        super().__init__(params, ranks, **settings)
        self._dense: list[tuple[onebit_adam.Tensor, Array]] = []
        self._parameters = [torch.nn.Parameter(torch.from_numpy(x.param.copy())) for x in self.tensors]
        self._inner = inner(self._parameters)

    def _dense_step(self, x: onebit_adam.Tensor, local: list[Array], lr: float) -> None:
        self._dense.append((x, self._dense_average(x, local)))

    def _freeze(self) -> None:
        self._step_dense()
        super()._freeze()

    def _step_dense(self) -> None:
        dense, self._dense = self._dense, []
        (group,) = self._inner.param_groups
        group.update(lr=self.lr(self.t), betas=(self.beta1, self.beta2), weight_decay=self.coupled + self.decoupled)
        of = {id(x): p for x, p in zip(self.tensors, self._parameters, strict=True)}
        for p in self._parameters:
            p.grad = None
        for x, average in dense:
            of[id(x)].data.copy_(torch.from_numpy(x.param))
            of[id(x)].grad = torch.from_numpy(average)
        if self.clipping and not any(x.compressed for x in self.tensors):
            torch.nn.utils.clip_grad_norm_([of[id(x)] for x, _ in dense], self.clipping.max_grad_norm, foreach=False)
        if dense:
            self._inner.step()
        for x, _ in dense:
            state = self._inner.state[of[id(x)]]
            x.param = of[id(x)].detach().numpy().copy()
            x.momentum, x.variance = state["exp_avg"].numpy().copy(), state["exp_avg_sq"].numpy().copy()


class ShardedAdam(TorchAdam):
    """1-bit Adam whose dense steps are made by owners, in ocomm's arithmetic."""

    def _step_dense(self) -> None:
        dense, self._dense = self._dense, []
        if not dense:
            return
        adam = dense_adam.DenseAdam(
            [x.param for x, _ in dense],
            1,
            lr=self.lr(self.t),
            betas=(self.beta1, self.beta2),
            weight_decay=self.coupled + self.decoupled,
            decoupled=self.decoupled > 0,
            max_grad_norm=self.clipping.max_grad_norm
            if self.clipping and not any(x.compressed for x in self.tensors)
            else None,
        )
        adam.momenta, adam.variances = [x.momentum for x, _ in dense], [x.variance for x, _ in dense]
        adam.steps = [x.step - 1 for x, _ in dense]
        adam.step([[average for _, average in dense]])
        for (x, _), p, m, v in zip(dense, adam.params, adam.momenta, adam.variances, strict=True):
            x.param, x.momentum, x.variance = p, m, v


class Codes:
    """Torch's own optimizer ``inner`` on averages in codes of ``bits`` bits; ``low`` are the 16-bit parameters."""

    def __init__(
        self, params: Sequence[Array], nodes: Sequence[int], bits: int, inner: Callable[..., Any], low: Sequence[int]
    ) -> None:
        self._parameters = [torch.nn.Parameter(torch.from_numpy(np.array(p, F))) for p in params]
        self._inner, self._low, self._nodes = inner(self._parameters), low, nodes
        self._codes = [
            DenseCodes(p.numel(), len(nodes), bits, [slice(0, p.numel())], 0.8 if bits == 4 else 0.0)
            for p in self._parameters
        ]

    @property
    def params(self) -> list[Array]:
        return [p.detach().numpy().copy() for p in self._parameters]

    def write(self, at: int, values: Array) -> None:
        self._parameters[at].data.copy_(torch.from_numpy(values))

    def step(self, gradients: Sequence[Sequence[Array | None]], group: dict[str, Any]) -> None:
        for at, (p, codes) in enumerate(zip(self._parameters, self._codes, strict=True)):
            local = [own[at] for own in gradients]
            p.grad = None
            if any(g is not None for g in local):
                flat = [np.zeros(p.numel(), F) if g is None else g.reshape(-1) for g in local]
                average = torch.from_numpy(
                    codes.average(birder.inside_nodes(flat, self._nodes)).reshape(tuple(p.shape))
                )
                p.grad = average.bfloat16().float() if at in self._low else average
        known = self._inner.param_groups[0]
        known.update({key: group[key] for key in ("lr", "betas", "momentum", "weight_decay") if key in known})
        self._inner.step()


def supports(program: Any) -> bool:
    """Whether the simulations have all that the program does."""
    setup = program.setup
    ends = {step.end for step in program.steps}
    events = [event for step in program.steps for event in (*step.before, *step.between)]
    if setup.is_in_codes and any(isinstance(event, Edit) for event in events):
        return False  # of averages, which a rank's gradients do not show
    return not ("drop" in ends and setup.kind == "0/1 Adam, local steps")


class Oracle:
    """The simulation of a program's optimizer, from ``parameters`` on."""

    def __init__(self, setup: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._setup = setup
        kind = setup.optimizer
        options = dict(kind.options)
        params = [p.detach().float().numpy() for p in parameters]
        low = [at for at, p in enumerate(parameters) if p.dtype is not torch.float32]
        nodes = [setup.slots] * (setup.ranks // setup.slots) if setup.slots else None
        common: dict[str, Any] = {"nodes": nodes}
        if setup.max_grad_norm is not None:
            common["clipping"] = Clipping(setup.max_grad_norm, previous=setup.clip == "previous")
        inner = functools.partial(kind.inner, **setup.inner_options)
        self._decays = ["weight_decay"]
        blocks = {"block_size": setup.block_size, "dense_bits": setup.dense_bits}
        if setup.is_in_codes:
            self._sim: Any = Codes(params, nodes or [1] * setup.ranks, int(setup.kind[3]), inner, low)
        elif setup.kind.startswith("1-bit Adam"):
            made = ShardedAdam if setup.shard_state else TorchAdam
            self._sim = made(params, setup.ranks, inner=inner, **options, **common, **blocks)
            self._decays = ["decoupled" if setup.decoupled else "coupled"]
        elif setup.kind.startswith("1-bit LAMB"):
            self._sim = onebit_lamb.Simulation(params, setup.ranks, **options, **common, **blocks)
            self._decays = ["decay"]
        elif setup.kind.startswith("0/1 Adam"):
            self._sim = zero_one_adam.Simulation(params, setup.ranks, **options, **common, **blocks)
            self._decays = ["decoupled" if setup.decoupled else "coupled"]
        elif setup.kind == "Lion":
            self._sim = lion.Lion(params, setup.ranks, **common)
        elif setup.kind == "EF-SGD":
            width = 1 << 30 if setup.block_size == "tensor" else setup.block_size
            self._sim = ef_sgd.EFSGD(params, setup.ranks, momentum=0.9, nesterov=True, block_size=width, **common)
            self._decays = ["coupled"]
        else:
            sim = birder.Birder if setup.kind == "Birder" else birder.SoftSign
            self._sim = sim(params, setup.ranks, **{**common, "nodes": nodes if setup.kind == "Birder" else None})
        self._low = low

    def step(self, taken: Sequence[Taken]) -> None:
        """Takes the step that each rank has recorded."""
        gradients = [[None if g is None else g.float().numpy() for g in own.gradients] for own in taken]
        group, sim = taken[0].group, self._sim
        if isinstance(sim, Codes):
            sim.step(gradients, group)
            return
        sim.lr = lambda t: group["lr"]
        for name in self._decays:
            setattr(sim, name, group["weight_decay"])
        if hasattr(sim, "beta1"):
            sim.beta1, sim.beta2 = group["betas"]
        sim.step(gradients)

    def write(self, at: int, values: torch.Tensor) -> None:
        """Sets a parameter on all ranks. Of a 16-bit one, elements that are the rounded master keep their digits."""
        new = values.float().numpy().reshape(-1)
        if at in self._low:
            old = torch.from_numpy(self._flat(at, 0).copy())
            new = np.where((old.bfloat16() == values.reshape(-1)).numpy(), old.numpy(), new)
        if isinstance(self._sim, Codes):
            self._sim.write(at, new.reshape(tuple(values.shape)))
            return
        x = self._sim.tensors[at]
        if isinstance(self._sim, zero_one_adam.Simulation):
            x.params = [new.copy() for _ in x.params]
            if not x.interval_lr:
                x.synced = new.copy()
        else:
            x.param = new.astype(F)

    def finish(self) -> None:
        self._sim.finish()

    def _flat(self, at: int, worker: int) -> Array:
        if isinstance(self._sim, zero_one_adam.Simulation):
            return self._sim.params_of(worker)[at].reshape(-1)
        return self._sim.params[at].reshape(-1)

    def parameters(self, rank: int) -> list[torch.Tensor]:
        """Returns the parameters of a rank, flat, in their types."""
        worker = rank // self._setup.slots if self._setup.slots else rank
        found = [torch.from_numpy(self._flat(at, worker).copy()) for at in range(len(self._sim.params))]
        return [value.bfloat16() if at in self._low else value for at, value in enumerate(found)]


def compare(setup: Any, records: Sequence[Sequence[tuple[int, Record, list[torch.Tensor]]]]) -> None:
    """Raises AssertionError where the parameters of a rank are not those of the simulation.

    Args:
        setup: That of the program.
        records: By rank, what it has recorded: the step, what was done, and its parameters after that.
    """
    oracle: Any = None
    for each in zip(*records, strict=True):
        number, record, _ = each[0]
        match record:
            case Begun():
                oracle = Oracle(setup, record.parameters)
            case Written():
                oracle.write(record.at, record.values)
            case Finished():
                oracle.finish()
            case Taken():
                oracle.step([own for _, own, _ in each])
        for rank, (_, _, found) in enumerate(each):
            for at, (value, wanted) in enumerate(zip(found, oracle.parameters(rank), strict=True)):
                bits = torch.int16 if value.dtype is torch.bfloat16 else torch.int32
                if not torch.equal(value.reshape(-1).view(bits), wanted.view(bits)):
                    raise AssertionError(
                        f"step {number}, {type(record).__name__}: p[{at}] on rank {rank} is "
                        f"{value.reshape(-1)[:4].tolist()}, in the simulation {wanted[:4].tolist()}"
                    )
