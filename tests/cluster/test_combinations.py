"""Every trainer, launcher and optimizer of the list, run: what trains, warns or is refused; nothing is silent."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.combinations import PAGE, REFUSED, ROWS, TRAINED, WARNED, Row, page
from tests.cluster.jobs import MPICH, launchers, run_by, without_launcher

SCRIPT = str(Path(__file__).with_name("train_combination.py"))
#: What a trainer needs to be imported.
PACKAGES = {"Lightning": "lightning", "Trainer": "transformers", "Accelerate": "accelerate"}
OF_MPICH = ("torchrun", "Lightning's own")


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "python -m tests.cluster.combinations"


@pytest.mark.long
@pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.trainer}-{row.launcher}-{row.optimizer}-{row.how}")
def test_each_combination_trains_as_alone_or_says_why_not(row: Row, tmp_path: Path) -> None:
    package = PACKAGES.get(row.trainer)
    if package and find_spec(package) is None:
        pytest.skip(reason=f"no {package}: pip install 'ocomm[lightning,transformers]'")
    if row.launcher in OF_MPICH and not (MPICH / "lib").is_dir():
        pytest.skip(reason="no MPICH: make test-mpich installs one")
    own = ([sys.executable], without_launcher())
    launcher = {**launchers(2), "Lightning's own": own}[row.launcher]
    done = run_by(launcher, SCRIPT, str(tmp_path), row.trainer, row.optimizer, row.how)
    said: list[dict[str, Any]] = [json.loads(file.read_text()) for file in tmp_path.glob("rank of process *")]
    shown = f"{said}\n{done.stderr}"
    errors = [each["error"] for each in said if each["error"]]
    if row.outcome == REFUSED:
        assert done.returncode != 0 and any(row.says in error for error in errors), shown
        return
    assert done.returncode == 0 and len(said) == 2 and not errors, shown
    assert all(each["size"] == 2 for each in said), shown
    warned = [text for each in said for text in each["warned"]]
    if row.outcome == WARNED:
        assert any(row.says in text for text in warned), shown
        return
    assert row.outcome == TRAINED
    assert warned == [] and all(each["same"] and each["steps"] == 22 for each in said), shown
