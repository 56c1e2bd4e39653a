"""``check_replicas`` compares what it is given, bit for bit, and names what differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.session import Session
from tests.world.test_runtime import threads_only
from tests.worlds import run_ranks

pytestmark = threads_only  # nothing here depends on the network


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))


def test_equal_replicas_pass_in_every_form_and_are_not_changed() -> None:
    plain = model()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}

    def body(session: Session) -> None:
        own = model() if session.topology is None else plain
        hvd.check_replicas(own.state_dict())
        hvd.check_replicas(own.named_parameters())
        hvd.check_replicas(
            [torch.full((3,), float("nan")), torch.ones(2, 3).T, torch.ones(5, dtype=torch.bfloat16), None]
        )
        hvd.check_replicas([])

    run_ranks(2, body)
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())


def test_a_difference_of_one_bit_names_tensor_and_ranks() -> None:
    def body(session: Session) -> str:
        weight = torch.ones(3, 5)
        if hvd.rank() == 1:
            weight[2, 4] = float(np.nextafter(np.float32(1), np.float32(2)))
        with pytest.raises(MismatchError) as raised:
            hvd.check_replicas({"bias": torch.zeros(2), "weight": weight})
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert (
        first.startswith("the replicas differ: rank(s) [0] hold 'weight' (3, 5) torch.float32 with checksum ")
        and "; rank(s) [1] hold 'weight' (3, 5) torch.float32 with checksum " in first
    )
    assert "call broadcast_parameters and broadcast_optimizer_state before the first step" in first


def test_another_number_of_tensors_is_named() -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            hvd.check_replicas([torch.ones(2)] * (1 + hvd.rank()))
        return str(raised.value)

    assert "rank(s) [0] hold nothing; rank(s) [1] hold '1' (2,) torch.float32" in run_ranks(2, body)[0]


def test_the_ranks_of_a_process_set_are_compared_by_themselves() -> None:
    def body(session: Session) -> None:
        pair = hvd.ProcessSet([0, 1])
        if hvd.rank() < 2:
            hvd.check_replicas([torch.ones(2)], pair)

    run_ranks(3, body, process_sets=[[0, 1]])


def test_what_is_no_tensor_is_refused() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="'lr' is of type float, not a tensor"):
            hvd.check_replicas({"lr": 0.1})

    run_ranks(1, body)


# What writes to parameters in forward


class Table(torch.nn.Module):
    """Rows that forward scales to a norm, or that ``scale`` scales on all ranks alike."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.rows = torch.nn.EmbeddingBag.from_pretrained(torch.ones(20, 4), freeze=False, max_norm=max_norm)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        return self.rows(torch.randint(0, 20, (2, 3), generator=generator)).sum()

    def scale(self) -> None:
        with torch.no_grad():
            self.rows.weight.copy_(self.rows.weight.renorm(2, 0, 0.5))


@pytest.mark.parametrize("kind", ["DistributedOptimizer", "DistributedOneBitAdam", "DistributedDiLoCo"])
def test_an_embedding_with_max_norm_is_named_as_what_makes_replicas_differ(kind: str) -> None:
    def train(max_norm: float | None, steps: int) -> Table:
        model = Table(max_norm)
        optimizer = getattr(hvd, kind)(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(steps):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
            if max_norm is None:
                model.scale()
        if hasattr(optimizer, "finish"):
            optimizer.finish()
        return model

    def body(session: Session) -> str:
        hvd.check_replicas(train(None, 19).state_dict())
        with pytest.raises(MismatchError) as raised:
            hvd.check_replicas(train(0.5, 19).state_dict())
        return str(raised.value)

    for message in run_ranks(2, body):
        assert "' is the weight of an EmbeddingBag with max_norm=0.5: its forward writes to the rows that" in message
        assert "weight.copy_(weight.renorm(2, 0, 0.5))" in message and "broadcast" not in message
