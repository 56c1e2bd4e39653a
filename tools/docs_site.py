"""Hooks of mkdocs: pages of docs/ link to files of the repository outside of docs/, which become part of the site.

A file keeps its path in the repository: docs/step.md that links to ../benchmarks/results/step.md becomes step.md that
links to benchmarks/results/step.md. Pages are read on the repository's site as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def _site_path(path: str) -> str:
    """Returns the place on the site of a file of the repository."""
    return path.removeprefix(DOCS)


def _repository_path(site_path: str) -> str:
    """Returns the file of the repository at a place on the site."""
    return DOCS + site_path if (ROOT / DOCS / site_path).exists() else site_path


def _targets(path: str) -> Iterator[str]:
    """Yields the files of the repository to which one of its pages links."""
    for link in _LINK.finditer((ROOT / path).read_text()):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))


def _outside(pages: list[str]) -> set[str]:
    """Returns the files outside docs/ to which these pages, or pages among those, link."""
    found: set[str] = set()
    while pages:
        for target in _targets(pages.pop()):
            if not target.startswith(DOCS) and (ROOT / target).is_file() and target not in found:
                found.add(target)
                if target.endswith(".md"):
                    pages.append(target)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/."""
    for path in sorted(_outside([DOCS + file.src_uri for file in files.documentation_pages()])):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes links between files of the repository links between places on the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(_repository_path(here))

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] + posixpath.relpath(_site_path(target), posixpath.dirname(here)) + link[3]

    return _LINK.sub(moved, markdown)
