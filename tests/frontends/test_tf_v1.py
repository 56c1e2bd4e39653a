"""What TensorFlow still has of its first version: optimizers of ``tf.compat.v1.train``, eager and in a session."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")

import numpy as np  # noqa: E402

import ocomm_tf as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.telemetry.log import NOTICE  # noqa: E402
from tests.cluster.jobs import run  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

v1 = tf.compat.v1
OPTIMIZERS = {
    "gradient descent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "Adam": lambda: v1.train.AdamOptimizer(0.1),
}


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Of y = 3 x - 1, other points on each rank."""
    x = np.random.default_rng(rank).normal(size=16).astype(np.float32)
    return x, 3 * x - 1


def in_session(make: Any, share: tuple[np.ndarray, np.ndarray], distributed: bool) -> list[float]:
    """Twenty steps in a graph of TensorFlow 1: slope and offset. Ranks start apart."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
        begin = float(hvd.rank()) if distributed else 0.0
        slope, offset = (v1.get_variable(name, initializer=begin, use_resource=True) for name in ("slope", "offset"))
        loss = tf.reduce_mean((slope * x + offset - y) ** 2)
        optimizer = make()
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        train = optimizer.minimize(loss)
        session.run(v1.global_variables_initializer())
        if distributed:
            session.run(hvd.broadcast_global_variables(0))
        for _ in range(20):
            session.run(train, {x: share[0], y: share[1]})
        return [float(value) for value in session.run([slope, offset])]


def eagerly(make: Any, share: tuple[np.ndarray, np.ndarray], distributed: bool) -> list[float]:
    """The same without a graph."""
    begin = float(hvd.rank()) if distributed else 0.0
    slope, offset = tf.Variable(begin, name="slope"), tf.Variable(begin, name="offset")
    optimizer = make()
    if distributed:
        hvd.broadcast_variables([slope, offset], 0)
        optimizer = hvd.DistributedOptimizer(optimizer)
    for _ in range(20):
        optimizer.minimize(
            lambda: tf.reduce_mean((slope * share[0] + offset - share[1]) ** 2), var_list=[slope, offset]
        )
    return [float(slope), float(offset)]


@pytest.mark.short("in_session")
@pytest.mark.parametrize("train", [in_session, eagerly])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_ranks_learn_what_one_process_learns_from_the_data_of_both(train: Any, kind: str) -> None:
    make = OPTIMIZERS[kind]

    def body(session: Session) -> list[float]:
        return train(make, data(hvd.rank()), True)

    first, second = run_ranks(2, body)
    assert first == second
    both = tuple(np.concatenate(parts) for parts in zip(data(0), data(1), strict=True))
    np.testing.assert_allclose(first, train(make, both, False), rtol=1e-4)
    assert first[0] > 1.0


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("divides", [False, True], ids=["sum", "average"])
def test_passes_of_a_graph_are_summed_and_applied_in_the_last(divides: bool, is_sparse: bool) -> None:
    def body(session: Session) -> list[list[float]]:
        with tf.Graph().as_default(), v1.Session() as run:
            given = v1.placeholder(tf.float32, [])
            table = v1.get_variable("table", initializer=[0.0, 0.0])
            unused = v1.get_variable("unused", initializer=5.0)
            steps = v1.get_variable("steps", initializer=np.int64(0), trainable=False)
            loss = tf.reduce_sum(tf.gather(table, [1]) if is_sparse else table * [0.0, 1.0]) * given
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(1.0, 0.5),
                backward_passes_per_step=3,
                average_aggregated_gradients=divides,
                sparse_as_dense=is_sparse,
            )
            train = optimizer.minimize(loss, global_step=steps, var_list=[table, unused])
            run.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            seen = []
            for number in range(7):
                run.run(train, {given: 3.0 * (1 + number + 10 * hvd.rank())})
                assert run.run([unused, steps]) == [5.0, number + 1]
                seen.append(run.run(table).tolist())
            return seen

    first, second = run_ranks(2, body)
    assert first == second
    # Averages over the ranks of 3 (6 + pass), summed over three passes: momentum makes 63 of them, and 90 + 63 / 2.
    whole = np.repeat([0.0, 63.0, 63.0 + 90.0 + 31.5], [2, 3, 2]) / (3 if divides else 1)
    assert first == [[0.0, -value] for value in whole]


def test_passes_that_cannot_be_counted_are_refused() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="must be > 0"):
            hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), backward_passes_per_step=0)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), backward_passes_per_step=2)
        variable = tf.Variable(1.0)
        for minimize in (optimizer.minimize, tf.function(optimizer.minimize, autograph=False)):
            with pytest.raises(InvalidRequestError, match=r"works in graphs of tf\.compat\.v1; use a Keras optimizer"):
                minimize(lambda: variable * 2.0, var_list=[variable])
        with tf.Graph().as_default():
            table = v1.get_variable("table", initializer=[0.0, 0.0])
            with pytest.raises(InvalidRequestError, match=r"needs sparse_as_dense=True for tf\.IndexedSlices"):
                optimizer.minimize(tf.reduce_sum(tf.gather(table, [1])), var_list=[table])
            with pytest.raises(InvalidRequestError, match=r"needs compute_gradients\(\) of this optimizer"):
                optimizer.apply_gradients([(tf.zeros(2), table)])

    run_ranks(1, body)


@pytest.mark.skipif(MPI_SIZE > 0, reason="starts a process of its own")
def test_scripts_without_the_behavior_of_tensorflow_2_train_as_one_process() -> None:
    command = [sys.executable, "-m", "tests.frontends.tensorflow_1"]
    done = run(command, {**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as one process has learnt\n"


@pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: rank 0 alone says it")
@pytest.mark.parametrize(
    ("compression", "dtype", "sent", "in_two"),
    [("none", tf.float32, "4 kB", "8 kB"), ("none", tf.float64, "8 kB", "16 kB"), ("bf16", tf.float32, "2 kB", "4 kB")],
)
def test_a_step_is_told_in_bytes_as_they_are_sent(
    compression: str, dtype: Any, sent: str, in_two: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        weights = tf.Variable(tf.zeros(1000, dtype))
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), compression=getattr(hvd.Compression, compression)
        )
        for _ in range(2):
            optimizer.minimize(lambda: tf.reduce_sum(weights), var_list=[weights])

    with caplog.at_level(NOTICE, "ocomm"):
        run_ranks(2, body)
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith(f"DistributedOptimizer, 1000 parameters: a step sends {sent} per rank, dense.")
    assert last == f"DistributedOptimizer: 2 steps, all dense. This rank sent about {in_two}."
