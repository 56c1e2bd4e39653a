"""Keras optimizers that a 1-bit optimizer cannot stand for, and calls in two orders, are refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import ocomm_tf  # noqa: E402
import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError  # noqa: E402
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
