"""When 0/1 Adam exchanges."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.errors import SettingsError
from ocomm.optim.intervals import RefreshSchedule, SyncSchedule
from ocomm.optim.zero_one_adam import ZeroOneAdamOptions

syncs = st.builds(
    SyncSchedule,
    local_step_start=st.integers(0, 60),
    local_step_doubling=st.integers(1, 60),
    local_step_clip=st.integers(1, 20),
)
few = settings(max_examples=100)


def sync_schedule(**options):
    """Of 0/1 Adam's options, with its defaults."""
    return ZeroOneAdamOptions(**options).schedules()[0]


def refresh_schedule(**options):
    return ZeroOneAdamOptions(**options).schedules()[1]


def taken(schedule, steps, start=1):
    """Which of the steps from ``start`` to ``steps`` are syncs, each taken as it comes."""
    found = []
    for step in range(start, steps + 1):
        if schedule.is_due(step):
            schedule.synced(step)
            found.append(step)
    return found


def refreshed(schedule, steps, start=1):
    found = []
    for step in range(start, steps + 1):
        if schedule.is_due(step):
            schedule.refreshed(step)
            found.append(step)
    return found


def test_the_convergent_setting_of_a_short_run():
    schedule = sync_schedule(local_step_start=6, local_step_doubling=6, local_step_clip=4)
    assert [schedule.interval(t) for t in range(1, 27)] == [1] * 11 + [2] * 6 + [4] * 9
    assert taken(schedule, 26) == [*range(1, 12), 13, 15, 17, 21, 25]


def test_the_usual_setting_syncs_at_every_step_for_32767_steps():
    schedule = sync_schedule()
    assert [schedule.interval(t) for t in (1, 32767, 32768, 65535, 65536, 131072, 10**9)] == [1, 1, 2, 2, 4, 16, 16]


def test_refreshes_come_more_and_more_rarely():
    schedule = refresh_schedule(var_update_scaler=3)
    assert refreshed(schedule, 60) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 30, 38, 46]


def test_refreshes_end_with_the_first_longer_interval():
    schedule = refresh_schedule(local_step_start=4, local_step_doubling=6, var_update_scaler=2)
    assert not schedule.is_over(1)
    assert refreshed(schedule, 200) == [1, 2, 3, 5, 7]
    assert [schedule.is_over(t) for t in (8, 11, 200)] == [True] * 3, "the next would be step 11, whose interval is 2"


def test_a_freeze_step_ends_them_instead():
    schedule = refresh_schedule(local_step_doubling=4, var_update_scaler=2, var_freeze_step=15)
    assert refreshed(schedule, 200) == [1, 2, 3, 5, 7, 11, 15]
    assert refreshed(refresh_schedule(var_freeze_step=3), 50) == [1, 2, 3]


def test_the_first_refresh_takes_place_even_if_no_interval_is_1():
    schedule = refresh_schedule(local_step_doubling=1, local_step_clip=8)
    assert refreshed(schedule, 50) == [1]


def definition(start, doubling, clip, steps, last_step=None):
    """T_u as docs/algorithms.md has it."""
    found, last = [], 0
    for t in range(1, steps + 1):
        interval = 1 if t <= start else min(clip, 2 ** math.floor((t - start) / doubling))
        if t - last >= interval or t == last_step:
            found.append(t)
            last = t
    return found


@few
@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 20), st.none() | st.integers(1, 150))
def test_syncs_are_those_of_the_definition(start, doubling, clip, last):
    assert taken(SyncSchedule(start, doubling, clip, last), 150) == definition(start, doubling, clip, 150, last)


@few
@given(syncs, st.integers(1, 20))
def test_refreshes_are_those_of_the_definition(schedule, scaler):
    steps = [1]
    for j in range(300):
        steps.append(steps[-1] + 2 ** math.floor(j / scaler))
    expected = [t for t in steps if t <= 200 and (t == 1 or schedule.interval(t) == 1)]
    assert refreshed(RefreshSchedule(schedule, scaler, None), 200) == expected


@few
@given(syncs)
def test_the_interval_never_falls_and_no_sync_is_later_than_the_clip(schedule):
    intervals = [schedule.interval(t) for t in range(1, 200)]
    assert intervals == sorted(intervals)
    assert max(intervals) <= schedule.clip
    found = [0, *taken(schedule, 200)]
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert gaps == [schedule.interval(t) for t in found[1:]]


@few
@given(syncs, st.integers(1, 8), st.integers(1, 150))
def test_a_resumed_schedule_goes_on_as_an_uninterrupted_one(schedule, scaler, stop):
    def fresh():
        again = SyncSchedule(schedule.start, schedule.doubling, schedule.clip)
        return again, RefreshSchedule(again, scaler, None)

    whole_syncs, whole_refreshes = fresh()
    expected = taken(whole_syncs, 200), refreshed(whole_refreshes, 200)
    before, refreshes_before = fresh()
    first = taken(before, stop), refreshed(refreshes_before, stop)
    after, refreshes_after = fresh()
    after.load_progress(before.progress())
    refreshes_after.load_progress(refreshes_before.progress())
    second = taken(after, 200, stop + 1), refreshed(refreshes_after, 200, stop + 1)
    assert tuple(a + b for a, b in zip(first, second, strict=True)) == expected


@few
@given(syncs, st.sets(st.integers(1, 100)))
def test_a_sync_that_cannot_be_is_due_at_the_next_step(schedule, impossible):
    last = 0
    for step in range(1, 101):
        due = schedule.is_due(step)
        assert due == (step - last >= schedule.interval(step))
        if due and step not in impossible:
            schedule.synced(step)
            last = step


@pytest.mark.parametrize("option", ["local_step_start", "local_step_doubling", "local_step_clip"])
@pytest.mark.parametrize("value", [-1, 0.5, "4", True])
def test_an_interval_that_is_no_number_of_steps_is_an_error_that_names_the_option(option, value):
    with pytest.raises(SettingsError, match=f"{option} must be a whole number of at least"):
        ZeroOneAdamOptions(**{option: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 32768, 16)),
        ({"total_steps": 1000}, (250, 250, 4)),
        ({"total_steps": 3}, (1, 1, 4)),
        ({"total_steps": 1000, "local_step_clip": 8, "local_step_start": 0}, (0, 250, 8)),
    ],
)
def test_the_length_of_the_run_gives_what_is_not_chosen(options, expected):
    found = ZeroOneAdamOptions(**options)
    assert (found.local_step_start, found.local_step_doubling, found.local_step_clip) == expected


@pytest.mark.parametrize("option", ["var_update_scaler", "var_freeze_step"])
@pytest.mark.parametrize("value", [0, -1, 0.5, "4"])
def test_a_refresh_setting_out_of_range_is_an_error_that_names_the_option(option, value):
    with pytest.raises(SettingsError, match=f"{option} must be a whole number of at least 1"):
        ZeroOneAdamOptions(**{option: value})
