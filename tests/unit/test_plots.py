"""Pictures and tables are made from the results that lie beside them, and pictures are small enough to be kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import plots, tables


def test_published_results_have_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step-2hosts.json", "profile-2hosts.json"):
        shutil.copy(plots.RESULTS / name, tmp_path)
    monkeypatch.setattr("sys.argv", ["plots", "--into", str(tmp_path)])
    assert plots.main() == 0
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == {"speed.svg", "bytes.svg", "timeline.svg"}
    assert all(len(text) < 100_000 for text in drawn.values())
    assert "1-bit Adam" in drawn["speed.svg"] and "1-bit Adam" in drawn["bytes.svg"]
    assert "COMPRESS" in drawn["timeline.svg"]


def test_published_tables_are_those_of_the_published_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in plots.RESULTS.glob("step*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr("sys.argv", ["tables", "--into", str(tmp_path)])
    assert tables.main() == 0
    assert (tmp_path / "step.md").read_text() == (plots.RESULTS / "step.md").read_text()
