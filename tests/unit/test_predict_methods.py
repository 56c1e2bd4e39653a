"""Whole runs: every step is counted, and the choice follows from bytes, latency and known losses alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.predict.__main__ import main
from ocomm.predict.methods import (
    EXACT,
    METHODS,
    NOISE,
    VOTE,
    Candidate,
    Method,
    Place,
    candidates,
    fastest,
    table,
    zero_one_kinds,
)
from ocomm.predict.model import CodecTimes, Network, Training, predict

MODEL = Training(13_817_088, 0.15)
BY_NAME = {method.name: method for method in METHODS}


def place(rate: float, round_s: float = 0.0, nodes: int = 2, ranks_per_node: int = 1) -> Place:
    return Place(nodes, ranks_per_node, Network(rate, round_s=round_s), CodecTimes())


@given(st.integers(1, 20_000))
def test_every_step_is_of_one_kind(total: int) -> None:
    for method in METHODS:
        kinds = method.kinds(total)
        assert sum(kinds.values()) == total and min(kinds.values()) >= 0


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_a_step_of_exact_averages_is_the_dense_step_of_the_model(ranks_per_node: int) -> None:
    here = place(1e9, 1e-3, 4, ranks_per_node)
    dense = predict("dense", 4, ranks_per_node, MODEL, here.network, here.codec)
    assert here.seconds(("32",), MODEL) == pytest.approx(dense.step_s)
    form = "flat" if ranks_per_node == 1 else "hierarchical"
    onebit = predict(form, 4, ranks_per_node, MODEL, here.network, here.codec)
    assert here.seconds(("1",), MODEL) == pytest.approx(onebit.step_s)


def test_a_step_alone_waits_for_nobody_and_a_sync_hides_nothing() -> None:
    here = place(1e7, 0.05)
    assert here.seconds((), MODEL) == MODEL.compute_s
    assert here.seconds((VOTE,), MODEL) == MODEL.compute_s + 0.05
    assert here.seconds(("sync-4",), MODEL) > here.seconds(("4",), MODEL)
    assert here.seconds(("8", "1"), MODEL) > here.seconds(("8",), MODEL)
    with pytest.raises(ValueError, match="'2' is none of 32, 8, 4, 1, sync-32"):
        here.seconds(("2",), MODEL)


def test_the_steps_of_zero_one_adam_are_counted_without_going_through_them() -> None:
    count = BY_NAME["0/1 Adam"].kinds
    for total in [*range(1, 300), 999, 1000, 1001, 12_345]:
        assert count(total) == Counter(zero_one_kinds(total)), total
    assert sum(count(10**12).values()) == 10**12


def test_a_faster_network_never_makes_a_run_longer() -> None:
    for method in METHODS:
        runs = [place(rate).run_seconds(method, MODEL, 1000) for rate in (1e6, 1e7, 1e8, 1e9, 1e12)]
        assert runs == sorted(runs, reverse=True)


@pytest.mark.parametrize(("rate", "name"), [(1e8, "0/1 Adam"), (1e6, "DiLoCo")])
def test_the_fastest_method_follows_from_the_rate(rate: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Method, "gap", lambda method, *_: 0.0)
    unfit = {} if name == "DiLoCo" else {"DistributedDiLoCo": "it has no place here"}
    found = candidates(place(rate), MODEL, 10_000, "Adam", 0.005, unfit)
    chosen = fastest(found)
    assert chosen.method.name.startswith(name)
    lines = table(found, chosen).splitlines()
    assert [line for line in lines if line.startswith("->")] == [line for line in lines if chosen.method.name in line]
    assert sum("it has no place here" in line for line in lines) == len(unfit) * 4


@pytest.mark.parametrize("gap", [0.004, 0.001, 0.0, -0.001])
def test_a_small_gain_is_not_worth_a_loss_and_noise_is_no_gain(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Method, "gap", lambda method, *_: 0.0 if method.wrapper == EXACT else gap)
    found = candidates(place(1e12), Training(1000, 1.0), 1000, "Adam", 0.005, {})
    assert fastest(found).method.wrapper == EXACT


def test_of_gaps_that_are_noise_the_faster_method_is_taken() -> None:
    onebit, codes = (Candidate(BY_NAME[name], 0.0, 0.0) for name in ("1-bit Adam", "averages in 4 bits"))
    for gap, chosen in ((0.9 * NOISE, onebit), (1.1 * NOISE, codes)):
        found = [replace(onebit, seconds=1.0, gap=gap), replace(codes, seconds=1.04, gap=-0.0005)]
        assert fastest(found).method is chosen.method


def test_what_was_not_measured_or_costs_too_much_is_not_chosen() -> None:
    slow = place(1e6)
    for optimizer, limit in (("Lamb", 1.0), ("Adam", 0.0)):
        found = candidates(slow, MODEL, 1000, optimizer, limit, {})
        chosen = fastest(found).method
        assert chosen.wrapper == EXACT or (chosen.gap(optimizer) or 0.0) <= limit
        assert len(found) == len(METHODS)


def test_the_program_prints_whole_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--parameters", "110e6", "--compute-ms", "58", "--rate", "10mbit", "--ranks-per-node", "1"]
    assert main([*arguments, "--nodes", "2", "--total-steps", "10000"]) == 0
    printed = capsys.readouterr().out
    for method in METHODS:
        assert method.name in printed
    assert printed.count("->") == 1
