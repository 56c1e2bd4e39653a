"""Keras: options that Torch has, too, do the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.oracle import onebit_lamb, zero_one_adam  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

SHAPES = [(6, 5), (7,)]
STEPS = 6

KINDS: dict[str, Callable[..., Any]] = {
    "1-bit Adam": lambda **o: hvd.DistributedOneBitAdam(keras.optimizers.Adam(1e-2), freeze_step=3, **o),
    "1-bit LAMB": lambda **o: hvd.DistributedOneBitLamb(keras.optimizers.Lamb(1e-2), freeze_step=3, **o),
    "0/1 Adam": lambda **o: hvd.DistributedZeroOneAdam(keras.optimizers.Adam(1e-2), local_step_doubling=2, **o),
    "Birder": lambda **o: hvd.DistributedBirder(keras.optimizers.SGD(1e-2), **o),
    "SoftSignSGD": lambda **o: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(1e-2), **o),
    "EF-SGD": lambda **o: hvd.DistributedEFSGD(keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True), **o),
    "Lion": lambda **o: hvd.DistributedLion(keras.optimizers.SGD(1e-2), **o),
}
HIERARCHICAL = [kind for kind in KINDS if kind != "SoftSignSGD"]


def gradients(step: int, rank: int, part: int) -> list[np.ndarray]:
    rng = np.random.default_rng((step, rank, part))
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def trained(optimizer: Any, passes: int, in_graph: bool = False) -> tuple[list[bytes], dict[str, Any]]:
    """Variables after ``STEPS`` steps on the sum of two gradients, which come in so many passes; and the report."""
    variables = [keras.Variable(np.ones(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]
    optimizer.build(variables)
    apply = tf.function(optimizer.apply) if in_graph else optimizer.apply
    for step in range(STEPS):
        first, second = (gradients(step, hvd.rank(), part) for part in range(2))
        if passes == 2:
            apply([tf.constant(g) for g in first])
            apply([tf.constant(g) for g in second])
        else:
            apply([tf.constant(a + b) for a, b in zip(first, second, strict=True)])
    return [v.numpy().tobytes() for v in variables], optimizer.compression_report()


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", few(KINDS, list(KINDS)[::3]))
def test_backward_passes_are_summed_before_a_step(kind: str, in_graph: bool) -> None:
    def body(session: Session) -> None:
        expected, before = trained(KINDS[kind](), 1, in_graph)
        got, after = trained(KINDS[kind](backward_passes_per_step=2), 2, in_graph)
        assert got == expected
        assert after["step"] == before["step"] == STEPS
        assert after["bytes_sent"] == before["bytes_sent"], "nothing is sent for a pass that is no step"

    run_ranks(2, body)


def test_a_sum_is_clipped_after_it_is_made() -> None:
    def body(session: Session) -> None:
        def make(**options: Any) -> Any:
            return hvd.DistributedSoftSignSGD(keras.optimizers.SGD(1e-2, clipvalue=0.5), **options)

        assert trained(make(backward_passes_per_step=2), 2)[0] == trained(make(), 1)[0]

    run_ranks(2, body)


@pytest.mark.parametrize("kind", few(HIERARCHICAL, list(HIERARCHICAL)[::3]))
def test_the_ranks_of_a_host_add_up_where_that_is_chosen(kind: str) -> None:
    def body(session: Session) -> list[bytes]:
        weights, report = trained(KINDS[kind](hierarchical=True), 1)
        assert report["form"] == "hierarchical"
        automatic, report = trained(KINDS[kind](), 1)
        assert report["form"] == "hierarchical" and automatic == weights
        flat, report = trained(KINDS[kind](hierarchical=False), 1)
        assert report["form"] == "flat" and flat != weights
        return weights

    results = run_ranks(4, body, hosts="aabb")
    if kind != "0/1 Adam":  # hosts may be between two syncs
        assert results == results[:1] * 4


@pytest.mark.parametrize("option", [{"hierarchical": False}, {"backward_passes_per_step": 2}])
def test_ranks_that_choose_differently_are_told_which_option(option: dict[str, Any]) -> None:
    (name,) = option

    def body(session: Session) -> None:
        optimizer = hvd.DistributedLion(keras.optimizers.SGD(1e-2), **(option if hvd.rank() else {}))
        with pytest.raises(MismatchError, match=f"{name}="):
            optimizer.build([keras.Variable(np.ones(3, np.float32), name="v")])

    run_ranks(2, body)


def test_passes_that_both_count_are_refused() -> None:
    def body(session: Session) -> None:
        sgd = keras.optimizers.SGD(1e-2, gradient_accumulation_steps=3)
        with pytest.raises(InvalidRequestError, match="gradient_accumulation_steps=3; set one of the two"):
            hvd.DistributedLion(sgd, backward_passes_per_step=2)
        with pytest.raises(InvalidRequestError, match="backward_passes_per_step must be > 0"):
            hvd.DistributedLion(keras.optimizers.SGD(1e-2), backward_passes_per_step=0)

    run_ranks(1, body)


LAWS: dict[str, tuple[type, dict[str, Any]]] = {
    "1-bit LAMB": (onebit_lamb.Simulation, {"freeze_step": 3}),
    "0/1 Adam": (zero_one_adam.Simulation, {"local_step_doubling": 2}),
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("bits", few([16, 8, 4], [8]))
@pytest.mark.parametrize("kind", LAWS)
def test_dense_steps_in_few_bits_are_those_of_the_simulation(kind: str, bits: int, in_graph: bool) -> None:
    sizes = 300, 7

    def given(step: int, rank: int) -> list[np.ndarray]:
        rng = np.random.default_rng((step, rank))
        return [rng.normal(size=size).astype(np.float32) for size in sizes]

    law, settings = LAWS[kind]
    simulation = law([np.ones(size, np.float32) for size in sizes], 2, lr=1e-2, eps=1e-7, dense_bits=bits, **settings)
    expected: list[list[bytes]] = [[], []]
    for step in range(STEPS):
        simulation.step([given(step, rank) for rank in range(2)])
        for rank in range(2):
            values = simulation.params_of(rank) if kind == "0/1 Adam" else simulation.params
            expected[rank].append(b"".join(value.tobytes() for value in values))

    def body(session: Session) -> list[bytes]:
        variables = [keras.Variable(np.ones(size, np.float32), name=f"v{n}") for n, size in enumerate(sizes)]
        optimizer = KINDS[kind](dense_bits=bits)
        optimizer.build(variables)
        apply = tf.function(optimizer.apply) if in_graph else optimizer.apply
        history = []
        for step in range(STEPS):
            apply([tf.constant(g) for g in given(step, hvd.rank())])
            history.append(b"".join(v.numpy().tobytes() for v in variables))
        return history

    assert run_ranks(2, body) == expected


def test_one_bit_adam_learns_alike_in_graph_and_outside_with_dense_steps_in_few_bits() -> None:
    results = [
        run_ranks(2, lambda s, g=in_graph: trained(KINDS["1-bit Adam"](dense_bits=4), 1, g)[0])
        for in_graph in (False, True)
    ]
    assert results[0][0] == results[0][1] == results[1][0] == results[1][1]
