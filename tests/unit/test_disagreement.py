"""What ranks are told whose settings differ."""

from __future__ import annotations

import numpy as np
import pytest

from ocomm.collectives.segment_header import SegmentHeader, SegmentHeaders
from ocomm.compression.wire import COMPARED, DISAGREEMENT
from ocomm.optim.disagreement import disagreement


def heard(*said: tuple[int, float]) -> SegmentHeader:
    """Rank 0's headers, after it has heard from all ranks their ``hyper`` and lr."""
    shared = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.int64)
    headers = [SegmentHeaders(rank, [(7, 0)], *shared) for rank in range(len(said))]
    for each, (hyper, lr) in zip(headers, said, strict=True):
        each.begin(1, 0, hyper, 0, lr)
    headers[0][0].received = [each[0].header.view(np.uint8) for each in headers]
    return headers[0][0]


GIVE = "Give all ranks the same optimizer settings and the same schedule."
EQUAL = " This lr is equal, so another of these differs, or the lr of a later group."


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([(1, 0.01), (2, 0.02)], "rank(s) [5] (lr 0.01); rank(s) [9] (lr 0.02)."),
        ([(1, 0.01), (2, 0.01)], "rank(s) [5] (lr 0.01); rank(s) [9] (lr 0.01)." + EQUAL),
        ([(1, 0.0081), (2, 0.0081000002)], "rank(s) [5] (lr 0.0081); rank(s) [9] (lr 0.0081000002)."),
        ([(1, 0.01), (2, 0.02), (2, 0.02)], "rank(s) [5] (lr 0.01); rank(s) [9, 11] (lr 0.02)."),
    ],
)
def test_rates_are_shown_with_the_digits_that_differ(said: list[tuple[int, float]], text: str) -> None:
    error = disagreement("Adam.1", 3, heard(*said), (5, 9, 11), ["w"], "settings differ", " Mend it.")
    assert str(error) == f"Adam.1: settings differ in step 3: {text} {GIVE}{'' if EQUAL in text else ' Mend it.'}"


def test_the_rate_of_a_rank_that_reports_a_difference_is_unknown() -> None:
    segment_header = heard((1, 0.01), (2, 0.0))
    reports = segment_header.received[1].view(segment_header.header.dtype)
    reports["magic"], reports["tensors"] = DISAGREEMENT, COMPARED.index("hyper")
    reports["rank"], reports["signature"], reports["gradients"], reports["hyper"] = 0, 1, 1, 2
    error = disagreement("Adam.1", 3, segment_header, (5, 9), ["w"], "settings differ")
    assert str(error) == f"Adam.1: settings differ in step 3: rank(s) [5] (lr 0.01); rank(s) [9]. {GIVE}"
