"""Headers of segments and votes in which anything is another value: the ranks disagree, and the error can be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.collectives.plan import read_header
from ocomm.collectives.python_engine import PythonEngine, _Mismatch
from ocomm.collectives.segment_header import SegmentHeader, SegmentHeaders
from ocomm.compression.wire import COMPARED, DISAGREEMENT, HEADER, MAGIC
from ocomm.errors import MismatchError
from ocomm.optim.disagreement import disagreement
from tests.fuzz.harm import examples, harmed

RANKS = (5, 9)
FIELDS = [name for name in HEADER.names or () if name != "magic"]


def two_ranks() -> tuple[SegmentHeader, list[np.ndarray]]:
    """A header of rank 0, and the messages of ranks 0 and 1 that it compares."""
    flags, heard, announcement = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.int64)
    headers = [SegmentHeaders(rank, [(7, 3)], flags, heard, announcement)[0] for rank in range(2)]
    rows = [np.concatenate([each.header.view(np.uint8), each.presence]) for each in headers]
    headers[0].received = rows
    return headers[0], rows


@st.composite
def header(draw: st.DrawFn, original: np.ndarray) -> np.ndarray:
    """A header with damage, or one that tells of a disagreement that no ranks have."""
    if draw(st.booleans()):
        data = draw(harmed(original.tobytes()))[: original.nbytes]
        return np.frombuffer(data.ljust(original.nbytes, b"\0"), np.uint8).copy()
    row = original.copy()
    said = row[: HEADER.itemsize].view(HEADER)
    said["magic"] = draw(st.sampled_from([MAGIC, DISAGREEMENT]))
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        said[name] = np.frombuffer(
            draw(st.sampled_from([b"\0", b"\1", b"\7", b"\x7f", b"\xff"])) * 8, said[name].dtype
        )[0]
    return row


def compared(mine: SegmentHeader, rows: list[np.ndarray], passes_on: bool) -> int | None:
    """The rank that the Python engine blames, None for nobody; tests/fuzz/engine.c has the native one."""
    segment: Any = SimpleNamespace(culprit=None, ranks=2, stages=[])
    segment.ticket = SimpleNamespace(culprit=None, plan=SimpleNamespace(segments=[segment.stages]))
    try:
        PythonEngine._check(mine.check_and_pass_on(rows) if passes_on else mine.check(rows), segment)
    except _Mismatch as mismatch:
        return mismatch.rank
    return segment.culprit  # type: ignore[no-any-return]


@examples(150)
@given(st.data())
def test_a_header_that_differs_is_an_error_that_blames_a_rank_of_the_exchange(data: st.DataObject) -> None:
    mine, rows = two_ranks()
    rows[1] = data.draw(header(rows[1]))
    differs = any(read_header(rows[1])[name] != mine.header[name][0] for name in COMPARED)
    blamed = compared(mine, rows, data.draw(st.booleans()))
    assert (blamed is not None) == differs and blamed in (None, 0, 1)
    if differs:
        # A rank that has the headers of all, and one that was told.
        for received in (rows, []):
            mine.received = received
            assert isinstance(disagreement("Adam.1", 3, mine, RANKS, ["w"], "lr"), MismatchError)
    mine.received = rows
    try:
        assert not any(square < 0 for square in mine.squares())
    except MismatchError as error:
        assert str(error).startswith("rank 1 of this exchange sent -")


@pytest.mark.parametrize("rank", [2, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_difference_is_not_missed_where_the_header_names_a_rank_that_is_none(rank: int) -> None:
    mine, rows = two_ranks()
    said = rows[1][: HEADER.itemsize].view(HEADER)
    said["rank"], said["step"] = rank, 3
    assert compared(mine, rows, passes_on=True) == 0
    mine.received = []
    assert str(disagreement("Adam.1", 3, mine, RANKS, ["w"], "lr")).startswith(
        "Adam.1: a message arrived in step 3 whose header no rank writes."
    )
