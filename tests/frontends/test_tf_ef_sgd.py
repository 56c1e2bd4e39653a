"""DistributedEFSGD of Keras against the plain simulation, and what is saved of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.resume import one_state  # noqa: E402
from tests.oracle import ef_sgd as oracle  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

SHAPES = [(30, 20), (7,)]
STEPS = 12


def gradients(step: int, rank: int) -> list[np.ndarray | None]:
    rng = np.random.default_rng((step, rank))
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def rate(step: int) -> float:
    """Rates that float32 holds."""
    return 0.5 ** (3 + step // 4)


def expected(**options: Any) -> list[np.ndarray]:
    law = oracle.EFSGD([np.ones(shape, np.float32) for shape in SHAPES], 2, lr=rate, **options)
    for step in range(1, STEPS + 1):
        law.step([gradients(step, rank) for rank in range(2)])
    return law.params


def made(**options: Any) -> tuple[Any, list[Any]]:
    variables = [keras.Variable(np.ones(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]
    optimizer = hvd.DistributedEFSGD(keras.optimizers.SGD(1.0, **options))
    optimizer.build(variables)
    return optimizer, variables


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.125}], ids=str
)
def test_it_equals_the_simulation(options: dict[str, Any], in_graph: bool) -> None:
    law = expected(**{"decoupled" if name == "weight_decay" else name: value for name, value in options.items()})

    def body(session: Session) -> None:
        optimizer, variables = made(**options)
        apply = tf.function(optimizer.apply) if in_graph else optimizer.apply
        for step in range(1, STEPS + 1):
            optimizer.learning_rate = rate(step)
            apply([tf.constant(g) for g in gradients(step, hvd.rank())])
        for variable, wanted in zip(variables, law, strict=True):
            assert np.array_equal(variable.numpy(), wanted)

    run_ranks(2, body)


def test_a_state_goes_on_in_every_bit() -> None:
    options = {"momentum": 0.9, "nesterov": True}
    law = expected(**options)

    def body(session: Session) -> None:
        optimizer, variables = made(**options)
        for step in range(1, STEPS + 1):
            if step == 6:
                state, own = optimizer.ocomm_state(), optimizer.ocomm_rank_state()
                values = [v.numpy() for v in variables]
                optimizer, variables = made(**options)
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
                optimizer.ocomm_load_state(state)
                assert optimizer.ocomm_load_rank_state(one_state(own))["rank_state"] == "loaded"
            optimizer.learning_rate = rate(step)
            optimizer.apply([tf.constant(g) for g in gradients(step, hvd.rank())])
        for variable, wanted in zip(variables, law, strict=True):
            assert np.array_equal(variable.numpy(), wanted)

    run_ranks(2, body)


def test_a_model_saved_with_it_loads_without_ocomm(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        path = tmp_path / f"{hvd.rank()}.keras"
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(hvd.DistributedEFSGD(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
        model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.SGD
        for mine, its in zip(model.weights, plain.weights, strict=True):
            assert np.array_equal(mine.numpy(), its.numpy())

    run_ranks(2, body)


def test_it_wraps_sgd_only() -> None:
    with pytest.raises(InvalidRequestError, match=r"wraps keras.optimizers.SGD, not Adam"):
        hvd.DistributedEFSGD(keras.optimizers.Adam())
