"""The optimizers equal simulations that were written from docs/algorithms.md alone: the page is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.session import Session
from ocomm_torch import (
    DistributedBirder,
    DistributedEFSGD,
    DistributedLion,
    DistributedOneBitAdam,
    DistributedOneBitLamb,
    DistributedZeroOneAdam,
)
from tests.frontends.onebit_jobs import digest, initial, train
from tests.oracle import from_text
from tests.oracle.from_text import Settings
from tests.worlds import run_ranks

#: With blocks of 64: a tensor of many blocks and a short one, one whose last block has two elements, one that comes
#: late, one of zeros at first, and a single element.
SHAPES = ((20, 33), (130,), (33,), (100,), (1,))
STEPS = 40


def grads(step: int, rank: int) -> list[np.ndarray | None]:
    """Gradients that are missing on some ranks or on all, a late tensor, rows and a tensor that are zero at first."""
    everywhere = np.random.default_rng([22, step])
    here = np.random.default_rng([23, step, rank])
    found: list[np.ndarray | None] = []
    for number, shape in enumerate(SHAPES):
        size = 0.3**number
        gradient = size * (everywhere.normal(size=shape) + here.normal(size=shape))
        gradient *= everywhere.random(size=shape) + 0.01
        missing = everywhere.random() < 0.1 or here.random() < 0.2
        found.append(None if missing or (number == 2 and step < 4) else gradient.astype(np.float32))
    if (rows := found[0]) is not None:
        rows[8 if step < 11 else 19 if step > 23 else 12 if rank else 16 :] = 0.0
        if step < 7:
            rows[2, 3:9] = 0.0
    if (zeros := found[3]) is not None and step < 12:
        zeros[:] = 0.0
    return found


class TorchAdam:
    """Dense steps of the wrapped optimizer."""

    def __init__(self, kind: type[torch.optim.Adam], s: Settings) -> None:
        self.parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(SHAPES)]
        self.adam = kind(self.parameters, lr=s.lr, weight_decay=s.weight_decay, foreach=False)

    def __call__(self, number: int, average: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        parameter = self.parameters[number]
        self.adam.zero_grad()
        parameter.grad = torch.from_numpy(average)
        self.adam.step()
        state = self.adam.state[parameter]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        return parameter.detach().numpy().copy(), m.numpy().copy(), v.numpy().copy(), int(state["step"])


def options(*names: str) -> dict[str, Any]:
    return {name: getattr(Settings(), name) for name in names}


def torch_adam(kind: type[torch.optim.Adam]) -> Callable[[Settings], Callable[..., torch.optim.Optimizer]]:
    return lambda s: lambda p: kind(p, lr=s.lr, weight_decay=s.weight_decay, foreach=False)


def torch_sgd(momentum: bool) -> Callable[[Settings], Callable[..., torch.optim.Optimizer]]:
    form = (lambda s: {"momentum": s.momentum, "nesterov": s.nesterov}) if momentum else lambda s: {}
    return lambda s: lambda p: torch.optim.SGD(p, lr=s.lr, weight_decay=s.weight_decay, **form(s))


ADAM, ADAMW = torch_adam(torch.optim.Adam), torch_adam(torch.optim.AdamW)
MASKS = {"mask_refresh": 5}
BOUNDS = ("min_coeff", "max_coeff", "coeff_beta", "factor_min", "factor_max", "factor_threshold")
SCHEDULE = ("local_step_start", "local_step_doubling", "local_step_clip", "var_update_scaler", "var_freeze_step")


def onebit_adam(kind: type[torch.optim.Adam]) -> Callable[..., from_text.OneBit]:
    return lambda params, nodes, s: from_text.OneBitAdam(params, nodes, s, TorchAdam(kind, s))


#: By name: the optimizer, what it wraps, the simulation, its settings, and the optimizer's options.
CASES: dict[str, tuple[Any, Any, Any, Settings, dict[str, Any]]] = {
    "1-bit Adam": (
        DistributedOneBitAdam,
        ADAMW,
        onebit_adam(torch.optim.AdamW),
        Settings(weight_decay=0.1, **MASKS),
        {"freeze_step": 6, **MASKS},
    ),
    "1-bit Adam, coupled": (
        DistributedOneBitAdam,
        ADAM,
        onebit_adam(torch.optim.Adam),
        Settings(weight_decay=0.1, decoupled=False),
        {"freeze_step": 6},
    ),
    "1-bit LAMB": (
        DistributedOneBitLamb,
        ADAMW,
        from_text.OneBitLamb,
        Settings(weight_decay=0.1, **MASKS),
        {"freeze_step": 6, **MASKS, **options(*BOUNDS)},
    ),
    "0/1 Adam": (
        DistributedZeroOneAdam,
        ADAMW,
        from_text.ZeroOneAdam,
        Settings(weight_decay=0.1, variance_floor=0.2, **MASKS),
        {**MASKS, **options(*SCHEDULE)},
    ),
    "0/1 Adam, coupled": (
        DistributedZeroOneAdam,
        ADAM,
        from_text.ZeroOneAdam,
        Settings(weight_decay=0.1, decoupled=False, variance_floor=0.2),
        options(*SCHEDULE),
    ),
    "0/1 Adam, refreshes between syncs": (
        DistributedZeroOneAdam,
        ADAM,
        from_text.ZeroOneAdam,
        Settings(variance_floor=0.2, var_freeze_step=30, **MASKS),
        {**MASKS, **options(*SCHEDULE), "var_freeze_step": 30},
    ),
    "Birder": (DistributedBirder, torch_sgd(False), from_text.Birder, Settings(weight_decay=0.1), {"beta": 0.9}),
    "Lion": (
        DistributedLion,
        torch_sgd(False),
        from_text.Lion,
        Settings(weight_decay=0.1, betas=(0.9, 0.99), seed=2**40 + 7),
        {"betas": (0.9, 0.99), "seed": 2**40 + 7},
    ),
    "dist-EF-SGD": (DistributedEFSGD, torch_sgd(True), from_text.EfSgd, Settings(weight_decay=0.1), {}),
    "dist-EF-SGD, Nesterov": (DistributedEFSGD, torch_sgd(True), from_text.EfSgd, Settings(nesterov=True), {}),
}
#: A letter per rank; where some are equal, the form is hierarchical.
HOSTS = ("a", "ab", "abcd", "aabb", "aaab", "abcc")


def simulated(name: str, nodes: list[list[int]], steps: int) -> list[list[str]]:
    """By rank: digests of its parameters after every step."""
    _, _, simulation, s, _ = CASES[name]
    size = sum(map(len, nodes))
    job = simulation(initial(SHAPES), nodes, s)
    found: list[list[str]] = [[] for _ in range(size)]
    for step in range(1, steps + 1):
        job.step([grads(step, rank) for rank in range(size)])
        for worker, node in enumerate(nodes):
            held = job.params_of(worker) if isinstance(job, from_text.ZeroOneAdam) else job.params
            for rank in node:
                found[rank].append(digest(held))
    return found


def trained(name: str, hosts: str, steps: int) -> list[dict[str, Any]]:
    wrap, inner, _, s, given = CASES[name]
    flat = len(set(hosts)) == len(hosts)
    form = {"hierarchical": not flat, "block_size": 64, "shapes": SHAPES, "grads": grads, "make": inner(s)}

    def body(session: Session) -> dict[str, Any]:
        assert session.topology is not None
        rank = session.topology.rank
        return train(rank, steps, wrap=wrap, hash_state=lambda parameters, optimizer: "", **form, **given)

    return run_ranks(len(hosts), body, hosts=list(hosts))


def equal(name: str, hosts: str, steps: int) -> None:
    nodes = [[rank for rank, host in enumerate(hosts) if host == own] for own in dict.fromkeys(hosts)]
    results = trained(name, hosts, steps)
    assert [result["digests"] for result in results] == simulated(name, nodes, steps)


@pytest.mark.parametrize("name", [name for name in CASES if "," not in name])
def test_an_optimizer_equals_what_its_page_says(name: str) -> None:
    equal(name, "ab", STEPS)


@pytest.mark.long
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("name", CASES)
def test_every_form_on_any_hosts_equals_what_its_page_says(name: str, hosts: str) -> None:
    equal(name, hosts, 2 * STEPS)
