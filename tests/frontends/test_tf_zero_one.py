"""``finish()`` of Keras' 0/1 Adam: the simulation's sync, eagerly and in graphs, and at the ends of ``fit``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.frontends.onebit_jobs import digest, gradients, initial  # noqa: E402
from tests.oracle.zero_one_adam import Simulation  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

#: Syncs up to step 5, then every second and every fourth step.
SCHEDULE = {"local_step_start": 2, "local_step_doubling": 4, "local_step_clip": 4}
#: After a sync, within intervals of 2 and of 4 steps, and twice in a row.
FINISHES = (5, 8, 11, 11, 14, 17)
RATE = 0.0625


def expected(steps: int) -> tuple[list[list[str]], list[np.ndarray]]:
    """Digests of every rank's variables after every step, and m at the end, by a simulation of two ranks."""
    simulation = Simulation(initial(), 2, lr=RATE, weight_decay=0.01, decoupled=True, eps=1e-7, **SCHEDULE)
    digests: list[list[str]] = [[], []]
    for step in range(1, steps + 1):
        simulation.step([gradients(step, rank) for rank in (0, 1)])
        for _ in range(FINISHES.count(step)):
            simulation.finish()
        for rank in (0, 1):
            digests[rank].append(digest(simulation.params_of(rank)))
    return digests, [x.momenta[0] for x in simulation.tensors]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("vote", ["step", "sync"])
def test_finish_is_the_simulations_sync_and_the_run_goes_on_bit_for_bit(in_graph: bool, vote: Any) -> None:
    def body(session: Session) -> tuple[list[str], list[np.ndarray]]:
        variables = [keras.Variable(value, name=f"v{number}") for number, value in enumerate(initial())]
        inner = keras.optimizers.AdamW(RATE, weight_decay=0.01)
        optimizer = hvd.DistributedZeroOneAdam(inner, variables, vote=vote, **SCHEDULE)
        apply: Callable[..., Any] = tf.function(optimizer.apply) if in_graph else optimizer.apply
        optimizer.finish()  # before the first step there is nothing to sync
        digests = []
        for step in range(1, 18):
            apply([tf.constant(g) for g in gradients(step, hvd.rank())])
            assert optimizer.variables  # whose m and v are of this moment, and not of the sync that follows
            for _ in range(FINISHES.count(step)):
                optimizer.finish()
            digests.append(digest([v.numpy() for v in variables]))
        return digests, [m.numpy().reshape(-1) for m in optimizer._momentums]

    found = run_ranks(2, body)
    digests, momenta = expected(17)
    assert [each[0] for each in found] == digests
    for _, saved in found:
        for one, other in zip(saved, momenta, strict=True):  # what a plain Adam would go on from
            np.testing.assert_array_equal(one, other)


def model(dtype: str) -> Any:
    hidden, last = keras.layers.Dense(8, activation="relu", dtype=dtype), keras.layers.Dense(1, dtype=dtype)
    net = keras.Sequential([keras.Input((4,)), hidden, last])
    chance = np.random.default_rng(1)
    net.set_weights([chance.normal(size=v.shape).astype(np.float32) for v in net.trainable_variables])
    return net


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], ["bfloat16"]))
def test_a_fit_of_any_length_ends_with_equal_variables_and_validates_them_where_asked_for(dtype: str) -> None:
    inputs = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
    targets = inputs.sum(1, keepdims=True)

    def body(session: Session) -> tuple[list[str], list[list[float]]]:
        net = model(dtype)
        own = slice(hvd.rank(), None, 2)
        net.compile(hvd.DistributedZeroOneAdam(keras.optimizers.Adam(0.05), **SCHEDULE), "mse")
        ends, losses = [], []
        for epochs, equal in ((1, False), (2, True), (1, False)):
            callbacks = [hvd.callbacks.FinishCallback(equal_replicas=equal)]
            data = inputs[own], targets[own]
            held = net.fit(
                *data, 8, epochs, verbose=0, shuffle=False, callbacks=callbacks, validation_data=(inputs, targets)
            )
            losses.append(held.history["val_loss"])
            ends.append(digest([np.array(v, np.float32) for v in net.trainable_variables]))
        return ends, losses

    one, other = run_ranks(2, body)
    assert one[0] == other[0]
    assert one[1][0] != other[1][0] and one[1][1] == other[1][1]
