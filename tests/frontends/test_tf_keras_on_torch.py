"""Keras' Torch backend: the same classes, in a process of their own, since a process has one backend."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("torch", "tensorflow", "keras", "sklearn")
pytestmark = [
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts a process of its own; runs once, without mpirun"),
]

WAYS = ["dense", "1-bit Adam", "0/1 Adam", "Birder", "SoftSignSGD", "Lion", "1-bit LAMB", "DiLoCo"]
#: Trains two ranks in each of the ways that are named; prints a line for each.
TRAINING = """
import sys
import keras, numpy as np, torch
from sklearn.datasets import load_digits
import ocomm_tf.keras as hvd
from ocomm.errors import InvalidRequestError
from tests.worlds import run_ranks

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
of = keras.optimizers
ways = {
    "dense": lambda: hvd.DistributedOptimizer(of.Adam(6e-3)),
    "1-bit Adam": lambda: hvd.DistributedOneBitAdam(of.AdamW(6e-3, weight_decay=1e-3, clipnorm=1.0), freeze_step=15),
    "0/1 Adam": lambda: hvd.DistributedZeroOneAdam(of.Adam(6e-3)),
    "Birder": lambda: hvd.DistributedBirder(of.SGD(6e-3), beta=0.8),
    "SoftSignSGD": lambda: hvd.DistributedSoftSignSGD(of.SGD(6e-3), beta=0.8),
    "Lion": lambda: hvd.DistributedLion(of.Lion(4e-3)),
    "1-bit LAMB": lambda: hvd.DistributedOneBitLamb(of.Lamb(3e-2), freeze_step=15),
    "DiLoCo": lambda: hvd.DistributedDiLoCo(of.Adam(6e-3), sync_every=5, bits=8),
}
for name in sys.argv[1:]:
    make = ways[name]
    random = np.random.default_rng(1)
    starts = [random.normal(0, 0.15, shape).astype(np.float32) for shape in ((64, 32), (32,), (32, 10), (10,))]

    def body(session):
        rank = hvd.rank()
        layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers, name="digits")
        model.set_weights([value * (1 + rank) for value in starts])  # the ranks start apart
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss=loss, metrics=["accuracy"])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        history = model.fit(
            images[rank:1280:2], labels[rank:1280:2], batch_size=32, epochs=2, verbose=0, shuffle=False,
            callbacks=callbacks,
        )
        assert all(isinstance(v.value, torch.nn.Parameter) for v in model.trainable_variables)
        assert model.optimizer.ocomm_exchanges == 40
        return [v.numpy() for v in model.trainable_variables], history.history["accuracy"][-1]

    (first, accuracy), (second, again) = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)) and accuracy == again
    print(f"{name}: {accuracy}")

def options(session):
    a, b = (keras.Variable(np.ones(2), dtype=dtype, name=dtype) for dtype in ("bfloat16", "float32"))
    sgd = hvd.DistributedOptimizer(of.SGD(1.0), compression=hvd.Compression.fp16, groups=1)
    with torch.no_grad():
        gradients = [torch.full((2,), 1.0 + hvd.rank()).to(a.value.dtype), torch.full((2,), 1.0 + 2.0**-12)]
        sgd.apply(gradients, [a, b])
    return a.numpy().tolist(), b.numpy().tolist()

# float16 has not the last digit of the second gradient.
assert run_ranks(2, options) == [([-0.5, -0.5], [0.0, 0.0])] * 2

def loss_scale_outside(session):
    refused = []
    for name in ("dense", "1-bit Adam", "DiLoCo"):
        optimizer = of.LossScaleOptimizer(ways[name]())
        variable = keras.Variable(np.ones(2), dtype="float32")
        optimizer.build([variable])
        try:
            optimizer.apply([torch.ones(2)], [variable])
        except InvalidRequestError as error:
            refused += [name] * ("LossScaleOptimizer" in str(error))
    return refused

assert run_ranks(2, loss_scale_outside) == [["dense", "1-bit Adam", "DiLoCo"]] * 2
"""


@pytest.mark.parametrize("ways", [WAYS[:2], pytest.param(WAYS[2:], marks=pytest.mark.long)], ids=", ".join)
def test_replicas_are_equal_and_learn_with_every_optimizer(ways: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, *ways],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert done.returncode == 0, done.stderr
    accuracies = {name: float(value) for name, value in (line.split(": ") for line in done.stdout.splitlines())}
    assert list(accuracies) == ways
    for name, accuracy in accuracies.items():
        assert accuracy > 0.6, name
