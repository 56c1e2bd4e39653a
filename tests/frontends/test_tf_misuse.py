"""Keras optimizers that cannot be what a 1-bit optimizer stands for are refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
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
