"""Where Open MPI's launchers keep their session directories, each named after the number of its process.

A launcher that is killed leaves its session directory. A later one that gets the same number ends with status 213 and
"The PMIx server's listener thread failed to start" (Open MPI 5.0.11), so that one needs another folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

#: The variable that names the folder of session directories.
BASE = "PRTE_MCA_prte_tmpdir_base"
_VARIABLES = (BASE, "TMPDIR", "TEMP", "TMP")
_NAMES = ("ompi", "prte")


def added_environ(pid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without which a launcher could not start as process ``pid``: with a new folder, if one that
    was killed has left a session directory of this name, else none.
    """
    folder = next((environ[name] for name in _VARIABLES if environ.get(name)), "/tmp")
    if not any(os.path.lexists(os.path.join(folder, f"{name}.{pid}")) for name in _NAMES):
        return {}
    return {BASE: new_folder()}


def new_folder() -> str:
    """Returns a new folder for the session directories of launchers."""
    return tempfile.mkdtemp(prefix="ocommrun-")
