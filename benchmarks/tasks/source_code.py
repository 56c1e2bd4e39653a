"""Python source code: that of the package ``networkx``, with its tests, which its wheel has.

Some of its subpackages are the validation split.
"""

from __future__ import annotations

import zipfile

from benchmarks.tasks import Task, language
from benchmarks.tasks.downloads import fetch

PACKAGE = "networkx==3.3"
HELD_OUT = ("algorithms/centrality", "algorithms/flow", "readwrite")


def texts() -> tuple[str, str]:
    """Training and validation texts, 5 and 1 MB. Raises DownloadError."""
    archive = fetch(PACKAGE, "networkx-3.3-py3-none-any.whl")
    training, validation = [], []
    with zipfile.ZipFile(archive) as packed:
        for name in sorted(name for name in packed.namelist() if name.endswith(".py")):
            is_held_out = name.startswith(tuple(f"networkx/{part}/" for part in HELD_OUT))
            (validation if is_held_out else training).append(packed.read(name).decode())
    return "".join(training), "".join(validation)


CORPUS = language.Corpus("networkx", f"Python source code ({PACKAGE})", ", ".join(HELD_OUT), texts)


def load() -> Task:
    """Downloads the code if it is not in the cache. Raises DownloadError."""
    return language.task("code", CORPUS)
