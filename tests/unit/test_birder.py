"""The cores of Birder and SoftSignSGD: what a checkpoint needs, and what they refuse. Their steps: tests/frontends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.kernels.reference import ReferenceKernels
from ocomm.optim.birder import Birder, BirderOptions
from ocomm.optim.checkpoint import Resharding
from ocomm.optim.soft_sign import SoftSignSGD, SoftSignSGDOptions

SPECS = [TensorSpec("a", (70,)), TensorSpec("b", (33,))]


def cores(ranks: int, block_size: int = 16, kind: type[SoftSignSGD] = Birder) -> list[Any]:
    layout = Layout(SPECS, ranks, block_size)
    options = BirderOptions() if kind is Birder else SoftSignSGDOptions()
    return [kind(layout, rank, ReferenceKernels(), options) for rank in range(ranks)]


def fill(some: Sequence[Any], seed: int = 0) -> None:
    """State as after some steps: |m| <= b, |e| <= 2."""
    rng = np.random.default_rng(seed)
    for core in some:
        for tensor in range(len(SPECS)):
            span, owned = core.flat_span(tensor), core.owned_span(tensor)
            core.magnitude[span] = rng.random(span.stop - span.start)
            core.momentum[span] = core.magnitude[span] * rng.uniform(-1, 1, span.stop - span.start)
            if isinstance(core, Birder):
                core.error[span] = rng.uniform(-2, 2, span.stop - span.start)
                core.server_error[owned] = rng.uniform(-2, 2, owned.stop - owned.start)


def server_errors(some: Sequence[Any]) -> np.ndarray:
    """Of all owners, flat."""
    flat = np.zeros(some[0].layout.flat_numel, np.float32)
    for block in some[0].layout.blocks:
        owned = slice(int(block["owned"]), int(block["owned"] + block["length"]))
        flat[block["offset"] : block["offset"] + block["length"]] = some[block["owner"]].server_error[owned]
    return flat


@pytest.mark.parametrize("kind", [Birder, SoftSignSGD])
def test_a_rank_gets_back_what_it_has_saved(kind: type[SoftSignSGD]) -> None:
    before, after = cores(2, kind=kind), cores(2, kind=kind)
    fill(before)
    for old, new in zip(before, after, strict=True):
        new.load_rank_state(old.rank_state())
        for name in ("momentum", "magnitude", "error", "server_error"):
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))


@pytest.mark.parametrize(("part", "name"), [("worker", "momentum"), ("worker", "magnitude"), ("owner", "error")])
def test_a_saved_state_that_is_not_finite_is_refused_before_anything_changes(part: str, name: str) -> None:
    core, target = cores(1)[0], cores(1)[0]
    fill([core])
    state = core.rank_state()
    state[part][name][5] = np.nan
    with pytest.raises(ValueError, match=f"{part} buffer '{name}' has NaN or Inf"):
        target.load_rank_state(state)
    assert not target.momentum.any() and not target.error.any()


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kind", [Birder, SoftSignSGD])
def test_with_another_number_of_ranks_the_mean_of_what_workers_hold_stays(kind: type[SoftSignSGD], ranks: int) -> None:
    old, new = cores(3, kind=kind), cores(ranks, kind=kind, block_size=32)
    fill(old)
    for core in new:
        resharding = Resharding(old[0].layout, core.layout, core.rank)
        for each in old:
            resharding.add({"rank": each.rank, **each.rank_state()})
        core.load_rank_state(resharding.result())
        for name in ("momentum", "magnitude", "error"):
            mean = np.mean([getattr(o, name).astype(np.float64) for o in old], axis=0)
            np.testing.assert_array_equal(getattr(core, name), mean.astype(np.float32))
        assert (np.abs(core.momentum) <= core.magnitude).all()
    if kind is Birder:
        np.testing.assert_array_equal(server_errors(new), server_errors(old))


def test_the_counters_of_a_checkpoint_decide_when_magnitudes_may_fall() -> None:
    layout = Layout(SPECS, 1)
    core = SoftSignSGD(layout, 0, ReferenceKernels(), SoftSignSGDOptions(amsgrad_after=3))
    assert [core.amsgrad, core.committed] == [False, 0]
    core.load_state({"committed": 3, "steps": [3, 1]})
    assert core.amsgrad
    assert core.state()["steps"] == [3, 1]
