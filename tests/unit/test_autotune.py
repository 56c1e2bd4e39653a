"""Autotuning: what a step and a sample are, where the search looks, and that it ends with the best it has seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ocomm.config import TUNABLE, read_settings
from ocomm.negotiation.autotune import SAMPLES, SPACE, Autotune, BayesianSearch, Point, Tuned, at, position
from ocomm.runtime.tuner import Tuner
from ocomm.types import Settings

START = Tuned.of(Settings())
NBYTES = 1_000_000


def run_steps(autotune: Autotune, seconds_of: Callable[[Tuned], float], now_s: float = 0.0) -> float | None:
    """Steps of two tensors until a point has its score."""
    for _ in range(10_000):
        for tensor in ("a", "b"):
            score = autotune.note([tensor], NBYTES // 2, now_s)
            if score is not None:
                return score
        now_s += seconds_of(autotune.current)
    return None


def test_a_score_is_the_median_rate_of_samples_after_the_warm_up() -> None:
    autotune = Autotune(START, TUNABLE, warmup_samples=2, steps_per_sample=10, max_points=3)
    steps = []

    def seconds(tuned: Tuned) -> float:
        steps.append(tuned)
        return 5.0 if len(steps) <= 21 else 0.001 if len(steps) % 50 == 7 else 0.5

    assert run_steps(autotune, seconds) == pytest.approx(NBYTES / 0.5 / 1e6)
    assert len(steps) == 1 + 10 * (2 + SAMPLES), "of the first step the beginning was not seen"
    assert run_steps(autotune, lambda tuned: 1.0) is None, "nothing is measured while the search thinks"


def test_the_best_point_stays() -> None:
    """A model of a job for which 8 MiB and short cycles are best."""
    autotune = Autotune(START, TUNABLE, 0, 3, 8)
    search = BayesianSearch(TUNABLE, 0.1)

    def seconds(tuned: Tuned) -> float:
        return 0.1 + 0.05 * abs(math.log2(tuned.fusion_threshold / 2**23)) + 0.01 * tuned.cycle_time_ms

    while not autotune.is_over:
        score = run_steps(autotune, seconds)
        assert score is not None
        search.tell(position(autotune.current, TUNABLE), score)
        autotune.go_on(autotune.seed or search.ask())
    scores = dict(autotune.results)
    assert scores[autotune.current] == max(scores.values()) > 1.5 * scores[START]
    assert len(autotune.results) == 8
    assert autotune.note(["a"], 1, 0.0) is None


def test_a_search_that_fails_ends_with_the_best_so_far(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def tell(self, point: Point, score: float) -> None:
            raise ArithmeticError("not a number")

        def ask(self) -> Point:
            raise AssertionError

    autotune = Autotune(START, TUNABLE, 0, 1, 5)
    tuner = Tuner(autotune, Broken(), TUNABLE, str(tmp_path / "log.csv"))
    now_s = 0.0
    while (tuned := tuner.poll()) is None:
        tuner.note(["a"], NBYTES, now_s)
        now_s += 0.5
    assert tuned == START and autotune.is_over
    assert "autotuning ends early: ArithmeticError: not a number" in caplog.text
    header, row = (tmp_path / "log.csv").read_text().splitlines()
    assert header == "cycle_time_ms,tensor_fusion_threshold,segment_bytes,score"
    assert row == "1.0,134217728,8388608,2.0"


def test_a_job_that_ends_before_anything_was_tuned_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Still:
        def tell(self, point: Point, score: float) -> None: ...

        def ask(self) -> Point:
            return {}

    autotune = Autotune(START, TUNABLE, 2, 3, 5)
    tuner = Tuner(autotune, Still(), TUNABLE, "")
    needed = autotune.steps_of_first_point
    for step in range(needed):
        tuner.note(["a"], NBYTES, float(step))
    assert not autotune.results
    tuner.say_end()
    assert (
        "autotuning has tried nothing: it goes by what" in caplog.text and f" more than {needed} steps" in caplog.text
    )
    caplog.clear()
    tuner.note(["a"], NBYTES, float(needed))
    assert len(autotune.results) == 1
    tuner.say_end()
    tuner.close()
    assert not caplog.text


def test_what_the_environment_sets_is_not_tuned() -> None:
    assert read_settings({"HOROVOD_AUTOTUNE": "1"}).autotune == TUNABLE
    fixed = read_settings({"OCOMM_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "1000"})
    assert fixed.autotune == ("cycle_time_ms", "segment_nbytes")
    tuned = at(dict.fromkeys(fixed.autotune, 0.5), Tuned.of(fixed))
    assert tuned.fusion_threshold == 1000 and tuned.cycle_time_ms == 1.6
    assert read_settings({"OCOMM_AUTOTUNE": "0"}).autotune == ()


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_points_cover_the_space_and_come_back(end: float) -> None:
    tuned = at(dict.fromkeys(TUNABLE, end), START)
    assert [getattr(tuned, name) for name in TUNABLE] == pytest.approx([SPACE[name][int(end)] for name in TUNABLE])
    assert position(tuned, TUNABLE) == pytest.approx(dict.fromkeys(TUNABLE, end))
    assert Tuned.unpack(tuned.pack()) == tuned
