"""``Compression.int8`` and ``int4`` of Keras' ``DistributedOptimizer`` and of ``DistributedGradientTape``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf as hvd  # noqa: E402
import ocomm_tf.keras as for_keras  # noqa: E402
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.resume import one_state  # noqa: E402
from ocomm_tf.elastic import TensorFlowKerasState  # noqa: E402
from tests.oracle.dense_codes import DenseCodes  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

COMPRESSIONS = {8: hvd.Compression.int8, 4: hvd.Compression.int4}
SHAPES = [(90, 50), (7,)]
STEPS = 8


def gradients(step: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng((step, rank))
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


class Simulation:
    def __init__(self, ranks: int, bits: int) -> None:
        self.ranks, self.codes = ranks, []
        for shape in SHAPES:
            numel = int(np.prod(shape))
            blocks = [slice(start, min(start + 4096, numel)) for start in range(0, numel, 4096)]
            self.codes.append(DenseCodes(numel, ranks, bits, blocks, 0.8 if bits == 4 else 0.0))

    def averages(self, step: int) -> list[np.ndarray]:
        each = [gradients(step, rank) for rank in range(self.ranks)]
        return [
            codes.average([own[n].reshape(-1) for own in each]).reshape(SHAPES[n]) for n, codes in enumerate(self.codes)
        ]


def variables() -> list[Any]:
    return [keras.Variable(np.ones(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]


def made(bits: int, **options: Any) -> tuple[Any, list[Any]]:
    inner = keras.optimizers.SGD(0.125, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(inner, compression=COMPRESSIONS[bits], **options)
    own = variables()
    optimizer.build(own)
    return optimizer, own


@pytest.mark.parametrize(("bits", "ranks", "in_graph"), [(8, 1, False), (8, 2, True), (4, 2, False), (4, 4, True)])
def test_keras_steps_on_the_averages_of_the_simulation(bits: int, ranks: int, in_graph: bool) -> None:
    law = Simulation(ranks, bits)
    plain, expected = keras.optimizers.SGD(0.125, momentum=0.5), variables()
    plain.build(expected)
    for step in range(1, STEPS + 1):
        plain.apply([tf.constant(average) for average in law.averages(step)])

    def body(session: Session) -> None:
        optimizer, own = made(bits)
        apply = tf.function(optimizer.apply) if in_graph else optimizer.apply
        for step in range(1, STEPS + 1):
            apply([tf.constant(g) for g in gradients(step, hvd.rank())])
        for variable, wanted in zip(own, expected, strict=True):
            assert np.array_equal(variable.numpy(), wanted.numpy())
        report = optimizer.compression_report()
        assert report["dense_bits"] == bits and report["step"] == STEPS

    run_ranks(ranks, body)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tape_made_anew_in_each_step_keeps_its_errors(in_graph: bool) -> None:
    def body(session: Session) -> None:
        law = Simulation(2, 8)
        own = [tf.Variable(np.ones(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]

        def averages(*factors: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(v * f) for v, f in zip(own, factors, strict=True))
            return hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8).gradient(loss, own)

        call = tf.function(averages) if in_graph else averages
        for step in range(1, STEPS + 1):
            found = call(*[tf.constant(g) for g in gradients(step, hvd.rank())])
            for average, wanted in zip(found, law.averages(step), strict=True):
                assert np.array_equal(average.numpy(), wanted)

    run_ranks(2, body)


def test_new_variables_with_the_numbers_of_old_ones_begin_without_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocomm_tf.low_bit.key_of", lambda variable: 0)

    def body(session: Session) -> None:
        for _ in range(2):
            law = Simulation(2, 8)
            own = [tf.Variable(np.ones(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]
            for step in range(1, 4):
                with tf.GradientTape() as tape:
                    factors = gradients(step, hvd.rank())
                    loss = sum(tf.reduce_sum(v * f) for v, f in zip(own, factors, strict=True))
                found = hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8).gradient(loss, own)
                for average, wanted in zip(found, law.averages(step), strict=True):
                    assert np.array_equal(average.numpy(), wanted)

    run_ranks(2, body)


def test_a_run_goes_on_in_every_bit() -> None:
    def body(session: Session) -> None:
        optimizer, own = made(4)

        def train(optimizer: Any, steps: range) -> None:
            for step in steps:
                optimizer.apply([tf.constant(g) for g in gradients(step, hvd.rank())])

        train(optimizer, range(1, 5))
        state, errors, kept = optimizer.ocomm_state(), optimizer.ocomm_rank_state(), [v.numpy() for v in own]
        train(optimizer, range(5, 9))
        again, other = made(4)
        for variable, value in zip(other, kept, strict=True):
            variable.assign(value)
        again.ocomm_load_state(state)
        assert again.ocomm_load_rank_state(one_state(errors))["rank_state"] == "loaded"
        train(again, range(5, 9))
        for a, b in zip(own, other, strict=True):
            assert np.array_equal(a.numpy(), b.numpy())

    run_ranks(2, body)


def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    def body(session: Session) -> None:
        optimizer, own = made(8)
        optimizer.apply([tf.constant(g) for g in gradients(1, hvd.rank())])
        kept, errors = [v.numpy() for v in own], optimizer.ocomm_rank_state()
        bad = gradients(2, hvd.rank())
        if hvd.rank() == 1:
            bad[0][3, 3] = np.nan
        with pytest.raises(HorovodInternalError, match=r"rank\(s\) \[1\]"):
            optimizer.apply([tf.constant(g) for g in bad])
        assert all(np.array_equal(v.numpy(), value) for v, value in zip(own, kept, strict=True))
        now = optimizer.ocomm_rank_state()
        assert all(np.array_equal(now["worker"][name], errors["worker"][name]) for name in now["worker"])
        optimizer.apply([tf.constant(g) for g in gradients(2, hvd.rank())])

    run_ranks(2, body)


def test_a_loss_scale_shrinks_on_all_ranks_together() -> None:
    def body(session: Session) -> list[np.ndarray]:
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.125), initial_scale=4.0)
        optimizer = hvd.DistributedOptimizer(scaled, compression=hvd.Compression.int8)
        own = variables()
        optimizer.build(own)
        for step in range(1, 4):
            found = gradients(step, hvd.rank())
            if step == 2 and hvd.rank() == 1:
                found[1][0] = np.inf
            optimizer.apply([tf.constant(g) for g in found])
        assert float(optimizer.dynamic_scale.numpy()) == 2.0
        return [v.numpy() for v in own]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) and np.isfinite(a).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("other", ["int4", "none"])
def test_another_compression_on_one_rank_is_named(other: str) -> None:
    def body(session: Session) -> None:
        compression = getattr(hvd.Compression, other if hvd.rank() else "int8")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        with pytest.raises(MismatchError, match=f"compression={other}"):
            optimizer.build(variables())
            optimizer.apply([tf.constant(g) for g in gradients(1, hvd.rank())])

    run_ranks(2, body)


def test_what_cannot_be_had_with_codes_is_named() -> None:
    def body(session: Session) -> None:
        int8 = hvd.Compression.int8
        for options, name in (({"op": hvd.Sum}, "op"), ({"groups": 2}, "groups")):
            with pytest.raises(InvalidRequestError, match=name):
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=int8, **options)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=int8)
        with pytest.raises(InvalidRequestError, match="float64"):
            optimizer.build([keras.Variable(np.ones(3), dtype="float64")])
        with pytest.raises(InvalidRequestError, match="DistributedOptimizer"):
            hvd.allreduce(tf.ones(3), compression=int8)

    run_ranks(1, body)


@pytest.mark.parametrize("in_graph", [False, True])
def test_passes_of_a_step_are_summed_before_they_are_sent(in_graph: bool) -> None:
    def body(session: Session) -> list[np.ndarray]:
        optimizer, own = made(8, backward_passes_per_step=2)
        apply = tf.function(optimizer.apply) if in_graph else optimizer.apply
        for step in range(1, 7):
            apply([tf.constant(g) for g in gradients(step, hvd.rank())])
        assert optimizer.compression_report()["step"] == 3
        return [v.numpy() for v in own]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_elastic_state_has_the_errors() -> None:
    def body(session: Session) -> list[np.ndarray]:
        model = keras.Sequential([keras.layers.Dense(3)])
        model.build((None, 5))
        for variable in model.variables:
            variable.assign(np.ones(variable.shape))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.int4)
        state = TensorFlowKerasState(model, optimizer)

        def train(steps: range) -> list[np.ndarray]:
            for step in steps:
                rng = np.random.default_rng((step, hvd.rank()))
                optimizer.apply([tf.constant(rng.normal(size=v.shape), tf.float32) for v in model.trainable_variables])
            return [v.numpy() for v in model.variables]

        train(range(3))
        state.commit()
        expected = train(range(3, 6))
        state.restore()
        assert all(np.array_equal(a, b) for a, b in zip(train(range(3, 6)), expected, strict=True))
        return expected

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("way", few(["loaded", "built", "partial"], ["partial"]))
def test_an_optimizer_that_is_built_before_it_is_wrapped_has_errors_and_a_report(way: str, tmp_path: Path) -> None:
    def body(session: Session) -> None:
        layers = [keras.layers.Dense(2, kernel_initializer="ones") for _ in range(2)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        adam = keras.optimizers.Adam(0.01)
        if way == "loaded":
            model.compile(adam, loss="mse")
            adam.build(model.trainable_variables)
            path = tmp_path / f"{hvd.rank()}.keras"
            model.save(path)
            model = for_keras.load_model(path, compression=hvd.Compression.int8)
        else:
            adam.build(model.trainable_variables)
            more = {"local_layers": layers[0]} if way == "partial" else {}
            wrap = for_keras.PartialDistributedOptimizer if more else for_keras.DistributedOptimizer
            model.compile(wrap(adam, compression=hvd.Compression.int8, **more), loss="mse")
        optimizer = model.optimizer
        assert optimizer.compression_report()["step"] == 0
        state = TensorFlowKerasState(model)
        model.fit(np.ones((8, 3)), np.full((8, 2), hvd.rank()), batch_size=4, verbose=0)
        assert optimizer.compression_report()["step"] == 2
        state.commit()
        assert len(optimizer.ocomm_rank_state()["tensors"]) == (2 if way == "partial" else 4)

    run_ranks(2, body)
