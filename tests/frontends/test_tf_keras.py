"""Keras 3 and GradientTape on two ranks: equal replicas, as good as one process, and never a lonely training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
datasets = pytest.importorskip("sklearn.datasets")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm_tf import engine  # noqa: E402
from ocomm_tf.optimizer import trained_alone  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.world.test_runtime import threads_only  # noqa: E402
from tests.worlds import MPI_SIZE, PATIENCE_S, run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

IMAGES, LABELS = datasets.load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)
TRAIN, TEST = slice(0, 1408), slice(1408, None)
BATCH = 64


def make_model(seed: int = 1, hidden: int = 48) -> Any:
    keras_seed = keras.initializers.GlorotUniform
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(hidden, activation="relu", kernel_initializer=keras_seed(seed), name="hidden"),
            keras.layers.Dense(10, kernel_initializer=keras_seed(seed + 1), name="output"),
        ],
        name="digits",
    )


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer, loss=loss(), metrics=["accuracy"], **options)
    return model


def fit(model: Any, rank: int, size: int, epochs: int = 8, callbacks: Any = (), **options: Any) -> Any:
    """Every step takes the same images as one process would."""
    x, y = IMAGES[TRAIN][rank::size], LABELS[TRAIN][rank::size]
    return model.fit(
        x, y, batch_size=BATCH // size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks), **options
    )


def weights_of(model: Any) -> list[np.ndarray]:
    return [w.numpy() for w in model.trainable_weights]


def accuracy_of(model: Any) -> float:
    """As ``evaluate`` has it, without a graph of its own."""
    return float(np.mean(model(IMAGES[TEST]).numpy().argmax(axis=1) == LABELS[TEST]))


def assert_equal(results: list[list[np.ndarray]]) -> None:
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.array_equal(a, b)


@pytest.fixture(scope="module")
def alone() -> tuple[list[np.ndarray], list[float]]:
    """What a single process without ocomm learns: weights, and (loss, accuracy) on other images."""
    model = compiled(make_model(), keras.optimizers.Adam(3e-3))
    fit(model, 0, 1)
    return weights_of(model), model.evaluate(IMAGES[TEST], LABELS[TEST], verbose=0)


class TestFit:
    @pytest.mark.long
    @pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
    def test_ranks_together_learn_what_one_process_learns(self, size: int, alone: Any) -> None:
        def body(session: Session) -> Any:
            # Ranks start apart; the first batch ends with everything broadcast. A rate of zero there, so that it does
            # not matter what was learned in it.
            model = compiled(make_model(), hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3)))
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
            history = fit(model, hvd.rank(), size, callbacks=[*callbacks, hvd.callbacks.ReplicaChecksumCallback()])
            return weights_of(model), model.evaluate(IMAGES[TEST], LABELS[TEST], verbose=0), history.history["loss"]

        before = sum(engine.runs().values())
        results = run_ranks(size, body)
        steps, variables = 8 * (1408 // BATCH), 4
        here = 1 if MPI_SIZE else size
        assert sum(engine.runs().values()) - before == here * steps * variables
        assert_equal([weights for weights, _, _ in results])
        assert results[0][2] == results[1][2]  # the averaged metrics
        weights, (own_loss, own_accuracy), _ = results[0]
        assert max(np.abs(a - b).max() for a, b in zip(weights, alone[0], strict=True)) < 2e-3
        assert own_loss < 1.1 * alone[1][0] and own_accuracy > alone[1][1] - 0.005
        assert own_accuracy > 0.85

    @pytest.mark.long
    @pytest.mark.short("decay and fp16")
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0), groups=2),
                marks=pytest.mark.long,
            ),
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.AdamW(3e-3, weight_decay=1e-2, global_clipnorm=1.0), compression=hvd.Compression.fp16
            ),
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(3e-3, 20, 0.9)),
                backward_passes_per_step=2,
                gradient_predivide_factor=2.0,
            ),
            pytest.param(
                lambda: hvd.DistributedOptimizer(
                    keras.optimizers.Adam(3e-3, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5)
                ),
                marks=pytest.mark.long,
            ),
        ],
        ids=["momentum", "decay and fp16", "passes and schedule", "accumulation and averages"],
    )
    def test_options_of_keras_and_ours(self, make: Any) -> None:
        def body(session: Session) -> Any:
            model = compiled(make_model(seed=hvd.rank() + 3), make())
            fit(model, hvd.rank(), 2, 2, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
            return weights_of(model), accuracy_of(model)

        results = run_ranks(2, body)
        assert_equal([weights for weights, _ in results])
        assert results[0][1] > 0.3

    @pytest.mark.short("1 bit")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)),
            pytest.param(
                lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=3),
                marks=pytest.mark.long,
            ),
            pytest.param(
                lambda: hvd.DistributedOptimizer(
                    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
                ),
                marks=pytest.mark.long,
            ),
            lambda: hvd.DistributedLion(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=3)),
        ],
        ids=["accumulation", "passes", "loss scale", "1 bit"],
    )
    def test_a_broadcast_between_passes_leaves_each_rank_its_own_gradients(self, make: Any) -> None:
        """Ranks begin equal, so the callback changes nothing; its broadcast comes after the first of three passes."""

        def body(session: Session) -> Any:
            trained = []
            for callbacks in ([], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]):
                model = compiled(make_model(), make())
                fit(model, hvd.rank(), 2, 1, callbacks)
                trained.append(weights_of(model))
            return trained

        for plain, with_broadcast in run_ranks(2, body):
            assert_equal([plain, with_broadcast])

    def test_gradients_are_exchanged_once_per_accumulated_step(self) -> None:
        def body(session: Session) -> None:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), "once", backward_passes_per_step=4)
            fit(compiled(make_model(), optimizer), hvd.rank(), 2, 1)

        run_ranks(2, body)
        here = 1 if MPI_SIZE else 2
        ran = [n for name, n in engine.runs().items() if name.startswith("once")]
        assert sum(ran) == here * 4 * (1408 // BATCH // 4)

    @pytest.mark.long
    def test_summed_passes_are_one_larger_batch(self) -> None:
        def body(session: Session) -> Any:
            summed, averaged, plain = (
                hvd.DistributedOptimizer(keras.optimizers.SGD(rate), backward_passes_per_step=n,
                                         average_aggregated_gradients=average)
                for rate, n, average in ((0.05, 2, False), (0.1, 2, True), (0.1, 1, False))
            )  # fmt: skip
            models = []
            for optimizer, batch in ((summed, 16), (averaged, 16), (plain, 32)):
                model = compiled(make_model(), optimizer)
                x, y = IMAGES[TRAIN][hvd.rank() :: 2], LABELS[TRAIN][hvd.rank() :: 2]
                model.fit(x, y, batch_size=batch, epochs=1, verbose=0, shuffle=False)
                models.append(weights_of(model))
            return models

        for models in run_ranks(2, body):
            for weights in zip(*models, strict=True):
                np.testing.assert_allclose(weights[0], weights[2], atol=1e-4)
                np.testing.assert_allclose(weights[1], weights[2], atol=1e-4)

    def test_an_inf_on_one_rank_skips_the_step_on_all(self) -> None:
        def body(session: Session) -> Any:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
            optimizer.build(model.trainable_variables)
            trained = []
            for step in range(3):
                bad = step == 1 and hvd.rank() == 1
                value = np.inf if bad else 1024.0
                optimizer.apply([tf.fill(v.shape, value) for v in model.trainable_variables])
                trained.append(weights_of(model))
            return trained, float(optimizer.dynamic_scale.numpy()), int(optimizer.iterations.numpy())

        results = run_ranks(2, body)
        for trained, scale, steps in results:
            assert np.array_equal(trained[0][0], trained[1][0]) and not np.array_equal(trained[1][0], trained[2][0])
            assert scale == 2.0**14 and steps == 2
        assert_equal([trained[2] for trained, _, _ in results])

    @pytest.mark.skipif(MPI_SIZE > 0, reason="the policy would stay for the tests after this one")
    def test_mixed_precision_makes_the_optimizer_one_that_scales(self) -> None:
        def body(session: Session) -> Any:
            keras.config.set_dtype_policy("mixed_float16")  # of this thread
            model = make_model()
            inner = hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3))
            compiled(model, inner)
            assert model.optimizer is inner and isinstance(inner, keras.optimizers.LossScaleOptimizer)
            fit(model, hvd.rank(), 2, 2, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
            return weights_of(model)

        assert_equal(run_ranks(2, body))

    def test_an_embedding_sends_the_rows_it_has_used(self) -> None:
        def body(session: Session) -> Any:
            model = keras.Sequential([keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)])
            compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
            x = np.arange(64).reshape(16, 4) % (20 + 10 * hvd.rank())
            model.fit(
                x, np.arange(16) % 2, epochs=2, verbose=0,
                callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
            )  # fmt: skip
            return weights_of(model)

        assert_equal(run_ranks(2, body))

    def test_local_layers_stay_local(self) -> None:
        def body(session: Session) -> Any:
            model = make_model()
            hidden, _ = model.layers
            optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=hidden)
            optimizer.apply(
                [tf.fill(v.shape, 1.0 + hvd.rank()) for v in model.trainable_variables], model.trainable_variables
            )
            start = weights_of(make_model())
            return [float((a - b).reshape(-1)[0]) for a, b in zip(start, weights_of(model), strict=True)]

        for rank, moved in enumerate(run_ranks(2, body)):
            np.testing.assert_allclose(moved, [0.05 * (1 + rank)] * 2 + [0.15] * 2, rtol=1e-4)

    @pytest.mark.parametrize("way", ["eager", "graph", "accumulated", "scaled"])
    def test_a_norm_over_local_layers_and_others_clips_neither(self, way: str) -> None:
        def body(session: Session) -> None:
            model = make_model()
            accumulation = 2 if way == "accumulated" else None
            inner = keras.optimizers.SGD(0.1, global_clipnorm=0.1, gradient_accumulation_steps=accumulation)
            if way == "scaled":
                inner = keras.optimizers.LossScaleOptimizer(inner)
            optimizer = hvd.PartialDistributedOptimizer(inner, local_layers=model.layers[0])
            optimizer.build(model.trainable_variables)
            apply = tf.function(optimizer.apply) if way == "graph" else optimizer.apply
            gradients = [tf.fill(v.shape, 1.0 + hvd.rank()) for v in model.trainable_variables]
            with pytest.raises(
                InvalidRequestError, match=r"global_clipnorm=0\.1 clips .* the local variable '.*kernel'"
            ):
                for _ in range(accumulation or 1):
                    apply(gradients)

        run_ranks(2, body)

    def test_a_norm_over_local_layers_alone_clips_them(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            for layer in model.layers:
                optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.1)
                optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[0])
                gradients = [tf.fill(v.shape, 1.0 - 2.0 * hvd.rank()) for v in layer.trainable_variables]
                optimizer.apply(gradients, layer.trainable_variables)
            return weights_of(model)

        first, second = run_ranks(2, body)
        assert [np.array_equal(a, b) for a, b in zip(first, second, strict=True)] == [False] * 2 + [True] * 2

    def test_batch_statistics_are_those_of_all_ranks(self) -> None:
        def body(session: Session) -> Any:
            layer, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
            x = IMAGES[:32]
            for use in (tf.function, lambda f: f):
                out = use(lambda x: layer(x, training=True))(tf.constant(x[hvd.rank() :: 2]))
                whole = plain(x, training=True).numpy()
                np.testing.assert_allclose(out.numpy(), whole[hvd.rank() :: 2], atol=2e-4)
            np.testing.assert_allclose(layer.moving_variance.numpy(), plain.moving_variance.numpy(), atol=1e-5)

        run_ranks(2, body)

    @pytest.mark.short("24 and 8 rows")
    @pytest.mark.parametrize("split", [[0, 24], [0, 0]], ids=["24 and 8 rows", "no and 32 rows"])
    def test_batch_statistics_keep_their_digits_where_the_mean_is_large(self, split: list[int]) -> None:
        def body(session: Session) -> None:
            start, end = [*split, 32][hvd.rank() :][:2]
            generator = np.random.default_rng(5)
            x, w = (generator.standard_normal((32, 4, 3), np.float32) for _ in range(2))
            x += np.float32(1e3)

            def outputs_and_gradients(layer: Any, x: Any, w: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    out = layer(x, training=True)
                    loss = tf.reduce_sum(out * w)
                return out, tape.gradient(loss, x)

            for use in (tf.function, lambda f: f):
                layer, plain = hvd.SyncBatchNormalization(momentum=0.0), keras.layers.BatchNormalization()
                own = tf.constant(x[start:end]), tf.constant(w[start:end])
                out, gradient = use(outputs_and_gradients)(layer, *own)
                exact, expected = outputs_and_gradients(plain, tf.constant(x), tf.constant(w))
                wide = x.astype(np.float64)
                np.testing.assert_allclose(layer.moving_variance.numpy(), wide.var((0, 1)), rtol=1e-5)
                np.testing.assert_allclose(layer.moving_mean.numpy(), wide.mean((0, 1)), rtol=1e-6)
                np.testing.assert_allclose(out.numpy(), exact.numpy()[start:end], atol=2e-3)
                np.testing.assert_allclose(gradient.numpy(), expected.numpy()[start:end], atol=2e-3)

        run_ranks(2, body)

    @pytest.mark.long
    def test_second_derivatives_are_those_of_all_ranks_batches(self) -> None:
        x, w, v = np.random.default_rng(5).standard_normal((3, 8, 3))

        def normalized(x: Any) -> Any:  # Keras leaves the mean out of the second derivatives of its variance
            deviations = x - tf.reduce_mean(x, 0)
            return deviations / tf.sqrt(tf.reduce_mean(deviations**2, 0) + 1e-3)

        def penalty_gradient(layer: Any, rows: slice) -> Any:
            given = tf.constant(x[rows])
            with tf.GradientTape() as outer:
                outer.watch(given)
                with tf.GradientTape() as inner:
                    inner.watch(given)
                    loss = tf.reduce_sum(tf.tanh(layer(given) * w[rows]) ** 2)
                penalty = tf.reduce_sum(inner.gradient(loss, given) * v[rows])
            return outer.gradient(penalty, given)

        def body(session: Session) -> None:
            layer = hvd.SyncBatchNormalization(epsilon=1e-3, dtype="float64")
            expected = penalty_gradient(normalized, slice(8)).numpy()
            rows = [slice(3), slice(3, 8)][hvd.rank()]
            for use in (tf.function, lambda f: f):
                found = use(lambda: penalty_gradient(lambda x: layer(x, training=True), rows))()
                np.testing.assert_allclose(found.numpy(), expected[rows], rtol=1e-9, atol=1e-12)

        run_ranks(2, body)


def adam(rate: float = 3e-3, **options: Any) -> Any:
    return keras.optimizers.Adam(rate, **options)


class TestCompressed:
    @pytest.mark.long
    @pytest.mark.short("1-bit Adam")
    @pytest.mark.parametrize(
        ("make", "ratio"),
        [
            (lambda: hvd.DistributedOneBitAdam(adam(clipnorm=1.0), freeze_step=60), 20),
            *few(
                [
                    (lambda: hvd.DistributedZeroOneAdam(keras.optimizers.AdamW(3e-3, weight_decay=1e-3)), 20),
                    (lambda: hvd.DistributedBirder(keras.optimizers.SGD(2e-3), beta=0.8), 20),
                    (lambda: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(2e-3), beta=0.8), 0.9),
                    (lambda: hvd.DistributedLion(keras.optimizers.Lion(2e-3, weight_decay=1e-2)), 20),
                    (
                        lambda: hvd.DistributedOneBitLamb(
                            keras.optimizers.Lamb(1e-2), freeze_step=60, max_grad_norm=1.0
                        ),
                        20,
                    ),
                ],
                lambda make, ratio: ratio < 1,
            ),
        ],
        ids=["1-bit Adam", "0/1 Adam", "Birder", "SoftSignSGD", "Lion", "1-bit LAMB"],
    )
    def test_replicas_are_equal_and_learn(self, make: Any, ratio: float, alone: Any) -> None:
        def body(session: Session) -> Any:
            model = compiled(make_model(hvd.rank() + 1), make())
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.ReplicaChecksumCallback()]
            fit(model, hvd.rank(), 2, 8, callbacks)
            report = model.optimizer.compression_report()
            assert report["step"] == 8 * (1408 // BATCH) and report["last_ratio"] > ratio
            return weights_of(model), accuracy_of(model)

        results = run_ranks(2, body)
        assert_equal([weights for weights, _ in results])
        assert results[0][1] > alone[1][1] - 0.05

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda adam, **options: hvd.DistributedOneBitAdam(adam, freeze_step=6, **options),
            *few([hvd.DistributedZeroOneAdam, hvd.DistributedLion], []),
        ],
        ids=["1-bit Adam", "0/1 Adam", "Lion"],
    )
    def test_gradients_leave_before_the_step_and_nothing_else_changes(self, wrap: Any) -> None:
        def body(session: Session) -> Any:
            results = []
            for overlap in (True, False):
                rate = keras.optimizers.schedules.ExponentialDecay(3e-3, 5, 0.9)
                model = compiled(make_model(), wrap(adam(rate), overlap=overlap))
                model.optimizer.build(model.trainable_variables)
                stepper = model.optimizer._frontend.driver.stepper
                posted: list[list[int]] = []
                step = model.optimizer._frontend.step
                model.optimizer._frontend.step = lambda *a, step=step, stepper=stepper, posted=posted: (
                    posted.append(stepper.buckets.posted_tensors if stepper.begun else []),
                    step(*a),
                )[1]
                fit(model, hvd.rank(), 2, 1)
                assert model.optimizer.compression_report()["redone_steps"] == 0
                results.append((posted, weights_of(model)))
            return results

        for (early, with_overlap), (late, without) in run_ranks(2, body):
            assert not early[0] and all(sorted(tensors) == [0, 1, 2, 3] for tensors in early[1:])
            assert len(early) == 1408 // BATCH and not any(late)
            assert_equal([with_overlap, without])

    @pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's log is another process's")
    def test_clipping_by_keras_is_a_warning_that_names_our_own(self, caplog: pytest.LogCaptureFixture) -> None:
        def body(session: Session) -> None:
            hvd.DistributedLion(keras.optimizers.SGD(1e-3, clipnorm=0.5), make_model())
            hvd.DistributedLion(keras.optimizers.SGD(1e-3, global_clipnorm=0.5), make_model())
            hvd.DistributedLion(keras.optimizers.SGD(1e-3), make_model(), max_grad_norm=0.5)
            with pytest.raises(InvalidRequestError, match=r"max_grad_norm=0.5, and the SGD has global_clipnorm=0.1"):
                hvd.DistributedLion(keras.optimizers.SGD(1e-3, global_clipnorm=0.1), max_grad_norm=0.5)

        with caplog.at_level("WARNING", "ocomm"):
            run_ranks(2, body)
        (said,) = [each.getMessage() for each in caplog.records if "clips" in each.getMessage()]
        assert said == (
            "DistributedLion: clipnorm=0.5 clips each rank's gradients by themselves, before they are averaged. Use "
            "global_clipnorm= instead, or max_grad_norm= of the 1-bit optimizer: both clip by the norm of the averaged "
            "gradient."
        )

    def test_a_global_clipnorm_of_keras_is_that_of_the_averaged_gradient(self) -> None:
        def body(session: Session) -> Any:
            found = []
            for inner, ours in (({"global_clipnorm": 0.05}, {}), ({}, {"max_grad_norm": 0.05})):
                adam = keras.optimizers.Adam(3e-3, **inner)
                model = compiled(make_model(), hvd.DistributedOneBitAdam(adam, freeze_step=5, **ours))
                fit(model, hvd.rank(), 2, 1)
                found.append((weights_of(model), model.optimizer.compression_report()["grad_norm"]))
            (weights, norm), (expected, expected_norm) = found
            assert norm == expected_norm > 0.05
            assert_equal([weights, expected])

        run_ranks(2, body)

    @pytest.mark.long
    def test_schedules_accumulation_and_averages_of_keras(self) -> None:
        def body(session: Session) -> Any:
            rate = keras.optimizers.schedules.ExponentialDecay(3e-3, 10, 0.9)
            inner = keras.optimizers.Adam(rate, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5)
            model = compiled(make_model(), hvd.DistributedOneBitAdam(inner, freeze_step=10))
            fit(model, hvd.rank(), 2, 2)
            assert model.optimizer.compression_report()["step"] == 22
            return weights_of(model)

        assert_equal(run_ranks(2, body))

    def test_an_inf_on_one_rank_skips_the_step_on_all(self) -> None:
        def body(session: Session) -> Any:
            model = make_model()
            optimizer = hvd.DistributedOneBitAdam(keras.optimizers.LossScaleOptimizer(adam()), model, freeze_step=2)
            trained = []
            for step in range(5):
                value = np.inf if step == 3 and hvd.rank() == 1 else 1024.0
                optimizer.apply([tf.fill(v.shape, value) for v in model.trainable_variables])
                trained.append(weights_of(model))
            assert float(optimizer.dynamic_scale.numpy()) == 2.0**14
            assert optimizer.compression_report()["step"] == 4
            return trained

        for trained in run_ranks(2, body):
            assert np.array_equal(trained[2][0], trained[3][0]) and not np.array_equal(trained[3][0], trained[4][0])

    @pytest.mark.parametrize("way", [lambda f: f, tf.function], ids=["eager", "graph"])
    def test_a_nan_is_an_error_on_all_ranks_and_changes_nothing(self, way: Any) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedBirder(keras.optimizers.SGD(0.1), model)
            before = weights_of(model)
            value = np.nan if hvd.rank() == 1 else 1.0
            gradients = [tf.fill(v.shape, value) for v in model.trainable_variables]
            with pytest.raises(tf.errors.FailedPreconditionError, match="NaN") as caught:
                way(lambda: optimizer.apply(gradients))()
            assert isinstance(caught.value, NonFiniteError) or "NonFiniteError: " in caught.value.message
            assert_equal([before, weights_of(model)])

        run_ranks(2, body)

    @pytest.mark.long
    @pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough")
    @pytest.mark.parametrize(
        "wrap", [partial(hvd.DistributedOneBitAdam, freeze_step=10), *few([hvd.DistributedZeroOneAdam], [])]
    )
    def test_plain_adam_goes_on_from_a_saved_model_and_so_do_we(self, tmp_path: Path, wrap: Any) -> None:
        def body(session: Session) -> None:
            path = tmp_path / f"{hvd.rank()}.keras"
            model = compiled(make_model(), wrap(adam()))
            fit(model, hvd.rank(), 2, 1)
            model.save(path)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is keras.optimizers.Adam and int(plain.optimizer.iterations.numpy()) == 22
            assert all(np.abs(v.numpy()).max() > 0 for v in plain.optimizer._velocities)
            again = compiled(make_model(), wrap(adam()))
            again.optimizer.build(again.trainable_variables)
            again.load_weights(path)
            for mine, saved in zip(again.optimizer.variables, plain.optimizer.variables, strict=True):
                assert np.array_equal(mine.numpy(), saved.numpy())
            fit(again, hvd.rank(), 2, 1)
            assert int(again.optimizer.iterations.numpy()) == 44

        run_ranks(2, body)

    def test_replicas_of_more_variables_on_one_rank_are_named(self) -> None:
        def body(session: Session) -> None:
            variables = [tf.Variable([1.0]) for _ in range(3)][: 2 + hvd.rank()]
            with pytest.raises(MismatchError, match=r"number of variables .*: 2 on ranks \[0\], 3 on ranks \[1\]"):
                hvd.check_replicas(variables)

        run_ranks(2, body)

    def test_what_cannot_be_wrapped_is_named(self) -> None:
        def body(session: Session) -> None:
            used = adam()
            used.build(make_model().trainable_variables)
            wide = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="float64")])
            for wrong, text in (
                (lambda: hvd.DistributedOneBitAdam(keras.optimizers.SGD(0.1)), "not SGD; use DistributedEFSGD for SGD"),
                (lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adagrad(0.1)), "not Adagrad; use DistributedOpt"),
                (lambda: hvd.DistributedBirder(adam(), op=hvd.Sum), "^op=Sum: a 1-bit optimizer averages gradients"),
                (
                    lambda: hvd.DistributedLion(adam(), compression=hvd.Compression.fp16),
                    "^compression=FP16Compressor: ",
                ),
                (lambda: hvd.DistributedOneBitAdam(of_keras_2()), r"is of Keras 2 \(tf_keras, .* unset TF_USE_LEGACY"),
                (lambda: hvd.DistributedLion(of_keras_2()), "^this Adam is of Keras 2"),
                (lambda: hvd.DistributedDiLoCo(of_keras_2()), "^this Adam is of Keras 2"),
                (lambda: hvd.callbacks.MetricAverageCallback().set_model(of_keras_2()), "^this Adam is of Keras 2"),
                (lambda: hvd.callbacks.CompressionReportCallback().set_model(of_keras_2()), "^this Adam is of Keras 2"),
                (lambda: hvd.DistributedZeroOneAdam(adam(amsgrad=True)), "amsgrad=True is not supported"),
                (lambda: hvd.DistributedOneBitAdam(used), "has been used already"),
                (lambda: hvd.DistributedBirder(hvd.DistributedBirder(adam())), "distributed already"),
                (lambda: hvd.DistributedBirder(adam(), wide), "needs float32, bfloat16 or float16"),
                (lambda: hvd.DistributedBirder(adam()).compression_report(), "before the optimizer is built"),
            ):
                with pytest.raises(InvalidRequestError, match=text):
                    wrong()

        run_ranks(1, body)


def of_keras_2() -> Any:
    """Something of tf_keras."""
    return type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})()


class FailsBeforeTheFirstBatch(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        raise ZeroDivisionError


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class TestCopies:
    def test_in_a_graph_a_variable_takes_the_memory_of_its_new_value_without_a_copy(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            model = compiled(model, hvd.DistributedBirder(keras.optimizers.SGD(1e-3)))
            model.optimizer.build(model.trainable_variables)
            frontend = model.optimizer._frontend
            step, came, gave = frontend.step, [], []

            def watched(lr: float, indices: Any, gradients: Any, values: Any) -> Any:
                came.append([address(value) for value in values])
                results = step(lr, indices, gradients, values)
                gave.append([address(result) for result in results])
                assert not {address(parameter) for parameter in frontend.parameters} & set(gave[-1])
                return results

            frontend.step = watched
            fit(model, hvd.rank(), 2, 1)
            assert came[1:] == gave[:-1]

        run_ranks(2, body)


class TestSaving:
    @pytest.mark.long
    @pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough")
    def test_a_saved_model_goes_on_with_and_without_ocomm(self, tmp_path: Path) -> None:
        def body(session: Session) -> None:
            path = tmp_path / f"{hvd.rank()}.keras"
            model = compiled(make_model(), hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3)))
            fit(model, hvd.rank(), 2, 1)
            model.save(path)
            again = hvd.load_model(path)
            assert type(again.optimizer) is not keras.optimizers.Adam
            for before, after in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
                assert np.array_equal(before.numpy(), after.numpy())
            fit(again, hvd.rank(), 2, 1)
            assert again.optimizer.ocomm_exchanges and int(again.optimizer.iterations.numpy()) == 44

        run_ranks(2, body)
        self._goes_on_with_keras_alone(tmp_path / "0.keras")

    def _goes_on_with_keras_alone(self, path: Path) -> None:
        script = (
            "import keras, sys; model = keras.models.load_model(sys.argv[1]); "
            "print(type(model.optimizer) is keras.optimizers.Adam, int(model.optimizer.iterations.numpy()), "
            "any(name.startswith('ocomm') for name in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=200)
        assert done.stdout.split() == ["True", "22", "False"], done.stderr

    @pytest.mark.short("1-bit Adam")
    @pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough")
    @pytest.mark.parametrize(
        ("make", "wrap"),
        [
            (adam, lambda optimizer: hvd.DistributedOneBitAdam(optimizer, freeze_step=6)),
            (lambda: keras.optimizers.SGD(0.01, momentum=0.9), hvd.DistributedEFSGD),
        ],
        ids=["1-bit Adam", "EF-SGD"],
    )
    def test_a_saved_1_bit_run_goes_on_with_1_bit_where_load_model_is_told_to(
        self, make: Any, wrap: Any, tmp_path: Path
    ) -> None:
        def body(session: Session) -> None:
            path = tmp_path / f"{hvd.rank()}.keras"
            model = compiled(make_model(), wrap(make()))
            fit(model, hvd.rank(), 2, 1)
            model.save(path)
            again = hvd.load_model(path, wrap=wrap, compression=hvd.Compression.fp16)
            assert again.optimizer._frontend is not None and int(again.optimizer.iterations.numpy()) == 22
            for mine, theirs in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
                assert np.array_equal(mine.numpy(), theirs.numpy()), mine.path
            history = fit(again, hvd.rank(), 2, 1, [hvd.callbacks.CompressionReportCallback("of ")]).history
            report = again.optimizer.compression_report()
            assert history["of compressed_steps"] == [22] and history["of ratio"] == [report["ratio"]]
            assert (report["dense_steps"], report["compressed_steps"]) == (0, 22)
            hvd.check_replicas(again.trainable_variables)

        run_ranks(2, body)


class TestTape:
    @pytest.mark.long
    def test_a_loop_in_a_graph_trains_equal_replicas(self, alone: Any) -> None:
        def body(session: Session) -> Any:
            model, optimizer, criterion = make_model(hvd.rank() + 1), keras.optimizers.Adam(3e-3), loss()

            @tf.function
            def step(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    value = criterion(y, model(x, training=True))
                tape = hvd.DistributedGradientTape(tape)
                gradients = tape.gradient(value, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            hvd.broadcast_variables(model.variables, 0)
            x, y = IMAGES[TRAIN][hvd.rank() :: 2], LABELS[TRAIN][hvd.rank() :: 2]
            for start in list(range(0, len(x), BATCH // 2)) * 8:
                step(x[start : start + BATCH // 2], y[start : start + BATCH // 2])
            return weights_of(model)

        results = run_ranks(2, body)
        assert_equal(results)
        assert max(np.abs(a - b).max() for a, b in zip(results[0], alone[0], strict=True)) < 2e-3

    def test_eager_tapes_persistent_and_local_sources(self) -> None:
        def body(session: Session) -> None:
            a, b = tf.Variable([2.0], name="a"), tf.Variable([3.0], name="b")
            for use in (tf.function, lambda f: f):

                @use
                def gradients() -> Any:
                    with tf.GradientTape(persistent=True) as tape:
                        y = (1.0 + hvd.rank()) * a * b
                    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
                    tape.register_local_source(b)
                    return tape.gradient(y, {"a": a, "b": b}), tape.gradient(y, [a])

                both, (again,) = gradients()
                assert both["a"].numpy().tolist() == again.numpy().tolist() == [9.0]
                assert both["b"].numpy().tolist() == [1.0 + hvd.rank()]

        run_ranks(2, body)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(3e-3)), marks=pytest.mark.long),
        lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(3e-3), freeze_step=6),
    ],
    ids=["dense", "1-bit"],
)
def test_without_the_extension_fit_learns_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: Session) -> list[np.ndarray]:
        model = compiled(make_model(), make())
        fit(model, hvd.rank(), 2, 1)
        return weights_of(model)

    with_it = run_ranks(2, body)
    monkeypatch.setattr(engine, "_problem", "the test says so")
    assert_equal([*with_it, *run_ranks(2, body)])


@threads_only
def test_a_step_in_a_graph_is_known_to_end_before_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it a deadlock in that step could not be proven.
    enclosed_step, entered = Session.enclosed_step, []
    monkeypatch.setattr(Session, "enclosed_step", lambda session: entered.append(session) or enclosed_step(session))
    monkeypatch.setattr(engine, "_calls", [])  # of graphs of other tests
    monkeypatch.setattr(engine, "steppers", weakref.WeakSet())

    def body(session: Session) -> None:
        fit(compiled(make_model(), hvd.DistributedOneBitAdam(keras.optimizers.Adam(3e-3), freeze_step=6)), 0, 1, 1)

    run_ranks(1, body)
    assert len(entered) == 1408 // BATCH


class TestNeverAlone:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            lambda: hvd.callbacks.MetricAverageCallback(),
            lambda: hvd.callbacks.LearningRateWarmupCallback(1e-3),
            lambda: hvd.callbacks.ReplicaChecksumCallback(),
        ],
        ids=["broadcast", "metrics", "warm-up", "checksum"],
    )
    def test_an_optimizer_that_is_not_distributed_is_refused_by_every_callback(self, make: Any) -> None:
        def body(session: Session) -> None:
            model = compiled(make_model(), keras.optimizers.Adam(1e-3))
            with pytest.raises(InvalidRequestError, match=r"compiled with Adam, which is not distributed"):
                fit(model, hvd.rank(), 2, 1, [make()])

        run_ranks(2, body)

    @pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's log is another process's")
    @pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, lambda optimizer: optimizer], ids=["wrapped", "plain"])
    def test_batches_without_an_exchange_are_refused(
        self, wrap: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Lonely(keras.Sequential):
            def train_step(self, data: Any) -> dict[str, Any]:
                return {"loss": tf.constant(0.0)}

        def body(session: Session) -> None:
            model = Lonely(make_model().layers)
            model.compile(wrap(keras.optimizers.Adam(1e-3)), loss=loss())
            broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            model.fit(IMAGES[:32], LABELS[:32], batch_size=16, verbose=0, callbacks=[broadcast])
            hvd.barrier()
            monkeypatch.setattr(hvd.callbacks, "_MOST_ADDED_UP", 2)
            with pytest.raises(InvalidRequestError, match=r"first 2 batch\(es\) were trained without any exchange"):
                fit(model, hvd.rank(), 2, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

        run_ranks(2, body)
        said = [record.getMessage() for record in caplog.records if "without any exchange" in record.getMessage()]
        assert said == ["2 batches were trained without any exchange between the ranks"]

    @pytest.mark.parametrize("eagerly", [False, True])
    def test_a_train_step_may_average_by_itself_and_after_some_batches(self, eagerly: bool) -> None:
        """The collectives have no names; in a graph they are counted all the same."""
        # Exchanges are counted by process: no rank may begin its next batch before the others have looked.
        looked = threading.Barrier(1 if MPI_SIZE else 2)

        class Adding(keras.Sequential):
            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    value = self.compute_loss(x, y, self(x, training=True))
                gradients = tape.gradient(value, self.trainable_variables)
                self.kept = [*getattr(self, "kept", []), *gradients]
                if not eagerly or len(self.kept) > len(gradients):  # a graph that accumulates needs tf.cond
                    averages = [hvd.allreduce(sum(self.kept[n :: len(gradients)])) for n in range(len(gradients))]
                    self.kept = []
                    self.optimizer.apply(averages, self.trainable_variables)
                return {"loss": value}

        def body(session: Session) -> Any:
            model = Adding(make_model(hvd.rank() + 1).layers)
            model.compile(keras.optimizers.Adam(1e-3), loss=loss(), run_eagerly=eagerly)
            together = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: looked.wait(PATIENCE_S))
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), together]
            model.fit(IMAGES[:64], LABELS[:64], batch_size=16, verbose=0, shuffle=False, callbacks=callbacks)
            return weights_of(model)

        assert_equal(run_ranks(2, body))

    @pytest.mark.parametrize("eagerly", [False, True])
    def test_a_train_step_with_a_tape_of_ours_may_have_a_plain_optimizer(self, eagerly: bool) -> None:
        class Taped(keras.Sequential):
            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    value = self.compute_loss(x, y, self(x, training=True))
                gradients = hvd.DistributedGradientTape(tape).gradient(value, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                return {"loss": value}

        def body(session: Session) -> Any:
            model = Taped(make_model(hvd.rank() + 1).layers)
            model.compile(keras.optimizers.Adam(1e-3), loss=loss(), run_eagerly=eagerly)
            for _ in range(2):  # the second time nothing is traced any more
                callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
                model.fit(IMAGES[:64], LABELS[:64], batch_size=16, verbose=0, callbacks=callbacks)
            return weights_of(model)

        assert_equal(run_ranks(2, body))

    @pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough")
    def test_without_any_callback_the_end_of_the_process_finds_what_was_trained_alone(self, tmp_path: Path) -> None:
        """The search alone: it takes place at exit, for which a process of this suite has exchanged too much."""

        def body(session: Session) -> None:
            plain, other = (compiled(make_model(), keras.optimizers.Adam(1e-3)) for _ in range(2))
            assert trained_alone([plain, other]) == []
            with pytest.raises(ZeroDivisionError):
                other.fit(IMAGES[TRAIN], LABELS[TRAIN], verbose=0, callbacks=[FailsBeforeTheFirstBatch()])
            assert trained_alone([plain, other]) == []
            fit(plain, 0, 1, 1)
            assert trained_alone([other, plain, plain.optimizer]) == ["model 'digits'"]
            plain.save(tmp_path / "trained.keras")
            loaded = keras.models.load_model(tmp_path / "trained.keras")
            assert trained_alone([loaded.optimizer, loaded]) == []
            of_a_loop = keras.optimizers.SGD(0.1, name="mine")
            of_a_loop.build(other.trainable_variables)
            assert trained_alone([of_a_loop, loaded]) == []
            of_a_loop.apply([tf.zeros(v.shape) for v in other.trainable_variables])
            assert trained_alone([of_a_loop, loaded.optimizer, loaded]) == ["optimizer 'mine'"]
            wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
            assert trained_alone([plain, wrapped]) == ["model 'digits'"]
            fit(compiled(other, wrapped), 0, 1, 1)
            assert trained_alone([plain, of_a_loop, wrapped]) == []

        run_ranks(1, body)

    def test_a_way_around_the_average_is_refused(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
            optimizer.build(model.trainable_variables)
            gradients = [tf.ones(v.shape) for v in model.trainable_variables]
            with pytest.raises(InvalidRequestError, match=r"gradients that were not averaged over the ranks"):
                optimizer._backend_apply_gradients(gradients, model.trainable_variables)

        run_ranks(2, body)

    @pytest.mark.parametrize(
        ("wrap", "instead"),
        [(hvd.DistributedOptimizer, "Wrap it the other way"), (hvd.DistributedDiLoCo, "mixed_bfloat16")],
    )
    def test_loss_scaling_on_the_outside_is_refused(self, wrap: Any, instead: str) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(0.1)))
            gradients = [tf.ones(v.shape) for v in model.trainable_variables]
            with pytest.raises(InvalidRequestError, match=instead):
                optimizer.apply(gradients, model.trainable_variables)

        run_ranks(2, body)

    @pytest.mark.skipif(MPI_SIZE > 0, reason="the policy would stay for the tests after this one")
    @pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedBirder], ids=["dense", "1-bit"])
    @pytest.mark.parametrize(
        ("policy", "instead"), [("float32", "Wrap it the other"), ("mixed_float16", "Leave it out")]
    )
    def test_loss_scaling_on_the_outside_is_refused_in_fit(self, policy: str, instead: str, wrap: Any) -> None:
        def body(session: Session) -> None:
            keras.config.set_dtype_policy(policy)  # of this thread
            model = make_model()
            compiled(model, keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(0.1))))
            with pytest.raises(InvalidRequestError, match=instead):
                fit(model, hvd.rank(), 2, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

        run_ranks(2, body)

    @pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedBirder], ids=["dense", "1-bit"])
    def test_models_that_differ_are_named(self, wrap: Any) -> None:
        def body(session: Session) -> None:
            model = compiled(make_model(hidden=48 + hvd.rank()), wrap(keras.optimizers.SGD(0.1)))
            with pytest.raises(MismatchError) as error:
                fit(model, hvd.rank(), 2, 1)
            assert str(error.value).startswith(
                f"{wrap.__name__}: variable 0 differs between ranks: rank(s) [0]: 'digits/hidden/kernel' "
                "(64, 48) float32; rank(s) [1]: 'digits/hidden/kernel' (64, 49) float32."
            )

        run_ranks(2, body)

    @pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedBirder], ids=["dense", "1-bit"])
    def test_variables_in_another_order_are_named(self, wrap: Any) -> None:
        def body(session: Session) -> None:
            a, b = (keras.Variable(np.zeros(3), dtype="float32", name=name) for name in "ab")
            said = r"variable 0 differs between ranks: rank\(s\) \[0\]: 'a' \(3,\) float32; rank\(s\) \[1\]: 'b' \(3,\)"
            with pytest.raises(MismatchError, match=said):
                wrap(keras.optimizers.SGD(0.1)).apply([tf.ones(3)] * 2, [a, b] if hvd.rank() == 0 else [b, a])

        run_ranks(2, body)

    @pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedBirder], ids=["dense", "1-bit"])
    def test_jit_compile_is_refused(self, wrap: Any) -> None:
        def body(session: Session) -> None:
            model = compiled(make_model(), wrap(keras.optimizers.SGD(0.1)), jit_compile=True)
            with pytest.raises(InvalidRequestError, match=r"model.compile\(..., jit_compile=False\)"):
                fit(model, hvd.rank(), 2, 1)

        run_ranks(2, body)

    def test_replicas_that_drift_are_named(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            model.trainable_variables[2].assign_add(tf.fill((48, 10), 1e-7 * hvd.rank()))
            with pytest.raises(MismatchError, match=r"variable 'digits/output/kernel' is not the same on all ranks"):
                hvd.check_replicas(model.trainable_variables)

        run_ranks(2, body)

    def test_what_cannot_be_wrapped_is_named(self) -> None:
        def body(session: Session) -> None:
            wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            for wrong, text in (
                (lambda: hvd.DistributedOptimizer(wrapped), "distributed already"),
                (lambda: hvd.DistributedOptimizer("sgd"), "expected an optimizer of Keras"),
                (
                    lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=0),
                    "must be > 0",
                ),
            ):
                with pytest.raises(InvalidRequestError, match=text):
                    wrong()

        run_ranks(1, body)


class TestCallbacks:
    def test_the_learning_rate_warms_up_and_follows_the_schedule(self) -> None:
        def body(session: Session) -> None:
            model = compiled(make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)))
            seen: list[float] = []
            watch = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate.numpy()))
            )
            fit(model, hvd.rank(), 2, 3, [
                hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1),
                hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: [1, 1, 0.1][int(epoch)], start_epoch=1),
                watch,
            ])  # fmt: skip
            steps = 1408 // BATCH
            np.testing.assert_allclose(seen[:steps], [0.2 + 0.2 * (k + 1) / steps for k in range(steps)], rtol=1e-5)
            np.testing.assert_allclose(seen[steps:], [0.4] * steps + [0.04] * steps, rtol=1e-5)

        run_ranks(2, body)

    @pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: rank 0 alone says it")
    def test_a_multiplier_that_was_meant_for_all_epochs_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        def body(session: Session) -> None:
            for multiplier, staircase, start, rates in (
                (0.01, True, 1, [0.4, 0.4, 0.4, 0.4, 0.004, 0.004, 0.00004, 0.00004]),
                (0.81, False, 0, [0.4 * 0.9**k for k in range(8)]),  # two batches an epoch
            ):
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)), loss="mse")
                rate, seen = model.optimizer.learning_rate, []
                watch = keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs, rate=rate, seen=seen: seen.append(float(rate.numpy()))
                )
                decay = hvd.callbacks.LearningRateScheduleCallback(
                    0.4, multiplier, start, staircase=staircase, steps_per_epoch=2
                )
                model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, epochs=4, verbose=0, callbacks=[decay, watch])
                np.testing.assert_allclose(seen, rates, rtol=1e-5)

        with caplog.at_level("WARNING", "ocomm"):
            run_ranks(2, body)
        assert [r.getMessage() for r in caplog.records if "multiplier" in r.getMessage()] == [
            "LearningRateScheduleCallback(multiplier=0.01, start_epoch=1): the number is raised to the number of "
            "epochs since start_epoch, so epoch 1 has initial_lr, and epoch 3 0.0001 of it. If all of them are to "
            "have 0.01 of it, pass multiplier=lambda epoch: 0.01."
        ]
