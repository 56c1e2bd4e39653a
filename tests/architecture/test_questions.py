"""CONTRIBUTING.md says which word finds which file; it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| (?P<question>[^|]+\?) \| `(?P<words>[^`]+)` \| `(?P<file>[^`]+)` \|$", re.M)
QUESTIONS = [match.groups() for match in _ROW.finditer((ROOT / "CONTRIBUTING.md").read_text())]
#: A search that finds more files has not found the place.
FEW = 4


def test_there_are_ten() -> None:
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize(("question", "words", "file"), QUESTIONS, ids=[words for _, words, _ in QUESTIONS])
def test_the_word_finds_the_file(question: str, words: str, file: str) -> None:
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / "ocomm").rglob("*.py") if words in path.read_text()]
    assert file in found and len(found) <= FEW


def test_every_name_of_the_glossary_is_in_the_code() -> None:
    modules = [path for package in ("ocomm", "ocomm_torch", "ocomm_tf") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in modules)
    files = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in modules}
    names = re.findall(r"`([A-Za-z_.]+)`", (ROOT / "docs" / "glossary.md").read_text())

    def is_there(name: str) -> bool:
        is_module = any(f".{file}.".endswith(f".{name}.") or f".{name}." in f".{file}." for file in files)
        return is_module or re.search(rf"\b{name.rsplit('.', 1)[-1]}\b", code) is not None

    assert [name for name in names if not is_there(name)] == []
