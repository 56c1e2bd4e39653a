"""A job of four hosts to which something happens ends soon and says to whom. The long run: chaos.py."""

from __future__ import annotations

import pytest

from ocomm.bench._lab import why_not
from tests.cluster.chaos import Harm, endure
from tests.cluster.test_ocommrun import has_mpi

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}"),
    pytest.mark.skipif(not has_mpi(), reason="there is no mpirun"),
]


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(Harm("kill", 2, 1.1), marks=pytest.mark.long),  # test_elastic.py kills, too
        pytest.param(Harm("stop", 0, 0.2, by="stall"), marks=pytest.mark.long),  # and test_failures.py stops
        Harm("cut", 1, 0.6),
    ],
    ids=lambda harm: f"{harm.kind} {harm.victim}",
)
def test_a_job_that_is_harmed_ends_soon_and_names_the_rank(harm: Harm) -> None:
    ended = endure(harm)
    assert not ended.faults, ended
