"""Compression.fp16 in TensorFlow: what is too large for it is reduced in its own type, on all ranks."""

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
from ocomm_tf import mpi_ops  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

#: Per rank: a gradient which only rank 1 cannot send in half precision, and one that all can.
LARGE, SMALL = ([3.0, -1.0, 60000.0], [1e6, 7.0, 60000.0]), ([0.5, 0.25], [1.5, -0.25])
every_use = pytest.mark.parametrize("use", [tf.function, lambda function: function], ids=["graph", "eager"])


def make_variables() -> list[Any]:
    return [tf.Variable(tf.ones(3), name="large"), tf.Variable(tf.ones(2), name="small")]


def loss_of(variables: list[Any], values: Any = (LARGE, SMALL)) -> Any:
    """Its gradients are those of this rank."""
    return tf.add_n(
        [tf.reduce_sum(v * tf.constant(each[hvd.rank()])) for v, each in zip(variables, values, strict=True)]
    )


def gradients_of(variables: list[Any], values: Any = (LARGE, SMALL), **options: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(variables, values)
    return hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16, **options).gradient(loss, variables)


@every_use
@pytest.mark.parametrize(
    ("op", "options"),
    [(hvd.Average, {}), (hvd.Average, {"groups": 1}), (hvd.Average, {"gradient_predivide_factor": 2.0}), (hvd.Sum, {})],
    ids=["average", "group", "predivided", "sum"],
)
def test_the_tape_gives_what_it_would_give_without_compression(use: Any, op: int, options: dict[str, Any]) -> None:
    def body(session: Session) -> list[list[float]]:
        variables = make_variables()
        step = use(lambda: gradients_of(variables, op=op, **options))
        return [[g.numpy().tolist() for g in step()] for _ in range(2)][1]

    factor = 0.5 if op == hvd.Average else 1.0
    expected = [[factor * (a + b) for a, b in zip(*values, strict=True)] for values in (LARGE, SMALL)]
    assert run_ranks(2, body) == [expected] * 2


@every_use
def test_the_optimizer_steps_on_what_it_would_get_without_compression(use: Any) -> None:
    def body(session: Session) -> list[list[float]]:
        variables = make_variables()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), compression=hvd.Compression.fp16)
        optimizer.build(variables)

        @use
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(variables)
            optimizer.apply(tape.gradient(loss, variables), variables)

        step()
        return [v.numpy().tolist() for v in variables]

    expected = [[1 - 0.25 * (a + b) for a, b in zip(*values, strict=True)] for values in (LARGE, SMALL)]
    assert run_ranks(2, body) == [expected] * 2


def test_fit() -> None:
    def body(session: Session) -> tuple[list[np.ndarray], list[np.ndarray]]:
        found = []
        for compression in (hvd.Compression.fp16, hvd.Compression.none):
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-9), compression=compression)
            model.compile(optimizer, loss="mse", jit_compile=False)
            x = np.array([[300.0, 1.0, 0.0], [1.0, 2.0, 3.0]], np.float32) * (1 + hvd.rank())
            model.fit(x, np.array([[1.0], [2.0]]), batch_size=1, epochs=2, verbose=0, shuffle=False)
            found.append(model.get_weights())
        return tuple(found)

    results = run_ranks(2, body)
    for compressed, plain in results:
        for a, b in zip(compressed, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3)
    assert all(np.array_equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


@every_use
def test_what_was_infinite_before_stays_so(use: Any) -> None:
    values = ([1.0, 1.0, 2.0], [1.0, float("inf"), 2.0]), ([1.0, float("nan")], [1.0, 1.0])

    def body(session: Session) -> list[list[float]]:
        variables = make_variables()
        return [g.numpy().tolist() for g in use(lambda: gradients_of(variables, values))()]

    for large, small in run_ranks(2, body):
        assert large == [1.0, float("inf"), 2.0] and small[0] == 1.0 and np.isnan(small[1])


@every_use
def test_nothing_is_sent_again_where_nothing_overflows(use: Any) -> None:
    def body(session: Session) -> list[str]:
        sent: list[str] = []
        submit = session.submit

        def noting(number: int, submission: Any) -> Any:
            sent.extend(request.name for request in submission.requests)
            return submit(number, submission)

        session.submit = noting  # type: ignore[method-assign]
        variables = make_variables()
        step = use(lambda: gradients_of(variables, ([[1.0] * 3] * 2, SMALL)))
        for _ in range(3):
            step()
        return [name for name in sent if name.endswith(".uncompressed")]

    assert run_ranks(2, body) == [[], []]


CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "allreduce sum": lambda x: hvd.allreduce(x, name="x", op=hvd.Sum, compression=hvd.Compression.fp16) / 2,
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x], name="g", compression=hvd.Compression.fp16)[1],
    "reducescatter": lambda x: hvd.allgather(hvd.reducescatter(x, name="x", compression=hvd.Compression.fp16)),
    "grouped_reducescatter": lambda x: hvd.allgather(
        hvd.grouped_reducescatter([x, x], compression=hvd.Compression.fp16)[0]
    ),
}


@every_use
@pytest.mark.parametrize("call", few(CALLS, ["allreduce", "grouped_reducescatter"]))
def test_calls_are_right_too_and_differentiable(call: str, use: Any) -> None:
    def body(session: Session) -> tuple[list[float], list[float]]:
        @use
        def called(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = CALLS[call](x)
                total = tf.reduce_sum(found * 40000.0)  # whose gradient is large, too
            return found, tape.gradient(total, x)

        for value in ([2.0] * 4, [1e6, 2.0, 3.0, 4.0] if hvd.rank() else [2.0, 2.0, 3.0, 60000.0]):
            found, gradient = called(tf.constant(value))
        return found.numpy().tolist(), gradient.numpy().tolist()

    values = [(1e6 + 2.0) / 2, 2.0, 3.0, 30002.0]
    for found, gradient in run_ranks(2, body):
        assert found == values and np.isfinite(gradient).all() and gradient[0] == gradient[-1] != 0


def test_an_allreduce_in_a_session_of_tensorflow_1() -> None:
    def body(session: Session) -> list[float]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [2])
            found = hvd.allreduce(x, compression=hvd.Compression.fp16)
            return graph.run(found, {x: [1e6, 1.0]}).tolist()

    assert run_ranks(2, body) == [[1e6, 1.0]] * 2


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_other_compressions_never_look(compression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_ops, "_again", None)

    def body(session: Session) -> list[float]:
        return hvd.allreduce(tf.constant([1e6, float("inf")]), compression=compression).numpy().tolist()

    for found in run_ranks(2, body):
        assert found[0] == pytest.approx(1e6, rel=1e-2) and found[1] == float("inf")
