"""Everything here starts jobs, and most of it watches how long they take."""

from __future__ import annotations

from pathlib import Path

import pytest

#: What only looks at how jobs end, and at what they count.
PATIENT = {
    "test_data_loader.py", "test_elastic.py", "test_exchange_without_gil.py", "test_failures.py",
    "test_hanging_rank.py", "test_lightning.py", "test_mixed_teams.py", "test_ocommrun.py", "test_ocommrun_mpich.py",
    "test_resume.py", "test_run.py", "test_start.py", "test_step_benchmark.py", "test_step_profile.py",
    "test_torch_env.py", "test_torchrun.py", "test_transformers.py", "test_wire_bytes.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in PATIENT:
            item.add_marker(pytest.mark.alone)
