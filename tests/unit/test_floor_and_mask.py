"""What floor and mask are for: without them, as 1-bit Adam was published, a step has no measure.

The product cannot leave the mask out, so this is about the simulation, which it equals bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.onebit_adam import Simulation, Tensor

ROWS, EARLY, WIDTH, CLASSES = 48, 32, 8, 6
RANKS, FREEZE, ARRIVAL, STEPS = 2, 40, 60, 300
HOPELESS = 1e3


class AsPublished(Simulation):
    """No element is masked."""

    def _freeze_tensor(self, x: Tensor) -> None:
        super()._freeze_tensor(x)
        x.mask[:] = False


def train(kind: type[Simulation], variance_floor: float, seed: int, scale: str) -> list[float]:
    """Loss of each step, mean over the ranks, up to the first beyond HOPELESS.

    Learned is the class of each row of an embedding; the rows from EARLY on come up at step ARRIVAL and later.
    """
    rng = np.random.default_rng(seed)
    table, head = rng.normal(size=(ROWS, WIDTH)), 0.5 * rng.normal(size=(CLASSES, WIDTH))
    classes = rng.integers(CLASSES, size=ROWS)
    simulation = kind(
        [table, head],
        RANKS,
        freeze_step=FREEZE,
        lr=lambda t: 0.03 * (1 - (t - 1) / STEPS),
        variance_floor=variance_floor,
        scale=scale,
        mask_refresh=10,
    )
    losses = []
    for step in range(STEPS):
        batches = rng.integers(EARLY if step < ARRIVAL else ROWS, size=(RANKS, 16))
        parts = [gradients(*simulation.params, rows, classes[rows]) for rows in batches]
        losses.append(float(np.mean([loss for loss, _ in parts])))
        if losses[-1] > HOPELESS:
            break
        simulation.step([grads for _, grads in parts])
    return losses


def gradients(table: np.ndarray, head: np.ndarray, rows: np.ndarray, classes: np.ndarray) -> tuple[float, list]:
    """Mean cross-entropy in nats of softmax(table[rows] @ head.T), and its gradients; in float64."""
    vectors, head = table[rows].astype(np.float64), head.astype(np.float64)
    scores = vectors @ head.T
    scores -= scores.max(1, keepdims=True)
    sums = np.exp(scores).sum(1)
    picked = np.arange(rows.size), classes
    loss = float((np.log(sums) - scores[picked]).mean())
    errors = np.exp(scores) / sums[:, np.newaxis]
    errors[picked] -= 1
    errors /= rows.size
    by_row = np.zeros(table.shape)
    np.add.at(by_row, rows, errors @ head)
    return loss, [by_row, errors.T @ vectors]


@pytest.mark.parametrize("scale", ["l1", "rms"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_without_floor_and_mask_training_diverges_and_with_them_it_does_not(seed: int, scale: str) -> None:
    with_both = train(Simulation, 0.05, seed, scale)
    assert len(with_both) == STEPS
    assert max(with_both[FREEZE:]) < with_both[0]
    assert np.mean(with_both[-20:]) < 0.5 * with_both[0]
    assert len(train(AsPublished, 0.0, seed, scale)) <= ARRIVAL + 10
