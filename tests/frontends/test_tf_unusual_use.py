"""What Keras scripts do besides compile and fit: freeze layers, load on one rank, change a decay, train two halves."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm_tf.keras.frontend import KerasFrontend  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

X = np.random.default_rng(1).standard_normal((32, 6), np.float32)
Y = X[:, :2] * 3


def two(second: float = 1.0) -> list[Any]:
    return [keras.Variable(np.full(3, value, np.float32), name=name) for name, value in (("a", 1.0), ("b", second))]


def model(seed: int = 1) -> Any:
    start = keras.initializers.GlorotUniform(seed)
    layers = [keras.layers.Dense(size, kernel_initializer=start) for size in (4, 2)]
    return keras.Sequential([keras.Input((6,)), *layers])


def fit(made: Any, callbacks: Any = ()) -> None:
    x, y = X[hvd.rank() :: 2], Y[hvd.rank() :: 2]
    made.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))


def values_of(variables: Any) -> list[np.ndarray]:
    return [v.numpy() for v in variables]


class TestFailedGraph:
    @pytest.mark.parametrize("next_is_eager", [False, True], ids=["graph", "eager"])
    def test_what_a_failed_run_has_made_ready_does_not_count(
        self, next_is_eager: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ready, mark_ready = threading.Semaphore(0), KerasFrontend.mark_ready

        def counted(frontend: KerasFrontend, *arguments: Any) -> None:
            mark_ready(frontend, *arguments)
            ready.release()

        monkeypatch.setattr(KerasFrontend, "mark_ready", counted)

        def train(fails: bool) -> list[np.ndarray]:
            is_failing = False

            @tf.custom_gradient
            def trap(x: Any) -> Any:
                def body(d: Any) -> Any:
                    if is_failing:
                        for _ in range(2):  # until the last layer's gradients are ready, whose exchange begins
                            assert ready.acquire(timeout=60)
                        raise ValueError("planned")
                    return d

                def gradient(d: Any) -> Any:
                    result = tf.numpy_function(body, [d], d.dtype)
                    result.set_shape(d.shape)
                    return result

                return tf.identity(x), gradient

            first, last = model().layers
            variables = [*first.trainable_variables, *last.trainable_variables]
            optimizer = hvd.DistributedEFSGD(keras.optimizers.SGD(0.01, momentum=0.9), variables)

            def step(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((last(trap(first(x))) - y) ** 2)
                optimizer.apply(tape.gradient(loss, variables), variables)

            graph = tf.function(step)
            for k in range(4):
                if k == 2 and fails:
                    is_failing = True
                    with pytest.raises(tf.errors.OpError, match="planned"):
                        graph(tf.ones((4, 6)), tf.fill((4, 2), 1e6))
                    is_failing = False
                use = step if k == 2 and next_is_eager else graph
                use(tf.constant(X[8 * k + 4 * hvd.rank() :][:4]), tf.constant(Y[8 * k + 4 * hvd.rank() :][:4]))
                while ready.acquire(blocking=False):
                    pass
            return values_of(variables)

        def body(session: Session) -> None:
            for wanted, found in zip(train(False), train(True), strict=True):
                np.testing.assert_array_equal(wanted, found)

        run_ranks(1, body)


class TestDense:
    def test_accumulated_gradients_of_some_variables_are_averaged(self) -> None:
        def body(session: Session) -> None:
            a, b = two()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
            optimizer.build([a, b])
            for _ in range(2):  # as after a layer was frozen
                optimizer.apply([tf.fill(3, 1.0 + hvd.rank())], [b])
            np.testing.assert_allclose([a.numpy(), b.numpy()], [[1.0] * 3, [0.85] * 3], rtol=1e-6)

        run_ranks(2, body)

    def test_the_broadcast_waits_for_the_first_step_of_accumulated_passes(self) -> None:
        def body(session: Session) -> Any:
            trained = model(1 + hvd.rank())
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
            trained.compile(optimizer, loss="mse", run_eagerly=True)
            fit(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
            return values_of(trained.trainable_variables)

        first, second = run_ranks(2, body)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

    @pytest.mark.parametrize("average", [False, True])
    def test_passes_are_summed_with_a_scaled_loss_too(self, average: bool) -> None:
        def body(session: Session) -> None:
            (v, _) = two()
            scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
            optimizer = hvd.DistributedOptimizer(
                scaling, backward_passes_per_step=2, average_aggregated_gradients=average
            )
            seen = []
            for _ in range(4):
                optimizer.apply([tf.fill(3, 8.0 * (1 + hvd.rank()))], [v])
                seen.append(float(v.numpy()[0]))
            moved = 0.15 if average else 0.3
            np.testing.assert_allclose(seen, [1.0, 1.0 - moved, 1.0 - moved, 1.0 - 2 * moved], rtol=1e-5)

        run_ranks(2, body)

    def test_the_rows_of_a_local_embedding_stay_local(self) -> None:
        def body(session: Session) -> None:
            table = tf.Variable(tf.ones((4, 2)))
            with tf.GradientTape() as tape:
                loss = (1.0 + hvd.rank()) * tf.reduce_sum(tf.gather(table, [0, 2]))
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(table)
            gradient = tape.gradient(loss, table)
            assert gradient.indices.numpy().tolist() == [0, 2]
            assert gradient.values.numpy().tolist() == [[0.5 * (1 + hvd.rank())] * 2] * 2

        run_ranks(2, body)

    def test_a_config_makes_a_plain_optimizer(self) -> None:
        def body(session: Session) -> None:
            for optimizer in (hvd.DistributedOptimizer(keras.optimizers.SGD(0.25)), compressed(0.25)):
                again = type(optimizer).from_config(optimizer.get_config())
                assert type(again) in (keras.optimizers.SGD, keras.optimizers.Adam)
                assert float(again.learning_rate.numpy()) == 0.25

        run_ranks(1, body)


def compressed(rate: float = 0.01, **options: Any) -> Any:
    return hvd.DistributedOneBitAdam(keras.optimizers.Adam(rate, **options), freeze_step=3)


class TestCompressed:
    @pytest.mark.parametrize(
        "wrap", [partial(hvd.DistributedOneBitAdam, freeze_step=2), hvd.DistributedZeroOneAdam], ids=["1-bit", "0/1"]
    )
    def test_hyperparameters_are_read_at_every_step(self, wrap: Any) -> None:
        def body(session: Session) -> None:
            options = {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.125, "weight_decay": 0.25}
            late, early = wrap(keras.optimizers.Adam(0.01)), wrap(keras.optimizers.Adam(0.01, **options))
            trained = two()[:1], two()[:1]
            for optimizer, variables in zip((late, early), trained, strict=True):
                optimizer.build(variables)
            for name, value in options.items():
                setattr(late, name, value)
            for step in range(5):
                for optimizer, variables in zip((late, early), trained, strict=True):
                    optimizer.apply([tf.constant([1.0, -2.0, step + hvd.rank()])], variables)
            assert np.array_equal(*values_of(v for (v,) in trained))

        run_ranks(2, body)

    @pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
    def test_a_gradient_that_one_rank_has_not_counts_as_zeros(self) -> None:
        def body(session: Session, is_missing: bool) -> Any:
            a, b = two()
            optimizer = compressed()
            optimizer.build([a, b])
            for step in range(4):
                lacking = None if is_missing else tf.zeros(3)
                optimizer.apply([tf.ones(3), lacking if hvd.rank() == 1 else step * tf.ones(3)], [a, b])
            return values_of([a, b])

        expected = run_ranks(2, lambda session: body(session, is_missing=False))
        found = run_ranks(2, lambda session: body(session, is_missing=True))
        assert all(np.array_equal(values, expected[0]) for values in (*expected, *found))

    def test_what_the_first_step_does_not_move_is_compared_too(self) -> None:
        def body(session: Session) -> None:
            a, b = two(1.0 + hvd.rank())
            optimizer = compressed()
            optimizer.build([a, b])
            said = r"not alike before their first step: .* hold '1.b' .* and fit with BroadcastGlobalVariablesCallback"
            with pytest.raises(MismatchError, match=said):
                optimizer.apply([tf.ones(3)], [a])

        run_ranks(2, body)

    @pytest.mark.short("Birder")
    @pytest.mark.parametrize("make", [compressed, lambda: hvd.DistributedBirder(keras.optimizers.SGD(0.01))],
                             ids=["1-bit Adam", "Birder"])  # fmt: skip
    def test_a_checkpoint_may_be_loaded_by_one_rank_before_the_broadcast(self, make: Any, tmp_path: Path) -> None:
        def body(session: Session) -> Any:
            path = tmp_path / f"{hvd.rank()}.weights.h5"
            trained = model()
            trained.compile(make(), loss="mse")
            fit(trained)
            trained.save_weights(path)
            results = []
            for loading in ([0], [0, 1]):
                again = model(5 + hvd.rank())
                again.compile(make(), loss="mse")
                again.optimizer.build(again.trainable_variables)
                if hvd.rank() in loading:
                    again.load_weights(path)
                fit(again, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
                assert int(again.optimizer.iterations.numpy()) == 8
                results.append(values_of(again.trainable_variables))
            return results

        (by_one, by_all), other = run_ranks(2, body)
        for a, b, c, d in zip(by_one, by_all, *other, strict=True):
            assert np.array_equal(a, b) and np.array_equal(a, c) and np.array_equal(a, d)


ADAMS = [compressed, *few([lambda: hvd.DistributedZeroOneAdam(keras.optimizers.Adam(0.01))], [])]


class TestMomentsOfTheVariables:
    """m and v are in the optimizer's variables for whoever reads them, and are taken from there."""

    @staticmethod
    def built(optimizer: Any, seed: int = 5) -> Any:
        made = model(seed)
        made.compile(optimizer, loss="mse")
        made.optimizer.build(made.trainable_variables)
        return made

    @pytest.mark.short("1-bit-")
    @pytest.mark.parametrize("make", ADAMS)
    @pytest.mark.parametrize("first", ["1-bit", "Adam"])
    def test_a_checkpoint_of_tensorflow_goes_on_as_a_saved_model_does(
        self, make: Any, first: str, tmp_path: Path
    ) -> None:
        def body(session: Session) -> Any:
            path = tmp_path / str(hvd.rank())
            path.mkdir()
            trained = self.built(make() if first == "1-bit" else hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
            fit(trained)
            trained.save_weights(path / "saved.weights.h5")
            saved = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(str(path / "checkpoint"))
            plain = self.built(keras.optimizers.Adam(0.01))
            tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).restore(saved).assert_existing_objects_matched()
            assert all(v.numpy().any() for v in plain.optimizer._momentums + plain.optimizer._velocities)
            results = []
            for restoring in ([], [0, 1], [0]):
                again = self.built(make(), 5 + hvd.rank())
                if not restoring:
                    again.load_weights(path / "saved.weights.h5")
                elif hvd.rank() in restoring:
                    checkpoint = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
                    checkpoint.restore(saved).assert_existing_objects_matched()
                fit(again, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
                assert int(again.optimizer.iterations.numpy()) == 8
                results.append(values_of(again.weights + again.optimizer.variables))
            return results

        for loaded, restored, by_one in run_ranks(2, body):
            for a, b, c in zip(loaded, restored, by_one, strict=True):
                assert np.array_equal(a, b) and np.array_equal(a, c)

    @pytest.mark.short("LossScaleOptimizer")
    @pytest.mark.parametrize("scaled", [False, True], ids=["", "LossScaleOptimizer"])
    def test_one_rank_may_restore_before_its_optimizer_is_built(self, scaled: bool, tmp_path: Path) -> None:
        def body(session: Session) -> Any:
            def compiled(seed: int) -> Any:
                made, adam = model(seed), keras.optimizers.Adam(0.01)
                inner = keras.optimizers.LossScaleOptimizer(adam, 8.0) if scaled else adam
                made.compile(hvd.DistributedOneBitAdam(inner, freeze_step=6), loss="mse")
                return made

            trained, again = compiled(1), compiled(5 + hvd.rank())
            fit(trained)
            saved = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(
                str(tmp_path / str(hvd.rank()))
            )
            fit(trained)
            if hvd.rank() == 0:
                tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(saved)
            fit(again, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
            return [values_of(each.weights + each.optimizer.variables) for each in (trained, again)]

        for expected, found in run_ranks(2, body):
            assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))

    @pytest.mark.long
    def test_assigned_variables_go_on_as_loaded_ones_also_with_accumulated_gradients(self) -> None:
        def body(session: Session) -> Any:
            trained, again = (self.built(compressed(gradient_accumulation_steps=2), seed) for seed in (1, 5))
            fit(trained)
            for mine, other in zip(again.variables + again.optimizer.variables,
                                   trained.variables + trained.optimizer.variables, strict=True):  # fmt: skip
                mine.assign(other)
            loaded = self.built(compressed(gradient_accumulation_steps=2))
            saved: dict[str, Any] = {}
            trained.optimizer.save_own_variables(saved)
            loaded.set_weights(trained.get_weights())
            loaded.optimizer.load_own_variables(saved)
            for goes_on in (again, loaded):
                fit(goes_on)
            return values_of(again.weights), values_of(loaded.weights)

        for mine, other in run_ranks(2, body):
            for a, b in zip(mine, other, strict=True):
                assert np.array_equal(a, b)

    def test_a_warm_start_may_come_from_a_checkpoint(self, tmp_path: Path) -> None:
        def body(session: Session) -> None:
            trained = self.built(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
            fit(trained)
            saved = tf.train.Checkpoint(optimizer=trained.optimizer).save(str(tmp_path / str(hvd.rank())))
            again = self.built(hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.01), warm_start=True))
            tf.train.Checkpoint(optimizer=again.optimizer).restore(saved)
            fit(again)
            assert again.optimizer.compression_report()["warm_start"]["step"] == 4

        run_ranks(2, body)

    def test_a_step_that_failed_after_a_load_is_no_restore(self) -> None:
        def body(session: Session) -> None:
            saved: dict[str, Any] = {}
            for store in ({}, saved):
                variables, optimizer = two(), compressed()
                optimizer.build(variables)
                if saved:
                    optimizer.load_own_variables(saved)
                    with pytest.raises(NonFiniteError):
                        optimizer.apply([tf.fill([3], np.inf)] * 2, variables)
                    optimizer.save_own_variables(store)
                for _ in range(2):
                    optimizer.apply([tf.ones(3)] * 2, variables)
                optimizer.save_own_variables(saved)
            assert int(optimizer.iterations.numpy()) == 4

        run_ranks(2, body)

    def test_a_restore_after_the_first_step_is_refused(self, tmp_path: Path) -> None:
        def body(session: Session) -> None:
            trained = self.built(compressed())
            fit(trained)
            checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
            saved = checkpoint.save(str(tmp_path / str(hvd.rank())))
            fit(trained)
            trained.optimizer.iterations.assign(100)  # of a schedule: m and v are what they were
            fit(trained)
            checkpoint.restore(saved)
            with pytest.raises(tf.errors.InvalidArgumentError, match="after step 12 something has written to Adam's m"):
                fit(trained)

        run_ranks(2, body)

    @pytest.mark.short("compressed")
    @pytest.mark.parametrize("make", [*ADAMS, lambda: hvd.DistributedEFSGD(keras.optimizers.SGD(0.01, momentum=0.9))])
    def test_going_back_to_before_the_first_step_is_refused_and_a_load_is_not(self, make: Any, tmp_path: Path) -> None:
        def body(session: Session) -> None:
            path = tmp_path / str(hvd.rank())
            path.mkdir()
            trained = self.built(make())
            checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
            saved = checkpoint.save(str(path / "checkpoint"))
            trained.save_weights(path / "saved.weights.h5")
            fit(trained)
            first = values_of(trained.weights)
            checkpoint.restore(saved)
            trained.load_weights(path / "saved.weights.h5")
            fit(trained)
            assert all(np.array_equal(a, b) for a, b in zip(first, values_of(trained.weights), strict=True))
            checkpoint.restore(saved)
            refused = "after step 4 something has written to Adam's m|went back from iteration 4 to 0.*did not. Restore"
            with pytest.raises(tf.errors.InvalidArgumentError, match=refused):
                fit(trained)

        run_ranks(2, body)

    @pytest.mark.parametrize("make", ADAMS)
    def test_moments_of_another_run_at_the_same_step_are_refused(self, make: Any) -> None:
        def body(session: Session) -> None:
            mine, other = (self.built(make(), seed) for seed in (1, 5))
            for each in (mine, other):
                fit(each)
            for variable, value in zip(mine.optimizer.variables, other.optimizer.variables, strict=True):
                variable.assign(value)
            with pytest.raises(tf.errors.InvalidArgumentError, match="after step 4 something has written to Adam's m"):
                fit(mine)

        run_ranks(2, body)

    def test_variables_that_were_kept_go_back_with_an_error(self) -> None:
        def body(session: Session) -> None:
            trained = self.built(compressed())
            fit(trained)
            kept = [(variable, variable.numpy()) for variable in trained.optimizer.variables]
            fit(trained)
            for variable, value in kept:
                variable.assign(value)
            with pytest.raises(tf.errors.InvalidArgumentError, match="after step 8 something has written to Adam's m"):
                fit(trained)

        run_ranks(2, body)

    @pytest.mark.parametrize("make", ADAMS)
    def test_who_reads_or_broadcasts_the_variables_or_sets_iterations_changes_nothing(
        self, make: Any, tmp_path: Path
    ) -> None:
        def body(session: Session) -> None:
            trained, touched = (self.built(make()) for _ in range(2))
            for _ in range(3):
                fit(trained)
                fit(touched, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
                touched.save_weights(tmp_path / f"{hvd.rank()}.weights.h5")
                touched.optimizer.iterations.assign(0)
            assert all(np.array_equal(a, b) for a, b in zip(trained.get_weights(), touched.get_weights(), strict=True))

        run_ranks(2, body)


class Pair(keras.Model):
    """Two halves, each with an optimizer of its own; the one that Keras knows of is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = [model(1 + hvd.rank()), model(3 + hvd.rank())]
        self.built = True

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for half, optimizer in zip(self.halves, (self.first, self.second), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((half(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, half.trainable_variables), half.trainable_variables)
        return {"loss": loss}


def test_callbacks_find_the_optimizers_that_a_model_has_as_attributes() -> None:
    def body(session: Session) -> Any:
        pair = Pair()
        pair.compile(compressed(), compressed())
        fit(pair, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.ReplicaChecksumCallback()])
        return values_of(pair.trainable_variables)

    first, second = run_ranks(2, body)
    assert len(first) == 8 and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="an older Keras")
class TestMultiOptimizer:
    @staticmethod
    def compiled(first: Any, second: Any, in_function: bool = False) -> Any:
        made = model(1 + hvd.rank())
        chosen: Any = keras.optimizers.OptimizerMap(first, {f".*{made.layers[0].name}/.*": second})
        made.compile(keras.optimizers.MultiOptimizer(chosen.__call__ if in_function else chosen), "mse")
        return made

    @pytest.mark.short("map")
    @pytest.mark.parametrize("in_function", [False, True], ids=["map", "function"])
    def test_the_optimizers_inside_are_distributed(self, in_function: bool) -> None:
        def body(session: Session) -> Any:
            inside = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), compressed()
            made = self.compiled(*inside, in_function)
            if hvd.rank() == 0:
                made.optimizer.iterations.assign(7)
            fit(made, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
            return values_of(made.weights + made.optimizer.variables)

        first, second = run_ranks(2, body)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

    def test_one_that_is_not_is_named(self) -> None:
        def body(session: Session) -> None:
            made = self.compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.Adam())
            with pytest.raises(InvalidRequestError, match="compiled with MultiOptimizer around Adam, which is not"):
                fit(made, [hvd.callbacks.MetricAverageCallback()])
            for wrap in (hvd.DistributedOptimizer, hvd.DistributedBirder):
                with pytest.raises(InvalidRequestError, match=r"this MultiOptimizer lets other .*: wrap each of them"):
                    wrap(made.optimizer)

        run_ranks(2, body)


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedBirder], ids=["dense", "1-bit"])
def test_another_backend_is_refused(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(InvalidRequestError, match=r"not on 'jax'; set KERAS_BACKEND=tensorflow or torch before"):
        wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
