"""The scripts of the documentation run as they stand, on two ranks, and rank 0 says that they compress."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.jobs import run_job
from tests.doc_blocks import blocks

pytestmark = pytest.mark.long

SCRIPTS = blocks(".py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_documentation_trains_and_compresses(name: str, tmp_path: Path) -> None:
    for framework in ("torch", "keras", "lightning"):
        if re.search(rf"^(import|from) {framework}\b", SCRIPTS[name], re.MULTILINE):
            pytest.importorskip(framework)
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    done = run_job(2, script, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ocomm: 2 ranks on 1 host" in done.stderr
    assert "the warm-up is over" in done.stderr and "times fewer" in done.stderr
