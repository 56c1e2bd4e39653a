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
#: What mpirun is or executes in the end, also where it is a script of a cluster's own.
_PROGRAMS = {
    Flavour.OPEN_MPI_4: ("orterun",),
    Flavour.OPEN_MPI_5: ("prterun", "prte"),  # the first is a link to the second on Debian
    Flavour.MPICH: ("mpiexec.hydra",),
    Flavour.INTEL_MPI: ("mpiexec.hydra",),
}


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
    programs = {*_PROGRAMS.get(launcher.flavour, ())}
    if launcher.flavour is not Flavour.OPEN_MPI_5:  # whose mpirun only executes prterun
        programs.add(os.path.basename(os.path.realpath(launcher.path)))
    preloaded = ":".join(filter(None, (found.origin, environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preloaded, "_OCOMM_LOOPBACK": ":".join(sorted(programs))}
