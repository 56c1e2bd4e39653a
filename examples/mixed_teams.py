"""Keras and Torch in one job, on scikit-learn's handwritten digits.

    ocommrun -np 4 python examples/mixed_teams.py                # two teams: one trains in Keras, the other in Torch
    ocommrun -np 4 python examples/mixed_teams.py --one-model    # one model, on ranks of both

The first half of the ranks imports TensorFlow only, the second half Torch only. Two teams are two process sets, each
with a model and an optimizer of its own (1-bit Adam and Birder), at the same time. One model is trained by all ranks
together, with 1-bit Adam: ``NAMES`` says which variable in Keras is which parameter in Torch. Printed: loss, accuracy
on a fixed test split, bytes sent, and whether the ranks hold the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate

import ocomm  # no framework yet: which one depends on the rank

#: Variables in Keras, by the ends of their paths, and parameters in Torch, in Torch's order.
NAMES = {
    "first/kernel": "first.weight",
    "first/bias": "first.bias",
    "second/kernel": "second.weight",
    "second/bias": "second.bias",
    "hidden/kernel": "hidden.weight",
    "hidden/bias": "hidden.bias",
    "output/kernel": "output.weight",
    "output/bias": "output.bias",
}


@dataclass(frozen=True)
class Data:
    """Images are float32 (N, 8, 8) in [0, 1], labels int64 (N,); the training part is this rank's."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_data(team: ocomm.ProcessSet, batch_size: int) -> Data:
    """This rank's share of whole batches: every rank of the team takes equally many steps."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    whole = batch_size * team.size()
    mine = slice(team.rank(), len(train_x) // whole * whole, team.size())
    return Data(train_x[mine], train_y[mine], test_x, test_y)


@dataclass(frozen=True)
class Result:
    """What a rank has in the end; ``parameters`` as Torch has them."""

    loss: float
    accuracy: float
    report: dict[str, Any]
    parameters: list[np.ndarray]


def train_keras(data: Data, team: ocomm.ProcessSet, args: argparse.Namespace) -> Result:
    """``model.fit`` with 1-bit Adam."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import tensorflow as tf

    import ocomm_tf.keras as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(ocomm.rank())
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="second"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Permute((3, 1, 2)),  # channels first, as Torch flattens them
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="output"),
        ]
    )
    optimizer = hvd.DistributedOneBitAdam(
        keras.optimizers.Adam(args.lr, epsilon=1e-8),  # Torch's epsilon
        freeze_step=args.freeze_step,
        names=NAMES if args.one_model else None,
        process_set=team,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    model.fit(
        data.images[..., None],
        data.labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(team.ranks[0])],
    )
    value, accuracy = model.evaluate(data.test_images[..., None], data.test_labels, batch_size=360, verbose=0)
    axes = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}  # kernels lie the other way round in Keras
    parameters = [v.numpy().transpose(axes[len(v.shape)]) for v in model.trainable_variables]
    return Result(value, accuracy, optimizer.compression_report(), parameters)


def train_torch(data: Data, team: ocomm.ProcessSet, args: argparse.Namespace) -> Result:
    """A loop with 1-bit Adam, or with Birder in a team of its own."""
    import torch
    from torch import nn
    from torch.nn import functional

    import ocomm_torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(ocomm.rank())
    layers: dict[str, nn.Module] = {
        "first": nn.Conv2d(1, 16, 3, padding=1),
        "relu1": nn.ReLU(),
        "second": nn.Conv2d(16, 32, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(512, 64),
        "relu3": nn.ReLU(),
        "output": nn.Linear(64, 10),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    hvd.broadcast_parameters(model.named_parameters(), team.ranks[0], process_set=team)
    if args.one_model:
        optimizer: Any = hvd.DistributedOneBitAdam(
            torch.optim.Adam(model.parameters(), args.lr),
            model.named_parameters(),
            freeze_step=args.freeze_step,
            process_set=team,
        )
    else:
        optimizer = hvd.DistributedBirder(
            torch.optim.SGD(model.parameters(), args.birder_lr), model.named_parameters(), beta=0.9, process_set=team
        )
    images, labels = torch.from_numpy(data.images[:, None]), torch.from_numpy(data.labels)
    for _ in range(args.epochs):
        for x, y in zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        scores = model(torch.from_numpy(data.test_images[:, None])).double()
        truth = torch.from_numpy(data.test_labels)
        value = functional.cross_entropy(scores, truth).item()
        accuracy = (scores.argmax(1) == truth).double().mean().item()
    return Result(value, accuracy, optimizer.compression_report(), [p.detach().numpy() for p in model.parameters()])


def summary(name: str, mine: Result | None) -> list[Any] | None:
    """One line of the table, of a team, on rank 0. Collective over the world."""
    said = None
    if mine is not None:
        held = hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in mine.parameters)).hexdigest()
        frameworks = [f for f in ("tensorflow", "torch") if f in sys.modules]
        said = (mine.loss, mine.accuracy, mine.report, held, " and ".join(frameworks))
    everyone = {rank: s for rank, s in enumerate(ocomm.allgather_object(said)) if s is not None}
    if ocomm.rank() != 0:
        return None
    loss, accuracy, report, _, _ = next(iter(everyone.values()))
    equal = len({held for _, _, _, held, _ in everyone.values()}) == 1
    return [
        name,
        ", ".join(map(str, everyone)),
        ", ".join(dict.fromkeys(frameworks for *_, frameworks in everyone.values())),
        f"{loss:.4f}",
        f"{100 * accuracy:.2f} %",
        f"{report['bytes_sent'] / 1e6:.2f} MB, dense {report['bytes_dense'] / 1e6:.2f} MB",
        f"equal, sha256 {next(iter(everyone.values()))[3][:12]}" if equal else "THEY DIFFER",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-model", action="store_true", help="all ranks train one model together")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=2e-3, help="of 1-bit Adam")
    parser.add_argument("--freeze-step", type=int, default=40, help="dense steps of 1-bit Adam before compression")
    parser.add_argument("--birder-lr", type=float, default=2e-3)
    args = parser.parse_args()
    ocomm.init()
    size, half = ocomm.size(), ocomm.size() // 2
    if not half:
        raise SystemExit("start it on two ranks or more: ocommrun -np 4 python examples/mixed_teams.py")

    in_keras = ocomm.rank() < half
    train: Callable[[Data, ocomm.ProcessSet, argparse.Namespace], Result] = train_keras if in_keras else train_torch
    if args.one_model:
        team = ocomm.global_process_set
    else:
        teams = [ocomm.add_process_set(range(half)), ocomm.add_process_set(range(half, size))]
        team = teams[0 if in_keras else 1]
    result = train(load_data(team, args.batch_size), team, args)

    rows = [
        summary("Keras, 1-bit Adam", result if in_keras else None),
        summary(f"Torch, {'1-bit Adam' if args.one_model else 'Birder'}", None if in_keras else result),
    ]
    if args.one_model:
        rows.append(summary("all ranks", result))
    if ocomm.rank() == 0:
        headers = ["", "ranks", "imported", "test loss", "test accuracy", "sent per rank", "parameters"]
        print(tabulate(rows, headers, disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
