"""As ``saved_states``, of Keras: models that every compressed optimizer has trained, with the optimizer's variables.

python -m tests.frontends.saved_tf_states FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ocomm_tf.keras as hvd
from ocomm.session import Session
from tests.frontends.onebit_jobs import digest, gradients
from tests.frontends.saved_states import AFTER, BEFORE, RANKS, SHAPES, folder_name, rank_of
from tests.worlds import run_ranks

KINDS: dict[str, Callable[[Any], Any]] = {
    "1-bit Adam": lambda model: hvd.DistributedOneBitAdam(keras.optimizers.Adam(1e-2), model, freeze_step=3),
    "1-bit LAMB": lambda model: hvd.DistributedOneBitLamb(keras.optimizers.Adam(1e-2), model, freeze_step=3),
    "0/1 Adam": lambda model: hvd.DistributedZeroOneAdam(
        keras.optimizers.Adam(1e-2), model, local_step_start=2, local_step_doubling=2, local_step_clip=2
    ),
    "Birder": lambda model: hvd.DistributedBirder(keras.optimizers.SGD(1e-2), model, stochastic=True),
    "SoftSignSGD": lambda model: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(1e-2), model),
    "Lion": lambda model: hvd.DistributedLion(keras.optimizers.SGD(1e-2), model),
}


class KerasRun:
    """A layer of two variables and its optimizer, of gradients that follow from step and rank alone."""

    def __init__(self, kind: str, rank: int) -> None:
        self.rank = rank
        self.model = keras.Sequential([keras.Input((SHAPES[0][0],)), keras.layers.Dense(SHAPES[0][1], name="dense")])
        self.model.set_weights([np.ones(v.shape, np.float32) for v in self.model.trainable_variables])
        self.optimizer = KINDS[kind](self.model)
        self.model.compile(optimizer=self.optimizer, loss="mse")
        self.optimizer.build(self.model.trainable_variables)

    def train(self, first: int, steps: int) -> list[str]:
        """The digests of the variables after each of ``steps`` steps."""
        variables = self.model.trainable_variables
        digests = []
        for step in range(first, first + steps):
            given = gradients(step, self.rank, tuple(tuple(v.shape) for v in variables))
            self.optimizer.apply([tf.constant(gradient) for gradient in given])
            digests.append(digest([v.numpy() for v in variables]))
        return digests


def write(into: Path) -> None:
    """Saves every kind, and how a model that has loaded the file goes on: errors start at zero."""
    expected = {}
    for kind in KINDS:
        folder = into / folder_name(kind)
        folder.mkdir(parents=True)

        def body(session: Session, kind: str = kind, folder: Path = folder) -> Any:
            run = KerasRun(kind, rank_of(session))
            run.train(1, BEFORE)
            if run.rank == 0:
                run.model.save(folder / "model.keras")

        run_ranks(RANKS, body)
        results = run_ranks(RANKS, lambda session, kind=kind, folder=folder: resumed(session, kind, folder))
        expected[kind] = {"digests": results}
    (into / "expected.json").write_text(json.dumps(expected) + "\n")


def resumed(session: Session, kind: str, folder: Path) -> list[str]:
    """The digests of the steps after the checkpoint in ``folder``."""
    run = KerasRun(kind, rank_of(session))
    run.model.load_weights(folder / "model.keras")
    return run.train(BEFORE + 1, AFTER)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
