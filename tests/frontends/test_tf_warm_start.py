"""Keras: compressed from the first step on, with the moments of an Adam in a saved model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ocomm.errors import InvalidRequestError
from ocomm.session import Session
from tests.frontends.onebit_jobs import SHAPES, gradients, initial
from tests.oracle.onebit_adam import Simulation
from tests.worlds import MPI_SIZE, run_ranks

pytest.importorskip("tensorflow")
import keras

import ocomm_tf.keras as hvd

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: nothing here is of the network")

T, LR, BETAS, EPS = 8, 1e-2, (0.9, 0.9), 1e-7
SILENT = 1


def adam() -> Any:
    return keras.optimizers.Adam(LR, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=EPS)


def variables(values: list[np.ndarray]) -> list[Any]:
    return [keras.Variable(value, name=f"v{number}") for number, value in enumerate(values)]


def pretrained(silent: int | None = None) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The variables, and what is saved of a plain Adam, after T steps; variable ``silent`` had zeros as gradients."""
    mine, optimizer, store = variables(initial()), adam(), {}
    for step in range(1, T + 1):
        given = [grad * (number != silent) for number, grad in enumerate(gradients(step, 0))]
        optimizer.apply([keras.ops.convert_to_tensor(gradient) for gradient in given], mine)
    optimizer.save_own_variables(store)
    return [v.numpy() for v in mine], store


def loaded(wrap: Any, values: list[np.ndarray], store: dict[str, np.ndarray]) -> tuple[list[Any], Any]:
    mine = variables(values)
    optimizer = wrap(adam(), mine, warm_start=True)
    optimizer.load_own_variables(store)
    return mine, optimizer


def train(optimizer: Any, mine: list[Any], first: int, last: int) -> list[list[bytes]]:
    history = []
    for step in range(first, last + 1):
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients(step, hvd.rank())], mine)
        history.append([v.numpy().tobytes() for v in mine])
    return history


def test_a_warm_start_equals_the_simulation_from_the_first_step_without_a_dense_one() -> None:
    values, store = pretrained()
    simulation = Simulation(values, 2, freeze_step=T, lr=LR, betas=BETAS, eps=EPS)
    saved = [np.asarray(store[str(number)]) for number in range(len(store))]
    moments = saved[2:]  # after the step count and the learning rate: m and v of each variable, in turn
    for index, value in enumerate(values):
        momentum, variance = moments[2 * index : 2 * index + 2]
        simulation.adopt(index, param=value, momentum=momentum, variance=variance, step=T)
    simulation.end_warmup()
    expected = []
    for step in range(T + 1, T + 9):
        simulation.step([gradients(step, rank) for rank in range(2)])
        expected.append([param.tobytes() for param in simulation.params])

    def body(session: Session) -> tuple[list[list[bytes]], dict[str, Any]]:
        mine, optimizer = loaded(hvd.DistributedOneBitAdam, values, store)
        return train(optimizer, mine, T + 1, T + 8), optimizer.compression_report()

    for found, report in run_ranks(2, body):
        assert found == expected
        assert report["warm_start"] == {"step": T, "tensors": len(SHAPES), "dense": []}
        assert [report[key] for key in ("stage", "dense_steps", "compressed_steps")] == ["compressed", 0, 8]


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_a_variable_without_moments_begins_as_in_a_new_run(kind: str) -> None:
    values, store = pretrained(SILENT)

    def body(session: Session) -> tuple[list[list[bytes]], Any]:
        mine, optimizer = loaded(getattr(hvd, f"Distributed{kind}"), values, store)
        dense = optimizer.compression_report()["warm_start"]["dense"]
        return train(optimizer, mine, T + 1, T + 3), dense

    first, second = run_ranks(2, body)
    assert first == second
    assert len(first[1]) == 1 and first[1][0].endswith(f"v{SILENT}")


def test_a_warm_start_without_a_saved_model_is_refused() -> None:
    def body(session: Session) -> None:
        mine = variables(initial())
        with pytest.raises(InvalidRequestError, match="no Adam's moments were loaded"):
            train(hvd.DistributedOneBitAdam(adam(), mine, warm_start=True), mine, 1, 1)
        assert all(np.array_equal(v.numpy(), value) for v, value in zip(mine, initial(), strict=True))

    run_ranks(1, body)
