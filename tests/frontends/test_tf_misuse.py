"""Keras optimizers that a 1-bit optimizer cannot stand for, and calls in two orders, are refused by name."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import ocomm_tf  # noqa: E402
import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.collectives import waiting  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError, PeerError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

WRAPPERS = [hvd.DistributedOneBitAdam, hvd.DistributedZeroOneAdam, hvd.DistributedOneBitLamb]


class OwnStep(keras.optimizers.Adam):  # type: ignore[misc, name-defined]
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(-gradient, variable, learning_rate)


class OtherDefaults(keras.optimizers.AdamW):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__(learning_rate=3e-2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_adam_with_an_update_step_of_its_own_is_refused_and_one_with_other_defaults_is_not(wrapper: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match=r"this OwnStep has an update_step\(\) of its own"):
            wrapper(OwnStep())
        assert type(wrapper(OtherDefaults())).__name__ == "OtherDefaults"

    run_ranks(2, body)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_that_is_distributed_is_not_wrapped_again(wrapper: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="is distributed already; wrap it once"):
            hvd.DistributedOptimizer(wrapper(keras.optimizers.Adam()))
        with pytest.raises(InvalidRequestError, match="is distributed already; wrap it once"):
            wrapper(hvd.DistributedOptimizer(keras.optimizers.Adam()))

    run_ranks(2, body)


class TwoReplicas(tf.distribute.OneDeviceStrategy):  # type: ignore[misc, name-defined]
    """Stands for a MirroredStrategy of two devices; TensorFlow must know of them before its first operation."""

    num_replicas_in_sync = 2


@pytest.mark.parametrize("wrapper", [*WRAPPERS, hvd.DistributedLion, hvd.DistributedDiLoCo])
def test_a_strategy_of_several_devices_is_refused_and_one_of_one_device_is_not(wrapper: Any) -> None:
    def body(session: Session) -> None:
        adam = keras.optimizers.Lion if wrapper is hvd.DistributedLion else keras.optimizers.Adam
        with (
            TwoReplicas("/cpu:0").scope(),
            pytest.raises(InvalidRequestError, match=r"made inside a TwoReplicas of 2 devices.*Leave the strategy out"),
        ):
            wrapper(adam())
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            wrapper(adam())

    run_ranks(2, body)


@pytest.mark.parametrize("wrapper", [hvd.DistributedZeroOneAdam, hvd.DistributedDiLoCo])
def test_averages_of_variables_that_differ_between_ranks_are_refused(wrapper: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match=r"the Adam has use_ema=True.*Leave it out"):
            wrapper(keras.optimizers.Adam(use_ema=True))

    run_ranks(2, body)


def test_averages_of_variables_are_equal_where_every_step_of_0_1_adam_is_a_sync() -> None:
    def body(session: Session) -> list[float]:
        adam = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
        variable = keras.Variable([1.0, 2.0, 3.0])
        optimizer = hvd.DistributedZeroOneAdam(adam, [variable], local_step_clip=1)
        for step in range(1, 6):
            optimizer.apply([tf.constant([1.0, -1.0, 0.5]) * step * (1 + hvd.rank())])
        before: list[float] = variable.numpy().tolist()
        optimizer.finalize_variable_values([variable])
        average: list[float] = variable.numpy().tolist()
        assert average != before
        return average

    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.parametrize("way", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
def test_jacobians_of_a_distributed_tape_are_averages_without_pfor_and_refused_with_it(way: Any) -> None:
    def body(session: Session) -> list[Any]:
        w = tf.Variable([[1.0, 2.0]])

        @way
        def found(method: str, use_pfor: bool) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                y = w * w * (1.0 + hvd.rank())
            distributed = ocomm_tf.DistributedGradientTape(tape)
            return getattr(distributed, method)(y, w, experimental_use_pfor=use_pfor)

        for method in ("jacobian", "batch_jacobian"):
            with pytest.raises(InvalidRequestError, match=rf"^{method}\(\) of .* Pass experimental_use_pfor=False"):
                found(method, True)
        return [tf.squeeze(found("jacobian", False)).numpy().tolist()]

    assert run_ranks(2, body) == [[[[3.0, 0.0], [0.0, 6.0]]]] * 2


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
def test_a_tape_may_be_distributed_and_asked_while_it_records(way: Any, persistent: bool) -> None:
    def body(session: Session) -> list[Any]:
        w = tf.Variable([1.0, 2.0])

        @way
        def asked_inside() -> Any:
            with tf.GradientTape(persistent) as tape:
                y = w * w * (1.0 + hvd.rank())
                tape = ocomm_tf.DistributedGradientTape(tape)
                y = y * 2.0
                return tape.gradient(y, w)

        @way
        def asked_outside() -> Any:
            with tf.GradientTape(persistent) as tape:
                y = w * w * (1.0 + hvd.rank())
                tape = ocomm_tf.DistributedGradientTape(tape)
                with tape.stop_recording():
                    _ = w * 3.0
                y = y * 2.0
            return tape.gradient(y, w)

        return [asked_inside().numpy().tolist(), asked_outside().numpy().tolist()]

    assert run_ranks(2, body) == [[[6.0, 12.0], [6.0, 12.0]]] * 2


def test_a_function_that_broadcasts_may_be_traced_again_on_one_rank() -> None:
    """As for a shorter last batch. What the ranks have agreed on when it was traced first holds."""

    def body(session: Session) -> list[Any]:
        variables = [tf.Variable([1.0 + hvd.rank()]), tf.Variable([[2.0 + hvd.rank()]])]

        @tf.function
        def step(x: Any, is_first: Any) -> Any:
            if is_first:
                ocomm_tf.broadcast_variables(variables, root_rank=0)
            return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum, name="sum")

        sums = [float(step(tf.ones(3), tf.constant(True)))]
        sums.append(float(step(tf.ones(3 - hvd.rank()), tf.constant(False))))
        conditional = tf.function(
            lambda first: tf.cond(
                first, lambda: ocomm_tf.broadcast_variables(variables, root_rank=1), lambda: tf.constant(True)
            )
        )
        variables[0].assign([5.0 + hvd.rank()])
        conditional(tf.constant(True))
        return [*sums, *(v.numpy().ravel().tolist() for v in variables)]

    assert run_ranks(2, body) == [[6.0, 5.0, [6.0], [2.0]]] * 2


def test_a_rank_that_has_joined_agrees_on_what_is_broadcast() -> None:
    def body(session: Session) -> float:
        variable = tf.Variable([float(hvd.rank())])
        if hvd.rank() == 0:
            hvd.join()
        else:
            ocomm_tf.broadcast_variables([variable], root_rank=1)
            hvd.join()
        return float(variable[0])

    assert run_ranks(2, body) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]), r"not a tf.RaggedTensor; pass to_tensor\(\)"),
        (lambda: tf.sparse.from_dense([1.0, 0.0]), "not a tf.SparseTensor; pass tf.sparse.to_dense"),
    ],
    ids=["ragged", "sparse"],
)
def test_tensors_that_are_not_dense_are_refused(value: Any, said: str) -> None:
    def body(session: Session) -> None:
        for call in (ocomm_tf.allreduce, ocomm_tf.allgather, lambda x: ocomm_tf.grouped_allreduce([x])):
            with pytest.raises(InvalidRequestError, match=said):
                call(value())

    run_ranks(1, body)


def test_eager_calls_without_a_name_that_come_in_two_orders_are_refused() -> None:
    one, other = tf.fill(3, 1.0), tf.fill(3, 2.0)

    def body(session: Session) -> None:
        with pytest.raises(MismatchError, match=r"different orders on ranks 0, 1.*test_tf_misuse.py:"):
            if hvd.rank() == 0:
                ocomm_tf.allreduce(one)
                ocomm_tf.allreduce(other)
            else:
                ocomm_tf.allreduce(other)
                ocomm_tf.allreduce(one)

    run_ranks(2, body)


def _by_tape(variable: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    ocomm_tf.DistributedGradientTape(tape).gradient(loss, [variable])


def _by_optimizer(variable: Any) -> None:
    hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=hvd.Compression.int8).apply([variable], [variable])


def _by_one_bit_adam(variable: Any) -> None:
    freeze_step = 2 + int(variable.shape[0])
    adam = hvd.DistributedOneBitAdam(keras.optimizers.Adam(), freeze_step=freeze_step)
    adam.apply([tf.ones([4])], [tf.Variable(tf.ones([4]))])


@pytest.mark.parametrize("use", [_by_tape, _by_optimizer, _by_one_bit_adam])
def test_an_error_while_autograph_traces_a_graph_keeps_its_class(use: Any) -> None:
    def body(session: Session) -> None:
        variable = tf.Variable(tf.ones([2 + hvd.rank()]))
        with pytest.raises(ocomm_tf.errors.MismatchError):
            tf.function(use)(variable)

    run_ranks(2, body)


def test_a_rank_that_takes_fewer_steps_is_told_what_to_do_in_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_GRACE_S", 0.0)

    def body(session: Session) -> str:
        optimizer = hvd.DistributedOneBitAdam(keras.optimizers.Adam(), freeze_step=1)
        variable = tf.Variable(tf.ones([4]))
        optimizer.apply([tf.ones([4])], [variable])
        if hvd.rank() == 1:
            return ""
        with pytest.raises(PeerError) as raised:
            optimizer.apply([tf.ones([4])], [variable])
        return str(raised.value)

    said = run_ranks(2, body)[0]
    assert "step 2 cannot end: rank 1 has shut down" in said
    assert "fit(dataset.repeat(), steps_per_epoch=...)" in said and "torch" not in said


class BuiltLate(keras.Model):  # type: ignore[misc]
    """Has its variables when it is called for the first time, here those of the rank."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(1,), initializer=keras.initializers.Constant(1.0 + hvd.rank()))

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


def test_a_model_that_its_first_batch_builds_is_to_be_built_for_a_broadcast() -> None:
    def body(session: Session) -> float:
        x = tf.ones([4, 1])

        def fitted(model: Any) -> Any:
            model.compile(hvd.DistributedOneBitAdam(keras.optimizers.Adam(), freeze_step=1), "mse")
            model.fit(x, x, batch_size=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
            return model

        with pytest.raises(tf.errors.FailedPreconditionError, match="or build the model and its optimizer, and fit"):
            fitted(BuiltLate())
        model = BuiltLate()
        model.build((None, 1))
        return float(fitted(model).scale[0])

    first, second = run_ranks(2, body)
    assert first == second == pytest.approx(2.0, abs=0.01)


def of_float8() -> Any:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="low")])
    made.layers[0].quantize("float8")
    return made


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), "2 passes"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=3), "3 passes"),
        (lambda: hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.1)), "steps of ocomm.* Use DistributedOptimizer"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), None),
    ],
    ids=["accumulated", "passes", "1-bit", "dense"],
)
def test_scales_of_float8_are_equal_on_all_ranks_or_refused(wrap: Any, said: str | None) -> None:
    def body(session: Session) -> Any:
        made = of_float8()
        made.set_weights([np.ones_like(value) for value in made.get_weights()])
        made.compile(wrap(), "mse", jit_compile=False)
        inputs = np.random.default_rng(hvd.rank()).standard_normal((16, 4), np.float32)
        expected = (
            contextlib.nullcontext()
            if said is None
            else pytest.raises(InvalidRequestError, match=rf"variable '.*low/.*' with its gradient.*{said}")
        )
        with expected:
            made.fit(inputs, inputs[:, :2], batch_size=4, verbose=0)
        return [v.numpy() for v in made.weights]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd.DistributedOneBitAdam])
def test_what_is_excluded_from_weight_decay_on_the_wrapped_optimizer_counts(wrap: Any) -> None:
    def body(session: Session) -> None:
        kernel, bias = variables = [keras.Variable(np.ones(3, np.float32), name=name) for name in ("kernel", "bias")]
        inner = keras.optimizers.AdamW(0.5, weight_decay=0.5)
        wrap(inner)  # a wrapper that nobody keeps
        optimizer = wrap(inner)
        inner.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(variables)
        optimizer.apply([tf.zeros(3), tf.zeros(3)])
        assert (kernel.numpy() < 1.0).all() and (bias.numpy() == 1.0).all()
        if wrap is hvd.DistributedOneBitAdam:
            with pytest.raises(InvalidRequestError, match="comes too late for DistributedOneBitAdam, which is built"):
                inner.exclude_from_weight_decay([kernel])

    run_ranks(1, body)
