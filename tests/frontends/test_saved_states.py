"""Checkpoints that commit 687c053 wrote load, and the training goes on as it went on there, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ocomm.session import Session
from tests.frontends.saved_states import AFTER, BEFORE, RANKS, TorchRun, folder_name, rank_of
from tests.worlds import run_ranks

SAVED = Path(__file__).parent / "saved" / "torch"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
#: The wrapped Adam makes these steps, and how Torch rounds them depends on the processor.
OF_TORCH = {"1-bit Adam, dense"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_checkpoint_of_an_older_release_goes_on_as_there(kind: str) -> None:
    def body(session: Session) -> tuple[list[str], list[list[float]]]:
        run = TorchRun.read(kind, rank_of(session), SAVED / folder_name(kind))
        return run.train(BEFORE + 1, AFTER), run.values()

    results = run_ranks(RANKS, body)
    for (digests, values), before, then in zip(
        results, EXPECTED[kind]["digests"], EXPECTED[kind]["values"], strict=True
    ):
        for found, value in zip(values, then, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-6)
        if kind not in OF_TORCH:
            assert digests == before
