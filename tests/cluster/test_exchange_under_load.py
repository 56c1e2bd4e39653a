"""The data plane never holds the GIL, so a busy main thread may cost an exchange its core but not its turn."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.jobs import run_job


def test_a_main_thread_in_python_pickle_or_torch_at_most_doubles_an_exchange() -> None:
    job = run_job(2, Path(__file__).with_name("exchange_under_load.py"))
    line = next((line for line in job.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, job.stderr
    seconds = json.loads(line.removeprefix("RESULT "))
    ratios = {work: seconds[work] / seconds["idle"] for work in ("python", "pickle", "torch")}
    assert max(ratios.values()) <= 2.0, (ratios, seconds)
