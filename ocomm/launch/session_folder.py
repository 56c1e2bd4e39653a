"""Where Open MPI's launchers keep their folders, each named after the number of its process.

A launcher that is killed leaves its folder. A later one that gets the same number ends with status 213 and "The PMIx
server's listener thread failed to start" (Open MPI 5.0.11), so that one needs another place.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

#: The variable that names the place.
BASE = "PRTE_MCA_prte_tmpdir_base"
_PLACES = (BASE, "TMPDIR", "TEMP", "TMP")
_NAMES = ("ompi", "prte")


def added_environ(pid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without which a launcher could not start as process ``pid``: with a new place, if one that
    was killed has left a folder of this name, else none.
    """
    place = next((environ[name] for name in _PLACES if environ.get(name)), "/tmp")
    if not any(os.path.lexists(os.path.join(place, f"{name}.{pid}")) for name in _NAMES):
        return {}
    return {BASE: new_place()}


def new_place() -> str:
    """Returns a new folder for launchers."""
    return tempfile.mkdtemp(prefix="ocommrun-")
