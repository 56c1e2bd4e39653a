"""Which sums the probe takes to tell a network's rate."""

from __future__ import annotations

import pytest

from ocomm.predict.probe import NUMEL, _grown

#: Seconds that two equal sums may differ by.
NOISE_S = 0.005


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9])
@pytest.mark.parametrize("latency_s", [0.0, 0.1, 0.9])
def test_a_rate_is_told_by_sums_that_take_long_beside_their_latency(rate: float, latency_s: float) -> None:
    taken: list[float] = []

    def seconds_of(numel: int) -> float:
        seconds = latency_s + 32 * numel / rate
        taken.append(seconds)
        return seconds + NOISE_S * (-1) ** len(taken)

    (less, less_s), (more, more_s) = _grown(seconds_of, NUMEL)
    assert 32 * (more - less) / (more_s - less_s) == pytest.approx(rate, rel=0.1)
    assert sum(taken) - latency_s * len(taken) < 6.0


def test_the_largest_sum_has_to_do_on_a_fast_network() -> None:
    _, more = _grown(lambda numel: numel / 2**30, NUMEL)
    assert more == (NUMEL, NUMEL / 2**30)
    assert _grown(lambda numel: numel / 2**30, 1024) == ((512, 2.0**-21), (1024, 2.0**-20))
