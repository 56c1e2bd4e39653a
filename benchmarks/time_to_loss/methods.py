"""The methods that are compared: how each trains a model, and which kinds of steps it takes."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch as hvd
from benchmarks.methods import BETAS
from benchmarks.muon import MuonAndAdam
from benchmarks.step import DEEPSPEED, HIVEMIND
from benchmarks.turns import LOCAL, LOCAL_MUON
from ocomm.predict.methods import zero_one_kinds

#: Bits per element that a step can send to other ranks; 0: it sends nothing.
BITS = (0, 1, 4, 8, 16, 32)


@dataclass
class Trained:
    """One method at work: ``module`` computes the loss, whose gradients ``optimizer`` steps by."""

    module: nn.Module
    optimizer: Any

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Inside, the parameters are those that the method would be judged by."""
        if hasattr(self.optimizer, "evaluation_parameters"):
            with self.optimizer.evaluation_parameters():
                yield
        else:
            yield


#: How names of methods begin that are not ocomm's.
PEERS = ("DDP", "PostLocalSGD", "torchft", "DeepSpeed", "hivemind")
#: Makes a method from the model, the learning rate and the number of steps of the run. Collective.
Make = Callable[[nn.Module, float, int], Trained]


@dataclass(frozen=True)
class Method:
    """``kind(step)``: of a step, counted from 0, in a run of ``steps``; None where the optimizer's report says it.

    A kind is the number of bits of an element that is sent, after "sync-" where that cannot overlap with backward; "0"
    is a step without any message, and VOTE one with a header.

    ``steps_of`` names the row of ``steps`` that has the times of its kinds, ``local`` that of its local step. ``lr`` is
    a factor on the tuned rate of Adam, for optimizers that need another one. ``note`` is for the reader of the table.
    """

    name: str
    make: Make
    steps_of: str
    kind: Callable[[int, int], str] | None = None
    local: str = LOCAL
    lr: float = 1.0
    note: str = ""

    @property
    def is_peer(self) -> bool:
        return self.name.startswith(PEERS)


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr, betas=BETAS)


def _ddp(register: Callable[[DistributedDataParallel], None] | None = None) -> Make:
    def make(model: nn.Module, lr: float, steps: int) -> Trained:
        # In one bucket: PowerSGD's second allreduce of a bucket would meet the first of the next on gloo.
        module = DistributedDataParallel(model, bucket_cap_mb=1000)
        if register is not None:
            register(module)
        return Trained(module, adam(model, lr))

    return make


def _bf16(module: DistributedDataParallel) -> None:
    # By its own name DDP refuses this hook without NCCL, though gloo adds bfloat16.
    module.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))


def _power_sgd(module: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=POWER_SGD_START)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


#: Dense steps of PowerSGD before it begins.
POWER_SGD_START = 10
#: Steps between two averages of PostLocalSGD, and batches whose gradients are added up.
POST_LOCAL = 10
ACCUMULATED = 10


class _Accumulating:
    """Steps by the mean gradient of ACCUMULATED batches; only in the last one's backward DDP averages."""

    def __init__(self, module: DistributedDataParallel, optim: torch.optim.Optimizer) -> None:
        self.optim = optim
        self._module = module
        self._batches = 0

    def zero_grad(self) -> None:
        if self._batches % ACCUMULATED == 0:
            self.optim.zero_grad()
        # As no_sync() does, which has to be around the forward pass.
        self._module.require_backward_grad_sync = (self._batches + 1) % ACCUMULATED == 0

    def step(self) -> None:
        self._batches += 1
        if self._batches % ACCUMULATED == 0:
            for parameter in self._module.parameters():
                assert parameter.grad is not None
                parameter.grad /= ACCUMULATED
            self.optim.step()


def _accumulating(model: nn.Module, lr: float, steps: int) -> Trained:
    trained = _ddp(_bf16)(model, lr, steps)
    return Trained(trained.module, _Accumulating(trained.module, trained.optimizer))


def _deepspeed(model: nn.Module, lr: float, steps: int) -> Trained:
    peer = importlib.import_module(DEEPSPEED)
    return Trained(model, peer.OnebitAdam(model, lr, _fifth(steps), betas=BETAS))


def _hivemind(model: nn.Module, lr: float, steps: int) -> Trained:
    peer = importlib.import_module(HIVEMIND)
    return Trained(model, peer.Simulated(model.parameters(), lr=lr, betas=BETAS))


def _post_local(model: nn.Module, lr: float, steps: int) -> Trained:
    """torch's: dense for a tenth of the run, then each rank alone, with averages of the parameters."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns of torch.jit where it is imported

    start = steps // 10
    module = DistributedDataParallel(model)
    alone, _ = dist.new_subgroups(group_size=1)
    module.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=start),
        post_localSGD_hook.post_localSGD_hook,
    )
    averager = PeriodicModelAverager(period=POST_LOCAL, warmup_steps=start)
    return Trained(module, PostLocalSGDOptimizer(adam(model, lr), averager))


def _post_local_kind(step: int, steps: int) -> str:
    start = steps // 10
    if step < start:
        return "32"
    return "average" if (step - start) % POST_LOCAL == 0 else "0"


@functools.cache
def _zero_one_kinds(steps: int) -> list[str]:
    # A refresh sends signs as well.
    return ["8" if "8" in kind else kind[0] for kind in zero_one_kinds(steps)]


def _averaged(compression: Any) -> Make:
    def make(model: nn.Module, lr: float, steps: int) -> Trained:
        return Trained(model, hvd.DistributedOptimizer(adam(model, lr), model.named_parameters(), compression))

    return make


def _ours(wrap: Callable[..., Any], inner: Callable[[nn.Module, float], Any] = adam, **options: Any) -> Make:
    """``options`` that can be called are given the number of steps of the run."""

    def make(model: nn.Module, lr: float, steps: int) -> Trained:
        given = {name: value(steps) if callable(value) else value for name, value in options.items()}
        return Trained(model, wrap(inner(model, lr), model.named_parameters(), **given))

    return make


def _diloco(every: int, bits: int, inner: Callable[[nn.Module, float], Any] = adam, **options: float) -> Make:
    return _ours(hvd.DistributedDiLoCo, inner, sync_every=every, bits=bits, **options)


#: As the paper has them (arXiv 2311.08105), and everybody who uses torchft.
TORCHFT = {"outer_lr": 0.7, "outer_momentum": 0.9}


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return MuonAndAdam(model, lr, betas=BETAS)


def _fifth(steps: int) -> int:
    return steps // 5


def _whole(steps: int) -> int:
    return steps


LIKE_TORCHFT = "our code, which a test holds to torchft's numbers"
MULOCO = "MuLoCo; a rate of its own"

METHODS = {
    method.name: method
    for method in (
        Method("DDP fp32", _ddp(), "DDP fp32", lambda step, steps: "32", note="Adam, exact"),
        Method("DDP bf16 hook", _ddp(_bf16), "DDP bf16", lambda step, steps: "16"),
        Method(
            "DDP bf16 hook, 10 accumulated",
            _accumulating,
            "DDP bf16",
            lambda step, steps: "0" if (step + 1) % ACCUMULATED else "16",
            note="a rate of its own",
        ),
        Method(
            "DDP PowerSGD rank 1",
            _ddp(_power_sgd),
            "DDP PowerSGD rank 1",
            lambda step, steps: "32" if step < POWER_SGD_START else "powersgd",
        ),
        Method("PostLocalSGD, 10", _post_local, "DDP fp32", _post_local_kind),
        *(
            Method(f"torchft's DiLoCo {every}", _diloco(every, 32, **TORCHFT), "DiLoCo", note=LIKE_TORCHFT)
            for every in (10, 30, 100)
        ),
        Method(
            "DeepSpeed 1-bit Adam",
            _deepspeed,
            "DeepSpeed 1-bit Adam",
            lambda step, steps: "1" if step >= _fifth(steps) else "32",
            note="a warm-up of a fifth",
        ),
        Method(
            "hivemind, 8 bits",
            _hivemind,
            "hivemind, 8 bits",
            lambda step, steps: "8",
            note="averages of its drifting replicas take no time here",
        ),
        Method("Adam, Compression.int8", _averaged(hvd.Compression.int8), "ocomm int8"),
        Method("Adam, Compression.int4", _averaged(hvd.Compression.int4), "ocomm int4"),
        Method(
            "1-bit Adam, fp32 warm-up of a fifth", _ours(hvd.DistributedOneBitAdam, freeze_step=_fifth), "1-bit Adam"
        ),
        Method(
            "1-bit Adam, total_steps, 8 bits",
            _ours(hvd.DistributedOneBitAdam, total_steps=_whole, dense_bits=8),
            "1-bit Adam",
            note="a warm-up of a fifth",
        ),
        Method(
            "0/1 Adam, total_steps, 8 bits",
            _ours(hvd.DistributedZeroOneAdam, total_steps=_whole, dense_bits=8),
            "0/1 Adam",
            lambda step, steps: _zero_one_kinds(steps)[step],
        ),
        Method("Birder", _ours(hvd.DistributedBirder, sgd), "Birder"),
        Method("DiLoCo 10, 4 bits", _diloco(10, 4), "DiLoCo"),
        Method("DiLoCo 30, 4 bits", _diloco(30, 4), "DiLoCo"),
        Method("DiLoCo 30, 1 bit", _diloco(30, 1), "DiLoCo"),
        Method("DiLoCo 100, 4 bits", _diloco(100, 4), "DiLoCo"),
        Method("DiLoCo 30, 4 bits, Muon", _diloco(30, 4, muon), "DiLoCo", local=LOCAL_MUON, note=MULOCO),
    )
}


def kind_of(sent: int, dense: float, syncs: bool) -> str:
    """The kind of a step that has sent ``sent`` bytes, where a dense step sends ``dense``.

    ``syncs``: whether the optimizer sends nothing between its syncs, which do not overlap with backward.
    """
    if not sent:
        return "0"
    bits = min(BITS[1:], key=lambda each: abs(math.log(32 * sent / dense / each)))
    return f"sync-{bits}" if syncs else str(bits)
