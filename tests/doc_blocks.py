"""Files that stand in the documentation: fenced blocks with a title, which is the file's name."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(ending: str) -> dict[str, str]:
    """Returns the files whose name ends so: their text, by "page: name"."""
    return {
        f"{page.relative_to(DOCS)}: {name}": text
        for page in sorted(DOCS.rglob("*.md"))
        for name, text in _BLOCK.findall(page.read_text())
        if name.endswith(ending)
    }
