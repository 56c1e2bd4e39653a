"""The source archive, from which pip builds where there is no wheel for a platform."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("native", "ocomm", "ocomm_torch", "ocomm_tf")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


def test_it_has_all_that_a_wheel_is_built_from(tmp_path: Path) -> None:
    # In a copy: setuptools packs what it finds in a list of an earlier build, too.
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    needed = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert {"native/build.py", "native/ocomm.h", "ocomm/py.typed"} <= needed
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as members:
        assert needed <= {name.partition("/")[2] for name in members.getnames()}
