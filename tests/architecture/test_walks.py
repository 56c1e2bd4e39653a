"""How far a call walks through ocomm's functions: counted, not timed, so the same on every machine."""

from __future__ import annotations

import pytest

from tools.walks import Walk, of_ranks

#: At most so many calls, of which so many are of another file than the one before. Lower them with what lowers them.
LIMITS = {"gradients": Walk(36, 25), "step": Walk(66, 47), "allreduce": Walk(31, 19)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_walk_becomes_longer(ranks: int) -> None:
    found = of_ranks(ranks)
    assert found.keys() == LIMITS.keys()
    longer = {name: walk for name, walk in found.items() if walk.calls > LIMITS[name].calls}
    assert not longer, "python -m tools.walks --trace shows them"
    assert not {name: walk for name, walk in found.items() if walk.moves > LIMITS[name].moves}
