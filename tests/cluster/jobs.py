"""Real jobs in subprocesses: always bounded, never with a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MPIRUN = Path(sys.executable).with_name("mpirun")
ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which a job hangs: it takes a tenth of that on a machine of its own.
LIMIT_S = 240.0


def run_job(
    ranks: int, script: str | Path, *arguments: str, timeout_s: float = LIMIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``mpirun -np ranks python script``; ``script`` is a file, or the program itself."""
    program = [str(script)] if isinstance(script, Path) else ["-c", script]
    return subprocess.run(
        [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np", str(ranks), sys.executable, *program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **environment,
        },
    )
