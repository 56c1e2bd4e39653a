"""One model on ranks of Keras, of Torch and of both: do the jobs end with the same parameters, and learn the same?

    ocommrun -np 4 python benchmarks/mixed_jobs.py [--output benchmarks/results/mixed-jobs.md]

Ranks 0 and 1 train in Keras where a job has ranks of Keras, all others in Torch; a job is a process set. All jobs begin
with the same parameters and see the same global batches. Dense: a job of two ranks of Keras, one of two of Torch, and
one of both. Every other mode: the replicas of a job of both, and its loss beside that of a job of Torch alone, for some
seeds of the first parameters, since one flipped bit leads elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
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
import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch.nn import functional  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
import ocomm_torch  # noqa: E402
from ocomm.bench.kernels import commit, machine  # noqa: E402
from ocomm.operations import ProcessSet  # noqa: E402
from ocomm.version import __version__  # noqa: E402

BATCH = 64  # of all ranks of a job together
TRAINING = 1408  # of 1,797 images
BOUND = 1e-5  # between the parameters of the dense jobs
LOSS_BOUND = 0.02  # by which a job of both frameworks may end above one of Torch

#: Variables in Keras, parameters in Torch, in Torch's order.
NAMES = {
    "conv/kernel": "0.weight",
    "conv/bias": "0.bias",
    "hidden/kernel": "3.weight",
    "hidden/bias": "3.bias",
    "output/kernel": "5.weight",
    "output/bias": "5.bias",
}


@dataclass(frozen=True)
class Method:
    """``in_torch(model, steps, process_set)`` and ``in_keras(steps, process_set)`` make one optimizer."""

    name: str
    in_torch: Callable[[torch.nn.Module, int, ProcessSet], Any]
    in_keras: Callable[[int, ProcessSet], Any]


def torch_adam(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def keras_adam(lr: float) -> Any:
    return keras.optimizers.Adam(lr, epsilon=1e-8)  # Torch's epsilon


def sgd(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def one_bit_adam(name: str, freeze: Callable[[int], int]) -> Method:
    return Method(
        name,
        lambda m, steps, ranks: ocomm_torch.DistributedOneBitAdam(
            torch_adam(m, 2e-3), m.named_parameters(), freeze_step=freeze(steps), process_set=ranks
        ),
        lambda steps, ranks: hvd.DistributedOneBitAdam(
            keras_adam(2e-3), freeze_step=freeze(steps), names=NAMES, process_set=ranks
        ),
    )


DENSE = one_bit_adam("dense Adam", lambda steps: steps + 1)
METHODS = [
    one_bit_adam("1-bit Adam", lambda steps: steps // 5),
    Method(
        "0/1 Adam",
        lambda m, steps, ranks: ocomm_torch.DistributedZeroOneAdam(
            torch_adam(m, 2e-3), m.named_parameters(), process_set=ranks
        ),
        lambda steps, ranks: hvd.DistributedZeroOneAdam(keras_adam(2e-3), names=NAMES, process_set=ranks),
    ),
    Method(
        "Birder",
        lambda m, steps, ranks: ocomm_torch.DistributedBirder(sgd(m, 2e-3), m.named_parameters(), process_set=ranks),
        lambda steps, ranks: hvd.DistributedBirder(keras.optimizers.SGD(2e-3), names=NAMES, process_set=ranks),
    ),
    Method(
        "SoftSignSGD",
        lambda m, steps, ranks: ocomm_torch.DistributedSoftSignSGD(
            sgd(m, 2e-3), m.named_parameters(), process_set=ranks
        ),
        lambda steps, ranks: hvd.DistributedSoftSignSGD(keras.optimizers.SGD(2e-3), names=NAMES, process_set=ranks),
    ),
    Method(
        "Lion",
        lambda m, steps, ranks: ocomm_torch.DistributedLion(sgd(m, 1e-3), m.named_parameters(), process_set=ranks),
        lambda steps, ranks: hvd.DistributedLion(keras.optimizers.Lion(1e-3), names=NAMES, process_set=ranks),
    ),
    Method(
        "1-bit LAMB",
        lambda m, steps, ranks: ocomm_torch.DistributedOneBitLamb(
            torch_adam(m, 1e-2), m.named_parameters(), freeze_step=steps // 5, process_set=ranks
        ),
        lambda steps, ranks: hvd.DistributedOneBitLamb(
            keras_adam(1e-2), freeze_step=steps // 5, names=NAMES, process_set=ranks
        ),
    ),
]


def torch_model(seed: int) -> torch.nn.Sequential:
    """The same parameters for equal seeds."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def keras_model(seed: int) -> Any:
    """With Torch's parameters."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(8, 3, strides=2, activation="relu", name="conv"),
            keras.layers.Permute((3, 1, 2)),  # flattened as in Torch
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="output"),
        ]
    )
    given = dict(torch_model(seed).named_parameters())
    for path, name in NAMES.items():
        value = given[name].detach().numpy()
        variable_of(model, path).assign(value.transpose(*{1: [0], 2: [1, 0], 4: [2, 3, 1, 0]}[value.ndim]))
    return model


def variable_of(model: Any, path: str) -> Any:
    (variable,) = [v for v in model.trainable_variables if v.path.endswith(path)]
    return variable


class Digits:
    """``images`` are float32 (N, 1, 8, 8) in [0, 1]."""

    def __init__(self, steps: int) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        self.images, self.labels = images[:TRAINING], labels[:TRAINING]
        self.others = images[TRAINING:], labels[TRAINING:]
        random = np.random.default_rng(0)
        epochs = -(-steps * BATCH // TRAINING)
        order = np.concatenate([random.permutation(TRAINING) for _ in range(epochs)])
        self.batches = order[: steps * BATCH].reshape(steps, BATCH)


def train_torch(data: Digits, method: Method, ranks: ProcessSet, seed: int) -> list[np.ndarray]:
    model = torch_model(seed)
    optimizer = method.in_torch(model, len(data.batches), ranks)
    for batch in data.batches:
        mine = batch[ranks.rank() :: ranks.size()]
        optimizer.zero_grad()
        scores = model(torch.from_numpy(data.images[mine]))
        functional.cross_entropy(scores, torch.from_numpy(data.labels[mine])).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def train_keras(data: Digits, method: Method, ranks: ProcessSet, seed: int) -> list[np.ndarray]:
    """By ``fit``; the result is as Torch has it."""
    model = keras_model(seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(method.in_keras(len(data.batches), ranks), loss=loss, jit_compile=False)
    mine = data.batches[:, ranks.rank() :: ranks.size()]
    x, y = data.images[mine.reshape(-1)].transpose(0, 2, 3, 1), data.labels[mine.reshape(-1)]
    model.fit(x, y, batch_size=mine.shape[1], shuffle=False, verbose=0)
    values = [variable_of(model, path).numpy() for path in NAMES]
    return [v.transpose(*{1: [0], 2: [1, 0], 4: [3, 2, 0, 1]}[v.ndim]) for v in values]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    parameters: list[np.ndarray]  # of its first rank
    equal: bool  # all its ranks', bit for bit
    loss: float  # of images that were in no batch


def job(data: Digits, method: Method, ranks: ProcessSet, in_keras: Sequence[int], seed: int = 0) -> Ended:
    """Trains on ``ranks``; those ``in_keras`` in Keras. Collective over the world, and the same on all its ranks."""
    mine = None
    if ranks.included():
        mine = (train_keras if hvd.rank() in in_keras else train_torch)(data, method, ranks, seed)
    digest = None if mine is None else hashlib.sha256(b"".join(p.tobytes() for p in mine)).hexdigest()
    digests = [said for said in hvd.allgather_object(digest) if said is not None]
    parameters = hvd.broadcast_object(mine, ranks.ranks[0])
    return Ended(parameters, len(set(digests)) == 1, loss_of(data, parameters))


@torch.no_grad()
def loss_of(data: Digits, parameters: list[np.ndarray]) -> float:
    model = torch_model(0)
    for parameter, value in zip(model.parameters(), parameters, strict=True):
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    images, labels = data.others
    return float(functional.cross_entropy(model(torch.from_numpy(images)).double(), torch.from_numpy(labels)))


def apart(a: Ended, b: Ended) -> float:
    """The largest difference of a parameter."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a.parameters, b.parameters, strict=True))


def dense(data: Digits, sets: dict[str, ProcessSet]) -> str:
    jobs = {
        "2 ranks of Torch": job(data, DENSE, sets["Torch"], []),
        "2 ranks of Keras": job(data, DENSE, sets["Keras"], [0, 1]),
        "1 of Keras, 1 of Torch": job(data, DENSE, sets["both"], [1]),
    }
    reference = jobs["2 ranks of Torch"]
    begun = Ended([p.detach().numpy() for p in torch_model(0).parameters()], True, 0.0)
    rows = []
    for name, ended in jobs.items():
        largest = max(apart(ended, other) for other in jobs.values())
        rows.append(
            [name, f"{ended.loss:.6f}", said(ended.equal), f"{apart(ended, begun):.2f}",
             f"{apart(ended, reference):.1e}", f"{largest:.1e}", said(largest <= BOUND)]
        )  # fmt: skip
    headers = ["job", "loss", "replicas equal", "moved by", "from Torch's", "from any", f"at most {BOUND:g}"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def compressed(data: Digits, sets: dict[str, ProcessSet], seeds: int) -> str:
    rows = []
    for method in METHODS:
        pair = job(data, method, sets["both"], [1])
        mixed = [job(data, method, sets["all"], [0, 1], seed) for seed in range(seeds)]
        pure = [job(data, method, sets["all"], [], seed) for seed in range(seeds)]
        percent = 100 * (mean(j.loss for j in mixed) / mean(j.loss for j in pure) - 1)
        rows.append(
            [method.name, said(pair.equal), said(all(j.equal for j in mixed))]
            + [" / ".join(f"{j.loss:.4f}" for j in jobs) for jobs in (mixed, pure)]
            + [f"{percent:+.2f} %", said(percent <= 100 * LOSS_BOUND)]
        )
    headers = [
        "", "1 + 1: replicas equal", "2 + 2: replicas equal", "loss by seed, 2 + 2", "4 of Torch", "mean",
        f"at most +{100 * LOSS_BOUND:g} %",
    ]  # fmt: skip
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def said(kept: bool) -> str:
    return "yes" if kept else "NO"


def document(tables: str, steps: int, seeds: int) -> str:
    versions = f"Python {platform.python_version()}, tensorflow {tf.__version__}, keras {keras.__version__}"
    return f"""# One model on ranks of Keras and Torch

{tables}

{steps} steps of {BATCH} images of all ranks of a job together, scikit-learn's digits; a convolution and two dense
layers. All jobs of a seed begin with the same parameters and see the same batches; the loss is that of
{1797 - TRAINING} images which no rank has seen. Dense Adam is 1-bit Adam with a freeze_step after the end. Moved by:
the largest change of a parameter since the start; from Torch's, from any: the largest difference to a parameter of the
job of Torch, and of any of the three. In the compressed modes rounding decides some of the bits that are sent, and one
other bit leads elsewhere: so those jobs are compared by their loss.

- command: `ocommrun -np 4 python benchmarks/mixed_jobs.py --steps {steps} --seeds {seeds} --output FILE`
- machine: {machine()}
- versions: {versions}, torch {torch.__version__}, ocomm {__version__}
- commit: {commit()}, {date.today()}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="of the compressed modes (default 3)")
    parser.add_argument("--output", type=Path, help="write the tables, with where they come from, to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    if hvd.size() != 4:
        raise SystemExit("start it on four ranks: ocommrun -np 4 python benchmarks/mixed_jobs.py")
    sets = {"Keras": hvd.add_process_set([0, 1]), "Torch": hvd.add_process_set([2, 3])}
    sets |= {"both": hvd.add_process_set([1, 2]), "all": hvd.global_process_set}
    data = Digits(options.steps)
    text = f"## Dense Adam\n\n{dense(data, sets)}\n\n## Compressed\n\n{compressed(data, sets, options.seeds)}"
    if hvd.rank() == 0:
        print(text)
        if options.output:
            options.output.write_text(document(text, options.steps, options.seeds))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
