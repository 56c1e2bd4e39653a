"""Runs features over gloo and over ocomm in one job, compares what they give, and times them. Called by every rank."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ocomm_torch as hvd
from benchmarks.torch_features.features import FEATURES, Feature

BACKENDS = ("gloo", "ocomm")

#: Of a feature that both backends have: ``same_bits``, and the ``gap``, the largest of all tensors and ranks.
Row = dict[str, Any]


@contextlib.contextmanager
def world(backend: str) -> Iterator[None]:
    """The default group of torch.distributed is one of all ranks with this backend."""
    dist.init_process_group(backend, init_method="ocomm://")
    try:
        yield
    finally:
        dist.destroy_process_group()


def chosen(size: int, tier: Callable[[Feature], bool] = lambda feature: True) -> list[Feature]:
    """The features of the list that run on ``size`` ranks."""
    return [feature for feature in FEATURES if size in feature.sizes and tier(feature)]


def results(feature: Feature, backend: str) -> list[Tensor]:
    """What all steps of a feature give in the default group, which is of ``backend``; nothing if the backend lacks it.

    Raises AssertionError if the backend has a feature that it should lack.
    """
    words = feature.lacking_here.get(backend)
    if words is None:
        step = feature.prepare()
        return [tensor.detach().clone() for number in range(feature.steps) for tensor in step(number)]
    try:
        feature.prepare()(0)
    except Exception as error:
        if words in str(error):
            return []
        raise
    raise AssertionError(f"{feature.name}: the list says that {backend} does not have it, but it raised no error")


def have_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def relative_gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of two elements over the largest element of its tensor; infinite if the tensors are not
    comparable, not finite, or integers that differ.
    """
    if [(one.dtype, one.shape) for one in ours] != [(other.dtype, other.shape) for other in theirs]:
        return float("inf")
    gap = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if have_same_bits([one], [other]):
            continue
        largest = other.double().abs().max().clamp(min=1e-30)
        found = float((one.double() - other.double()).abs().max() / largest)
        gap = max(gap, found if found < float("inf") and one.is_floating_point() else float("inf"))
    return gap


def compare(features: Sequence[Feature]) -> dict[str, Row]:
    """Runs each feature over both backends. Collective; rows by name, the same on all ranks."""
    found: dict[str, dict[str, list[Tensor]]] = {feature.name: {} for feature in features}
    for backend in BACKENDS:
        with world(backend):
            for feature in features:
                dist.barrier()
                found[feature.name][backend] = results(feature, backend)
    rows: dict[str, Row] = {}
    for feature in features:
        if not feature.lacking_here:
            both = found[feature.name]["ocomm"], found[feature.name]["gloo"]
            rows[feature.name] = {"same_bits": have_same_bits(*both), "gap": relative_gap(*both)}
    every = hvd.allgather_object(rows)
    for name, row in rows.items():
        row["same_bits"] = all(each[name]["same_bits"] for each in every)
        row["gap"] = max(each[name]["gap"] for each in every)
    return rows


def wrong(rows: dict[str, Row], size: int) -> list[str]:
    """The features whose numbers are not gloo's: other bits on two ranks, larger gaps than the list allows on four."""
    limits = {feature.name: feature.gap for feature in FEATURES}
    return [n for n, row in rows.items() if (not row["same_bits"] if size == 2 else row["gap"] > limits[n])]


def times(features: Sequence[Feature], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step, of the slowest rank, by feature and backend, one per round. Collective.

    In a round a feature runs over one backend right after the other, first over the one and then over the other in
    turn. Each time it is prepared anew, and its first steps do not count.
    """
    found = {feature.name: {backend: [] for backend in BACKENDS} for feature in features if not feature.lacking_here}
    for turn in range(rounds):
        for feature in features:
            for backend in BACKENDS[:: -1 if turn % 2 else 1] if feature.name in found else ():
                with world(backend):
                    step = feature.prepare()
                    for number in range(feature.steps):
                        step(number)
                    dist.barrier()
                    begun = time.perf_counter()
                    for number in range(feature.steps, feature.steps + steps):
                        step(number)
                    found[feature.name][backend].append(1e3 * (time.perf_counter() - begun) / steps)
    every = hvd.allgather_object(found)
    return {
        name: {b: [max(one) for one in zip(*(each[name][b] for each in every), strict=True)] for b in BACKENDS}
        for name in found
    }


def start() -> None:
    """What every rank does first."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()


def main(tier: str, path: str) -> None:
    """As a rank of a test: compares the features that are "long" or not, and rank 0 writes the rows to a file."""
    start()
    rows = compare(chosen(hvd.size(), lambda feature: feature.is_long == (tier == "long")))
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps(rows))
