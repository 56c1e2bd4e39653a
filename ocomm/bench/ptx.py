"""What the compiler makes of the CUDA kernels: registers, spills and 16-byte accesses per kernel and architecture.

Needs no device, but ``pip install 'cuda-toolkit[nvcc,nvrtc,nvvm]<14'``: numba-cuda with NVVM and NVRTC makes PTX, and
``ptxas``, if it is there, reports what it compiles to. Exit status 77: NVVM or NVRTC is missing.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from ocomm.bench.kernels import commit

UNAVAILABLE = 77


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one architecture; fields from ptxas are None without it."""

    kernel: str
    architecture: str
    vector_loads: int  # 16-byte instructions in the PTX
    vector_stores: int
    low_loads: int  # 8-byte loads of 16-bit gradients
    fused: int  # products that are fused with a sum, or may be
    local: int  # mentions of local memory
    registers: int | None
    stack_nbytes: int | None
    spill_stores_nbytes: int | None
    spill_loads_nbytes: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architectures", nargs="+", default=["sm_80", "sm_90"], metavar="sm_NN", help="default: sm_80 sm_90"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table, versions and commit there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep PTX and, with ptxas, cubins there")


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 77 if nothing can be compiled."""
    try:
        found = list(rows(args.architectures, args.keep))
    except ImportError as error:
        print(f"cannot compile: {error}", file=sys.stderr)
        return UNAVAILABLE
    table = formatted(found)
    print(table)
    if args.markdown:
        lines = [f"- {name}: {value}" for name, value in surroundings().items()]
        args.markdown.write_text("\n".join(["# CUDA kernels, compiled", "", table, "", *lines]) + "\n")
    return 0


def rows(architectures: list[str], keep: Path | None = None) -> Iterator[Row]:
    """Yields the rows. Raises ImportError if numba-cuda or NVVM is missing."""
    from ocomm.kernels.cuda import compiled
    from ocomm.kernels.cuda_kernels import KERNELS

    for architecture in architectures:
        number = architecture.removeprefix("sm_")
        for loop in KERNELS.values():
            name = loop.py_func.__name__
            ptx = compiled(loop, (int(number[:-1]), int(number[-1])))
            cubin = None
            if keep:
                (keep / f"{name}.{architecture}.ptx").write_text(ptx)
                cubin = keep / f"{name}.{architecture}.cubin"
            registers, stack, spill_stores, spill_loads = assembled(ptx, architecture, cubin)
            yield Row(
                name,
                architecture,
                len(re.findall(r"ld\.global\.v4\.[bfu]32", ptx)),
                len(re.findall(r"st\.global\.v4\.[bfu]32", ptx)),
                len(re.findall(r"ld\.global\.v4\.[bu]16", ptx)),
                len(re.findall(r"\b(?:fma|mad)\.\S*f32|\bmul\.(?:ftz\.)?f32", ptx)),
                len(re.findall(r"\.local\b", ptx)),
                registers,
                stack,
                spill_stores,
                spill_loads,
            )


def assembler() -> str | None:
    """Returns ptxas of the package nvidia-cuda-nvcc, which pip keeps at NVVM's release, else the one on the PATH."""
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate()) for file in files if file.name == "ptxas"), None) or shutil.which("ptxas")


def assembled(ptx: str, architecture: str, cubin: Path | None) -> tuple[int | None, int | None, int | None, int | None]:
    """Returns registers, bytes of stack, of spill stores and of spill loads. Raises RuntimeError if ptxas refuses the
    PTX.
    """
    ptxas = assembler()
    if ptxas is None:
        return None, None, None, None
    command = [ptxas, "-v", f"-arch={architecture}", "/dev/stdin", "-o", str(cubin or "/dev/null")]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{ptxas} does not take NVVM's PTX: {done.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    if registers is None or stack is None:
        raise RuntimeError(f"{ptxas} says something new: {done.stderr}")
    return int(registers[1]), int(stack[1]), int(stack[2]), int(stack[3])


def formatted(found: list[Row]) -> str:
    names = [field.name for field in fields(Row)]
    cells = [[str("-" if (value := getattr(row, name)) is None else value) for name in names] for row in found]
    titles = [name.replace("_", " ") for name in names]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]

    def line(parts: list[str]) -> str:
        aligned = [
            part.ljust(width) if i < 2 else part.rjust(width)
            for i, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        return "| " + " | ".join(aligned) + " |"

    return "\n".join([line(titles), line(["-" * width for width in widths]), *map(line, cells)])


def surroundings() -> dict[str, str | None]:
    versions = [f"Python {platform.python_version()}"]
    for package in ("numba-cuda", "numba", "nvidia-nvvm", "nvidia-cuda-nvrtc", "numpy"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    if ptxas := assembler():
        answer = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
        versions += [f"ptxas {release}" for release in re.findall(r"release ([^,]*)", answer)]
    return {
        "command": "python -m ocomm.bench " + " ".join(sys.argv[1:]),
        "versions": ", ".join(versions),
        "commit": commit(),
    }
