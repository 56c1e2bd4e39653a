"""What the ranks do while a call fails: everything that has a wait, small, and always with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import ocomm
from ocomm.types import Settings
from ocomm_torch import DistributedOneBitAdam, DistributedZeroOneAdam
from tests.faults.trail import Trail

#: Number of ranks. The set of ranks 1 and 2 has another coordinator than the world.
RANKS = 3
MEMBERS = [1, 2]
#: Small segments and a wide window, so that more messages are under way than an engine first has room for.
SETTINGS = Settings(segment_nbytes=512, window=24, kernel_threads=2, replica_check_steps=2)
_SHAPES = ((40, 30), (70,), (3,))
_STEPS = 4


def patient(seconds: float) -> Settings:
    """Returns the settings with which silence counts as death after so many seconds, and no wait is much longer."""
    return replace(
        SETTINGS,
        peer_timeout_s=seconds,
        start_timeout_s=seconds,
        stall_check_s=seconds,
        stall_shutdown_s=2 * seconds,
        deadlock_s=seconds,
    )


def collectives(trail: Trail) -> None:
    """Fused sums, an allgather, a broadcast, compressed sums, and a process set that is made and removed."""
    rank = ocomm.rank()
    for turn in range(2):
        handles = [
            ocomm.allreduce_async(np.full(100 + n, rank + n + 1, np.float32), name=f"sum.{n}", op=ocomm.Sum)
            for n in range(3)
        ]
        trail.did(f"sums{turn}", [ocomm.synchronize(handle) for handle in handles])
    trail.did("large", ocomm.allreduce(np.arange(6000, dtype=np.float32) + rank, name="large"))
    trail.did("gathered", ocomm.allgather(np.full((rank + 1, 2), rank), name="rows"))
    trail.did("broadcast", ocomm.broadcast(np.arange(9) + rank, 1, name="root"))
    for turn in range(2):
        values = np.random.default_rng([turn, rank]).normal(size=500).astype(np.float32)
        trail.did(f"compressed{turn}", ocomm.compressed_allreduce(values, "x"))
    for turn in range(2):
        members = ocomm.add_process_set(MEMBERS)
        if members.included():
            total = ocomm.allreduce(np.full(7, rank, np.float32), name="part", op=ocomm.Sum, process_set=members)
            trail.did(f"members{turn}", total)
        trail.did(f"removed{turn}", ocomm.remove_process_set(members))


def optimizers(trail: Trail) -> None:
    """1-bit Adam through its freeze, 0/1 Adam through its first local steps."""
    make = {
        "onebit": lambda adam, named: DistributedOneBitAdam(adam, named, freeze_step=2),
        "zero_one": lambda adam, named: DistributedZeroOneAdam(
            adam, named, local_step_start=2, local_step_doubling=2, local_step_clip=2, var_update_scaler=2
        ),
    }
    for name, wrap in make.items():
        _train(name, wrap, trail)


def _train(name: str, wrap: Callable[..., Any], trail: Trail) -> None:
    rank, rng = ocomm.rank(), np.random.default_rng(5)
    parameters = [torch.nn.Parameter(torch.from_numpy(rng.normal(size=s).astype(np.float32))) for s in _SHAPES]
    named = [(f"tensor.{number}", parameter) for number, parameter in enumerate(parameters)]
    optimizer = wrap(torch.optim.Adam(parameters, lr=1e-2, foreach=False), named)
    driver = optimizer._driver

    def state() -> Any:
        moments = [list(optimizer.state.get(parameter, {}).values()) for parameter in parameters]
        return [parameters, moments, driver.core.state(), driver.core.rank_state()]

    trail.look_at(name, state)
    for step in range(_STEPS):
        optimizer.zero_grad()
        own = np.random.default_rng([12, step, rank])
        for parameter in reversed(parameters):
            (parameter * torch.from_numpy(own.normal(size=parameter.shape).astype(np.float32))).sum().backward()
        optimizer.step()
        trail.did(f"{name}{step}")
    trail.look_at(name, None)


def everything(trail: Trail) -> None:
    """All of it."""
    collectives(trail)
    optimizers(trail)
