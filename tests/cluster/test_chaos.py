"""A job to which something happens goes on, or ends soon and says to whom; its ranks agree. The long run: chaos.py."""

from __future__ import annotations

import random

import pytest

from ocomm.bench._lab import why_not
from tests.cluster import chaos, chaos_elastic
from tests.cluster.chaos import Job, endure
from tests.cluster.harms import Harm
from tests.cluster.jobs import has_mpi
from tests.invariants import Expected

needs_lab = pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
needs_mpi = pytest.mark.skipif(not has_mpi(), reason="there is no mpirun")


@needs_lab
@needs_mpi
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(Harm("kill", 2, 1.1), marks=pytest.mark.long),  # test_elastic.py kills, too
        pytest.param(Harm("stop", 0, 0.2, by="stall"), marks=pytest.mark.long),  # and test_failures.py stops
        # A cut cable and a stopped rank are both silence; the launcher takes 25 s to give up a host.
        pytest.param(Harm("cut", 1, 0.6), marks=pytest.mark.long),
    ],
    ids=lambda harm: f"{harm.kind} {harm.victim}",
)
def test_a_job_that_is_harmed_ends_soon_and_names_the_rank(harm: Harm) -> None:
    pytest.importorskip("torch")
    ended = endure(Job((harm,)))
    assert not ended.faults, ended


@needs_lab
@needs_mpi
def test_every_optimizer_goes_on_after_harms_that_pass_and_all_ranks_agree_until_one_is_killed() -> None:
    harms = (Harm("pause", 1, 0.1, pause_s=0.3), Harm("delay", 0, 0.0, pause_s=0.3), Harm("kill", 2, 0.1))
    ended = endure(Job(harms, 1, 3, "numpy"))
    assert not ended.faults and not any(outcome.faults for outcome in ended.passed), ended
    assert min(map(len, ended.records.values())) > 2 * chaos.GOES_ON


@pytest.mark.long
@needs_lab
@needs_mpi
@pytest.mark.parametrize("kind", ["cut out", "cut in", "loss", "heal"])
def test_a_bad_network_is_found_out_or_endured(kind: str) -> None:
    ended = endure(Job((Harm(kind, 1, 0.3, pause_s=2.0),), 3, 3, "numpy"))
    assert not ended.faults, ended


@pytest.mark.long
@needs_lab
@needs_mpi
def test_an_elastic_job_recovers_from_each_harm_with_what_was_committed_also_while_it_recovers() -> None:
    ended = chaos_elastic.endure_many(chaos_elastic.many(random.Random(1)), Expected())
    assert not any(outcome.faults for outcome in ended.outcomes), ended


def test_many_faults_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    jobs = chaos.many(500, 7)
    assert jobs == chaos.many(500, 7) != chaos.many(500, 8)
    harms = [harm for job in jobs for harm in job.harms]
    assert 500 <= len(harms) < 515
    wanted = {*chaos._PASSING, *chaos._ENDING, *chaos._ON_HOSTS, "kill in recovery"}
    assert wanted <= {harm.name for harm in harms}
    assert not any(harm.is_deadly for job in jobs if isinstance(job, Job) for harm in job.harms[:-1])
