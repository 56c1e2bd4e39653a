"""Imports go one way, and the network library stays in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_layers_of_pyproject_hold() -> None:
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(command), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def product() -> list[Path]:
    return [path for package in ("ocomm", "ocomm_torch", "ocomm_tf") for path in (ROOT / package).rglob("*.py")]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file names in any import statement, at module level or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_no_room_imports_another_for_types_alone() -> None:
    """The contracts do not see imports under TYPE_CHECKING, which would hide a circle."""
    rooms = ("ocomm/elastic", "ocomm/optim", "ocomm/runtime", "ocomm/predict")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    files += (ROOT / "ocomm/kernels").glob("cuda*.py")
    assert len(files) > 20
    assert [path.name for path in files if "TYPE_CHECKING" in path.read_text()] == []


def test_no_module_imports_another_by_its_name_in_a_string() -> None:
    """The contracts do not see such imports either."""
    assert [path.name for path in product() if 'import_module("ocomm' in path.read_text()] == []


def test_one_module_imports_mpi4py() -> None:
    files = product()
    assert len(files) > 20
    assert [str(p.relative_to(ROOT)) for p in files if "mpi4py" in imported(p)] == ["ocomm/mpi_library.py"]


def test_importing_the_package_starts_no_mpi_and_loads_no_framework() -> None:
    script = "import sys, ocomm.session; print([m for m in ('mpi4py.MPI', 'torch', 'tensorflow') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "[]"
