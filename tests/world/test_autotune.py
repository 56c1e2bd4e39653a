"""Autotuning in a real job: all ranks switch at the same operation, and no bit of a result depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ocomm
from ocomm.errors import SettingsError
from ocomm.negotiation.autotune import Tuned
from ocomm.negotiation.request import Kind, Response
from ocomm.session import Session
from ocomm.types import Settings
from tests.worlds import MPI_SIZE, PATIENT, run_ranks

POINTS = 5


def tuned_settings(log: Path) -> Settings:
    return replace(
        PATIENT,
        autotune=("fusion_threshold", "cycle_time_ms", "segment_nbytes"),
        autotune_log=str(log),
        autotune_warmup_samples=1,
        autotune_steps_per_sample=1,
        autotune_max_points=POINTS,
    )


def test_all_ranks_tune_alike_and_results_stay(tmp_path: Path) -> None:
    def body(session: Session) -> tuple[list[bytes], list[tuple[int, Tuned]]]:
        digests = []
        executed: list[Kind] = []
        used: list[tuple[int, Tuned]] = []  # since how many responses
        world = session.member_set(0)
        assert world is not None
        execute, tune = world._execute, world._tune

        def count(response: Response) -> None:  # on the background thread, where no rank can miss one
            executed.append(response.kind)
            execute(response)

        def note(tuned: Tuned) -> None:
            used.append((len(executed), tuned))
            tune(tuned)

        world._execute, world._tune = count, note  # type: ignore[method-assign]
        rng = np.random.default_rng(ocomm.rank())
        gradients = [rng.normal(size=numel).astype(np.float32) for numel in (3, 70_000, 400_001)]
        is_over = False
        while not is_over and len(digests) < 5000:  # the search takes as long as it takes
            results = ocomm.grouped_allreduce(gradients, name="gradients")
            digests.append(b"".join(result.tobytes()[:64] + result.tobytes()[-64:] for result in results))
            mine = world._tuner is None or world._tuner._pool._shutdown  # the best is sent before "over" is
            is_over = bool(ocomm.allreduce(np.array([mine]), name="over", op=ocomm.Min)[0])
        now = used[-1][1] if used else Tuned.of(session.settings)
        assert (now.cycle_time_ms / 1e3, now.segment_nbytes) == (world._cycle_s, world._planner.segment_nbytes)
        return digests, used

    log = tmp_path / "autotune.csv"
    plain = run_ranks(2, body)
    tuned = run_ranks(2, body, settings=tuned_settings(log))
    assert {digest for digests, _ in [*plain, *tuned] for digest in digests} == {plain[0][0][0]}
    settings = [used for _, used in tuned]
    assert all(used == settings[0] for used in settings)
    if not log.exists():
        return  # of ranks under mpirun only rank 0 has it
    header, *rows = log.read_text().splitlines()
    assert header == "cycle_time_ms,tensor_fusion_threshold,segment_bytes,score" and len(rows) == POINTS
    tried = [tuple(map(float, row.split(","))) for row in rows]  # a point may be there twice, with other scores
    best = max(tried, key=lambda point: point[3])
    last = settings[0][-1][1]
    assert (last.cycle_time_ms, last.segment_nbytes) == pytest.approx((best[0], best[2]))
    assert len(settings[0]) > 2


@pytest.mark.skipif(MPI_SIZE > 0, reason="about one process")
def test_a_generation_leaves_the_log_of_the_one_that_failed(tmp_path: Path) -> None:
    for generation in (1, 2):
        settings = replace(tuned_settings(tmp_path / "log.csv"), elastic_generation=generation)
        run_ranks(1, lambda session: None, settings=settings)
    assert {file.name for file in tmp_path.iterdir()} == {"log.csv", "log.generation2.csv"}


def test_a_log_that_cannot_be_written_is_an_error_before_the_job_starts(tmp_path: Path) -> None:
    settings = tuned_settings(tmp_path / "missing" / "log.csv")
    with pytest.raises(SettingsError, match=r"OCOMM_AUTOTUNE_LOG='.*log.csv' cannot be written: .*No such file"):
        run_ranks(1, lambda session: None, settings=settings)
