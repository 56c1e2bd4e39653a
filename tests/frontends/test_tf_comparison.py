"""What averages gradients in TensorFlow compares what its ranks must hold alike, in eager mode, graphs and fit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import MismatchError, StallError  # noqa: E402
from ocomm.kernels.cpu import CpuKernels  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.comparison import GRACE  # noqa: E402
from ocomm.types import Settings  # noqa: E402
from ocomm_tf import engine  # noqa: E402
from ocomm_tf.replicas import comparison_of, options_of  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import PATIENCE_S, run_ranks  # noqa: E402

WITHIN = 8
STEPS = 4 * WITHIN
SETTINGS = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, replica_check_steps=WITHIN)
#: Before each step: (step, rank, model, optimizer)
Change = Callable[[int, int, Any, Any], Any]


def make_model(seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(20, activation="tanh", name="hidden"),
            keras.layers.Dense(6, name="last"),
        ]
    )
    model.set_weights([generator.normal(size=w.shape, scale=0.3).astype(np.float32) for w in model.get_weights()])
    return model


def batch(number: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(100 * number + rank)
    return generator.normal(size=(4, 12)).astype(np.float32), generator.normal(size=(4, 6)).astype(np.float32)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def in_a_loop(make_step: Callable[[Any, Any], Callable[[Any, Any], Any]]) -> Any:
    def train(model: Any, optimizer: Any, change: Change, rank: int, steps: int) -> None:
        step = make_step(model, optimizer)
        for number in range(steps):
            change(number, rank, model, optimizer)
            optimizer.now = number
            step(*(tf.constant(values) for values in batch(number, rank)))

    return train


def step_of_optimizer(model: Any, optimizer: Any) -> Any:
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


def step_of_tape(model: Any, optimizer: Any) -> Any:
    rates = tf.Variable(0.01)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape)
        variables = [v.value for v in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            # What does not depend on the gradient comes after the comparison, too.
            variable.assign(variable * 0.999)
            variable.assign_sub(rates * gradient)

    return step


def fit(model: Any, optimizer: Any, change: Change, rank: int, steps: int) -> None:
    class Changing(keras.callbacks.Callback):
        def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
            change(number, rank, model, optimizer)
            optimizer.now = number

    model.compile(optimizer, loss="mse", jit_compile=False)
    batches = [batch(number, rank) for number in range(steps)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[Changing()])


WAYS = {
    "eager": in_a_loop(step_of_optimizer),
    "graph": in_a_loop(lambda model, optimizer: tf.function(step_of_optimizer(model, optimizer))),
    "fit": fit,
    "tape": in_a_loop(step_of_tape),
    "tape in a graph": in_a_loop(lambda model, optimizer: tf.function(step_of_tape(model, optimizer))),
}
#: For every change: what adds to graphs.
SHORT = ("graph",)


OF_OPTIMIZERS = few(["eager", "graph", "fit"], SHORT)
every_way = pytest.mark.parametrize("way", few(WAYS, SHORT))


def told(
    way: str,
    change: Change,
    *,
    seed: Callable[[int], int] = lambda rank: 0,
    ranks: int = 2,
    steps: int = STEPS,
    settings: Settings = SETTINGS,
    **adam: Any,
) -> list[tuple[int, str]]:
    """In which step each rank is told that they differ, and how."""

    def body(session: Session) -> tuple[int, str]:
        rank = session.require_topology().rank
        model = make_model(seed(rank))
        optimizer = keras.optimizers.AdamW(**{"learning_rate": 1e-3, **adam})
        if "tape" not in way:
            optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.build(model.trainable_variables)  # a graph that did would be traced twice
        try:
            WAYS[way](model, optimizer, change, rank, steps)
        except (MismatchError, tf.errors.FailedPreconditionError, tf.errors.UnknownError) as error:
            return optimizer.now, str(error)
        return -1, ""

    return run_ranks(ranks, body, settings)


def nothing(*_: Any) -> None:
    pass


@every_way
def test_an_unequal_start_that_nobody_has_mended_is_an_error_after_the_grace_period(way: str) -> None:
    for number, message in told(way, nothing, seed=lambda rank: rank, steps=GRACE + 4):
        assert number == 1 + GRACE
        told_of = r"the replicas are still not alike after 17 steps: rank\(s\) \[0\] hold '\S*hidden/kernel(:0)?' with "
        assert re.search(told_of, message)
        assert "rank(s) [1] hold" in message and "or call broadcast_variables before the first step" in message


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_replicas_may_differ_until_one_of_them_takes_a_step(in_graph: bool) -> None:
    def body(session: Session) -> None:
        rank = session.require_topology().rank
        variable = tf.Variable([1.0 + rank, 2.0])

        def gradient() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(variable))
            return hvd.DistributedGradientTape(tape).gradient(loss, variable)

        take = tf.function(gradient) if in_graph else gradient
        assert [take().numpy().tolist() for _ in range(3)] == [[3.0, 4.0]] * 3
        if rank == 1:
            variable.assign_sub([0.0, 0.5])
        for _ in range(GRACE):
            take()
        with pytest.raises(tf.errors.FailedPreconditionError, match="still not alike after 17 steps"):
            take()

    run_ranks(2, body, SETTINGS)


@every_way
def test_a_broadcast_after_the_first_step_is_in_time(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 1:
            hvd.broadcast_variables(model.variables, 0)
            hvd.broadcast_variables(optimizer.variables, 0)

    assert told(way, change, seed=lambda rank: rank) == [(-1, "")] * 2


@pytest.mark.parametrize("way", OF_OPTIMIZERS)
def test_another_learning_rate_on_one_rank_is_told_in_that_step(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank == 1:  # as ReduceLROnPlateau on this rank's loss
            optimizer.learning_rate = 5e-4

    for number, message in told(way, change):
        assert number == 5
        assert (
            "hyperparameters differ: rank(s) [0] have learning_rate=0.001; rank(s) [1] have learning_rate=0.0005"
            in (message)
        )
        assert "average a loss before ReduceLROnPlateau sees it" in message


@pytest.mark.parametrize("way", OF_OPTIMIZERS)
def test_another_hyperparameter_on_one_rank_is_told_in_the_second_step(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 0 and rank == 1:
            optimizer.beta_1 = 0.8

    for number, message in told(way, change):
        assert number == 1 and "rank(s) [0] have beta_1=0.9; rank(s) [1] have beta_1=0.8" in message


@every_way
def test_a_checkpoint_that_one_rank_loads_is_told_within_so_many_steps(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank == 0:
            model.set_weights([value * 1.01 for value in model.get_weights()])

    found = told(way, change)
    assert len({number for number, _ in found}) == 1 and 5 <= found[0][0] < 5 + WITHIN
    assert all("the ranks' parameters have become different: rank(s) [0] hold '" in message for _, message in found)


@every_way
def test_one_weight_written_on_one_rank_is_told_within_so_many_steps(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 11 and rank == 1:
            kernel = model.layers[-1].kernel
            value = kernel.numpy()
            value[7, 3] += 0.25
            kernel.assign(value)

    found = told(way, change)
    assert len({number for number, _ in found}) == 1 and 11 <= found[0][0] < 11 + WITHIN
    assert all("kernel" in message and "rank(s) [1] hold" in message for _, message in found)


@every_way
def test_equal_ranks_are_never_told_anything(way: str) -> None:
    assert told(way, nothing, steps=200) == [(-1, "")] * 2


@pytest.mark.parametrize("way", ["eager", "fit"])
def test_equal_ranks_that_differ_in_the_names_of_their_optimizers_are_equal(way: str) -> None:
    def body(session: Session) -> None:
        rank = session.require_topology().rank
        rate = keras.optimizers.schedules.ExponentialDecay(1e-2, 3, 0.9, name=f"schedule{rank}")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9, name=f"sgd{rank}"))
        WAYS[way](make_model(), optimizer, nothing, rank, STEPS)

    run_ranks(2, body, SETTINGS)


@every_way
def test_0_switches_it_off(way: str) -> None:
    off = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, replica_check_steps=0)
    assert told(way, nothing, seed=lambda rank: rank, settings=off) == [(-1, "")] * 2


@every_way
def test_a_rank_that_has_joined_is_not_compared(way: str) -> None:
    def body(session: Session) -> list[list[float]]:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = keras.optimizers.SGD(0.01)
        if "tape" not in way:
            optimizer = hvd.DistributedOptimizer(optimizer)
        if rank < 2:
            WAYS[way](model, optimizer, nothing, rank, 2 * WITHIN)
        else:
            WAYS[way](model, optimizer, nothing, rank, 3)
            model.set_weights([value + 1 for value in model.get_weights()])
        hvd.join()
        return [w.tolist() for w in model.get_weights()]

    first, second, _ = run_ranks(3, body, SETTINGS)
    assert first == second


@pytest.mark.parametrize("way", ["eager", "fit"])
def test_accumulated_gradients_are_compared_when_they_are_averaged(way: str) -> None:
    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank == 1:
            optimizer.learning_rate = 5e-4

    assert [number for number, _ in told(way, change, gradient_accumulation_steps=4)] == [7, 7]


def test_steps_in_a_loop_inside_a_graph() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-2))
        optimizer.build(model.trainable_variables)
        step = step_of_optimizer(model, optimizer)
        x, y = (tf.constant(values) for values in batch(0, rank))

        @tf.function
        def steps(count: Any) -> None:
            for _ in tf.range(count):
                step(x, y)

        steps(tf.constant(50))
        if rank:
            model.layers[0].bias.assign_add(np.full(20, 0.5, np.float32))
        try:
            steps(tf.constant(WITHIN))
        except tf.errors.FailedPreconditionError as error:
            return str(error)
        return ""

    assert all("hidden/bias' with" in message or "bias' with" in message for message in run_ranks(2, body, SETTINGS))


@pytest.mark.parametrize("way", few(["graph", "tape in a graph"], ["graph"]))
def test_graphs_without_the_extension_compare_too(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_problem", "it is left out here")

    def change(number: int, rank: int, model: Any, optimizer: Any) -> None:
        if number == 5 and rank == 1:
            model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))

    found = told(way, change)
    assert len({number for number, _ in found}) == 1 and 5 <= found[0][0] < 5 + WITHIN
    assert told(way, nothing) == [(-1, "")] * 2


def test_two_averages_of_the_same_variables_that_are_under_way_at_once() -> None:
    def body(session: Session) -> list[float]:
        rank = session.require_topology().rank
        variable = tf.Variable(np.full(50, 2.0, np.float32), name="both")

        @tf.function
        def gradients() -> Any:
            results = []
            for factor in (1.0, 2.0, 3.0):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * variable) * (factor + rank)
                results.append(hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0])
            return results

        for _ in range(20):
            results = gradients()
        return [float(result[0]) for result in results]

    assert run_ranks(2, body, SETTINGS) == [[6.0, 10.0, 14.0]] * 2


def test_a_comparison_that_nobody_ends_does_not_hold_up_the_next_for_ever() -> None:
    settings = Settings(stall_check_s=0.5, stall_shutdown_s=1.0, replica_check_steps=WITHIN)

    def body(session: Session) -> str:
        variable = tf.Variable(np.ones(50, np.float32))
        comparison = comparison_of("Tape", "", ["left"], [variable], hvd.global_process_set)
        assert comparison is not None
        comparison.begin([])  # and then an interrupt
        with pytest.raises(StallError) as caught:
            comparison.begin([]).wait()
        return str(caught.value)

    for said in run_ranks(2, body, settings):
        assert "Tape: this comparison of the ranks has waited 1 s for the end of an earlier one" in said


@pytest.mark.parametrize("use", [tf.function, lambda function: function], ids=["graph", "eager"])
def test_gradients_of_plain_tensors_are_averaged_and_not_compared(use: Any) -> None:
    def body(session: Session) -> list[list[float]]:
        @use
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(x * x)
            return hvd.DistributedGradientTape(tape).gradient(loss, [x])[0]

        x = tf.constant([float(session.require_topology().rank), 1.0])
        return [gradient(x).numpy().tolist() for _ in range(3)]

    assert run_ranks(2, body, SETTINGS) == [[[1.0, 2.0]] * 3] * 2


def test_rows_of_an_embedding_are_not_compared() -> None:
    def body(session: Session) -> None:
        rank = session.require_topology().rank
        table = tf.Variable(np.zeros((40, 3), np.float32) + rank, name="table")
        weight = tf.Variable(np.ones((3, 1), np.float32), name="weight")
        for number in range(2 * WITHIN):
            with tf.GradientTape() as tape:
                rows = tf.gather(table, [number, 3, 3])
                loss = tf.reduce_sum(tf.matmul(rows, weight))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, [table, weight])
            assert isinstance(gradients[0], tf.IndexedSlices)

    run_ranks(2, body, SETTINGS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_byte_of_every_variable_is_in_one_window(dtype: str) -> None:
    from ocomm_tf.replicas import _in_memory, _nbytes

    shapes = [(3, 5), (1,), (0,), (), (7, 11)]
    variables = [tf.Variable(tf.zeros(shape, dtype), name=f"v{k}") for k, shape in enumerate(shapes)]
    kernels = CpuKernels()
    nbytes = np.array([_nbytes(v) for v in variables], np.int64)
    assert nbytes.tolist() == [int(np.prod(shape)) * tf.as_dtype(dtype).size for shape in shapes]
    for variable in variables:
        before = kernels.checksums(*_addresses(_in_memory, variables), nbytes)
        variable.assign(tf.ones(variable.shape, dtype))
        after = kernels.checksums(*_addresses(_in_memory, variables), nbytes)
        assert (before != after).sum() == (variable.shape.num_elements() > 0)


def _addresses(locate: Any, variables: Any) -> tuple[np.ndarray]:
    _addresses.kept = [locate(v) for v in variables]  # type: ignore[attr-defined]
    return (np.array([address for address, _ in _addresses.kept], np.uint64),)  # type: ignore[attr-defined]


def test_a_look_at_a_variable_copies_nothing() -> None:
    from ocomm_tf.replicas import _in_memory

    variable = tf.Variable(tf.zeros([1 << 20]))
    assert _in_memory(variable)[0] == _in_memory(variable)[0]


def test_options_are_what_the_constructors_of_the_class_name() -> None:
    plain = keras.optimizers.AdamW(weight_decay=0.1, clipnorm=1)
    found = options_of(keras.optimizers.LossScaleOptimizer(plain))
    assert {"weight_decay=0.1", "clipnorm=1.0", "beta_1=0.9", "initial_scale=32768.0"} <= set(found)
    assert not [line for line in found if line.startswith(("learning_rate", "name", "inner"))]


@pytest.mark.parametrize("way", OF_OPTIMIZERS)
def test_it_is_one_allreduce_of_40_bytes_per_rank_and_step(way: str) -> None:
    def body(session: Session) -> int:
        rank = session.require_topology().rank
        sent: list[tuple[int, ...]] = []
        submit = session.submit

        def noting(number: int, submission: Any) -> Any:
            sent.extend(request.shape for request in submission.requests if "compared" in request.name)
            return submit(number, submission)

        session.submit = noting  # type: ignore[method-assign]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        WAYS[way](make_model(), optimizer, nothing, rank, 5)
        assert set(sent) == {(80,)}
        return len(sent)

    assert run_ranks(2, body, SETTINGS) == [5] * 2
