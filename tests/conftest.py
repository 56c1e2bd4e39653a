"""Every test is bounded (pytest-timeout in pyproject.toml) and leaves no session behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ocomm import session as sessions


@pytest.fixture(autouse=True)
def _no_session_left_behind() -> Iterator[None]:
    yield
    assert not sessions.current().is_initialized, "a test left its session running"
