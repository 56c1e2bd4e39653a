"""What an error says inside another sentence has no full stop of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocomm.errors import clause

ROOT = Path(__file__).resolve().parents[2]


def caught_before_full_stops(tree: ast.Module) -> Iterator[int]:
    """Yields the lines of f-strings in which a full stop follows an exception that is caught there, or its text."""
    for handler in [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name]:
        for text in [node for node in ast.walk(handler) if isinstance(node, ast.JoinedStr)]:
            for part, behind in zip(text.values, text.values[1:], strict=False):
                names = [node.id for node in ast.walk(part) if isinstance(node, ast.Name)]
                is_said = isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
                is_stop = isinstance(behind, ast.Constant) and str(behind.value).startswith(".")
                if is_said and is_stop and names == [handler.name]:
                    yield text.lineno


def test_no_error_ends_with_two_full_stops() -> None:
    files = [path for package in ("ocomm", "ocomm_torch", "ocomm_tf") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in caught_before_full_stops(ast.parse(path.read_text()))
    ]
    assert found == [], "use errors.clause(error), because the error may end with a full stop"


def test_a_full_stop_after_an_error_is_found() -> None:
    source = 'try: pass\nexcept OSError as error:\n    raise ValueError(f"no: {error}.")\n'
    assert list(caught_before_full_stops(ast.parse(source))) == [3]
    assert list(caught_before_full_stops(ast.parse(source.replace("{error}", "{clause(error)}")))) == []


@pytest.mark.parametrize("said", ["boom", "boom.", "boom...", "boom.\n"])
def test_a_clause_has_no_full_stop(said: str) -> None:
    assert clause(ValueError(said)) == "boom"
    assert clause("1.5 s") == "1.5 s"
