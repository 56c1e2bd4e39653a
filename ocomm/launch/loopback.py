"""Keeps the launcher of a job on one host off the network.

The launchers listen on all interfaces for daemons of other hosts, even if there are none (Open MPI 6.0.0 on the first
one), and no parameter of theirs changes that (Open MPI 5.0.11, MPICH 5.0.2). A library for LD_PRELOAD,
``native/loopback.c``, does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from ocomm.launch.flavour import Flavour, Launcher

_LIBRARY = "ocomm.launch._loopback"


def environment(launcher: Launcher, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which ``launcher`` listens on loopback alone; ranks do not inherit them.

    Args:
        launcher: The launcher of the job.
        environ: The environment of ``ocommrun``, whose LD_PRELOAD stays in force.

    Returns:
        The variables; none if the library was not built.
    """
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        return {}
    # The program that mpirun executes in the end: mpirun itself, except for Open MPI 5 and 6, where it is prterun,
    # which Debian has as a link to prte.
    has_prte = launcher.flavour is Flavour.OPEN_MPI_5
    programs = "prterun:prte" if has_prte else os.path.basename(os.path.realpath(launcher.path))
    preloaded = ":".join(filter(None, (found.origin, environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preloaded, "_OCOMM_LOOPBACK": programs}
