"""The arithmetic of ``benchmarks.time_to_loss``: which steps a run needs to a loss, and what they take on a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.time_to_loss.__main__ import bars
from benchmarks.time_to_loss.choices import LIMITS, Choice, choices, judged
from benchmarks.time_to_loss.join import SEEDS, Network, cost, gaps, kinds, networks, reached, to_loss
from benchmarks.time_to_loss.losses import RESULTS, stored
from benchmarks.time_to_loss.methods import METHODS, kind_of
from benchmarks.time_to_loss.steps import NETWORKS, STEPS_FILE, rows_at
from benchmarks.turns import LOCAL, LOCAL_MUON
from ocomm.predict import methods
from ocomm.predict.methods import GAPS, VOTE

ONE_BIT = METHODS["1-bit Adam, total_steps, 8 bits"]
RUN = {"seed": 0, "losses": [5.0, 4.0, 3.0], "kinds": [["8", 60], ["1", 90]]}
ROWS = {LOCAL: 100.0, "1-bit Adam, 8-bit warm-up": 300.0, "1-bit Adam": 150.0}
SENT = {"1-bit Adam, 8-bit warm-up": 14e6, "1-bit Adam": 1.75e6, "ocomm dense": 55e6}


def network(**rows: float) -> Network:
    return Network("10mbit", 0.0, {**ROWS, **rows}, SENT)


def test_the_first_evaluation_at_the_target_counts():
    assert reached(RUN, 4.0) == 100
    assert reached(RUN, 3.5) == 150
    assert reached(RUN, 2.9) is None


def test_steps_are_counted_by_kind_up_to_the_last_one():
    assert list(kinds(RUN, 50)) == [("8", 50)]
    assert list(kinds(RUN, 100)) == [("8", 60), ("1", 40)]
    assert list(kinds(RUN, 1000)) == [("8", 60), ("1", 90)]


def test_seconds_and_bytes_are_those_of_the_steps():
    seconds, sent = cost(network(), ONE_BIT, RUN, 100)
    assert seconds == pytest.approx(60 * 0.3 + 40 * 0.15)
    assert sent == pytest.approx(60 * 14e6 + 40 * 1.75e6)


def test_what_was_not_measured_takes_as_long_as_its_bytes():
    seconds, sent = network().step(ONE_BIT, "32")
    assert seconds == pytest.approx(0.1 + 8 * 55e6 / (0.95 * 10e6))
    assert sent == 55e6


def test_a_step_that_does_two_things_takes_both():
    seconds, sent = network(**{"0/1 Adam": 160.0}).step(METHODS["0/1 Adam, total_steps, 8 bits"], "0")
    assert (seconds, sent) == (0.1, 0.0)
    both = Network("10mbit", 0.0, {**ROWS, "0/1 Adam": 160.0}, {**SENT, "0/1 Adam": 2e6})
    seconds, sent = both.step(METHODS["0/1 Adam, total_steps, 8 bits"], "8")
    assert seconds == pytest.approx(0.1 + 0.2 + 0.06)
    assert sent == pytest.approx(16e6)


def test_another_inner_optimizer_has_a_local_step_of_its_own():
    method = METHODS["DiLoCo 30, 4 bits, Muon"]
    rows = network(**{LOCAL_MUON: 180.0, "DiLoCo sync, 4 bit(s)": 160.0})
    synced = Network("10mbit", 0.0, rows.rows, {"DiLoCo sync, 4 bit(s)": 7e6})
    assert synced.step(method, "0") == (0.18, 0.0)
    assert synced.step(method, "sync-4") == (pytest.approx(0.18 + 0.06), 7e6)


def test_a_step_of_a_vote_waits_for_an_answer_and_no_more():
    method = METHODS["0/1 Adam, total_steps, 8 bits"]
    assert [method.kind(step, 3000) for step in (0, 20, 2998)] == ["8", "8", VOTE]
    assert Network("10mbit", 50.0, ROWS, SENT).step(method, VOTE) == (0.1 + 0.1, 0.0)


def test_one_seed_that_never_gets_there_is_never():
    runs = [RUN, {**RUN, "seed": 1}]
    assert to_loss(network(), ONE_BIT, runs, {0: 4.0, 1: 2.5}, 0.01) is None
    found = to_loss(network(), ONE_BIT, runs, {0: 4.0, 1: 3.98}, 0.01)
    assert found is not None and found[0] == pytest.approx(cost(network(), ONE_BIT, RUN, 100)[0])


def test_results_of_one_network_are_joined_and_slow_ones_come_first():
    def result(rate: str, local: float, row: str, ms: float) -> dict:
        times = {LOCAL: local, row: ms}
        return {"rate": rate, "rows": [{"method": name, "step_ms": ms, "sent": 1.0} for name, ms in times.items()]}

    found = networks(
        [result("50mbit", 1.0, "a", 4.0), result("10mbit", 3.0, "a", 4.0), result("50mbit", 2.0, "b", 7.0)]
    )
    assert [(each.name, dict(each.rows)) for each in found] == [
        ("10 Mbit/s", {LOCAL: 2.0, "a": 3.0}),
        ("50 Mbit/s", {LOCAL: 2.0, "a": 5.0, "b": 7.0}),
    ]


def test_headers_of_packets_that_a_relay_counts_are_no_bytes_of_a_row():
    def result(delay: float, sent: float) -> dict:
        return {"rate": "10mbit", "delay_ms": delay, "rows": [{"method": LOCAL, "step_ms": 1.0, "sent": sent}]}

    assert [each.sent for each in networks([result(0.0, 1.0), result(50.0, 1.05)])] == [{LOCAL: 1.0}] * 2


def test_what_was_measured_with_one_delay_waits_as_often_with_another():
    def result(rate: str, delay: float, ms: float | None) -> dict:
        times = {LOCAL: 100.0} if ms is None else {LOCAL: 100.0, "1-bit Adam": ms}
        rows = [{"method": name, "step_ms": ms, "sent": 1e6} for name, ms in times.items()]
        return {"rate": rate, "delay_ms": delay, "rows": rows}

    found = networks([result("50mbit", 0.0, 300.0), result("50mbit", 50.0, 450.0), result("10mbit", 100.0, None)])
    (unmeasured,) = (each for each in found if each.rate == "10mbit")
    assert unmeasured.waits == {LOCAL: 0.0, "1-bit Adam": 3.0}
    assert unmeasured.step(ONE_BIT, "1")[0] == pytest.approx(0.1 + 8 * 1e6 / (0.95 * 10e6) + 3 * 0.1)


@pytest.mark.parametrize(
    ("sent", "syncs", "kind"),
    [(0, False, "0"), (33, False, "1"), (250, False, "8"), (1010, False, "32"), (125, True, "sync-4"), (0, True, "0")],
)
def test_the_kind_of_a_step_is_the_nearest_number_of_bits(sent: int, syncs: bool, kind: str):
    assert kind_of(sent, 1000.0, syncs) == kind


def test_the_losses_that_decide_are_those_that_were_measured():
    known = {method: by_task for method, by_task in gaps(stored()["runs"]).items() if by_task}
    assert known == GAPS.get("Adam", {})


def test_the_picture_of_the_readme_is_that_of_the_stored_results(tmp_path: Path):
    measured = networks(json.loads(STEPS_FILE.read_text())["results"])
    bars(stored()["runs"], measured, tmp_path / "bars.svg")
    drawn, published = (re.findall("<text.*?>(.*?)<", (at / "bars.svg").read_text()) for at in (tmp_path, RESULTS))
    assert drawn == published and drawn.count("DDP") == drawn.count("ocomm") == 4


def test_what_would_begin_with_minutes_of_dense_steps_is_not_measured():
    assert rows_at("1mbit", 0.0) == ["local-muon", "birder", "diloco-1"]
    assert {"powersgd", "onebit", "diloco-4"} <= set(rows_at("10mbit", 50.0))


def test_deepspeed_is_measured_with_one_delay_only():
    assert [where for where in NETWORKS if where[1] and "deepspeed" in rows_at(*where)] == [("160mbit", 50.0)]


#: One step of each method's: seconds of 100 steps are a tenth of milliseconds per step.
JUDGED_STEPS = {LOCAL: 100.0, "DDP fp32": 1000.0, "ocomm int8": 400.0, "DiLoCo sync, 4 bit(s)": 600.0}


def runs_of(loss: float, diloco: float, int8: float = 1.0) -> dict[str, list[dict]]:
    """Two equal seeds', by method: the final loss is ``loss`` times what is given."""
    ends = {
        "DDP fp32": (1.0, [["32", 100]]),
        "Adam, Compression.int8": (int8, [["8", 100]]),
        "DiLoCo 10, 4 bits": (diloco, [["0", 90], ["sync-4", 10]]),
    }
    return {
        name: [{"seed": seed, "steps": 100, "losses": [loss * times], "kinds": kinds} for seed in range(SEEDS)]
        for name, (times, kinds) in ends.items()
    }


def judge(runs: dict, seconds: dict[str, float]) -> dict[tuple[str, float], Choice]:
    measured = [Network("10mbit", 0.0, JUDGED_STEPS, dict.fromkeys(JUDGED_STEPS, 1.0))]
    return {(each.task, each.limit): each for each in choices(runs, measured, {"10 Mbit/s": seconds})}


#: What is expected of the three methods above, in their true order.
SECONDS = {method.name: 1000.0 for method in methods.METHODS} | {
    "averages in 8 bits": 40.0,
    "DiLoCo, a sync in 10 steps, 4 bits": 15.0,
}


def test_a_choice_is_right_if_it_is_the_fastest_that_keeps_the_loss():
    found = judge({"text": runs_of(3.0, 1.009), "large text": runs_of(2.0, 1.008)}, SECONDS)
    assert len(found) == 2 * len(LIMITS)
    assert all(each.is_right for each in found.values())
    assert found["text", 0.005].chosen == "averages in 8 bits"
    assert (found["text", 0.01].chosen_s, found["text", 0.01].best_s) == pytest.approx((15.0, 15.0))


def test_a_choice_that_loses_more_than_was_asked_is_wrong():
    found = judge({"text": runs_of(3.0, 1.02), "large text": runs_of(2.0, 1.008)}, SECONDS)
    missed = found["text", 0.01]
    assert (missed.chosen, missed.best) == ("DiLoCo, a sync in 10 steps, 4 bits", "averages in 8 bits")
    assert not missed.is_close and not missed.is_right and missed.gap == pytest.approx(0.02)
    slow = found["large text", 0.01]
    assert slow.is_close and not slow.is_right and slow.chosen_s / slow.best_s == pytest.approx(40 / 15)
    said = judged(list(found.values()))
    for words in ("4 of 6", "4 take at most 5% longer", "1 miss that loss", "2.67 times"):
        assert words in said


def test_a_wrong_prediction_makes_a_wrong_choice():
    found = judge({"text": runs_of(3.0, 1.0), "large text": runs_of(2.0, 1.0)}, {**SECONDS, "averages in 8 bits": 5.0})
    assert not any(each.is_right for each in found.values())
