"""What scripts of TensorFlow 1 do after ``tf.disable_v2_behavior()``, on two ranks that are threads of this process.

Variables are then references, dimensions are objects, and everything runs in a session. It holds for the whole process,
so ``test_tf_v1`` starts this one: ``python -m tests.frontends.tensorflow_1``.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

import numpy as np  # noqa: E402

import ocomm_tf as hvd  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

STEPS = 20


def batch(number: int, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, features and what they add up to: four of each."""
    random = np.random.default_rng([number, rank])
    words, features = random.integers(0, 5, 4), random.normal(size=(4, 3)).astype(np.float32)
    return words, features, (features.sum(1) + words).astype(np.float32)


class End(tf.train.SessionRunHook):
    """Reads variables when a session ends."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        self.variables = variables
        self.values: list[np.ndarray] = []

    def end(self, session: tf.Session) -> None:
        self.values = session.run(self.variables)


class Own(tf.train.MomentumOptimizer):
    """As optimizers of BERT's are: pairs come one by one, and steps take an option."""

    def compute_gradients(self, *arguments: Any, **options: Any) -> Any:
        return zip(*zip(*super().compute_gradients(*arguments, **options), strict=True), strict=True)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None, factor: Any = 1.0) -> Any:
        scaled = [(gradient * factor, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(scaled, global_step, name)


def check_an_optimizer_of_the_users(rank: int) -> None:
    """Its gradients are averaged, its options arrive, and values of its variables can be sent."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        weight = tf.get_variable("weight", [2], initializer=tf.zeros_initializer())
        optimizer = hvd.DistributedOptimizer(Own(1.0, 0.0))
        pairs = optimizer.compute_gradients(tf.reduce_sum(weight) * (rank + 1.0))
        step = optimizer.apply_gradients(pairs, factor=2.0)
        session.run(tf.global_variables_initializer())
        session.run(step)
        value = graph.get_tensor_by_name("weight:0")
        np.testing.assert_array_equal(session.run(hvd.allreduce(value, op=hvd.Sum)), [-6.0, -6.0])


def trained(ranks: list[int], is_distributed: bool) -> list[np.ndarray]:
    """Trains on the data of ``ranks``, and returns a table of words, whose gradients are rows, and a weight."""
    with tf.Graph().as_default():
        words = tf.placeholder(tf.int64, [None])
        features, target = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
        start = float(hvd.rank()) if is_distributed else 0.0
        table = tf.get_variable("table", [5], initializer=tf.constant_initializer(start))
        weight = tf.get_variable("weight", [3], initializer=tf.constant_initializer(start))
        predicted = tf.gather(table, words) + tf.reduce_sum(features * weight, 1)
        loss = tf.reduce_mean(tf.square(predicted - target))
        steps = tf.train.get_or_create_global_step()
        optimizer = tf.train.MomentumOptimizer(0.05, 0.5)
        hooks = [tf.train.StopAtStepHook(last_step=STEPS)]
        if is_distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
            hooks.append(hvd.BroadcastGlobalVariablesHook(0))
        step = optimizer.minimize(loss, global_step=steps)
        end = End([table, weight])
        with tf.train.MonitoredTrainingSession(hooks=[*hooks, end]) as session:
            for number in range(STEPS):
                parts = [np.concatenate(part) for part in zip(*[batch(number, rank) for rank in ranks], strict=True)]
                session.run(step, dict(zip((words, features, target), parts, strict=True)))
            assert session.should_stop()
        return end.values


def check_collectives(rank: int) -> None:
    """The collectives, of tensors whose shapes are known and not, and a gradient of each that has one."""
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
        open_ended = tf.placeholder_with_default(x, [None, None])
        made = {
            "average": hvd.allreduce(x),
            "sum": hvd.allreduce(tf.cast(open_ended, tf.int64), op=hvd.Sum),
            "fp16": hvd.allreduce(x, compression=hvd.Compression.fp16, name="half"),
            "grouped": hvd.grouped_allreduce([x, x[0]], op=hvd.Max)[1],
            "gathered": hvd.allgather(open_ended[: rank + 1]),
            "broadcast": hvd.broadcast(x, 1),
            "alltoall": hvd.alltoall(x)[:1],
            "scattered": hvd.reducescatter(x, op=hvd.Sum),
            "size": hvd.size_op(),
        }
        expected = {
            "average": [[1.5, 3.0], [4.5, 6.0]],
            "sum": [[3, 6], [9, 12]],
            "fp16": [[1.5, 3.0], [4.5, 6.0]],
            "grouped": [2.0, 4.0],
            "gathered": [[1.0, 2.0], [2.0, 4.0], [6.0, 8.0]],
            "broadcast": [[2.0, 4.0], [6.0, 8.0]],
            "alltoall": [[[1.0, 2.0]], [[3.0, 4.0]]][rank],
            "scattered": [[[3.0, 6.0]], [[9.0, 12.0]]][rank],
            "size": 2,
        }
        for name, value in session.run(made).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        (gradient,) = tf.gradients(hvd.allgather(x, name="differentiated"), x)
        np.testing.assert_array_equal(session.run(gradient), np.ones((2, 2)))
        assert hvd.broadcast_object({"rank": rank}, 1, session=session) == {"rank": 1}
        assert hvd.broadcast_object_fn(0, session=session)(["from", rank]) == ["from", 0]
        assert hvd.allgather_object(rank, session=session) == [0, 1]


def main() -> None:
    def body(session: Session) -> list[np.ndarray]:
        check_collectives(hvd.rank())
        check_an_optimizer_of_the_users(hvd.rank())
        return trained([hvd.rank()], True)

    first, second = run_ranks(2, body)
    alone = trained([0, 1], False)
    for mine, other, expected in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, expected, rtol=1e-4)
        assert np.abs(expected).max() > 0.5
    print("as one process has learnt")


if __name__ == "__main__":
    main()
