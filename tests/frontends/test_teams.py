"""Ranks that train in a process set: a team's bits are those of a job of its own, whatever the others do meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")
datasets = pytest.importorskip("sklearn.datasets")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd_keras  # noqa: E402
import ocomm_torch as hvd_torch  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.operations import ProcessSet  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

IMAGES, LABELS = datasets.load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)
BATCH = 32


def start(seed: int) -> list[np.ndarray]:
    """Kernels as Keras has them, and biases."""
    random = np.random.default_rng(seed)
    return [random.normal(0, 0.1, shape).astype(np.float32) for shape in ((64, 32), (32,), (32, 10), (10,))]


def share(team: ProcessSet, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's images, other ones on each rank of the team."""
    mine = np.arange(team.rank(), BATCH * batches * team.size(), team.size())
    return IMAGES[mine], LABELS[mine]


def keras_model(seed: int) -> Any:
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)], name="team"
    )
    model.set_weights(start(seed))
    return model


def fit(wrap: Callable[..., Any], team: ProcessSet) -> list[np.ndarray]:
    """Two epochs of eight batches by ``model.fit``, with all callbacks; ranks start apart."""
    model = keras_model(team.rank())
    model.compile(wrap(team), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(team.ranks[0]),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.ReplicaChecksumCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(2e-3, warmup_epochs=1),
    ]
    x, y = share(team, 8)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    losses = np.array(history["loss"])
    assert losses[1] < losses[0]
    return [*(w.numpy() for w in model.trainable_weights), losses]


def tape(wrap: Callable[..., Any], team: ProcessSet) -> list[np.ndarray]:
    """Sixteen steps of a loop in a graph."""
    model, optimizer = keras_model(team.rank()), keras.optimizers.Adam(2e-3)
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd_keras.broadcast_variables(model.variables, team.ranks[0], process_set=team)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as recorded:
            value = criterion(y, model(x, training=True))
        gradients = wrap(recorded, team).gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x, y = share(team, 16)
    for first in range(0, len(x), BATCH):
        step(x[first : first + BATCH], y[first : first + BATCH])
    hvd_keras.check_replicas(model.trainable_variables, team)
    return [w.numpy() for w in model.trainable_weights]


def loop(wrap: Callable[..., Any], team: ProcessSet) -> list[np.ndarray]:
    """Sixteen steps of a loop in Torch; ranks start apart."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start(team.rank()), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    optimizer = wrap(model, team)
    hvd_torch.broadcast_parameters(model.state_dict(), team.ranks[0], process_set=team)
    hvd_torch.broadcast_optimizer_state(optimizer, team.ranks[0], process_set=team)
    x, y = share(team, 16)
    for first in range(0, len(x), BATCH):
        optimizer.zero_grad()
        scores = model(torch.from_numpy(x[first : first + BATCH]))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(y[first : first + BATCH])).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def adam() -> Any:
    return keras.optimizers.Adam(2e-3)


def torch_adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), 2e-3)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 2e-3)


#: What the team of Keras does, and what that of Torch does beside it.
PAIRS: dict[str, tuple[Callable[[ProcessSet], Any], Callable[[ProcessSet], Any]]] = {
    "dense": (
        lambda team: fit(lambda t: hvd_keras.DistributedOptimizer(adam(), process_set=t), team),
        lambda team: loop(
            lambda m, t: hvd_torch.DistributedOptimizer(torch_adam(m), m.named_parameters(), process_set=t), team
        ),
    ),
    "tape and Adasum": (
        lambda team: tape(lambda recorded, t: hvd_keras.DistributedGradientTape(recorded, process_set=t), team),
        lambda team: loop(
            lambda m, t: hvd_torch.DistributedOptimizer(
                sgd(m), m.named_parameters(), op=hvd_torch.Adasum, process_set=t
            ),
            team,
        ),
    ),
    "1-bit Adam": (
        lambda team: fit(lambda t: hvd_keras.DistributedOneBitAdam(adam(), freeze_step=6, process_set=t), team),
        lambda team: loop(
            lambda m, t: hvd_torch.DistributedOneBitAdam(
                torch_adam(m), m.named_parameters(), freeze_step=5, process_set=t
            ),
            team,
        ),
    ),
    "0/1 Adam": (
        lambda team: fit(lambda t: hvd_keras.DistributedZeroOneAdam(adam(), process_set=t), team),
        lambda team: loop(
            lambda m, t: hvd_torch.DistributedZeroOneAdam(torch_adam(m), m.named_parameters(), process_set=t), team
        ),
    ),
    "Birder": (
        lambda team: fit(
            lambda t: hvd_keras.DistributedBirder(keras.optimizers.SGD(2e-3), beta=0.8, process_set=t), team
        ),
        lambda team: loop(
            lambda m, t: hvd_torch.DistributedBirder(sgd(m), m.named_parameters(), beta=0.8, process_set=t), team
        ),
    ),
    "SoftSignSGD and Lion": (
        lambda team: fit(
            lambda t: hvd_keras.DistributedSoftSignSGD(keras.optimizers.SGD(2e-3), beta=0.8, process_set=t), team
        ),
        lambda team: loop(lambda m, t: hvd_torch.DistributedLion(sgd(m), m.named_parameters(), process_set=t), team),
    ),
}


#: In every run: ``fit``, dense and 1-bit. The others have the same path through a process set.
SOME = ("dense", "1-bit Adam")


@pytest.mark.parametrize("pair", few(PAIRS, SOME))
def test_a_team_of_keras_and_one_of_torch_train_as_in_jobs_of_their_own(pair: str) -> None:
    works = PAIRS[pair]

    def together(session: Session) -> Any:
        teams = ProcessSet([0, 1]), ProcessSet([2, 3])
        (which,) = [number for number, team in enumerate(teams) if team.included()]
        return works[which](teams[which])

    results = run_ranks(4, together, process_sets=[[0, 1], [2, 3]])
    for which, work in enumerate(works):
        ranks = results[2 * which : 2 * which + 2]
        # Under mpirun there is one job only.
        own = [] if MPI_SIZE else run_ranks(2, lambda session, work=work: work(hvd_torch.global_process_set))
        for other in [*ranks[1:], *own]:
            for a, b in zip(ranks[0], other, strict=True):
                assert np.array_equal(a, b)


def test_what_a_rank_outside_the_team_may_not_do_is_named() -> None:
    def body(session: Session) -> None:
        team = ProcessSet([0])
        if team.included():
            return
        model, other = torch.nn.Linear(2, 2), keras_model(0)
        names = {"dense/kernel": "0.weight", "dense/bias": "0.bias"}
        for wrong in (
            lambda: hvd_torch.DistributedOneBitAdam(torch_adam(model), freeze_step=5, process_set=team),
            lambda: hvd_torch.DistributedLion(sgd(model), process_set=team),
            lambda: hvd_keras.DistributedOneBitAdam(adam(), other, process_set=team),
            lambda: hvd_keras.DistributedBirder(adam(), keras_dense(), names=names, process_set=team),
            lambda: hvd_keras.broadcast_variables(other.variables, 0, process_set=team),
            lambda: hvd_keras.check_replicas(other.variables, team),
        ):
            with pytest.raises(InvalidRequestError, match=r"rank 1 is not a member of process set 1 \(ranks \[0\]\)"):
                wrong()

    run_ranks(2, body, process_sets=[[0]])


def keras_dense() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="dense")])


def test_a_root_outside_the_team_is_named_before_anything_is_trained() -> None:
    def body(session: Session) -> None:
        team = ProcessSet([1])
        if not team.included():
            return
        model = keras_model(0)
        model.compile(hvd_keras.DistributedOptimizer(adam(), process_set=team), loss="mse")
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        with pytest.raises((InvalidRequestError, tf.errors.OpError), match=r"invalid root rank 0 .* ranks \[1\]"):
            model.fit(IMAGES[:8], IMAGES[:8, :10], verbose=0, callbacks=[callback])

    run_ranks(2, body, process_sets=[[1]])


def test_a_callback_speaks_to_the_set_it_is_given_instead_of_the_optimizers() -> None:
    def body(session: Session) -> float:
        team = ProcessSet([hvd_keras.rank()])
        model = keras_model(0)
        model.compile(hvd_keras.DistributedOptimizer(adam(), process_set=team), loss="mse")
        average = hvd_keras.callbacks.MetricAverageCallback(process_set=hvd_keras.global_process_set)
        average.set_model(model)
        logs = {"loss": float(hvd_keras.rank())}
        average.on_epoch_end(0, logs)
        return logs["loss"]

    assert run_ranks(2, body, process_sets=[[0], [1]]) == [0.5, 0.5]


def test_the_warm_up_of_the_learning_rate_counts_the_team() -> None:
    def body(session: Session) -> list[float]:
        team = ProcessSet([0, 1] if hvd_keras.rank() < 2 else [2])
        model = keras_model(0)
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.4), process_set=team), loss="mse")
        seen: list[float] = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate.numpy()))
        )
        warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=1)
        model.fit(IMAGES[:16], IMAGES[:16, :10], batch_size=8, verbose=0, callbacks=[warm_up, watch])
        return seen

    pair, other, lonely = run_ranks(3, body, process_sets=[[0, 1], [2]])
    np.testing.assert_allclose(pair, [0.3, 0.4], rtol=1e-6)
    assert pair == other
    np.testing.assert_allclose(lonely, [0.4, 0.4], rtol=1e-6)


def test_layers_that_normalize_over_overlapping_teams_find_each_other() -> None:
    def body(session: Session) -> None:
        teams = ProcessSet([0, 1]), ProcessSet([1, 2])
        for team in teams:
            if not team.included():
                continue
            layer = hvd_keras.SyncBatchNormalization(process_set=team)
            x = IMAGES[:32]
            out = layer(x[team.rank() :: 2], training=True)
            whole = keras.layers.BatchNormalization()(x, training=True).numpy()
            np.testing.assert_allclose(out.numpy(), whole[team.rank() :: 2], atol=2e-4)

    run_ranks(3, body, process_sets=[[0, 1], [1, 2]])
