"""Keras' ``model.fit`` on a slow network: the 1-bit optimizers against the dense one, on the same links, in turn.

    python -m benchmarks.keras_step --hosts 2 --rate 160mbit [--json FILE]

makes a lab of namespaces on this machine (see benchmarks/step.py; exit status 77 where it cannot be had) and trains
dense layers of 14.8 M parameters, one rank and one thread per host. All methods live in one job and take turns, so that
whatever else the machine does, it does to all of them. As ranks of a job that is already running it measures there.

step     milliseconds from the first batch of a fit to its last, per batch; slowest rank, median over rounds; of 1-bit
         Adam its compressed stage
exposed  step - step of "local", plain Keras without any communication
sent     bytes that crossed a host's interface per step, all headers included
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ocomm_tf.keras as hvd
from benchmarks import turns
from benchmarks.turns import DENSE, LOCAL, Method, Result

INPUTS, WIDTH, LAYERS, CLASSES = 1024, 2048, 4, 10
LR = 1e-4
#: Steps before a method is timed; enough for 1-bit optimizers to freeze.
WARMUP = 5
FREEZE_STEP = 2


def adam() -> Any:
    return keras.optimizers.Adam(LR)


#: What they are called, and how they are made.
METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    LOCAL: (LOCAL, adam),
    "dense": (DENSE, lambda: hvd.DistributedOptimizer(adam())),
    "onebit": ("1-bit Adam", lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=FREEZE_STEP)),
    "onebit-after": (
        "1-bit Adam, overlap=False",
        lambda: hvd.DistributedOneBitAdam(adam(), freeze_step=FREEZE_STEP, overlap=False),
    ),
    "zero-one": ("0/1 Adam", lambda: hvd.DistributedZeroOneAdam(adam(), var_freeze_step=FREEZE_STEP)),
    "birder": ("Birder", lambda: hvd.DistributedBirder(keras.optimizers.SGD(LR))),
}


class Clock(keras.callbacks.Callback):
    """Seconds from the first batch of a fit to its last."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._started


def fit(model: Any, x: np.ndarray, y: np.ndarray, steps: int) -> float:
    """Trains so many steps on one batch; returns their seconds."""
    clock = Clock()
    repeated = np.tile(x, (steps, 1)), np.tile(y, steps)
    model.fit(*repeated, batch_size=len(x), shuffle=False, verbose=0, callbacks=[clock])
    return clock.seconds


def make_model(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            *(keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def digest(model: Any) -> str:
    return hashlib.blake2b(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is the same on all of them."""
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(args.batch, INPUTS)).astype(np.float32)
    y = random.integers(0, CLASSES, args.batch)
    methods = []
    for name in args.methods:
        title, make = METHODS[name]
        model = make_model(make())
        methods.append(
            Method(title, lambda steps, m=model: fit(m, x, y, steps), lambda m=model: digest(m))  # type: ignore[misc]
        )
    for method in methods:
        method.run(WARMUP)
    rows = turns.take_turns(methods, args.rounds, args.steps)
    result = {"ranks": hvd.size(), "rate": args.rate[0], "parameters": model.count_params(), "rows": rows}
    hvd.shutdown()
    return [result]


def main() -> int:
    args = turns.parser(__doc__, list(METHODS), 32, "examples").parse_args()
    args.methods = [name for name in METHODS if args.methods is None or name in (LOCAL, *args.methods)]
    return turns.main(
        args,
        measure,
        lambda args, rate: turns.in_lab("benchmarks.keras_step", args, rate),
        lambda result: turns.show(result, DENSE),
        {"tensorflow": tf.__version__, "keras": keras.__version__},
    )


if __name__ == "__main__":
    sys.exit(main())
