"""The checker of records finds whatever does not hold, and is silent about what may be."""

from __future__ import annotations

from pathlib import Path

from tests.invariants import COMMITTING, RESTORED, Expected, Line, Record, differences, lags, read, restores


def steps(last: int, first: int = 1, parameters: str = "p", **other: str) -> list[Line]:
    """Steps ``first`` to ``last`` of a rank; ``other`` are the parameters after some of them, by ``_NUMBER``."""
    return [
        Line(number, True, other.get(f"_{number}", f"{parameters}{number}"), f"s{number}", "Lion")
        for number in range(first, last + 1)
    ]


def test_equal_records_of_which_one_is_a_step_behind_are_in_order() -> None:
    records = {0: steps(7), 1: steps(6), 2: steps(7)}
    assert not differences(records) and not lags(records)
    assert not differences({}) and not lags({})


def test_other_parameters_after_one_step_are_found_on_the_rank_that_has_them() -> None:
    assert differences({0: steps(5), 1: steps(5, _3="else"), 2: steps(5)}) == [
        "step 3: ranks 0 and 1 differ in the parameters"
    ]


def test_another_state_is_found_even_if_the_parameters_are_equal_or_differ_by_right() -> None:
    ours = Line(3, False, "mine", "s", "DiLoCo")
    assert not differences({0: [ours], 1: [ours._replace(parameters="yours")]})
    assert differences({0: [ours], 1: [ours._replace(state="t")]}) == [
        "step 3: ranks 0 and 1 differ in the optimizer's state"
    ]
    assert differences({0: [ours], 1: [ours._replace(synced=True)]}) == [
        "step 3: ranks 0 and 1 made different steps: 'DiLoCo', 'DiLoCo'"
    ]
    assert differences({0: [ours], 1: [ours._replace(kind="Lion")]}) == [
        "step 3: ranks 0 and 1 made different steps: 'DiLoCo', 'Lion'"
    ]


def test_a_step_that_is_left_out_is_found() -> None:
    assert differences({0: [*steps(3), *steps(6, 5)]}) == ["rank 0 has step 5 after step 3"]


def test_a_rank_that_is_two_exchanges_ahead_is_found_unless_one_of_them_was_local() -> None:
    assert lags({0: steps(4), 1: steps(6), 2: steps(5)}) == ["rank 1 has ended step 6, rank 0 only step 4"]
    local = [Line(number, False, "p", "s", "DiLoCo") for number in (5, 6, 7)]
    assert not lags({0: steps(4), 1: [*steps(4), *local, *steps(8, 8)]})
    assert lags({0: [], 1: steps(2)})


def test_the_same_job_with_other_bits_is_found_and_jobs_of_other_sizes_are_other_jobs() -> None:
    expected = Expected()
    assert not expected.departures({0: steps(4), 1: steps(5)}, 2)
    assert not expected.departures({0: steps(6), 1: steps(6)}, 2)
    assert not expected.departures({0: steps(6, parameters="q")}, 1)
    assert expected.departures({0: steps(6), 1: steps(6, _6="else")}, 2) == [
        "rank 1 differs in step 6 from the same step of an earlier job"
    ]


def commit(kind: str, step: int, number: int, parameters: str = "") -> Line:
    return Line(step, True, parameters or f"p{step}", f"s{step}", f"{kind} {number}")


def test_a_generation_begins_with_what_was_committed() -> None:
    first = {rank: [*steps(5), commit(COMMITTING, 5, 1), *steps(7, 6)] for rank in range(2)}
    second = {rank: [commit(RESTORED, 5, 1), *steps(9, 6)] for rank in range(2)}
    assert not restores([first, second])
    assert not restores([first, {}, second]), "a generation that was harmed before its first step"
    assert not differences(second) and not lags(second)


def test_a_generation_that_begins_with_anything_else_is_found() -> None:
    first = {rank: [*steps(5), commit(COMMITTING, 5, 1), *steps(7, 6)] for rank in range(2)}
    begun = commit(RESTORED, 5, 1)
    other, never = commit(RESTORED, 5, 1, "else"), commit(RESTORED, 10, 2)
    assert restores([first, {0: [other], 1: [other]}]) == [
        f"generation 2: rank {rank} begins with another state than was committed: {other}" for rank in range(2)
    ]
    assert restores([first, {0: [begun], 1: [other]}])[0].startswith(
        "generation 2: the ranks begin with different states"
    )
    assert restores([first, {0: [never]}]) == [
        "generation 2: rank 0 begins with a commit that was never made: restored 2"
    ]
    assert restores([first, {0: steps(8, 6)}]) == ["generation 2: rank 0 begins at step 6 without a commit"]


def test_a_record_has_what_was_written_without_a_line_that_is_cut_off(tmp_path: Path) -> None:
    lines = [Line(1, True, "ab", "-", "1-bit Adam, dense"), Line(2, False, "cd", "ef", "DiLoCo")]
    with Record(tmp_path / "record") as record:
        for line in lines:
            record.write(line)
    with (tmp_path / "record").open("a") as file:
        file.write("3 = gh")
    assert read(tmp_path / "record") == lines
