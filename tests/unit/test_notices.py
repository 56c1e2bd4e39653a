"""What rank 0 says of a run, from its numbers."""

from __future__ import annotations

import logging

import pytest

from ocomm.optim.traffic import Traffic, Waited
from ocomm.telemetry.log import NOTICE
from ocomm.telemetry.units import amount
from ocomm.training.notices import Notices, describe_ranks, loss, totals


def measured(dense_ms: float, compressed_ms: float, dense: int = 100, compressed: int = 1000) -> Traffic:
    """The counters of a run with so many steps of each kind, and mean waits."""
    return Traffic(
        steps=dense + compressed,
        dense_steps=dense,
        compressed_steps=compressed,
        bytes_sent=dense * 32_000_000 + compressed * 1_000_000,
        bytes_dense=32e6 * (dense + compressed),
        exposed_s=(dense * dense_ms + compressed * compressed_ms) / 1e3,
        waited_dense=Waited(dense, dense * dense_ms / 1e3),
        waited_compressed=Waited(compressed, compressed * compressed_ms / 1e3),
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (11_800, "11.8 kB"), (13.8e6, "13.8 MB"), (999.9e6, "1000 MB")],
)
def test_bytes_have_three_digits(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


def test_a_place_counts_ranks_and_hosts() -> None:
    assert (
        describe_ranks(["a", "a", "b"], "Open MPI 5.0.6", False)
        == "3 ranks on 2 hosts, Open MPI 5.0.6, parameters in host memory"
    )
    assert describe_ranks(["a", "a"], "MPICH 5.0.2", True) == "2 ranks on 1 host, MPICH 5.0.2, parameters on GPUs"


def test_a_gain_in_time_is_told_where_dense_steps_were_measured() -> None:
    assert totals(measured(40.0, 3.0)) == (
        "1100 steps (100 dense, 1000 compressed). This rank sent 4.2 GB instead of 35.2 GB, 8.38 times fewer. step() "
        "waited 7.0 s for exchanges: 40 ms in a dense step, 3 ms in a compressed one, which saved 37.0 s."
    )
    assert totals(measured(0.0, 3.0, dense=0)).endswith("step() waited 3.0 s for exchanges.")


def test_steps_that_were_skipped_local_or_exchanged_twice_are_counted() -> None:
    traffic = Traffic(steps=9, compressed_steps=5, local_steps=4, skipped_steps=2, redone_steps=1)
    assert totals(traffic).startswith("9 steps (5 compressed, 4 local; of these 2 skipped, 1 exchanged twice).")


def test_dense_steps_in_few_bits_say_so() -> None:
    traffic = Traffic(steps=9, dense_steps=4, compressed_steps=5, bytes_sent=2_500_000, bytes_dense=9e6)
    assert totals(traffic, 8).startswith(
        "9 steps (4 dense in 8 bits, 5 compressed). This rank sent 2.5 MB instead of 9 MB, 3.6 times fewer."
    )


@pytest.mark.parametrize(
    ("traffic", "is_lost"),
    [
        (measured(3.0, 5.0), True),
        (measured(5.0, 3.0), False),
        (measured(3.0, 3.5), False),  # half a second in all
        (measured(3.0, 50.0, dense=19), False),  # too few to tell
        (measured(3.0, 500.0, compressed=19), False),
    ],
)
def test_a_loss_is_told_where_it_is_no_chance(traffic: Traffic, is_lost: bool) -> None:
    text = loss(traffic)
    assert bool(text) == is_lost
    assert not is_lost or text == (
        "1 bit did not pay: compressed steps waited 5 ms for their exchange, and dense ones 3 ms, which cost 2.0 s. "
        "Set "
        "OCOMM_KERNEL_THREADS to the number of cores that each rank can spare, or use DistributedOptimizer on this "
        "network."
    )


def test_a_run_has_three_lines(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic()
    notices = Notices("DistributedOneBitAdam", traffic, lambda seen, steps: f"all {seen} were dense")
    with caplog.at_level(NOTICE, "ocomm"):
        notices.begin("2 ranks on 1 host", 13_800_000, "a step sends much.")
        for step in range(1, 5):
            traffic.steps = step
            traffic.dense_steps, traffic.compressed_steps = min(step, 2), max(step - 2, 0)
            traffic.last_bytes_sent = 3200 if step <= 2 else 100
            notices.steps = step
            if step == 3:
                notices.first_compressed(3200)
        notices.at_end(goes_on=False)
    assert [record.getMessage() for record in caplog.records] == [
        "2 ranks on 1 host. DistributedOneBitAdam, 13.8 million parameters: a step sends much.",
        "DistributedOneBitAdam: the warm-up is over. From step 3 on this rank sends 100 bytes per step instead of "
        "3.2 kB.",
        "DistributedOneBitAdam: 4 steps (2 dense, 2 compressed). This rank sent 0 bytes. step() waited 0.0 s for "
        "exchanges.",
    ]
    assert {record.levelno for record in caplog.records} == {NOTICE}


def test_a_run_without_a_compressed_step_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(steps=7, dense_steps=7)
    notices = Notices("X", traffic, lambda seen, steps: f"all {seen} of {steps} were dense", speaks=False)
    notices.steps = 27  # with those before a saved state was loaded
    notices.at_end(goes_on=False)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == ["X: all 7 of 27 were dense"]


def test_a_model_whose_compressed_steps_send_more_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(steps=4, dense_steps=3, compressed_steps=1, last_bytes_sent=192)
    notices = Notices("X", traffic, lambda seen, steps: "")
    notices.steps = 4
    with caplog.at_level(NOTICE, "ocomm"):
        notices.first_compressed(44)
    assert caplog.records[0].getMessage() == (
        "X: the warm-up is over. From step 4 on this rank sends 192 bytes per step where a dense step has sent 44 "
        "bytes: with so few parameters the headers of messages are more than their bits, so DistributedOptimizer would "
        "send less."
    )


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("is_synced", [False, True])
def test_ranks_that_end_with_different_parameters_are_told_where_the_run_does_not_go_on(
    is_synced: bool, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    notices = Notices("X", Traffic(steps=7, local_steps=7), None, why_apart=lambda steps: f"no sync in step {steps}")
    notices.steps, notices.is_synced = 7, is_synced
    with caplog.at_level(NOTICE, "ocomm"):
        notices.at_end(goes_on)
    said, *warned = [record.getMessage() for record in caplog.records]
    assert said.startswith("X: 7 steps (7 local).")
    assert warned == ([] if is_synced or goes_on else ["X: no sync in step 7"])
