"""DistributedOptimizer compares what its ranks must hold alike: hyperparameters, and parameters part by part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ocomm import api
from ocomm.api import join
from ocomm.errors import MismatchError
from ocomm.session import Session
from ocomm.training.comparison import GRACE
from ocomm.types import Settings
from ocomm_torch.compression import Compression
from ocomm_torch.functions import broadcast_optimizer_state, broadcast_parameters
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.replicas import ParameterChecksums
from tests.frontends.onebit_jobs import digest
from tests.world.test_runtime import threads_only
from tests.worlds import PATIENCE_S, run_ranks

pytestmark = threads_only  # nothing here depends on the network

WITHIN = 8
SETTINGS = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, replica_check_steps=WITHIN)


def make_model(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 30))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return model


def step(model: Any, optimizer: Any, number: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 40, generator=generator)).square().mean().backward()
    optimizer.step()


def told(
    change: Callable[[int, int, Any, Any], Any],
    *,
    seed: Callable[[int], int] = lambda rank: 0,
    ranks: int = 2,
    **adam: Any,
) -> list[tuple[int, str]]:
    """In which step each rank is told that they differ, and how; ``change(step, rank, ...)`` comes before each step."""

    def body(session: Session) -> tuple[int, str]:
        rank = session.require_topology().rank
        model = make_model(seed(rank))
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **adam}), model.named_parameters()
        )
        for number in range(4 * WITHIN):
            change(number, rank, model, optimizer)
            try:
                step(model, optimizer, number, rank)
            except MismatchError as error:
                return number, str(error)
        return -1, ""

    return run_ranks(ranks, body, SETTINGS)


def nothing(*_: Any) -> None:
    pass


def test_an_unequal_start_is_a_warning_in_the_second_step_and_an_error_later(caplog: pytest.LogCaptureFixture) -> None:
    warned: list[int] = []

    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 2 and rank == 0:
            warned.append(caplog.text.count("the replicas are not alike after their first step: each rank trains a"))

    (number, message), other = told(change, seed=lambda rank: rank)
    assert (number, message) == other and number == 1 + GRACE and warned == [1]
    assert message.startswith(
        "DistributedOptimizer: the replicas are still not alike after 17 steps: rank(s) [0] hold '0.weight' with "
    )
    assert "broadcast_parameters" in message and caplog.text.count("replicas are not alike") == 1


class Full(torch.optim.SGD):
    """Runs out of memory in the third step of rank 1."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3 and api.rank() == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return super().step(closure)


@pytest.mark.parametrize("compression", [Compression.none, Compression.int8], ids=["dense", "int8"])
def test_a_step_that_ran_out_of_memory_on_one_rank_is_told_as_what_makes_ranks_differ(compression: Any) -> None:
    def body(session: Session) -> str:
        model = make_model()
        optimizer = DistributedOptimizer(Full(model.parameters(), 1e-2), compression=compression)
        with pytest.raises(MismatchError) as raised:
            for number in range(4 * WITHIN):
                with contextlib.suppress(torch.OutOfMemoryError):
                    step(model, optimizer, number, api.rank())
        return str(raised.value)

    for message in run_ranks(2, body, SETTINGS):
        assert (
            "rank(s) [0] hold those of whole steps; rank(s) [1] hold parameters of step 3, which OutOfMemoryError ended"
        ) in message


def test_ranks_may_be_made_alike_after_their_first_step() -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 0 and rank == 1:
            optimizer.param_groups[0].update(lr=5e-4, weight_decay=0.5)
        if number == 1:
            broadcast_parameters(model.state_dict(), root_rank=0)
            broadcast_optimizer_state(optimizer, root_rank=0)

    assert told(change, seed=lambda rank: rank) == [(-1, "")] * 2


@pytest.mark.parametrize("first", [0, 5])
def test_another_learning_rate_on_one_rank_is_told_in_the_step_after(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == first and rank == 1:  # as ReduceLROnPlateau on this rank's loss
            optimizer.param_groups[0]["lr"] = 5e-4

    (number, message), other = told(change)
    assert (number, message) == other and number == first + 1
    assert "not alike" not in caplog.text, "replicas differ, but not because they were not broadcast"
    assert "hyperparameters differ: rank(s) [0] have lr=0.001 in group 0; rank(s) [1] have lr=0.0005" in message


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("used", [0, 2])
def test_a_rate_that_all_ranks_set_before_step_is_equal_where_exchanges_begin_at_other_moments(
    compression: str, used: int
) -> None:
    def body(session: Session) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(300)) for _ in range(3)]
        optimizer = DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), compression=getattr(Compression, compression)
        )
        for number in range(4):
            optimizer.zero_grad()
            if here := parameters[:used] if session.require_topology().rank else parameters:
                torch.cat(here).sum().backward()
            optimizer.param_groups[0]["lr"] = 0.5**number
            optimizer.step()
        return [p[0].item() for p in parameters]

    moved = [-1.875 if place < used else -0.9375 for place in range(3)]
    for found in run_ranks(2, body, SETTINGS):
        assert found == pytest.approx(moved, rel=0.01)


def test_a_rate_of_one_step_is_told_where_ranks_have_it_alike_again() -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 5e-4 if number == 5 and rank else 1e-3

    (number, message), other = told(change)
    assert (number, message) == other and number == 6
    assert "rank(s) [0] have lr=0.001 in group 0; rank(s) [1] have lr=0.0005 in group 0" in message


def test_rates_that_a_broadcast_has_made_equal_are_not_told() -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank:
            optimizer.param_groups[0]["lr"] = 2e-3
        if number == 6:
            broadcast_parameters(model.state_dict(), root_rank=0)
            broadcast_optimizer_state(optimizer, root_rank=0)

    assert told(change) == [(-1, "")] * 2


def test_ranks_that_come_back_with_a_rate_that_others_have_left_are_not_told() -> None:
    def body(session: Session) -> float:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for epoch in range(2):
            for number in range(3 + 2 * rank):
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + number + epoch)
                step(model, optimizer, number, rank)
            broadcast_parameters(model.state_dict(), root_rank=join())
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            step(model, optimizer, number, rank)
        return model[0].weight.sum().item()

    assert len(set(run_ranks(3, body, SETTINGS))) == 1


def test_equal_values_of_other_types_are_equal() -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = [1, 1.0, np.float64(1)][rank]

    assert told(change, ranks=3) == [(-1, "")] * 3


def test_a_load_on_one_rank_is_told_within_so_many_steps() -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank == 0:
            model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})

    (number, message), other = told(change)
    assert (number, message) == other and 5 <= number < 5 + WITHIN
    assert "the ranks' parameters have become different: rank(s) [0] hold '0.weight' with checksum" in message


def test_parameters_in_another_order_without_names_are_told() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        parameters = [torch.nn.Parameter(torch.full((6,), float(k))) for k in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters[:: -1 if rank else 1], lr=0.1))

        def one_step() -> None:
            optimizer.zero_grad()
            (parameters[0].sum() + parameters[1].square().sum()).backward()
            optimizer.step()

        for _ in range(1 + GRACE):
            one_step()
        with pytest.raises(MismatchError) as error:
            one_step()
        return str(error.value)

    assert all("the replicas are still not alike after 17 steps" in message for message in run_ranks(2, body))


@pytest.mark.parametrize("is_equal", [True, False], ids=["equal start", "unequal start"])
def test_unlike_ways_to_round_are_said_once_and_not_compared_any_further(
    is_equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        rank = session.require_topology().rank
        model = make_model(0 if is_equal else rank)
        way = {"fused": True} if rank else {"foreach": True}
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), **way), model.named_parameters())
        for number in range(2 * WITHIN):
            step(model, optimizer, number, rank)

    run_ranks(2, body, SETTINGS)
    (said,) = [record.getMessage() for record in caplog.records if "round differently" in record.getMessage()]
    assert "rank(s) [0] have AdamW (foreach)" in said and "rank(s) [1] another" in said
    assert said.endswith("They differ already, before the first step.") is not is_equal


def test_ranks_that_join_are_not_compared_and_may_come_back_when_all_have_the_same() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for _ in range(2):
            for number in range(3 + 2 * rank):
                step(model, optimizer, number, rank)
            last = join()
            broadcast_parameters(model.state_dict(), root_rank=last)
        for number in range(2 * WITHIN):
            step(model, optimizer, number, rank)
        return digest([p.detach().numpy() for p in model.parameters()])

    results = run_ranks(3, body, SETTINGS)
    assert len(set(results)) == 1


def test_ranks_that_go_on_apart_after_a_join_are_told() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for number in range(3 + 2 * rank):
            step(model, optimizer, number, rank)
        join()
        with pytest.raises(MismatchError) as error:
            for number in range(2 * WITHIN):
                step(model, optimizer, number, rank)
        return str(error.value)

    advice = (
        "Rank(s) [0] had joined before, and have not taken the steps that others took meanwhile: after join(), call "
        "broadcast_parameters and broadcast_optimizer_state, with the rank that join() returns as the root."
    )
    for message in run_ranks(2, body, SETTINGS):
        assert "have become different" in message and advice in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_byte_of_every_parameter_is_in_one_window(dtype: torch.dtype) -> None:
    from ocomm.kernels.cpu import CpuKernels

    shapes = [(3, 5), (1,), (0,), (7, 11), (2, 3, 3, 5)]
    parameters = [torch.zeros(shape).to(dtype) for shape in shapes]
    parameters[4] = parameters[4].contiguous(memory_format=torch.channels_last)
    checksums = ParameterChecksums(WITHIN, CpuKernels())
    before = [checksums.of(parameters, count) for count in range(WITHIN + 1)]
    for parameter in parameters:
        for place in range(parameter.numel()):
            parameter[np.unravel_index(place, parameter.shape)] = 1
            after = [checksums.of(parameters, count) for count in range(WITHIN + 1)]
            changed = [count for count in range(WITHIN + 1) if after[count] != before[count]]
            assert len(changed) == 2 and changed[0] == 0  # the first comparison sees all
            parameter.zero_()


def test_it_is_one_allreduce_of_40_bytes_per_rank_and_step() -> None:
    def body(session: Session) -> list[tuple[int, ...]]:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        sent: list[tuple[int, ...]] = []
        submit = session.submit

        def noting(number: int, submission: Any) -> Any:
            sent.extend(request.shape for request in submission.requests if "weight" not in request.name)
            return submit(number, submission)

        session.submit = noting  # type: ignore[method-assign]
        for number in range(3):
            step(model, optimizer, number, rank)
        return [shape for shape in sent if shape == (80,)]

    assert run_ranks(2, body, SETTINGS) == [[(80,)] * 3] * 2
