"""The fuzz targets of the C code, under gcc's sanitizers, with the same inputs in every run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.seeds import main

ROOT = Path(__file__).resolve().parents[2]
#: Loops that no plan of a target calls are left out, as in test_engine_race.py.
FLAGS = ["-g", "-O1", "-std=gnu11", "-ffp-contract=off", "-no-pie", "-pthread", "-Wl,--unresolved-symbols=ignore-all"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def built(target: str, sources: list[str], folder: Path) -> Path:
    """Returns the program of a target."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip(reason="no gcc")
    empty, program = folder / "empty.c", folder / target
    empty.write_text("int main(void) { return 0; }\n")
    build = [compiler, *FLAGS, *SANITIZERS, "-I", str(ROOT / "native"), "-I", str(folder), "-o", str(program)]
    if subprocess.run([*build, str(empty)], capture_output=True).returncode:
        pytest.skip(reason="gcc has no AddressSanitizer for this machine")
    subprocess.run([sys.executable, str(ROOT / "native" / "build.py"), str(folder)], check=True, cwd=ROOT)
    own = [str(ROOT / "tests" / "fuzz" / name) for name in (f"{target}.c", "standalone.c")]
    subprocess.run([*build, *own, *(str(ROOT / "native" / name) for name in sources), "-lm"], check=True)
    return program


def run(*command: object) -> None:
    environ = {**os.environ, "ASAN_OPTIONS": ""}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ)
    assert not done.returncode, done.stderr[-5000:]


def test_the_engine_ends_every_plan_whatever_headers_and_lengths_arrive(tmp_path: Path) -> None:
    run(built("engine", ["engine.c", "pool.c", "reduce.c"], tmp_path), 20000, 1)


@pytest.mark.long
def test_loops_read_any_signs_scales_and_codes_as_the_portable_path_does(tmp_path: Path) -> None:
    program = built("kernels", ["kernels.c", "pool.c", "reduce.c"], tmp_path)
    main(tmp_path / "seeds")
    run(program, 20000, 1, *sorted((tmp_path / "seeds").iterdir()))
