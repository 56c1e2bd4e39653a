"""0/1 Adam of Keras with ``vote="sync"``: the bits of ``vote="step"``, eagerly and in graphs, and silent steps."""

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
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.frontends.onebit_jobs import digest, gradients, initial  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Of Keras itself, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

#: Syncs up to step 5, then 7 and 9; 13 and 17 after three steps each that send nothing.
SCHEDULE = {"local_step_start": 2, "local_step_doubling": 4, "local_step_clip": 4}
SYNCS = (2, 3, 4, 5, 7, 9, 13, 17)


class Run:
    """Variables on one rank with their optimizer."""

    def __init__(self, vote: Any, in_graph: bool) -> None:
        self.variables = [keras.Variable(value, name=f"v{number}") for number, value in enumerate(initial())]
        inner = keras.optimizers.AdamW(0.0625, weight_decay=0.01)
        self.optimizer = hvd.DistributedZeroOneAdam(inner, self.variables, vote=vote, **SCHEDULE)
        self._apply: Callable[..., Any] = self.optimizer.apply
        if in_graph:

            @tf.function
            def apply(grads: list[Any]) -> None:
                self.optimizer.apply(
                    [g + 0.0 * tf.convert_to_tensor(v) for g, v in zip(grads, self.variables, strict=True)]
                )

            self._apply = apply

    def step(self, number: int, bad: bool = False) -> str:
        grads = [np.array(g) for g in gradients(number, hvd.rank())]
        if bad:
            grads[0][3, 5] = np.nan
        self._apply([tf.constant(g) for g in grads])
        return digest([v.numpy() for v in self.variables])

    @property
    def report(self) -> dict[str, Any]:
        return self.optimizer.compression_report()


@pytest.mark.parametrize("in_graph", [False, True])
def test_every_bit_is_that_of_a_run_that_votes_in_each_step(in_graph: bool) -> None:
    def body(session: Session) -> tuple[list[str], list[str], list[int]]:
        by_step, by_sync = Run("step", in_graph), Run("sync", in_graph)
        found, expected, sent = [], [], []
        for number in range(1, 18):
            expected.append(by_step.step(number))
            found.append(by_sync.step(number))
            sent.append(by_sync.report["last_bytes_sent"])
        return found, expected, sent

    for found, expected, sent in run_ranks(2, body):
        assert found == expected
        assert [number for number, nbytes in enumerate(sent, 1) if nbytes] == [1, *SYNCS]


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_step_whose_gradients_are_not_finite_changes_nothing_on_its_rank(in_graph: bool) -> None:
    def body(session: Session) -> tuple[bool, int, list[str]]:
        run = Run("sync", in_graph)
        digests = [run.step(number) for number in range(1, 11)]
        digests.append(run.step(11, bad=hvd.rank() == 1))
        digests += [run.step(number) for number in range(12, 18)]
        return digests[10] == digests[9], run.report["non_finite_steps"], digests

    first, second = run_ranks(2, body)
    assert (first[:2], second[:2]) == ((False, 0), (True, 1))
    assert [a == b for a, b in zip(first[2], second[2], strict=True)] == [n in (1, *SYNCS) for n in range(1, 18)]


def test_a_loss_scale_is_refused_because_it_asks_all_ranks_in_each_step() -> None:
    def body(session: Session) -> None:
        inner = keras.optimizers.Adam(0.01)
        with pytest.raises(InvalidRequestError, match="With vote='sync' a step between syncs sends nothing"):
            hvd.DistributedZeroOneAdam(keras.optimizers.LossScaleOptimizer(inner), vote="sync")

    run_ranks(1, body)
