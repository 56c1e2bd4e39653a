"""The native engine under ThreadSanitizer: nothing that two threads touch is touched without the lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The loops for gradients are left out, which no plan of the test calls.
FLAGS = ["-O0", "-g", "-std=gnu11", "-fsanitize=thread", "-no-pie", "-pthread", "-Wl,--unresolved-symbols=ignore-all"]


def test_threads_that_submit_open_wait_and_abandon_do_not_race_with_the_engine(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip(reason="no gcc")
    empty, program = tmp_path / "empty.c", tmp_path / "race"
    empty.write_text("int main(void) { return 0; }\n")
    subprocess.run([sys.executable, str(ROOT / "native" / "build.py"), str(tmp_path)], check=True, cwd=ROOT)
    build = [compiler, *FLAGS, "-I", str(ROOT / "native"), "-I", str(tmp_path), "-o", str(program)]
    if subprocess.run([*build, str(empty)], capture_output=True).returncode or subprocess.run([program]).returncode:
        pytest.skip(reason="gcc has no ThreadSanitizer for this machine")
    sources = [ROOT / "native" / name for name in ("engine.c", "pool.c", "reduce.c")]
    subprocess.run([*build, *map(str, sources), str(Path(__file__).with_name("engine_race.c"))], check=True)
    run = subprocess.run([program], capture_output=True, text=True, timeout=60, env={**os.environ, "TSAN_OPTIONS": ""})
    assert run.returncode == 0 and "ThreadSanitizer" not in run.stderr, run.stderr
