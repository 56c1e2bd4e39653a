"""What Horovod's scripts do with Keras 2, on two ranks that are threads of this process.

``test_tf_keras_2`` starts it, because TF_USE_LEGACY_KERAS=1 holds for the whole process:
``python -m tests.frontends.keras_2 NAME`` runs the function of this name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

import ocomm_tf as hvd_tf
import ocomm_tf.keras as hvd
from ocomm.errors import InvalidRequestError
from ocomm.session import Session
from tests.worlds import run_ranks

BATCH, EPOCHS = 8, 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.5, global_clipnorm=1.0),
    "adam": lambda: tf.keras.optimizers.Adam(0.05),
    "legacy": lambda: tf.keras.optimizers.legacy.SGD(0.05, momentum=0.5),
}


def refuses(make: Callable[[], object], message: str) -> None:
    try:
        make()
    except InvalidRequestError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(4 * BATCH, 3)).astype(np.float32)
    return x, x @ np.array([[1.0], [-2.0], [3.0]], np.float32)


def of_both() -> tuple[np.ndarray, np.ndarray]:
    """The data of two ranks, in batches that have one of each."""
    parts = [[np.split(array, 4) for array in data(rank)] for rank in (0, 1)]
    x, y = (
        np.concatenate([np.concatenate(pair) for pair in zip(*arrays, strict=True)])
        for arrays in zip(*parts, strict=True)
    )
    return x, y


def model(start: float, is_built: bool = True) -> Any:
    one = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.Constant(start))])
    if is_built:
        one.build((None, 3))
    return one


def fit(one: Any, optimizer: Any, share: tuple[np.ndarray, np.ndarray], batch: int, callbacks: Any = ()) -> Any:
    one.compile(optimizer, "mse", metrics=["mae"], experimental_run_tf_function=False)
    return one.fit(*share, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks))


def weights(one: Any) -> list[Any]:
    return [value.tolist() for value in one.get_weights()]


def same_as_one_process() -> None:
    """Two ranks that start apart learn what one process learns from batches of both."""
    for name, make in OPTIMIZERS.items():

        def body(session: Session, make: Any = make) -> tuple[list[Any], float]:
            rank, mine = hvd.rank(), model(float(hvd.rank()))
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
            optimizer = hvd.DistributedOptimizer(make())
            assert type(optimizer).__name__ == type(make()).__name__ and isinstance(optimizer, type(make()))
            history = fit(mine, optimizer, data(rank), BATCH, callbacks)
            return weights(mine), history.history["loss"][-1]

        first, second = run_ranks(2, body)
        assert first == second, name
        alone = model(0.0)
        history = fit(alone, make(), of_both(), 2 * BATCH)
        for mine, expected in zip(first[0], weights(alone), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(first[1], history.history["loss"][-1], rtol=1e-4)


class Averaged(tf.keras.optimizers.legacy.Optimizer):  # type: ignore[misc, name-defined]
    """Has its steps made by another optimizer, as ExponentialMovingAverage of tf-models-official has."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__("Averaged")
        self._optimizer = optimizer

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **options: Any) -> Any:
        return self._optimizer.apply_gradients(grads_and_vars, name)

    def variables(self) -> Any:
        return self._optimizer.variables()

    def get_config(self) -> dict[str, Any]:
        return {}


def wrapper_of_an_optimizer() -> None:
    """What makes the steps of another optimizer is distributed inside it, and found there."""

    def body(session: Session) -> list[Any]:
        mine, sgd = model(float(hvd.rank())), tf.keras.optimizers.legacy.SGD
        optimizer = Averaged(hvd.DistributedOptimizer(sgd(0.05)))
        fit(mine, optimizer, data(hvd.rank()), BATCH, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        for make, message in (
            (lambda: hvd.DistributedOptimizer(Averaged(sgd(0.05))), "Averaged(hvd.DistributedOptimizer(optimizer)), b"),
            (
                lambda: fit(mine, Averaged(sgd(0.1)), data(0), BATCH, [hvd.callbacks.MetricAverageCallback()]),
                "compiled with Averaged around SGD, which is not distributed",
            ),
        ):
            refuses(make, message)
        return weights(mine)

    first, second = run_ranks(2, body)
    assert first == second
    alone = model(0.0)
    fit(alone, tf.keras.optimizers.legacy.SGD(0.05), of_both(), 2 * BATCH)
    for mine, expected in zip(first, weights(alone), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def built_by_its_first_batch() -> None:
    """As in Horovod's examples: ranks that start apart are alike after the broadcast that follows the first batch."""

    def body(session: Session) -> list[Any]:
        mine = model(float(hvd.rank()), is_built=False)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.05))
        fit(mine, optimizer, data(hvd.rank()), BATCH, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        return weights(mine)

    first, second = run_ranks(2, body)
    assert first == second


def loss_scale() -> None:
    """Under mixed_float16 a gradient that overflows on one rank is a step that no rank takes."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")

    def body(session: Session) -> tuple[list[Any], list[float]]:
        mine = model(0.5)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), initial_scale=2.0**10
        )
        x, y = data(hvd.rank())
        y[BATCH : 2 * BATCH] = 3e4 if hvd.rank() else 0.0  # overflows on rank 1 in each second batch of an epoch
        fit(mine, optimizer, (x, y), BATCH, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        return weights(mine), [float(optimizer.loss_scale)]

    first, second = run_ranks(2, body)
    assert first == second and np.isfinite(first[0][0]).all()
    assert first[1][0] < 2.0**10


def schedule_and_files() -> None:
    """The callbacks of learning rates, a checkpoint in Keras 2's own format, and an elastic state."""
    folder = Path(tempfile.mkdtemp())

    def body(session: Session) -> list[Any]:
        mine = model(0.5)
        warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2)
        later = hvd.callbacks.LearningRateScheduleCallback(0.1, start_epoch=2, multiplier=lambda epoch: 0.5)
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9))
        history = fit(mine, optimizer, data(hvd.rank()), BATCH, [begin, warmup, later])
        np.testing.assert_allclose(history.history["lr"], [0.075, 0.1, 0.05], rtol=1e-6)
        state = hvd.elastic.KerasState(mine, epoch=3)
        state.save()
        path = str(folder / f"rank-{hvd.rank()}.h5")
        mine.save(path)
        saved = weights(mine)
        mine.set_weights([value + 1.0 for value in mine.get_weights()])
        state.restore()
        assert weights(mine) == saved and state.epoch == 3
        loaded = hvd.load_model(path)
        assert weights(loaded) == saved and type(loaded.optimizer).__name__ == "SGD"
        assert int(loaded.optimizer.iterations) == 4 * EPOCHS
        loaded.fit(*data(hvd.rank()), batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[])
        assert loaded.optimizer.ocomm_exchanges
        assert type(tf.keras.models.load_model(path).optimizer) is tf.keras.optimizers.legacy.SGD  # without ocomm, too
        return weights(loaded)

    first, second = run_ranks(2, body)
    assert first == second


def scaled_files() -> None:
    """A model with a LossScaleOptimizer, which averages inside, is distributed again when it is loaded."""
    folder = Path(tempfile.mkdtemp())

    def body(session: Session) -> list[Any]:
        mine = model(0.5)
        inner = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01))
        fit(mine, tf.keras.mixed_precision.LossScaleOptimizer(inner), data(hvd.rank()), BATCH)
        path = str(folder / f"rank-{hvd.rank()}.h5")
        mine.save(path)
        loaded = hvd.load_model(path)
        assert weights(loaded) == weights(mine)
        loaded.fit(*data(hvd.rank()), batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        assert loaded.optimizer.inner_optimizer.ocomm_exchanges
        return weights(loaded)

    first, second = run_ranks(2, body)
    assert first == second


def values(mine: Any) -> None:
    """The collectives of Keras return values where there is a session, and symbolic tensors for such ones."""
    rank = hvd.rank()
    for _ in range(2):  # a script calls them once an epoch
        assert list(hvd.allreduce([rank, 2.0 * rank], "score")) == [0.5, 1.0]
        assert list(hvd.allgather(np.full(1 + rank, rank), name="sizes")) == [0, 1, 1]
        assert hvd.broadcast(rank + 5, 1) == 6 and hvd.reducescatter([4.0, 4.0], op=hvd.Sum).tolist() == [8.0]
    symbolic = hvd.allreduce(tf.identity(mine.weights[0]))
    assert tf.is_symbolic_tensor(symbolic)
    mine.set_weights([weight + rank for weight in mine.get_weights()])
    hvd.broadcast_global_variables(1)


def without_eager_execution() -> None:
    """As scripts that were written for TensorFlow 1: Keras runs everything in its session, the broadcast, too."""
    tf.compat.v1.disable_eager_execution()

    def body(session: Session) -> list[Any]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as own:
            tf.compat.v1.keras.backend.set_session(own)
            mine = model(float(hvd.rank()))
            optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.1, momentum=0.5))
            warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2)
            begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            history = fit(
                mine, optimizer, data(hvd.rank()), BATCH, [begin, hvd.callbacks.MetricAverageCallback(), warmup]
            )
            np.testing.assert_allclose(history.history["lr"], [0.075, 0.1, 0.1], rtol=1e-6)
            values(mine)
            return weights(mine)

    first, second = run_ranks(2, body)
    assert first == second


def refused() -> None:
    """What only Keras 3 has is an error that says so."""
    sgd, scaled = tf.keras.optimizers.SGD, tf.keras.mixed_precision.LossScaleOptimizer

    def body(session: Session) -> None:
        for make, message in (
            (lambda: hvd.DistributedOptimizer(sgd(0.1), compression=hvd.Compression.int8), "are no codes (int8, int4)"),
            (lambda: hvd.DistributedOptimizer(sgd(0.1), backward_passes_per_step=2), "are no backward_passes_per_step"),
            (lambda: hvd.DistributedOptimizer(scaled(sgd(0.1))), "wrap it the other way, LossScaleOptimizer"),
            (lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(0.1))), "is distributed already"),
            (lambda: hvd.DistributedOneBitAdam(tf.keras.optimizers.Adam(0.1)), "this Adam is of Keras 2"),
        ):
            refuses(make, message)
        if hvd.size() > 1:
            average = [hvd.callbacks.MetricAverageCallback()]
            refuses(
                lambda: fit(model(0.0), sgd(0.1), data(0), BATCH, average),
                "compiled with SGD, which is not distributed",
            )
            for kind in (sgd, tf.keras.optimizers.legacy.SGD):
                optimizer, variables = hvd.DistributedOptimizer(kind(0.1, global_clipnorm=0.1)), model(0.0).weights
                optimizer.register_local_var(variables[0])
                gradients = [tf.ones(variable.shape) for variable in variables]
                pairs = list(zip(gradients, variables, strict=True))
                refuses(partial(optimizer.apply_gradients, pairs), "global_clipnorm=0.1 clips averages")

    run_ranks(2, body)


def tape() -> None:
    """A loop with a tape, as Horovod's examples for TensorFlow 2 have it: optimizer.variables() is a call."""

    def body(session: Session) -> list[Any]:
        mine, optimizer = model(float(hvd.rank())), tf.optimizers.Adam(0.05)
        x, y = data(hvd.rank())
        for number in range(8):
            part = slice(BATCH * (number % 4), BATCH * (number % 4 + 1))
            with tf.GradientTape() as plain:
                loss = tf.reduce_mean(tf.square(mine(x[part]) - y[part]))
            averaging = hvd_tf.DistributedGradientTape(plain)
            gradients = averaging.gradient(loss, mine.trainable_variables)
            optimizer.apply_gradients(zip(gradients, mine.trainable_variables, strict=True))
            if number == 0:
                hvd_tf.broadcast_variables(mine.variables, root_rank=0)
                hvd_tf.broadcast_variables(optimizer.variables(), root_rank=0)
        return weights(mine)

    first, second = run_ranks(2, body)
    assert first == second


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name)
