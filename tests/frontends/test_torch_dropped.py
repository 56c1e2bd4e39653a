"""Optimizers that are dropped or replaced: what an exchange under way reads lives on, and hooks do not."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import ocomm_torch as hvd
from ocomm.session import Session
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.onebit_jobs import backward, gradients, initial
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="ranks meet as threads")


@pytest.mark.parametrize("freeze_step", [2, 100], ids=["compressed", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_posted_gradients_outlive_the_optimizer_and_the_model(dtype: torch.dtype, freeze_step: int) -> None:
    dropped = threading.Barrier(2)

    def body(session: Session) -> None:
        assert session.topology is not None
        rank = session.topology.rank
        parameters = [torch.nn.Parameter(torch.from_numpy(p).to(dtype)) for p in initial()]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=freeze_step)
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            dropped.wait(60)
            backward(parameters, gradients(5, rank), [3, 2, 1, 0])
            return
        backward(parameters, gradients(5, rank), [3, 2, 1, 0])
        posted = optimizer._stepper.buckets.posted_tensors
        assert posted
        # What the exchange reads: the gradients, or copies of them in float32.
        read = [parameters[index].grad for index in posted]
        if dtype is not torch.float32:
            read = [optimizer._masters._gradients[index] for index in posted]
        kept = [weakref.ref(tensor) for tensor in read]
        del parameters, optimizer, read
        gc.collect()
        alive = [reference() is not None for reference in kept]
        dropped.wait(60)
        assert all(alive)

    run_ranks(2, body)


@pytest.mark.parametrize("then", ["dense", "compressed", "local steps"])
@pytest.mark.parametrize("first", ["dense", "compressed"])
def test_an_optimizer_that_lives_on_where_another_took_its_place_exchanges_nothing(first: str, then: str) -> None:
    def wrapped(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "dense":
            return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-2))
        if kind == "local steps":
            return hvd.DistributedDiLoCo(torch.optim.SGD(parameters, lr=1e-2), sync_every=1)
        return hvd.DistributedBirder(torch.optim.SGD(parameters, lr=1e-3))

    def body(session: Session) -> tuple[int, list[int]]:
        assert session.topology is not None
        rank = session.topology.rank
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = wrapped(first, parameters)
        kept = []
        for step in range(1, 7):
            if step == 4:
                kept = [optimizer] if rank == 1 else []
                optimizer = wrapped(then, parameters)
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [3, 2, 1, 0])
            optimizer.step()
        hvd.check_replicas(parameters)
        return len(kept), [len(p._post_accumulate_grad_hooks or ()) for p in parameters]

    hooks = [0 if then == "local steps" else 1] * 4  # local steps take gradients as they are
    assert run_ranks(2, body) == [(0, hooks), (1, hooks)]
