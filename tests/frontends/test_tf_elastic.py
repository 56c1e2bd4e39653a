"""Elastic states of TensorFlow and Keras, and the loop that goes on from the last commit, in a real job."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.elastic import plain  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.resume import one_state  # noqa: E402
from tests.cluster.jobs import run_job  # noqa: E402
from tests.tiers import alternating  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

JOB = """
import json, sys
import keras
import numpy as np
import tensorflow as tf
import ocomm_tf.keras as hvd

BATCHES, EPOCHS = 4, 3
WAYS = {
    "dense": lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)),
    "1-bit Adam": lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.05), freeze_step=3),
    "0/1 Adam": lambda: hvd.DistributedZeroOneAdam(keras.optimizers.Adam(0.05)),
    "Lion": lambda: hvd.DistributedLion(keras.optimizers.Lion(0.01)),
    "DiLoCo": lambda: hvd.DistributedDiLoCo(keras.optimizers.Adam(0.05), sync_every=3),
}

class Fails(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.epoch, self.batch, self.now, self.failed = epoch, batch, 0, False
        self.function = tf.function(lambda x: hvd.allreduce(x, name="different"))

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.now, batch) == (self.epoch, self.batch) and not self.failed:
            self.failed = True
            self.function(tf.ones([1 + hvd.rank()]))

def run(way, epoch, batch):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(WAYS[way](), loss="mse")
    random = np.random.default_rng(hvd.rank())
    x, y = random.normal(size=(8 * BATCHES, 4)), random.normal(size=(8 * BATCHES, 2))
    fails, calls = Fails(epoch, batch), []
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        calls.append([state.epoch, state.batch])
        callbacks = [
            hvd.callbacks.UpdateBatchStateCallback(state),
            hvd.callbacks.UpdateEpochStateCallback(state),
            fails,
            hvd.callbacks.CommitStateCallback(state, BATCHES),
        ]
        model.fit(x, y, batch_size=8, initial_epoch=state.epoch, epochs=EPOCHS, shuffle=False, verbose=0,
                  callbacks=callbacks)

    train(state)
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    return {"weights": [w.numpy().tolist() for w in model.weights], "calls": calls}

hvd.init()
results = {way: [run(way, -1, 0), run(way, 1, 2)] for way in sys.argv[2:]}
open(f"{sys.argv[1]}.{hvd.rank()}", "w").write(json.dumps(results))
"""


@pytest.mark.long
@pytest.mark.skipif(MPI_SIZE > 0, reason="starts jobs of its own")
@pytest.mark.parametrize(
    "ways", [["1-bit Adam"], pytest.param(["dense", "0/1 Adam", "Lion", "DiLoCo"], marks=pytest.mark.long)]
)
def test_a_fit_that_fails_inside_a_graph_goes_on_and_ends_where_it_would_have(ways: list[str], tmp_path: Path) -> None:
    done = run_job(2, JOB, str(tmp_path / "result"), *ways, TF_CPP_MIN_LOG_LEVEL="2")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2))
    assert first == second and list(first) == ways
    for undisturbed, failed in first.values():
        assert undisturbed["calls"] == [[0, 0]]
        assert failed["calls"] == [[0, 0], [1, 0]]
        assert failed["weights"] == undisturbed["weights"]


def test_variables_are_restored_in_place_and_synchronized_from_rank_zero() -> None:
    def body(session: Session) -> None:
        me = hvd.rank()
        variables = [tf.Variable([float(me)]), keras.Variable([[1.0 + me]])]
        state = hvd.elastic.TensorFlowState(variables, epoch=me)
        state.sync()
        assert state.epoch == 0 and [float(np.sum(v.numpy())) for v in variables] == [0.0, 1.0]
        variables[0].assign([5.0])
        state.epoch = 3
        state.restore()
        assert state.epoch == 0 and variables[0].numpy().tolist() == [0.0]
        state.epoch = 4
        state.commit()
        assert state.commits == 1

    run_ranks(2, body)


def test_variables_of_a_session_are_those_of_its_graph() -> None:
    def body(session: Session) -> None:
        v1, me = tf.compat.v1, hvd.rank()
        with tf.Graph().as_default():
            for use_resource in (False, True):
                v1.get_variable(f"w{use_resource}", initializer=[float(me)], use_resource=use_resource)
            variables = v1.global_variables()
            with pytest.raises(InvalidRequestError, match="without eager execution: pass session="):
                hvd.elastic.TensorFlowState(batch=0)
            with v1.Session() as own:
                own.run(v1.global_variables_initializer())
                state = hvd.elastic.TensorFlowState(batch=me)
                state.sync()
                assert state.batch == 0 and np.concatenate(own.run(variables)).tolist() == [0.0, 0.0]
                own.run([v1.assign_add(v, [5.0]) for v in variables])
                state.restore()
                assert np.concatenate(own.run(variables)).tolist() == [0.0, 0.0]
            with v1.Session() as own:
                own.run(v1.global_variables_initializer())
                hvd.elastic.TensorFlowState(variables[:1], own).load_replicated({"variables": [[7.0]], "values": {}})
                assert np.concatenate(own.run(variables)).tolist() == [7.0, float(me)]

    run_ranks(2, body)


def test_ranks_that_hold_different_models_get_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.Codec, "pickle", None)  # a commit of theirs needs none

    def body(session: Session) -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(hvd.DistributedBirder(keras.optimizers.SGD(0.1 * (1 + hvd.rank()))), loss="mse")
        state = hvd.elastic.TensorFlowKerasState(model, best=[hvd.rank()])
        state.sync()
        assert state.best == [0] and abs(float(model.optimizer.learning_rate.numpy()) - 0.1) < 1e-6
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
        written = io.BytesIO()
        state.dump((state.replicated(), state.own()), written)
        written.seek(0)
        replicated, own = state.load(written)  # as from a commit
        assert own.keys() == state.own().keys()
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        state.load_replicated(replicated)
        return [w.numpy() for w in model.weights]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


OPTIMIZERS = {
    "1-bit Adam": lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.01), freeze_step=2),
    "0/1 Adam": lambda: hvd.DistributedZeroOneAdam(
        keras.optimizers.Adam(0.01), local_step_start=4, local_step_doubling=4, local_step_clip=4
    ),
    "DiLoCo": lambda: hvd.DistributedDiLoCo(keras.optimizers.Adam(0.01), sync_every=4, bits=4),
    "int8": lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=hvd.Compression.int8),
}


def dense(units: int) -> Any:
    """Returns a layer that is the same on all ranks."""
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=units))


def bits(value: Any) -> Any:
    """Returns nested values with bytes in the place of arrays."""
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(entry) for entry in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_that_is_synchronized_leaves_each_rank_what_is_its_own(kind: str) -> None:
    def body(session: Session) -> Any:
        model = keras.Sequential([keras.Input((4,)), dense(8), keras.layers.BatchNormalization(), dense(2)])
        optimizer = OPTIMIZERS[kind]()
        model.compile(optimizer, loss="mse", run_eagerly=True)
        state = hvd.elastic.TensorFlowKerasState(model, epoch=hvd.rank())
        random = np.random.default_rng(hvd.rank())
        for step in range(20):
            model.train_on_batch(random.normal(size=(10, 4)), random.normal(size=(10, 2)))
            if step > 4 and not optimizer.compression_report().get("synced"):
                break
        weights, own = bits(model.get_weights()), bits(optimizer.ocomm_rank_state())
        trained = bits([v.numpy() for v in model.trainable_variables])
        state.sync()
        assert bits(optimizer.ocomm_rank_state()) == own
        assert bits([v.numpy() for v in model.trainable_variables]) == trained
        assert state.epoch == 0  # the rest is the first rank's
        statistics = bits([v.numpy() for v in model.non_trainable_variables])
        return weights, own, trained, statistics

    first, second = run_ranks(2, body)
    assert first[0] != second[0] and first[1] != second[1] and first[3] == second[3]
    assert (first[2] != second[2]) is (kind in ("0/1 Adam", "DiLoCo"))


def test_gradients_that_keras_has_accumulated_stay_each_rank_s_own_when_a_state_is_synchronized() -> None:
    def body(session: Session) -> Any:
        model = keras.Sequential([keras.Input((4,)), dense(2)])
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(hvd.DistributedOptimizer(adam), loss="mse", run_eagerly=True)
        state = hvd.elastic.TensorFlowKerasState(model)
        random = np.random.default_rng(hvd.rank())
        model.fit(random.normal(size=(30, 4)), random.normal(size=(30, 2)), batch_size=10, verbose=0)
        before = bits([v.numpy() for v in model.optimizer._accumulated_gradients])
        state.sync()
        assert bits([v.numpy() for v in model.optimizer._accumulated_gradients]) == before
        return before

    first, second = run_ranks(2, body)
    assert first != second


ADAMS = {
    "1-bit Adam": lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.01), freeze_step=6),
    "shards": lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.01), freeze_step=6, shard_state=True),
    "1-bit LAMB": lambda: hvd.DistributedOneBitLamb(keras.optimizers.Adam(0.01), freeze_step=6),
    "0/1 Adam": lambda: hvd.DistributedZeroOneAdam(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize(("kind", "makes_new"), alternating(ADAMS, [False, True]))
def test_a_restore_changes_no_bit_where_variables_have_taken_fewer_steps_than_iterations(
    kind: str, makes_new: bool
) -> None:
    def body(session: Session, restores: bool) -> Any:
        variables = [keras.Variable(np.ones(8, np.float32), name=f"v{n}") for n in range(3)]
        optimizer = ADAMS[kind]()
        optimizer.build(variables)
        apply = tf.function(lambda gradients, chosen: optimizer.apply(gradients, [variables[n] for n in chosen]))

        def step(number: int, *chosen: int, scale: float = 1.0) -> None:
            random = np.random.default_rng([number, hvd.rank()])
            apply([tf.constant(scale * random.normal(size=8), tf.float32) for _ in chosen], chosen)

        step(0, 0, 1)
        with pytest.raises(tf.errors.OpError, match="is NaN or Inf"):  # the graph has counted this step
            step(1, 0, 1, scale=np.nan if hvd.rank() else 1.0)
        step(2, 0)
        if restores:
            state = optimizer.ocomm_state(), optimizer.ocomm_rank_state()
            if makes_new:
                optimizer = ADAMS[kind]()
                optimizer.build(variables)
                apply = tf.function(
                    lambda gradients, chosen: optimizer.apply(gradients, [variables[n] for n in chosen])
                )
            optimizer.ocomm_load_state(state[0])
            optimizer.ocomm_load_rank_state(one_state(state[1]))
        for number in range(3, 9):
            step(number, 0, 1, 2)
        return bits([v.numpy() for v in variables])

    for kept, restored in run_ranks(2, lambda session: [body(session, restores) for restores in (False, True)]):
        assert kept == restored


@pytest.mark.parametrize("kind", ADAMS)
def test_a_restore_to_before_the_first_step_begins_anew(kind: str) -> None:
    def body(session: Session) -> None:
        variables = [keras.Variable(np.ones(8, np.float32), name="v")]
        optimizer = ADAMS[kind]()
        optimizer.build(variables)
        saved = optimizer.ocomm_state(), optimizer.ocomm_rank_state()
        ends = []
        for _ in range(2):
            for step in range(3):
                random = np.random.default_rng([step, hvd.rank()])
                optimizer.apply([tf.constant(random.normal(size=8), tf.float32)])
            ends.append(bits([v.numpy() for v in variables]))
            variables[0].assign(np.ones(8, np.float32))
            optimizer.ocomm_load_state(saved[0])
            optimizer.ocomm_load_rank_state(one_state(saved[1]))
        assert ends[0] == ends[1]

    run_ranks(2, body)


def test_each_rank_keeps_the_seeds_of_its_dropout_also_on_disk(tmp_path: Path) -> None:
    def body(session: Session, again: bool) -> tuple[list[float], list[float]]:
        folder = hvd.broadcast_object(str(tmp_path))
        session.settings = dataclasses.replace(session.settings, elastic_folder=folder)
        dropout = keras.layers.Dropout(0.5, seed=10 + hvd.rank() + 5 * again)
        model = keras.Sequential([keras.Input((64,)), dropout, dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + hvd.rank()))), loss="mse")
        state = hvd.elastic.KerasState(model)

        def mask() -> list[float]:
            return np.array(dropout(np.ones((1, 64), np.float32), training=True)).ravel().tolist()

        @hvd.elastic.run
        def train(state: Any) -> tuple[list[float], list[float]]:
            if again:
                return mask(), mask()
            mask()
            state.commit()
            drawn = mask(), mask()
            state.restore()
            assert (mask(), mask()) == drawn
            return drawn

        return train(state)

    first, second = drawn = run_ranks(2, lambda session: body(session, False))
    assert first[0] != second[0]
    assert run_ranks(2, lambda session: body(session, True)) == drawn
