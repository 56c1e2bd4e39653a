"""One model on ranks of Torch and TensorFlow together: equal replicas, and the same as with one framework alone."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
import ocomm_torch  # noqa: E402
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError  # noqa: E402
from ocomm.kernels import reference  # noqa: E402
from ocomm.optim.adam import DenseAdam  # noqa: E402
from ocomm.optim.core import Group  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

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
    """A rank's share of batches of 64 images, the same ones for any number of ranks."""
    images, labels = load_digits(return_X_y=True)
    share = 64 // hvd.size()
    order = np.random.default_rng(0).permutation(1408).reshape(-1, 64)[:, rank * share : rank * share + share]
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return [(x[order[k % 22]], labels[order[k % 22]]) for k in range(steps)]


def rate(step: int, steps: int) -> float:
    return 6e-3 * (1 - step / steps) + 1e-4


def train_torch(wrap: Callable[..., Any], rank: int, steps: int = 30, decays: bool = False) -> dict[str, np.ndarray]:
    model = torch_model()
    optimizer = wrap(model)
    for step, (x, y) in enumerate(batches(rank, steps)):
        if decays:
            optimizer.param_groups[0]["lr"] = rate(step, steps)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def train_keras(wrap: Callable[..., Any], rank: int, steps: int = 30, decays: bool = False) -> dict[str, np.ndarray]:
    model = keras_model()
    model.compile(wrap(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)  # a graph that did would be traced twice
    for step, (x, y) in enumerate(batches(rank, steps)):
        if decays:
            model.optimizer.learning_rate = rate(step, steps)
        model.train_on_batch(x.transpose(0, 2, 3, 1), y)
    return in_torch_order(model)


def in_torch_order(model: Any) -> dict[str, np.ndarray]:
    result = {}
    for path, name in NAMES.items():
        (variable,) = [v for v in model.trainable_variables if v.path.endswith(path)]
        axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(len(variable.shape))
        result[name] = variable.numpy() if axes is None else variable.numpy().transpose(axes)
    return result


@torch.no_grad()
def final_loss(parameters: dict[str, np.ndarray]) -> float:
    """Of the images that no rank has seen, with their own statistics."""
    model = torch_model()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()}, strict=False)
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((images[1408:] / 16).astype(np.float32).reshape(-1, 1, 8, 8))
    return torch.nn.functional.cross_entropy(model(x), torch.from_numpy(labels[1408:])).item()


def adam() -> Any:
    return keras.optimizers.Adam(4e-3, epsilon=1e-8)


def torch_adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), 4e-3)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 4e-3)


#: Most of the last steps send nothing; the last one, number 33, is a sync.
SILENT: Any = {"vote": "sync", "local_step_start": 2, "local_step_doubling": 8, "local_step_clip": 4}
WAYS = {
    "dense": (
        lambda m: ocomm_torch.DistributedOneBitAdam(torch_adam(m), m.named_parameters(), freeze_step=1000),
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=1000, names=NAMES),
    ),
    "1-bit Adam": (
        lambda m: ocomm_torch.DistributedOneBitAdam(torch_adam(m), m.named_parameters(), freeze_step=12),
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=12, names=NAMES),
    ),
    "1-bit Adam after 8-bit steps": (
        lambda m: ocomm_torch.DistributedOneBitAdam(torch_adam(m), m.named_parameters(), freeze_step=12, dense_bits=8),
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=12, dense_bits=8, names=NAMES),
    ),
    "clipped 1-bit AdamW": (
        lambda m: ocomm_torch.DistributedOneBitAdam(
            torch.optim.AdamW(m.parameters(), 4e-3), m.named_parameters(), freeze_step=12, max_grad_norm=1.0
        ),
        lambda: hvd.DistributedOneBitAdam(
            keras.optimizers.AdamW(4e-3, weight_decay=1e-2, epsilon=1e-8),
            freeze_step=12,
            max_grad_norm=1.0,
            names=NAMES,
        ),
    ),
    "0/1 Adam": (
        lambda m: ocomm_torch.DistributedZeroOneAdam(torch_adam(m), m.named_parameters()),
        lambda: hvd.DistributedZeroOneAdam(adam(), names=NAMES),
    ),
    "0/1 Adam, votes at syncs": (
        lambda m: ocomm_torch.DistributedZeroOneAdam(torch_adam(m), m.named_parameters(), **SILENT),
        lambda: hvd.DistributedZeroOneAdam(adam(), names=NAMES, **SILENT),
    ),
    "Birder": (
        lambda m: ocomm_torch.DistributedBirder(sgd(m), m.named_parameters()),
        lambda: hvd.DistributedBirder(keras.optimizers.SGD(4e-3), names=NAMES),
    ),
    "SoftSignSGD": (
        lambda m: ocomm_torch.DistributedSoftSignSGD(sgd(m), m.named_parameters()),
        lambda: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(4e-3), names=NAMES),
    ),
    "Lion": (
        lambda m: ocomm_torch.DistributedLion(sgd(m), m.named_parameters()),
        lambda: hvd.DistributedLion(keras.optimizers.Lion(4e-3), names=NAMES),
    ),
    "EF-SGD": (
        lambda m: ocomm_torch.DistributedEFSGD(
            torch.optim.SGD(m.parameters(), 4e-2, momentum=0.9, nesterov=True), m.named_parameters()
        ),
        lambda: hvd.DistributedEFSGD(keras.optimizers.SGD(4e-2, momentum=0.9, nesterov=True), names=NAMES),
    ),
    "clipped 1-bit LAMB": (
        lambda m: ocomm_torch.DistributedOneBitLamb(
            torch.optim.Adam(m.parameters(), 2e-2), m.named_parameters(), freeze_step=12, max_grad_norm=1.0
        ),
        lambda: hvd.DistributedOneBitLamb(
            keras.optimizers.Lamb(2e-2, epsilon=1e-8), freeze_step=12, max_grad_norm=1.0, names=NAMES
        ),
    ),
}


# Of dense jobs: the next test.
@pytest.mark.parametrize(
    "way",
    few([way for way in WAYS if way != "dense"], ["1-bit Adam"]),
)
def test_two_ranks_of_each_framework_are_equal_and_learn_what_four_of_torch_learn(way: str) -> None:
    for_torch, for_keras = WAYS[way]
    start()  # before there are threads: Torch has one random generator

    def body(ranks_of_torch: int) -> Callable[[Session], Any]:
        def run(session: Session) -> Any:
            rank = hvd.rank()
            # Rates that fall, of which Keras knows float32 only.
            decays = way.startswith("1-bit Adam")
            if rank < ranks_of_torch:
                return train_torch(for_torch, rank, 33, decays)
            return train_keras(for_keras, rank, 33, decays)

        return run

    mixed, pure = run_ranks(4, body(2)), run_ranks(4, body(4))
    for other in mixed[1:]:
        for name, value in mixed[0].items():
            assert np.array_equal(other[name], value), name
    before = final_loss({name: value.numpy() for name, value in start().items()})
    expected = final_loss(pure[0])
    assert expected < 0.7 * before
    assert abs(final_loss(mixed[0]) - expected) < 0.02 * expected


@pytest.mark.long
def test_dense_jobs_of_either_framework_and_of_both_end_with_the_same_parameters_after_100_steps() -> None:
    start()

    def body(in_keras: tuple[int, ...]) -> Callable[[Session], Any]:
        for_torch, for_keras = WAYS["dense"]

        def run(session: Session) -> Any:
            rank = hvd.rank()
            return train_keras(for_keras, rank, 100) if rank in in_keras else train_torch(for_torch, rank, 100)

        return run

    of_torch, of_keras, of_both = (run_ranks(2, body(in_keras)) for in_keras in ((), (0, 1), (1,)))
    for name, value in of_torch[0].items():
        assert np.array_equal(of_both[0][name], of_both[1][name])
        for other in (of_keras[0], of_both[0]):
            np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-5, err_msg=name)


class WithEmbedding(torch.nn.Module):
    """Images as sequences of 16 grey levels: every layer that Keras and Torch have in different orders, and some."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = torch.nn.Embedding(17, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.conv = torch.nn.Conv1d(8, 8, 2, stride=2)
        self.recurrent = torch.nn.RNN(8, 8, bias=False, batch_first=True)
        self.output = torch.nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        x = self.conv(self.norm(self.levels(x)).transpose(1, 2)).transpose(1, 2)
        return self.output(self.recurrent(x)[0][:, -1])


def keras_with_embedding() -> Any:
    return keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            keras.layers.Embedding(17, 8, name="levels"),
            keras.layers.LayerNormalization(epsilon=1e-5, name="norm"),
            keras.layers.Conv1D(8, 2, strides=2, name="conv"),
            keras.layers.SimpleRNN(8, use_bias=False, name="recurrent"),
            keras.layers.Dense(10, name="output"),
        ]
    )


NAMES_WITH_EMBEDDING = {
    "levels/embeddings": "levels.weight",
    "norm/gamma": "norm.weight",
    "norm/beta": "norm.bias",
    "conv/kernel": "conv.weight",
    "conv/bias": "conv.bias",
    "recurrent/simple_rnn_cell/kernel": "recurrent.weight_ih_l0",
    "recurrent/simple_rnn_cell/recurrent_kernel": "recurrent.weight_hh_l0",
    "output/kernel": "output.weight",
    "output/bias": "output.bias",
}


@pytest.mark.short("from Keras")
@pytest.mark.parametrize("root", [0, 1], ids=["from Torch", "from Keras"])
def test_ranks_start_alike_by_a_broadcast_and_go_on_alike_through_every_layer(root: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images[:, ::4].astype(np.int64)

    def as_torch(mine: np.ndarray) -> list[np.ndarray]:
        model = WithEmbedding()
        ocomm_torch.broadcast_parameters(model.named_parameters(), root)
        optimizer = ocomm_torch.DistributedOneBitAdam(torch_adam(model), model.named_parameters(), freeze_step=4)
        begun = [p.detach().numpy().copy() for p in model.parameters()]
        for k in range(8):
            chosen = mine[32 * k : 32 * k + 32]
            scores = model(torch.from_numpy(images[chosen]))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[chosen])).backward()
            optimizer.step()
        whole = model(torch.from_numpy(images[:256])).detach().numpy()
        return [whole, *begun, *(p.detach().numpy() for p in model.parameters())]

    def as_keras(mine: np.ndarray) -> list[np.ndarray]:
        model = keras_with_embedding()
        optimizer = hvd.DistributedOneBitAdam(adam(), freeze_step=4, names=NAMES_WITH_EMBEDDING)
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        begun: list[np.ndarray] = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: batch or begun.extend(keras_values(model))
        )
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), watch]
        model.fit(images[mine], labels[mine], batch_size=32, shuffle=False, verbose=0, callbacks=callbacks)
        return [model.predict(images[:256], verbose=0), *begun, *keras_values(model)]

    def keras_values(model: Any) -> list[np.ndarray]:
        values = []
        for path in NAMES_WITH_EMBEDDING:
            (variable,) = [v for v in model.trainable_variables if v.path.endswith(path)]
            axes = tuple(reversed(range(len(variable.shape)))) if path.endswith("kernel") else None
            values.append(variable.numpy() if axes is None else variable.numpy().transpose(axes))
        return values

    def body(session: Session) -> list[np.ndarray]:
        rank = hvd.rank()
        return (as_torch, as_keras)[rank](np.arange(rank, 512, 2))

    of_torch, of_keras = run_ranks(2, body)
    np.testing.assert_allclose(of_keras[0], of_torch[0], atol=1e-4)  # one function, in arithmetic of two frameworks
    assert len(of_torch) == len(of_keras) == 19
    for a, b in zip(of_torch[1:], of_keras[1:], strict=True):
        assert np.array_equal(a, b)


def test_the_adam_of_mixed_jobs_is_that_of_torch_but_for_rounding() -> None:
    random = np.random.default_rng(5)
    values = random.normal(size=500).astype(np.float32)
    parameter = torch.tensor(values)
    options = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6}
    theirs = torch.optim.AdamW([parameter], weight_decay=0.1, foreach=False, **options)
    ours = DenseAdam.fresh(500)
    group = Group(np.zeros(1, np.int64), decoupled_decay=0.1, **options)
    for _ in range(50):
        gradient = random.normal(size=500).astype(np.float32)
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        ours.update(reference, values, gradient, group)
    np.testing.assert_allclose(values, parameter.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.variance, theirs.state[parameter]["exp_avg_sq"].numpy(), rtol=1e-5)


def test_the_torch_ranks_of_a_mixed_job_save_what_a_plain_adam_goes_on_with() -> None:
    def body(session: Session) -> None:
        if hvd.rank() == 1:
            train_keras(WAYS["dense"][1], 1, 3)
            return
        model = torch_model()
        optimizer = WAYS["dense"][0](model)
        for x, y in batches(0, 3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            optimizer.step()
        plain = torch_adam(torch_model())
        plain.load_state_dict({key: value for key, value in optimizer.state_dict().items() if key != "ocomm"})
        for state in plain.state.values():
            assert state["step"] == 3 and state["exp_avg_sq"].max() > 0

    run_ranks(2, body)


def resumed(folder: Path, wrap: str, how: str, factor: float = 1.0, **options: Any) -> list[Any]:
    """Trains one rank of each framework for 4 steps, and for 4 more in a job that goes on from what both have saved.

    ``how`` says into what the Torch rank loads its state: "plain", "wrapped" or "warm_start". Its second moment of a
    tensor is multiplied by ``factor`` before. Returns, by rank, parameters and dense steps of the second job, or its
    error.
    """
    saved: dict[str, Any] = {}
    file = str(folder / "keras.weights.h5")
    is_warm = how == "warm_start"

    def torch_rank(goes_on: bool) -> Any:
        model = torch_model()
        plain = torch_adam(model)
        if goes_on:
            model.load_state_dict(saved["model"])
            saved["optimizer"]["state"][2]["exp_avg_sq"] *= factor
        if goes_on and how == "plain":
            plain.load_state_dict(saved["optimizer"])
        more = {"warm_start": saved["optimizer"]} if goes_on and is_warm else {}
        optimizer = getattr(ocomm_torch, wrap)(plain, model.named_parameters(), **options, **more)
        if goes_on and how == "wrapped":
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in batches(0, 8)[4:] if goes_on else batches(0, 4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            optimizer.step()
        saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
        return parameters, optimizer.compression_report()["dense_steps"]

    def keras_rank(goes_on: bool) -> Any:
        model = keras_model()
        more = {"warm_start": True} if goes_on and is_warm else {}
        optimizer = getattr(hvd, wrap)(adam(), names=NAMES, **options, **more)
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        optimizer.build(model.trainable_variables)
        if goes_on:
            model.load_weights(file)
        for x, y in batches(1, 8)[4:] if goes_on else batches(1, 4):
            model.train_on_batch(x.transpose(0, 2, 3, 1), y)
        if not goes_on:
            model.save_weights(file)
        return in_torch_order(model), optimizer.compression_report()["dense_steps"]

    def body(session: Session, goes_on: bool) -> Any:
        try:
            return (keras_rank if hvd.rank() else torch_rank)(goes_on)
        except (HorovodInternalError, tf.errors.OpError) as error:
            return str(error)

    run_ranks(2, lambda session: body(session, False))
    return run_ranks(2, lambda session: body(session, True))


@pytest.mark.skipif(MPI_SIZE > 0, reason="the second job has what the first has saved")
@pytest.mark.parametrize(
    ("wrap", "how", "options", "dense_steps"),
    few(
        [
            ("DistributedOneBitAdam", "plain", {"freeze_step": 2}, 0),
            ("DistributedOneBitAdam", "plain", {"freeze_step": 100}, 4),
            ("DistributedOneBitAdam", "warm_start", {"freeze_step": 100}, 0),
            ("DistributedOneBitLamb", "plain", {"freeze_step": 2}, 0),
            ("DistributedOneBitLamb", "warm_start", {"freeze_step": 100}, 0),
            ("DistributedZeroOneAdam", "plain", {}, 0),
            ("DistributedZeroOneAdam", "warm_start", {}, 0),
        ],
        lambda wrap, how, options, dense_steps: dense_steps > 0,
    ),
)
def test_a_mixed_job_goes_on_from_the_states_of_both(
    wrap: str, how: str, options: dict[str, Any], dense_steps: int, tmp_path: Path
) -> None:
    (torchs, torch_steps), (keras_own, keras_steps) = resumed(tmp_path, wrap, how, **options)
    assert all(np.array_equal(torchs[name], keras_own[name]) for name in NAMES.values())
    assert torch_steps == keras_steps == dense_steps


@pytest.mark.skipif(MPI_SIZE > 0, reason="the second job has what the first has saved")
@pytest.mark.parametrize(
    ("how", "factor", "said"),
    [
        ("warm_start", 2.0, r"are not alike before their first step: rank\(s\) \[0\] hold the optimizer's state"),
        ("plain", 2.0, r"rank\(s\) \[0\] hold moments of '1.bias' with checksum"),
        ("wrapped", 1.0, r"rank\(s\) \[0\] hold an order of gradients.* before it is wrapped"),
    ],
    ids=["warm_start", "plain", "wrapped"],
)
@pytest.mark.short("wrapped")
def test_states_of_a_mixed_job_that_differ_are_an_error_on_all_ranks(
    how: str, factor: float, said: str, tmp_path: Path
) -> None:
    for text in resumed(tmp_path, "DistributedOneBitAdam", how, factor, freeze_step=100):
        assert re.search(said, text)


def test_a_square_matrix_in_keras_order_is_caught() -> None:
    wrong = {**NAMES, "square/kernel": ("4.weight", (0, 1))}

    def body(session: Session) -> None:
        said = (
            r"rank\(s\) \[0\] registered tensor '4.weight' \(64, 64\) float32 order torch; "
            r"rank\(s\) \[1\] registered tensor '4.weight' \(64, 64\) float32 order keras"
        )
        with pytest.raises(MismatchError, match=said):
            if hvd.rank() == 0:
                WAYS["dense"][0](torch_model())
            else:
                model = keras_model()
                hvd.DistributedOneBitAdam(adam(), model, freeze_step=1000, names=wrong)

    run_ranks(2, body)


def test_a_square_matrix_in_keras_order_is_not_broadcast() -> None:
    wrong = {**NAMES, "square/kernel": ("4.weight", (0, 1))}

    def body(session: Session) -> None:
        with pytest.raises(MismatchError, match=r"'broadcast.4.weight': .*order"):
            if hvd.rank() == 0:
                ocomm_torch.broadcast_parameters(torch_model().named_parameters(), 0)
            else:
                hvd.broadcast_variables(keras_model().trainable_variables, 0, names=wrong)

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
            said = r"\(lr 0\.004\); rank\(s\) \[1\] \(lr 0\.002\).* compute the lr in Python on both sides"
            with pytest.raises(HorovodInternalError, match=said):
                train_torch(WAYS["dense"][0], 0)
        else:
            slower = keras.optimizers.Adam(2e-3, epsilon=1e-8)
            with pytest.raises(tf.errors.OpError, match="lr"):
                train_keras(lambda: hvd.DistributedOneBitAdam(slower, freeze_step=1000, names=NAMES), 1)

    run_ranks(2, body)
