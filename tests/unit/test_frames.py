"""Asking for the frames of all threads never collects garbage meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ocomm
from ocomm.runtime.frames import current_frames


@pytest.fixture
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_during_the_call_and_then_as_before(
    enabled: bool, collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    (gc.enable if enabled else gc.disable)()
    assert current_frames() == {}
    assert seen == [False]
    assert gc.isenabled() == enabled


def test_an_error_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(sys, "_current_frames", fail)
    with pytest.raises(MemoryError):
        current_frames()
    assert gc.isenabled()


def test_it_knows_the_calling_thread() -> None:
    assert current_frames()[threading.get_ident()].f_code.co_name == "current_frames"


def test_nobody_asks_python_itself() -> None:
    root = Path(ocomm.__file__).parents[1]
    files = [path for package in ("ocomm", "ocomm_torch", "ocomm_tf") for path in (root / package).rglob("*.py")]
    asking = [path.name for path in files if "_current_frames" in path.read_text()]
    assert asking == ["frames.py"]
