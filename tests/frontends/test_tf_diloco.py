"""DistributedDiLoCo of Keras against the plain simulation, eagerly and in graphs, and what belongs to a fit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError, SettingsError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.resume import one_state  # noqa: E402
from tests.frontends.onebit_jobs import digest, gradients, initial  # noqa: E402
from tests.oracle import diloco as oracle  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]]}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"sync_every": 3},
    "fragments, 4 bits": {"sync_every": 4, "fragments": 2, "bits": 4},
    "all of it": {"sync_every": 6, "fragments": 2, "delay": 2, "mix": 0.5, "bits": 1},
}
STEPS = 13


def adam() -> Any:
    return keras.optimizers.AdamW(0.0625, weight_decay=0.01)


def made(values: list[np.ndarray], constraint: Any = None) -> list[Any]:
    variables = [keras.Variable(value, name=f"v{number}") for number, value in enumerate(values)]
    for variable in variables:
        variable.constraint = constraint
    return variables


def tensors(step: int, rank: int) -> list[Any]:
    return [tf.constant(g) for g in gradients(step, rank) if g is not None]


class Run:
    """Variables on one rank with their optimizer."""

    def __init__(self, rank: int, constraint: Any = None, **options: Any) -> None:
        self.rank = rank
        self.variables = made(initial(), constraint)
        self.optimizer = hvd.DistributedDiLoCo(adam(), self.variables, **options)
        self._apply: Callable[..., Any] = self.optimizer.apply

    def in_graph(self) -> None:
        """Steps in ``tf.function`` from now on, whose gradients come from what the variables are, as in training."""

        @tf.function
        def apply(grads: list[Any]) -> None:
            self.optimizer.apply(
                [g + 0.0 * tf.convert_to_tensor(v) for g, v in zip(grads, self.variables, strict=True)]
            )

        self._apply = apply

    @property
    def values(self) -> list[np.ndarray]:
        return [v.numpy().reshape(-1) for v in self.variables]

    def train(self, first: int, last: int) -> list[str]:
        found = []
        for step in range(first, last + 1):
            self._apply(tensors(step, self.rank))
            core = self.optimizer._frontend.driver.core
            anchors = [core.anchor[core.flat_span(t)] for t in range(len(self.variables))]
            found.append(digest([*self.values, *anchors]))
        return found


def simulated(
    ranks: int, sync_every: int, fragments: int = 1, constraint: Any = None, **options: Any
) -> list[list[str]]:
    def constrained(values: np.ndarray) -> np.ndarray:
        return values if constraint is None else np.asarray(constraint(keras.ops.convert_to_tensor(values)))

    law = oracle.DiLoCo(
        initial(), ranks, FRAGMENTS[fragments], sync_every=sync_every, constrained=constrained, **options
    )
    models = [made(initial(), constraint) for _ in range(ranks)]
    optimizers = [adam() for _ in range(ranks)]
    found: list[list[str]] = [[] for _ in range(ranks)]
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.build(model)
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for number, variable in enumerate(model):
                variable.assign(law.thetas[rank][number].reshape(variable.shape))
            optimizer.apply(tensors(step, rank))
            law.thetas[rank] = [v.numpy().reshape(-1).copy() for v in model]
        law.end_step()
        for rank in range(ranks):
            found[rank].append(digest([*law.thetas[rank], *law.anchors]))
    return found


@pytest.mark.parametrize(
    ("form", "ranks", "in_graph"),
    few(
        [
            ("plain", 1, True),
            ("plain", 2, False),
            ("plain", 2, True),
            ("plain", 4, True),
            ("fragments, 4 bits", 2, True),
            ("all of it", 2, True),
            ("all of it", 2, False),
        ],
        [("plain", 2, False), ("fragments, 4 bits", 2, True)],
    ),
)
def test_it_equals_the_simulation_after_each_step(form: str, ranks: int, in_graph: bool) -> None:
    def body(session: Session) -> list[str]:
        run = Run(hvd.rank(), **FORMS[form])
        if in_graph:
            run.in_graph()
        return run.train(1, STEPS)

    assert run_ranks(ranks, body) == simulated(ranks, **FORMS[form])


@pytest.mark.parametrize(
    ("form", "in_graph"),
    few(itertools.product(FORMS, [False, True]), lambda form, in_graph: form == "plain" and not in_graph),
)
def test_anchors_keep_to_the_constraints_of_variables(form: str, in_graph: bool) -> None:
    constraint, outer_lr = keras.constraints.MaxNorm(0.5), 1.5  # so that a sync steps beyond it

    def body(session: Session) -> list[str]:
        run = Run(hvd.rank(), constraint, outer_lr=outer_lr, **FORMS[form])
        if in_graph:
            run.in_graph()
        found = run.train(1, STEPS)
        run.optimizer.finish()
        for values in run.variables:
            norms = np.sqrt(np.sum(np.square(values.numpy()), axis=0))
            assert (norms < 0.501).all()
        return found

    assert run_ranks(2, body) == simulated(2, constraint=constraint, lr=outer_lr, **FORMS[form])


def test_between_syncs_nothing_is_sent() -> None:
    def body(session: Session) -> list[int]:
        run, sent = Run(hvd.rank(), sync_every=4), []
        run.in_graph()
        for step in range(1, 9):
            run.train(step, step)
            sent.append(run.optimizer.compression_report()["last_bytes_sent"])
        report = run.optimizer.compression_report()
        assert (report["syncs"], report["local_steps"], report["step"]) == (2, 6, 8)
        return sent

    for sent in run_ranks(2, body):
        assert [nbytes > 0 for nbytes in sent] == [False, False, False, True] * 2


@pytest.mark.short("False")
@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_that_are_not_finite_change_nothing_but_the_count(in_graph: bool) -> None:
    def body(session: Session) -> None:
        run = Run(hvd.rank(), sync_every=3)
        if in_graph:
            run.in_graph()
        run.train(1, 1)
        before = run.values
        if run.rank:
            bad = tensors(2, run.rank)
            bad[0] = bad[0] * np.inf
            run._apply(bad)
            assert all(np.array_equal(a, b) for a, b in zip(run.values, before, strict=True))
        else:
            run.train(2, 2)
        run.train(3, 3)
        report = run.optimizer.compression_report()
        assert report["synced"] and report["non_finite_steps"] == run.rank
        assert int(run.optimizer.iterations.numpy()) == 3
        assert len(set(hvd.allgather_object(digest(run.values)))) == 1

    run_ranks(2, body)


@pytest.mark.short("False")
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_sync_of_what_is_not_finite_returns_all_ranks_to_the_anchors(in_graph: bool) -> None:
    def body(session: Session) -> None:
        run = Run(hvd.rank(), sync_every=2)
        if in_graph:
            run.in_graph()
        run.train(1, 2)
        anchors = run.values
        run.train(3, 3)
        if run.rank:
            run.variables[0].assign(run.variables[0] * np.nan)
        with pytest.raises((NonFiniteError, tf.errors.OpError), match="is NaN or Inf at the sync of step 4, on rank"):
            # In a graph this gradient must not depend on the variable, which is not finite.
            run.optimizer.apply(tensors(4, run.rank))
        assert all(np.array_equal(a, b) for a, b in zip(run.values, anchors, strict=True))
        run.train(5, 8)
        assert len(set(hvd.allgather_object(digest(run.values)))) == 1

    run_ranks(2, body)


def test_a_saved_run_goes_on_bit_for_bit() -> None:
    def body(session: Session) -> None:
        run = Run(hvd.rank(), **FORMS["all of it"])
        run.train(1, 6)
        state, own, values = run.optimizer.ocomm_state(), run.optimizer.ocomm_rank_state(), run.values
        expected = run.train(7, STEPS)
        again = Run(hvd.rank(), **FORMS["all of it"])
        for variable, value in zip(again.variables, values, strict=True):
            variable.assign(value.reshape(variable.shape))
        again.optimizer.ocomm_load_state(state)
        assert again.optimizer.ocomm_load_rank_state(one_state(own))["rank_state"] == "loaded"
        assert again.train(7, STEPS) == expected

    run_ranks(2, body)


def test_a_fit_evaluates_the_anchors_and_ends_with_them() -> None:
    inputs = np.random.default_rng(0).normal(size=(96, 6)).astype(np.float32)
    targets = inputs @ np.arange(6, dtype=np.float32)[:, None] / 6

    def body(session: Session) -> tuple[list[float], list[float], str]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        optimizer = hvd.DistributedDiLoCo(
            keras.optimizers.Adam(0.02), sync_every=4, bits=8, buffers=model.non_trainable_variables
        )
        model.compile(optimizer, "mse", steps_per_execution=2, jit_compile=False)
        mine = slice(hvd.rank(), None, 2)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.DiLoCoCallback()]
        history = model.fit(
            inputs[mine], targets[mine], 8, 5, 0, callbacks, validation_data=(inputs, targets), shuffle=False
        ).history
        report = optimizer.compression_report()
        assert report["step"] == 30 and report["synced"]
        return history["loss"], history["val_loss"], digest([v.numpy() for v in model.weights if "seed" not in v.path])

    first, second = run_ranks(2, body)
    assert first[0] != second[0]  # each has its own data
    assert first[1:] == second[1:]
    assert first[1][-1] < 0.8 * first[1][0]


def refused(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="LossScaleOptimizer skips"):
        hvd.DistributedDiLoCo(keras.optimizers.LossScaleOptimizer(adam()))
    with pytest.raises(InvalidRequestError, match="every batch is a step"):
        hvd.DistributedDiLoCo(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd.DistributedDiLoCo(hvd.DistributedDiLoCo(adam()))
    with pytest.raises(SettingsError, match="sync_every"):
        hvd.DistributedDiLoCo(adam(), sync_every=0)
    used = adam()
    used.build(made(initial()))
    with pytest.raises(InvalidRequestError, match="has been used already"):
        hvd.DistributedDiLoCo(used)
    run = Run(hvd.rank(), sync_every=3)
    run.train(1, 1)
    with run.optimizer.evaluation_parameters(), pytest.raises(InvalidRequestError, match="not this rank's own"):
        run.optimizer.finish()


def test_what_cannot_be_is_refused() -> None:
    run_ranks(1, refused)


def test_ranks_that_begin_apart_or_set_other_rates_are_told() -> None:
    def apart(session: Session) -> None:
        run = Run(hvd.rank(), sync_every=2)
        run.variables[1].assign(run.variables[1] + hvd.rank())
        with pytest.raises(MismatchError, match="not alike before their first step"):
            run.train(1, 2)

    def rates(session: Session) -> None:
        run = Run(hvd.rank(), sync_every=2)
        run.optimizer.learning_rate = 0.1 * (1 + hvd.rank())
        with pytest.raises(MismatchError):
            run.train(1, 2)

    run_ranks(2, apart)
    run_ranks(2, rates)
