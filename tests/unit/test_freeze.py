"""When the dense warm-up ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.errors import SettingsError
from ocomm.optim.freeze import FreezeSchedule, LateTensors, is_stable, require_total_steps

BETA2 = 0.9  # a window of 10 steps


def first_decision(schedule, norms, lrs=None, start=1):
    """(step of the decision, T_w), or None."""
    for step, norm in enumerate(norms, start):
        looked_at = norm if schedule.needs_norm(step) else None
        decided = schedule.observe(step, looked_at, lrs[step - start] if lrs else [1e-3])
        if decided is not None:
            return step, decided
    return None


def test_an_integer_is_known_from_the_start():
    schedule = FreezeSchedule(100, 0.999)
    assert not schedule.needs_norm(1)
    assert schedule.observe(1, 0.0, [1.0]) == 100


def test_a_constant_norm_freezes_just_after_two_windows_one_step_ahead():
    schedule = FreezeSchedule("auto", BETA2)
    assert schedule.window == 10
    assert first_decision(schedule, [5.0] * 50) == (21, 22)
    assert schedule.observe(22, 1e9, [1.0]) == 22  # it does not change its mind
    assert not schedule.needs_norm(23)


def test_the_usual_beta2_has_a_window_of_a_thousand_steps_and_looks_at_every_tenth():
    schedule = FreezeSchedule("auto", 0.999)
    assert schedule.window == 1000
    assert [step for step in range(1, 1041) if schedule.needs_norm(step)] == [1010, 1020, 1030, 1040]
    assert first_decision(schedule, [1.0] * 3000) == (2010, 2011)


@given(st.floats(0.0, 0.99999))
def test_a_window_is_a_whole_number_of_at_most_a_hundred_strides(beta2):
    schedule = FreezeSchedule("auto", beta2)
    assert schedule.window % schedule.stride == 0
    assert schedule.window <= 100 * schedule.stride
    assert schedule.stride == 1 or schedule.window > 49 * schedule.stride
    assert abs(schedule.window - 1 / (1 - beta2)) <= max(0.5, 0.01 / (1 - beta2))


@pytest.mark.parametrize(
    ("beta2", "window", "stride"),
    [(0.9, 10, 1), (0.95, 20, 1), (0.99, 100, 1), (0.995, 200, 2), (0.9985, 665, 7), (0.999, 1000, 10)],
)
def test_only_a_step_with_a_norm_decides(beta2, window, stride):
    schedule = FreezeSchedule("auto", beta2)
    assert (schedule.window, schedule.stride) == (window, stride)
    looks = [step for step in range(1, 2 * window + stride + 1) if schedule.is_norm_step(step)]
    assert looks == list(range((window // stride + 1) * stride, 2 * window + stride + 1, stride))
    assert first_decision(schedule, [1.0] * 3 * window) == (2 * window + stride, 2 * window + stride + 1)


def test_a_window_that_was_saved_with_more_norms_goes_on():
    saved = FreezeSchedule("auto", 0.9985)
    for step in range(1, 900):
        saved.observe(step, 1.0, [1.0])
    state = saved.state()
    state["norms"] = np.ones(668)  # one for each step, as once
    schedule = FreezeSchedule("auto", 0.9985)
    schedule.load_state(state)
    assert first_decision(schedule, [1.0] * 1000, start=900) == (1337, 1338)


@pytest.mark.parametrize("factor", [1.02, 1 / 1.02])
def test_a_norm_that_keeps_growing_or_falling_does_not_freeze(factor):
    assert first_decision(FreezeSchedule("auto", BETA2), [factor**t for t in range(200)]) is None


def test_it_freezes_as_soon_as_the_norm_changes_by_less_than_four_percent_in_a_window():
    norms = [max(1.0, 100.0 - t) for t in range(1, 200)]
    step, _ = first_decision(FreezeSchedule("auto", BETA2), norms)
    assert norms[step - 1] / norms[step - 11] >= 0.96
    assert norms[step - 2] / norms[step - 12] < 0.96


def test_a_learning_rate_that_rises_puts_it_off_for_a_window():
    lrs = [[1e-3, min(t, 40) * 1e-5] for t in range(1, 100)]
    assert first_decision(FreezeSchedule("auto", BETA2), [1.0] * 99, lrs) == (50, 51)


@pytest.mark.parametrize(("total_steps", "latest"), [(1, 2), (9, 2), (10, 2), (100, 20), (104, 20), (10_000, 2000)])
def test_a_fifth_of_the_run_is_the_latest_freeze_one_step_ahead(total_steps, latest):
    schedule = FreezeSchedule("auto", 0.999, total_steps)
    known = [schedule.observe(step, float(2**step) if step < 1000 else 1.0, [1.0]) for step in range(1, latest)]
    assert known == [None] * (latest - 2) + [latest]


def test_a_stable_variance_freezes_before_a_fifth_of_the_run():
    assert first_decision(FreezeSchedule("auto", BETA2, 100_000), [5.0] * 50) == (21, 22)


def test_a_run_that_goes_on_after_a_fifth_of_it_freezes_in_the_next_step():
    assert FreezeSchedule("auto", 0.999, 100).observe(50, 1.0, [1.0]) == 51


def test_a_chosen_freeze_step_stays_as_it_is():
    assert FreezeSchedule(70, 0.999, 100).decided == 70


@pytest.mark.parametrize("total_steps", [0, -1, 1.5, True, "100", math.nan])
def test_other_lengths_of_runs_are_errors(total_steps):
    with pytest.raises(SettingsError, match="total_steps must be a positive number of steps, got"):
        require_total_steps(total_steps)


def test_a_learning_rate_that_falls_does_not():
    lrs = [[1e-3 / t] for t in range(1, 100)]
    assert first_decision(FreezeSchedule("auto", BETA2), [1.0] * 99, lrs) == (21, 22)


def test_a_restart_waits_for_a_window_of_its_own():
    assert first_decision(FreezeSchedule("auto", BETA2), [1.0] * 99, start=1000) == (1010, 1011)


def test_a_gap_or_another_number_of_groups_starts_the_window_again():
    schedule = FreezeSchedule("auto", BETA2)
    assert first_decision(schedule, [1.0] * 18) is None
    assert first_decision(schedule, [1.0] * 50, start=20) == (30, 31)
    schedule = FreezeSchedule("auto", BETA2)
    assert first_decision(schedule, [1.0] * 18) is None
    assert first_decision(schedule, [1.0] * 50, [[1.0, 1.0]] * 50, start=19) == (29, 30)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_norm_that_is_zero_or_not_finite_is_not_stable(bad):
    assert not is_stable(bad, bad)
    assert not is_stable(1.0, bad)
    assert first_decision(FreezeSchedule("auto", BETA2), [bad] * 60) is None


@given(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30))
def test_stability_does_not_depend_on_the_direction(a, b):
    assert is_stable(a, b) == is_stable(b, a)
    assert is_stable(a, a)


@pytest.mark.parametrize("freeze_step", [0, -3, "soon", 5.5, float("nan"), None, True])
def test_other_freeze_steps_are_errors(freeze_step):
    with pytest.raises(SettingsError, match="freeze_step"):
        FreezeSchedule(freeze_step, 0.999)


@pytest.mark.parametrize("freeze_step", [5, 5.0, np.int64(5)])
def test_a_whole_number_of_any_type_is_one(freeze_step):
    chosen = FreezeSchedule(freeze_step, 0.999).freeze_step
    assert chosen == 5 and type(chosen) is int


def test_a_beta2_of_one_is_an_error():
    with pytest.raises(SettingsError, match="beta2"):
        FreezeSchedule("auto", 1.0)


def test_a_late_tensor_gets_its_own_warm_up_from_its_first_variance():
    late = LateTensors()
    used = [step >= 7 for step in range(1, 20)]
    ready = [late.observe(3, step, used[step - 1], 5) for step in range(1, 20)]
    assert ready.index(True) + 1 == 11  # steps 7, 8, 9, 10, 11


def test_late_tensors_do_not_share_their_counts():
    late = LateTensors()
    assert not late.observe(0, 1, True, 3)
    assert not late.observe(1, 3, True, 3)
    assert late.observe(0, 3, True, 3)
    assert not late.observe(1, 4, True, 3)
    assert late.observe(1, 5, True, 3)
