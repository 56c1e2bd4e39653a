"""The benchmark of launchers: how sure its ratio is, and that it gives other launchers no settings of transports."""

from __future__ import annotations

import pytest

pytest.importorskip("tabulate")

from benchmarks.launchers import compare, interval_of_median, words
from benchmarks.turns import DDP
from ocomm import mpi_settings


@pytest.mark.parametrize(
    ("count", "dropped"),
    # P(at most k of n on one side) * 2: 0.0625 at n = 5, 0.031 at 6; with k = 1 0.070 at 8, 0.021 at 10.
    [(5, 0), (6, 0), (8, 0), (10, 1), (20, 5)],
)
def test_the_interval_of_a_median_leaves_out_as_many_values_as_it_may(count: int, dropped: int) -> None:
    values = [float(number) for number in range(count)]
    assert interval_of_median(values[::-1]) == (values[dropped], values[-1 - dropped])


def test_a_slow_machine_cancels_out_over_ddp() -> None:
    pairs = [({DDP: 10.0, "dense": 8.0}, {DDP: 20.0, "dense": 16.0})] * 10
    compared = compare(pairs)
    assert (compared["dense"]["ratio"], compared["dense"]["over_ddp"]) == (2.0, 1.0)
    assert compared[DDP]["ratio"] == 2.0


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun"])
def test_other_launchers_get_no_settings_of_transports(launcher: str) -> None:
    line = words(launcher, None, 2, ["python", "train.py"], {})
    assert line[-2:] == ["python", "train.py"]
    assert not set(line) & {*mpi_settings.OPEN_MPI, "pml", "btl"}
