"""Replicas that become different after the first step: it is noticed, and said which parameter on which ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from ocomm.errors import MismatchError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.every_kind import KINDS
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.world.test_runtime import threads_only
from tests.worlds import PATIENCE_S, run_ranks

pytestmark = threads_only  # nothing here depends on the network

WITHIN = 8
SETTINGS = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, replica_check_steps=WITHIN)
AT = 6


def make_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]


def one_step(parameters: list[torch.nn.Parameter], optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    backward(parameters, gradients(step, rank), range(4))
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_that_one_rank_changes_is_noticed_within_so_many_steps(kind: str) -> None:
    def body(session: Session) -> tuple[int, str]:
        rank = session.require_topology().rank
        parameters = make_parameters()
        names = [(f"weight{k}", p) for k, p in enumerate(parameters)]
        optimizer = KINDS[kind].wrap(parameters, named_parameters=names)
        for step in range(1, AT + 3 * WITHIN):
            if step == AT and rank == 1:
                parameters[2].data.view(-1)[-1] += 0.125
            try:
                one_step(parameters, optimizer, step, rank)
            except MismatchError as error:
                return step, str(error)
        return 0, ""

    (step, message), other = run_ranks(2, body, SETTINGS)
    assert (step, message) == other
    # A local step of 0/1 Adam moves what is not compared until the ranks' next average.
    assert AT <= step < AT + (2 if "local" in kind else 1) * WITHIN
    assert "'weight2'" in message and "rank(s) [0] hold" in message and "rank(s) [1] hold" in message


def test_equal_edits_on_all_ranks_are_none_of_its_business() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        parameters = make_parameters()
        optimizer = KINDS["1-bit Adam, compressed"].wrap(parameters)
        for step in range(1, 3 * WITHIN):
            parameters[step % 4].data.mul_(0.9)
            one_step(parameters, optimizer, step, rank)
        return digest([p.detach().numpy() for p in parameters])

    results = run_ranks(2, body, SETTINGS)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_differ_until_step_is_called(kind: str) -> None:
    """As with noise for a forward and backward pass that is taken off before ``step()``, in the first step too."""

    def body(session: Session, noise: float) -> str:
        rank = session.require_topology().rank
        parameters = make_parameters()
        optimizer = KINDS[kind].wrap(parameters)
        for step in range(1, 2 * WITHIN):
            optimizer.zero_grad()
            kept = [p.detach().clone() for p in parameters]
            with torch.no_grad():
                for p in parameters:
                    p += noise * (1 + rank)
            backward(parameters, gradients(step, rank), range(4))
            with torch.no_grad():
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)
            optimizer.step()
        return digest([p.detach().numpy() for p in parameters])

    settings = replace(SETTINGS, replica_check_steps=1)  # all parameters in each step
    without = run_ranks(2, lambda s: body(s, 0.0), settings)
    # A local step of 0/1 Adam parts them, until the next average.
    assert run_ranks(2, lambda s: body(s, 0.01), settings) == without


def test_zero_steps_between_checks_switch_it_off() -> None:
    def body(session: Session) -> None:
        rank = session.require_topology().rank
        parameters = make_parameters()
        optimizer = KINDS["1-bit Adam, compressed"].wrap(parameters)
        for step in range(1, 3 * WITHIN):
            if step == AT and rank == 1:
                parameters[2].data.view(-1)[-1] += 0.125
            one_step(parameters, optimizer, step, rank)

    run_ranks(2, body, Settings(stall_shutdown_s=PATIENCE_S, replica_check_steps=0))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.AdamW])
def test_ranks_whose_adams_round_differently_stay_equal_in_warm_up(
    inner: Any, weight_decay: float, caplog: pytest.LogCaptureFixture
) -> None:
    """``foreach`` against ``fused``: their last bits differ, as those of processors of different kinds do."""

    def body(session: Session) -> str:
        rank = session.require_topology().rank
        parameters = make_parameters()
        way = {"fused": True} if rank else {"foreach": True}
        optimizer = DistributedOneBitAdam(
            inner(parameters, lr=1e-2, weight_decay=weight_decay, **way), freeze_step=12, max_grad_norm=0.5
        )
        for step in range(1, 20):
            one_step(parameters, optimizer, step, rank)
        return digest([p.detach().numpy() for p in parameters])

    results = run_ranks(3, body, SETTINGS)
    assert len(set(results)) == 1
    (said,) = [record.getMessage() for record in caplog.records if "round differently" in record.getMessage()]
    assert "rank(s) [0] have" in said and "rank(s) [1, 2] have" in said and "fused" in said and "foreach" in said


@pytest.mark.long
def test_threads_that_are_the_first_to_take_square_roots_take_the_same_ones() -> None:
    """Of processes in which nothing has been imported but Torch, 1 in 50 has threads whose roots have 12 bits."""
    script = """
import os, threading, torch
import ocomm_torch

values = torch.rand(1200) + 0.1

def is_same():
    start, roots = threading.Barrier(6), []
    threads = [threading.Thread(target=lambda: (start.wait(), roots.append(values.sqrt()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(torch.equal(one, values.sqrt()) for one in roots)

for process in range(200):
    if not os.fork():
        os._exit(0 if is_same() else 1)
    assert os.wait()[1] == 0, process
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
