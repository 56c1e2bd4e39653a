"""Models that commit 687c053 saved load, and the training goes on as it went on there, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frontends.saved_states import RANKS, folder_name
from tests.worlds import run_ranks

pytest.importorskip("tensorflow")
from tests.frontends.saved_tf_states import resumed

SAVED = Path(__file__).parent / "saved" / "keras"
EXPECTED = json.loads((SAVED / "expected.json").read_text())


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_of_an_older_release_goes_on_as_there(kind: str) -> None:
    results = run_ranks(RANKS, lambda session: resumed(session, kind, SAVED / folder_name(kind)))
    assert results == EXPECTED[kind]["digests"]
