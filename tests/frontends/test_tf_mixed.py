"""One model on ranks of Torch and TensorFlow together: equal replicas, and the same as with one framework alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
import ocomm_torch  # noqa: E402
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

#: Keras variables by the ends of their paths, Torch parameters by their names, in Torch's order.
NAMES = {
    "conv/kernel": "0.weight",
    "norm/gamma": "1.weight",
    "norm/beta": "1.bias",
    "square/kernel": "4.weight",
    "square/bias": "4.bias",
    "output/kernel": "6.weight",
    "output/bias": "6.bias",
}


def layers() -> Any:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1, stride=2, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


@functools.cache
def start() -> dict[str, Any]:
    torch.manual_seed(3)
    return layers().state_dict()


def torch_model() -> Any:
    model = layers()
    model.load_state_dict(start())
    return model


def keras_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(4, 3, strides=2, use_bias=False, name="conv"),
            keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name="norm"),
            keras.layers.ReLU(),
            keras.layers.Permute((3, 1, 2)),  # flattened as in Torch
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="square"),
            keras.layers.Dense(10, name="output"),
        ],
        name="mixed",
    )
    for path, name in NAMES.items():
        (variable,) = [v for v in model.trainable_variables if v.path.endswith(path)]
        value = start()[name].numpy()
        axes = {2: (1, 0), 4: (2, 3, 1, 0)}.get(value.ndim)
        variable.assign(value if axes is None else value.transpose(axes))
    return model


def batches(rank: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(1408).reshape(-1, 64)[:, rank * 32 : rank * 32 + 32]
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return [(x[order[k % 22]], labels[order[k % 22]]) for k in range(steps)]


def train_torch(wrap: Callable[..., Any], rank: int, steps: int = 30) -> dict[str, np.ndarray]:
    model = torch_model()
    optimizer = wrap(model)
    for x, y in batches(rank, steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def train_keras(wrap: Callable[..., Any], rank: int, steps: int = 30) -> dict[str, np.ndarray]:
    model = keras_model()
    model.compile(wrap(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for x, y in batches(rank, steps):
        model.train_on_batch(x.transpose(0, 2, 3, 1), y)
    result = {}
    for path, name in NAMES.items():
        (variable,) = [v for v in model.trainable_variables if v.path.endswith(path)]
        axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(len(variable.shape))
        result[name] = variable.numpy() if axes is None else variable.numpy().transpose(axes)
    return result


def adam() -> Any:
    return keras.optimizers.Adam(1e-3, epsilon=1e-8)


WAYS = {
    "dense": (
        lambda m: ocomm_torch.DistributedOneBitAdam(
            torch.optim.Adam(m.parameters(), 1e-3), m.named_parameters(), freeze_step=1000
        ),
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=1000, names=NAMES),
    ),
    "1-bit Adam": (
        lambda m: ocomm_torch.DistributedOneBitAdam(
            torch.optim.Adam(m.parameters(), 1e-3), m.named_parameters(), freeze_step=12
        ),
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=12, names=NAMES),
    ),
    "0/1 Adam": (
        lambda m: ocomm_torch.DistributedZeroOneAdam(torch.optim.Adam(m.parameters(), 1e-3), m.named_parameters()),
        lambda: hvd.DistributedZeroOneAdam(adam(), names=NAMES),
    ),
    "Birder": (
        lambda m: ocomm_torch.DistributedBirder(torch.optim.SGD(m.parameters(), 1e-3), m.named_parameters()),
        lambda: hvd.DistributedBirder(keras.optimizers.SGD(1e-3), names=NAMES),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_replicas_of_both_frameworks_are_equal(way: str) -> None:
    for_torch, for_keras = WAYS[way]
    start()  # before there are threads: Torch has one random generator

    def body(session: Session) -> Any:
        rank = hvd.rank()
        return train_torch(for_torch, rank) if rank == 0 else train_keras(for_keras, rank)

    of_torch, of_keras = run_ranks(2, body)
    for name, value in of_torch.items():
        if way == "dense":  # each framework's warm-up is its own Adam; the formula is one
            np.testing.assert_allclose(of_keras[name], value, rtol=0, atol=1e-6)
        else:
            assert np.abs(of_keras[name] - value).max() <= (1e-6 if way == "1-bit Adam" else 0), name


def test_a_mixed_job_ends_where_jobs_of_one_framework_end() -> None:
    for_torch, for_keras = WAYS["dense"]
    start()  # before there are threads: Torch has one random generator

    def body(kind: str) -> Callable[[Session], Any]:
        def run(session: Session) -> Any:
            rank = hvd.rank()
            if kind == "keras" or (kind == "mixed" and rank == 1):
                return train_keras(for_keras, rank, 100)
            return train_torch(for_torch, rank, 100)

        return run

    ends = [run_ranks(2, body(kind))[0] for kind in ("torch", "keras", "mixed")]
    for other in ends[1:]:
        for name, value in ends[0].items():
            np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-5)


def test_a_square_matrix_in_keras_order_is_caught() -> None:
    wrong = {**NAMES, "square/kernel": ("4.weight", (0, 1))}

    def body(session: Session) -> None:
        with pytest.raises(MismatchError, match=r"'4.weight' \(64, 64\) float32 order (torch|keras)"):
            if hvd.rank() == 0:
                WAYS["dense"][0](torch_model())
            else:
                model = keras_model()
                hvd.DistributedOneBitAdam(adam(), model, freeze_step=1000, names=wrong)

    run_ranks(2, body)


def test_a_map_without_a_variable_is_named() -> None:
    def body(session: Session) -> None:
        model = keras_model()
        with pytest.raises(InvalidRequestError, match=r"there is none for variable 'mixed/output/bias'"):
            hvd.DistributedBirder(
                keras.optimizers.SGD(0.1), model, names={k: v for k, v in NAMES.items() if k != "output/bias"}
            )
        with pytest.raises(InvalidRequestError, match=r"'nowhere/kernel' is the end of 0 variables' paths"):
            hvd.DistributedBirder(keras.optimizers.SGD(0.1), model, names={"nowhere/kernel": "0.weight"})

    run_ranks(1, body)


def test_another_learning_rate_is_caught() -> None:
    def body(session: Session) -> None:
        if hvd.rank() == 0:
            with pytest.raises(HorovodInternalError, match="lr"):
                train_torch(WAYS["dense"][0], 0)
        else:
            slower = keras.optimizers.Adam(2e-3, epsilon=1e-8)
            with pytest.raises(tf.errors.OpError, match="lr"):
                train_keras(lambda: hvd.DistributedOneBitAdam(slower, freeze_step=1000, names=NAMES), 1)

    run_ranks(2, body)
