"""Keras on several ranks against one process: every optimizer, by ``model.fit`` and by a loop in ``tf.function``.

    ocommrun -np 4 python benchmarks/keras_accuracy.py [--output benchmarks/results/keras-accuracy-4ranks.md]

The single process is plain Keras with Adam, without ocomm; all runs of a seed begin with the same parameters and see
the same global batches. Asserts that the ranks end with the same bits, and that every step was exchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tabulate import tabulate  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from benchmarks.tasks.mnist import PACKAGE, images  # noqa: E402
from ocomm.bench.kernels import commit, machine  # noqa: E402
from ocomm.version import __version__  # noqa: E402
from ocomm_tf import engine  # noqa: E402

BATCH = 128  # of all ranks together
ACCURACY_BOUND, LOSS_BOUND = 0.5, 10.0


@dataclass(frozen=True)
class Method:
    """``make(schedule, steps)`` makes the optimizer."""

    name: str
    lr: float
    make: Callable[[Any, int], Any]


METHODS = [
    Method("Adam", 5e-3, lambda lr, steps: hvd.DistributedOptimizer(keras.optimizers.Adam(lr))),
    Method("1-bit Adam", 5e-3, lambda lr, steps: hvd.DistributedOneBitAdam(adam(lr), freeze_step=steps // 5)),
    Method("0/1 Adam", 5e-3, lambda lr, steps: hvd.DistributedZeroOneAdam(adam(lr))),
    Method("0/1 Adam, higher lr", 8e-3, lambda lr, steps: hvd.DistributedZeroOneAdam(adam(lr))),
    Method("Birder", 8e-3, lambda lr, steps: hvd.DistributedBirder(keras.optimizers.SGD(lr), beta=0.9)),
    Method("SoftSignSGD", 8e-3, lambda lr, steps: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(lr), beta=0.8)),
    Method("Lion", 2e-3, lambda lr, steps: hvd.DistributedLion(keras.optimizers.Lion(lr))),
    Method(
        "1-bit LAMB",
        2e-2,
        lambda lr, steps: hvd.DistributedOneBitLamb(keras.optimizers.Lamb(lr), freeze_step=steps // 5),
    ),
]


def adam(lr: Any) -> Any:
    return keras.optimizers.Adam(lr, epsilon=1e-8)


@dataclass(frozen=True)
class Run:
    loss: float  # validation
    accuracy: float
    ratio: float | None  # dense bytes over those sent
    exchanges: float | None  # per step: collectives of a dense optimizer, else steps of ocomm's
    digest: str  # of the parameters
    seconds: float


class Task:
    """MNIST's 5,000 images; every fifth is for validation."""

    def __init__(self, steps: int) -> None:
        pictures, labels = images()
        pictures = pictures.transpose(0, 2, 3, 1)
        held_out = np.arange(len(labels)) % 5 == 4
        self.steps = steps
        self.train = pictures[~held_out], labels[~held_out]
        self.validation = pictures[held_out], labels[held_out]

    def batches(self, seed: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's images of all steps, in order: its share of batches that do not depend on the number of ranks."""
        random = np.random.default_rng([seed, 1])
        count = len(self.train[1])
        passes = -(-self.steps * BATCH // count)
        order = np.concatenate([random.permutation(count) for _ in range(passes)])[: self.steps * BATCH]
        mine = order[rank::size]
        return self.train[0][mine], self.train[1][mine]


def make_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def schedule(lr: float, steps: int) -> Any:
    """Rises over the first tenth of the steps, then falls to zero."""
    rise = steps // 10
    return keras.optimizers.schedules.CosineDecay(lr / rise, steps - rise, warmup_target=lr, warmup_steps=rise)


def by_fit(model: Any, optimizer: Any, x: np.ndarray, y: np.ndarray, batch: int) -> None:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if hvd.is_initialized() else []
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)


def by_tape(model: Any, optimizer: Any, x: np.ndarray, y: np.ndarray, batch: int) -> None:
    """Dense averages are taken by the tape, so its optimizer is plain Keras'."""
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    is_dense = not hasattr(optimizer, "compression_report")

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        recorded = hvd.DistributedGradientTape(tape) if is_dense else tape
        optimizer.apply(recorded.gradient(loss, model.trainable_variables), model.trainable_variables)

    hvd.broadcast_variables(model.variables, 0)
    for start in range(0, len(x), batch):
        step(x[start : start + batch], y[start : start + batch])


def run(task: Task, method: Method, train: Callable[..., None], seed: int, rank: int, size: int) -> Run:
    started, before = time.perf_counter(), sum(engine.runs().values())
    model, lr = make_model(seed), schedule(method.lr, task.steps)
    alone = size == 1
    plain = alone or (method.name == "Adam" and train is by_tape)
    optimizer = keras.optimizers.Adam(lr) if plain else method.make(lr, task.steps)
    train(model, optimizer, *task.batches(seed, rank, size), BATCH // size)
    ratio = exchanges = None
    if hasattr(optimizer, "compression_report"):
        report = optimizer.compression_report()
        ratio, exchanges = report["ratio"], (report["dense_steps"] + report["compressed_steps"]) / task.steps
        assert exchanges == 1.0 and report["step"] == task.steps, report
    elif not alone:
        exchanges = (sum(engine.runs().values()) - before) / task.steps
        assert exchanges == len(model.trainable_variables), exchanges
    scores = model(task.validation[0], training=False)
    loss = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(task.validation[1], scores))
    accuracy = 100 * float(np.mean(np.argmax(scores, 1) == task.validation[1]))
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()
    return Run(loss, accuracy, ratio, exchanges, digest, time.perf_counter() - started)


def row(name: str, lr: float, runs: list[Run], alone: list[Run]) -> list[str]:
    points = mean(r.accuracy for r in runs) - mean(r.accuracy for r in alone)
    percent = 100 * (mean(r.loss for r in runs) / mean(r.loss for r in alone) - 1)
    kept = "" if runs is alone else "yes" if points >= -ACCURACY_BOUND and percent <= LOSS_BOUND else "NO"
    return [
        name,
        f"{lr:g}",
        " / ".join(f"{r.accuracy:.1f}" for r in runs),
        f"{mean(r.accuracy for r in runs):.2f} %",
        "" if runs is alone else f"{points:+.2f}",
        " / ".join(f"{r.loss:.4f}" for r in runs),
        "" if runs is alone else f"{percent:+.1f} %",
        kept,
        "" if runs[0].exchanges is None else f"{runs[0].exchanges:g}",
        "" if runs[0].ratio is None else f"{runs[0].ratio:.1f}",
    ]


HEADERS = [
    "", "lr", "accuracy by seed", "mean", "points", "validation loss by seed", "against one process", "kept?",
    "exchanges per step", "times fewer bytes",
]  # fmt: skip


def document(text: str, steps: int, seeds: int) -> str:
    command = f"ocommrun -np {hvd.size()} python benchmarks/keras_accuracy.py --steps {steps} --seeds {seeds}"
    versions = f"Python {platform.python_version()}, tensorflow {tf.__version__}, keras {keras.__version__}"
    return f"""# Keras: {hvd.size()} ranks against one process

{text}

{steps} steps of {BATCH} images of all ranks together; 5,000 images of MNIST ({PACKAGE}), every fifth for validation, so
one image is 0.1 points. 2 convolutions, 2 dense layers. Rates rise over the first tenth of the steps and fall to zero.
One process: plain Keras, Adam, `model.fit`, the same first parameters and global batches. Points and loss: means over
the seeds, against one process; kept: at most {ACCURACY_BOUND} points below, a loss at most {LOSS_BOUND:g} % above.
1-bit Adam and LAMB: a fifth of the steps is dense; all else is default. After every run all ranks held the same
parameters, bit for bit (asserted), and the exchanges per step are asserted: collectives of a dense optimizer, one per
variable; joint steps of a 1-bit optimizer.

- command: `{command} --output FILE`
- machine: {machine()}
- versions: {versions}, ocomm {__version__}
- commit: {commit()}, {date.today()}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=6, help="number of seeds (default 6)")
    parser.add_argument("--methods", help="names with semicolons between them; all by default")
    parser.add_argument("--output", type=Path, help="write the tables, with where they come from, to this file")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    chosen = options.methods.split(";") if options.methods else [method.name for method in METHODS]
    task = Task(options.steps)
    # Alone, before there are others: each process of a job has seeds of its own.
    position, count = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    seeds = range(options.seeds)
    own = {seed: run(task, METHODS[0], by_fit, seed, 0, 1) for seed in seeds if seed % count == position}
    hvd.init()
    together: dict[int, Run] = {}
    for part in hvd.allgather_object(own):
        together.update(part)
    alone = [together[seed] for seed in seeds]
    tables = []
    for title, train in (("model.fit", by_fit), ("GradientTape in tf.function", by_tape)):
        rows = [row("one process", METHODS[0].lr, alone, alone)]
        for method in METHODS:
            if method.name not in chosen:
                continue
            runs = []
            for seed in seeds:
                result = run(task, method, train, seed, hvd.rank(), hvd.size())
                digests = hvd.allgather_object(result.digest)
                assert len(set(digests)) == 1, f"{method.name}: the ranks' parameters differ"
                runs.append(result)
                if hvd.rank() == 0:
                    print(f"{title} {method.name} seed {seed}: {result.accuracy:.1f} %, loss {result.loss:.4f}, "
                          f"{result.seconds:.1f} s", flush=True)  # fmt: skip
            rows.append(row(method.name, method.lr, runs, alone))
        tables.append(f"## {title}\n\n" + tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))
    if hvd.rank() == 0:
        text = "\n\n".join(tables)
        print(f"\n{text}")
        if options.output:
            options.output.write_text(document(text, options.steps, options.seeds))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
