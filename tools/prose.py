"""Counts what makes sentences of README.md and docs/ hard to read, and fails unless the counts are those of LIMITS.

    python tools/prose.py [--list]

Code and addresses of links are no prose. A cell of a table is a paragraph.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = 35
#: Lower one with each page that gets better; none rises.
LIMITS = {"long": 1, "those of": 1, "that of": 0, "of which": 3, "what is": 0, "nested parentheses": 0}
_CODE = re.compile(r"^```.*?^```$|^<!--.*?-->$|^    (?! *(?:[-*]|\d+\.) )[^\n]*$", re.MULTILINE | re.DOTALL)
_INLINE = [
    (re.compile(r"`+[^`]*`+"), "code"),
    (re.compile(r"!?\[([^]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\*+"), ""),
    (re.compile(r"code(?:, code)+"), "code"),
]
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#>|]|\d+\.) ?)|\s\|\s")
_END = re.compile(r"(?<=[.?!])[\"')]*\s+(?=[\"'(A-Z0-9]|code\b)")


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a page in Markdown, each on one line."""
    text = _CODE.sub("\n", text)
    for pattern, plain in _INLINE:
        text = pattern.sub(plain, text)
    for paragraph in _BREAK.split(text):
        yield from (" ".join(each.split()) for each in _END.split(paragraph) if each.strip())


def faults(sentence: str) -> Iterator[str]:
    """Yields the name of each fault, as often as the sentence has it."""
    if len(re.findall(r"\w[\w'.,-]*", sentence)) > WORDS:
        yield "long"
    for phrase in ("those of", "that of", "of which", "what is"):
        yield from re.findall(rf"\b{phrase}\b", sentence.lower())
    yield from ("nested parentheses" for _ in re.findall(r"\([^()]*\(", sentence))


def main() -> str | None:
    counts = dict.fromkeys(LIMITS, 0)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for sentence in sentences(page.read_text()):
            for fault in faults(sentence):
                counts[fault] += 1
                if "--list" in sys.argv:
                    print(f"{page.relative_to(ROOT)}: {fault}: {sentence}")
    wrong = (
        f"{fault}: {count}, LIMITS has {LIMITS[fault]}" for fault, count in counts.items() if count != LIMITS[fault]
    )
    return "\n".join(wrong) or None


if __name__ == "__main__":
    sys.exit(main())
