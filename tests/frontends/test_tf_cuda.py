"""Keras' 1-bit optimizers on a real GPU, which all ranks share. The law is the same training in the host's memory.

Where there are no scales every bit is the same, in 1-bit Adam's warm-up too; scales may differ in their last bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
if not tf.config.list_physical_devices("GPU"):
    pytest.skip(reason="no GPU that TensorFlow can use", allow_module_level=True)

import keras  # noqa: E402
import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm_tf.keras.gpu import GpuFrontend  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

RANKS = MPI_SIZE or 1
SHAPES = (70, 130), (4097,), (33,), ()
ADAM, SGD = keras.optimizers.Adam, keras.optimizers.SGD
EXACT: dict[str, Callable[[], Any]] = {
    "1-bit Adam, dense": lambda: hvd.DistributedOneBitAdam(ADAM(1e-2), freeze_step=100),
    "Birder": lambda: hvd.DistributedBirder(SGD(1e-3, weight_decay=0.1)),
    "SoftSignSGD": lambda: hvd.DistributedSoftSignSGD(SGD(1e-3)),
    "Lion": lambda: hvd.DistributedLion(keras.optimizers.Lion(1e-3)),
}
NEAR: dict[str, Callable[[], Any]] = {
    "1-bit Adam": lambda: hvd.DistributedOneBitAdam(ADAM(1e-2), freeze_step=3),
    "0/1 Adam, local steps": lambda: hvd.DistributedZeroOneAdam(ADAM(1e-2), local_step_start=2, local_step_doubling=2),
}


@pytest.fixture(scope="module", autouse=True)
def _leave_memory_to_ocomm() -> None:
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)


def initial() -> list[np.ndarray]:
    return [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(SHAPES)]


def trained(make: Callable[[], Any], device: str, in_graph: bool) -> list[np.ndarray]:
    with tf.device(device):
        variables = [keras.Variable(value, dtype="float32", name=f"v{n}") for n, value in enumerate(initial())]
        optimizer = make()
        optimizer.build(variables)
        assert isinstance(optimizer._frontend, GpuFrontend) == ("GPU" in device)

        def step(gradients: list[Any]) -> None:
            optimizer.apply(gradients, variables)

        apply = tf.function(step) if in_graph else step
        for number in range(20):
            random = np.random.default_rng([number, hvd.rank()])
            # Still being computed, on a GPU, when the step is asked for.
            apply([tf.constant(random.normal(size=shape), tf.float32) * 2.0 for shape in SHAPES])
        return [variable.numpy() for variable in variables]


def on_gpu_and_host(make: Callable[[], Any], in_graph: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    def body(session: Session) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return trained(make, "GPU:0", in_graph), trained(make, "CPU:0", in_graph)

    results = run_ranks(RANKS, body)
    for got, _ in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(got, results[0][0], strict=True))
    return results[0]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", EXACT)
def test_what_has_no_scales_has_the_bits_of_the_host(kind: str, in_graph: bool) -> None:
    got, expected = on_gpu_and_host(EXACT[kind], in_graph)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", NEAR)
def test_what_has_scales_is_near(kind: str, in_graph: bool) -> None:
    got, expected = on_gpu_and_host(NEAR[kind], in_graph)
    moved = np.concatenate([(e - i).ravel() for e, i in zip(expected, initial(), strict=True)])
    apart = np.concatenate([(g - e).ravel() for g, e in zip(got, expected, strict=True)])
    assert np.isfinite(apart).all() and np.linalg.norm(apart) < 0.05 * np.linalg.norm(moved)


def test_a_model_is_fit_without_xla() -> None:
    def body(session: Session) -> list[float]:
        random = np.random.default_rng(hvd.rank())
        x = random.normal(size=(256, 8)).astype(np.float32)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOneBitAdam(ADAM(1e-2), freeze_step=8)
        model.compile(optimizer, "mse", jit_compile=False)
        begin = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        run = model.fit(x, x.sum(1), batch_size=16, epochs=5, shuffle=False, verbose=0, callbacks=begin)
        assert isinstance(optimizer._frontend, GpuFrontend)
        return run.history["loss"]

    for losses in run_ranks(RANKS, body):
        assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int64"])
def test_results_of_collectives_are_where_their_tensors_are(dtype: str) -> None:
    def body(session: Session) -> None:
        for device in ("CPU:0", "GPU:0"):
            with tf.device(device):
                tensor = tf.identity(tf.cast(tf.constant([1, 0, 1]), dtype))
            for result in (hvd.allreduce(tensor, op=hvd.Max), hvd.broadcast(tensor, 0)):
                assert result.backing_device.endswith(device) and np.array_equal(result.numpy(), tensor.numpy())

    run_ranks(RANKS, body)
