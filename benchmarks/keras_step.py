"""Keras' ``model.fit`` on a slow network: the 1-bit optimizers against the dense one, on the same links, in turn.

    python benchmarks/keras_step.py --hosts 2 --rate 160mbit [--json FILE]

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
import gc
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from tabulate import tabulate

import ocomm_tf.keras as hvd
from ocomm.bench._lab import Lab, LabError, interface_sent_bytes, why_not
from ocomm.bench.kernels import commit, processor

SKIPPED = 77
INPUTS, WIDTH, LAYERS, CLASSES = 1024, 2048, 4, 10
LR = 1e-4
#: Steps before a method is timed: enough for 1-bit Adam to freeze, and for the order of buckets.
WARMUP = 5
FREEZE_STEP = 2


def adam() -> Any:
    return keras.optimizers.Adam(LR)


#: What they are called, and how they are made.
METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "local": ("local", adam),
    "dense": ("ocomm dense", lambda: hvd.DistributedOptimizer(adam())),
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


@dataclass(slots=True, eq=False)
class Method:
    """``times`` are of this rank, in seconds per step, one per round."""

    name: str
    model: Any
    times: list[float] = field(default_factory=list)
    sent: int = 0
    steps: int = 0

    def fit(self, x: np.ndarray, y: np.ndarray, steps: int) -> float:
        """Trains so many steps on one batch; returns seconds per step."""
        clock = Clock()
        repeated = np.tile(x, (steps, 1)), np.tile(y, steps)
        self.model.fit(*repeated, batch_size=len(x), shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds / steps


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


def sent_bytes() -> int:
    return interface_sent_bytes(Path("/proc/self/net/dev").read_text())


def digest(model: Any) -> str:
    return hashlib.blake2b(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs as every rank of a job; the result is the same on all of them."""
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(args.batch, INPUTS)).astype(np.float32)
    y = random.integers(0, CLASSES, args.batch)
    methods = [Method(METHODS[name][0], make_model(METHODS[name][1]())) for name in args.methods]
    for method in methods:
        method.fit(x, y, WARMUP)
    gc.collect()
    for _ in range(args.rounds):
        for method in methods:
            hvd.barrier()
            before = sent_bytes()
            method.times.append(method.fit(x, y, args.steps))
            hvd.barrier()  # whoever is done sooner must not take the others' share of a processor
            method.sent += sent_bytes() - before
            method.steps += args.steps
    table = hvd.allgather_object([(m.times, m.sent / m.steps, digest(m.model)) for m in methods])
    rows = []
    for number, method in enumerate(methods):
        of = [said[number] for said in table]
        if method.name != "local" and len({replica for _, _, replica in of}) > 1:
            raise SystemExit(f"keras_step: the replicas of {method.name} differ")
        times = [max(each) for each in zip(*(t for t, _, _ in of), strict=True)]
        rows.append(
            {
                "method": method.name,
                "step_ms": 1e3 * median(times),
                "best_ms": 1e3 * min(times),
                "sent": max(sent for _, sent, _ in of),
            }
        )
    ranks, parameters = hvd.size(), methods[0].model.count_params()
    hvd.shutdown()
    return {"ranks": ranks, "rate": args.rate, "parameters": parameters, "rows": rows}


def show(result: dict[str, Any]) -> str:
    rows = result["rows"]
    local = rows[0]["step_ms"]
    dense = next((row["step_ms"] for row in rows if row["method"] == "ocomm dense"), None)
    lines = [
        [
            r["method"],
            f"{r['step_ms']:.1f}",
            f"{r['step_ms'] - local:.1f}",
            f"{r['sent'] / 1e6:.2f}",
            f"{dense / r['step_ms']:.2f}" if dense else "-",
        ]
        for r in rows
    ]
    share = f", {1 - local / dense:.0%} of the dense step is communication" if dense else ""
    head = f"{result['ranks']} ranks at {result['rate']}, {result['parameters'] / 1e6:.1f} M parameters{share}"
    return head + "\n" + tabulate(lines, ["model.fit", "step ms", "exposed ms", "sent MB", "x ocomm dense"], "github")


def in_lab(args: argparse.Namespace) -> dict[str, Any]:
    with Lab(args.hosts, args.rate) as lab, tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        program = [sys.executable, __file__, "--rate", args.rate, "--json", str(output), "--methods", *args.methods]
        for name in ("steps", "rounds", "batch", "threads"):
            program += [f"--{name}", str(getattr(args, name))]
        done = lab.run(lab.mpirun(args.hosts, program), args.timeout, {"OMP_NUM_THREADS": "1"})
        if not output.exists():
            raise LabError(f"the ranks have written no result:\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
        return json.loads(output.read_text())["result"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, metavar="N", help="make a lab of N hosts, and measure there")
    parser.add_argument("--rate", default="160mbit", help="nominal rate of a host's network (default 160mbit)")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=4, help="of a method in one round (default 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="examples per rank (default 32)")
    parser.add_argument("--threads", type=int, default=1, help="of an operation in TensorFlow (default 1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.methods = [name for name in METHODS if name in {"local", *args.methods}]
    if args.hosts:
        if reason := why_not():
            print(f"keras_step: no lab here: {reason}", file=sys.stderr)
            return SKIPPED
        try:
            result = in_lab(args)
        except LabError as error:
            print(f"keras_step: {error}", file=sys.stderr)
            return 1
    else:
        result = measure(args)
    if args.hosts or os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(show(result))
        if args.json:
            versions = {name: metadata.version(name) for name in ("keras", "numpy", "mpi4py")}
            versions["tensorflow"] = tf.__version__  # its distribution has several names
            about = {"processor": processor(), "python": platform.python_version(), **versions, "commit": commit()}
            arguments = {k: v for k, v in vars(args).items() if k != "json"}
            args.json.write_text(json.dumps({"about": about, "arguments": arguments, "result": result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
