"""Files that stand in README.md and docs/: fenced blocks with a title, which is the file's name; a diff's new side."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
DOCS = README.parent / "docs"
_BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_OLD, _MARK = re.compile(r"^-.*\n", re.MULTILINE), re.compile(r"^[+ ]", re.MULTILINE)


def blocks(ending: str) -> dict[str, str]:
    """Returns the files whose name ends so: their text, by "page: name"."""
    return {
        f"{page.relative_to(DOCS) if page != README else page.name}: {name}": text
        if language != "diff"
        else _MARK.sub("", _OLD.sub("", text))
        for page in [README, *sorted(DOCS.rglob("*.md"))]
        for language, name, text in _BLOCK.findall(page.read_text())
        if name.endswith(ending)
    }
