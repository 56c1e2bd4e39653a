"""The core of 1-bit Lion: nodes, and what a checkpoint needs. Its steps through the runtime: tests/frontends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.kernels.reference import ReferenceKernels
from ocomm.optim.checkpoint import Resharding
from ocomm.optim.lion import Lion, LionOptions

SPECS = [TensorSpec("a", (70,)), TensorSpec("b", (33,))]


def cores(ranks: int, block_size: int = 16) -> list[Lion]:
    layout = Layout(SPECS, ranks, block_size)
    return [Lion(layout, rank, ReferenceKernels(), LionOptions()) for rank in range(ranks)]


def fill(some: Sequence[Lion]) -> None:
    rng = np.random.default_rng(0)
    for core in some:
        for tensor in range(len(SPECS)):
            span = core.local_span(tensor)
            core.momentum[span] = rng.normal(size=span.stop - span.start)


def test_a_rank_gets_back_what_it_has_saved() -> None:
    before, after = cores(2), cores(2)
    fill(before)
    for old, new in zip(before, after, strict=True):
        new.load_rank_state(old.rank_state())
        np.testing.assert_array_equal(new.momentum, old.momentum)


def test_a_saved_momentum_that_is_not_finite_is_refused_before_anything_changes() -> None:
    core, target = cores(1)[0], cores(1)[0]
    fill([core])
    state = core.rank_state()
    state["worker"]["momentum"][5] = np.nan
    with pytest.raises(ValueError, match="worker buffer 'momentum' has NaN or Inf"):
        target.load_rank_state(state)
    assert not target.momentum.any()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_with_another_number_of_ranks_all_get_the_mean_momentum(ranks: int) -> None:
    old, new = cores(3), cores(ranks, block_size=32)
    fill(old)
    mean = np.mean([core.momentum.astype(np.float64) for core in old], axis=0).astype(np.float32)
    for core in new:
        resharding = Resharding(old[0].layout, core.layout, core.rank)
        for each in old:
            resharding.add({"rank": each.rank, **each.rank_state()})
        core.load_rank_state(resharding.result())
        np.testing.assert_array_equal(core.momentum, mean)


def test_the_counters_of_a_checkpoint_are_those_of_the_next_coins() -> None:
    (core,) = cores(1)
    core.load_state({"committed": 7, "steps": [7, 2]})
    assert core.state() == {"committed": 7, "steps": [7, 2]}
    assert core._owner_noise["step"] == 7
