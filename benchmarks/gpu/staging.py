"""Sums of a GPU's tensors through page-locked memory, beside copies alone and the same sums of the host's tensors.

    mpirun -np 2 python -m benchmarks.gpu.staging [--nbytes 67108864 ...] [--rounds 9] [--json FILE]

Ranks may share the GPU. ``allreduce`` of a GPU's tensor copies it to the host, sums it there with the other ranks, and
copies it back. Copies alone and sums of tensors in the host's memory are measured in turn with it.

of copies  rate of staging, in the time by which the GPU's sum took longer than the host's, over that of copies alone,
           both directions
of parts   (copies + the host's sum) / the GPU's sum: above 1 where they overlap
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks.gpu.device import Gpu, opened, parser, seconds_of, write

NBYTES = (1 << 20, 16 << 20, 256 << 20)
REHEARSED = (1 << 12,)
#: Bytes after which a part of a round is over.
LEAST = 256 << 20


def parts(device: Gpu, nbytes: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name: each moves ``nbytes`` one way, or there and back."""
    numel = nbytes // 4
    pinned = torch.empty(numel, pin_memory=not device.is_rehearsal)
    on_device, on_host = torch.ones(numel, device=device.torch), torch.ones(numel)
    hvd.allreduce_(on_device, name=f"check.{nbytes}")
    if not torch.equal(on_device.cpu(), on_host):
        raise SystemExit(f"an average of ones of {nbytes} bytes is not one")
    return {
        "to the host": lambda: pinned.copy_(on_device, non_blocking=True),
        "to the device": lambda: on_device.copy_(pinned, non_blocking=True),
        "in the host's memory": lambda: hvd.allreduce_(on_host, name=f"host.{nbytes}"),
        "on the GPU": lambda: hvd.allreduce_(on_device, name=f"gpu.{nbytes}"),
    }


def row(device: Gpu, nbytes: int, rounds: int) -> dict[str, Any]:
    """One line of the table, of this rank. Collective."""
    repeats = 1 if device.is_rehearsal else max(1, LEAST // nbytes)
    found: dict[str, list[float]] = {}
    work = parts(device, nbytes)
    for _ in range(rounds):
        for name, part in work.items():
            hvd.barrier()
            found.setdefault(name, []).append(seconds_of(device, part, repeats))
    seconds = {name: median(times) for name, times in found.items()}
    copies = seconds["to the host"] + seconds["to the device"]
    staged = seconds["on the GPU"] - seconds["in the host's memory"]
    return {
        "nbytes": nbytes,
        "ms": {name: 1e3 * each for name, each in seconds.items()},
        "of_copies": copies / staged if staged > 0 else None,
        "of_parts": (copies + seconds["in the host's memory"]) / seconds["on the GPU"],
    }


def show(rows: list[dict[str, Any]]) -> str:
    lines = []
    for each in rows:
        ms = each["ms"]
        rates = [f"{each['nbytes'] / ms[name] / 1e6:.1f}" for name in ("to the host", "to the device")]
        times = [f"{ms[name]:.3f}" for name in ("in the host's memory", "on the GPU")]
        of_copies = "-" if each["of_copies"] is None else f"{each['of_copies']:.2f}"
        lines.append([f"{each['nbytes'] / 1e6:.2f}", *rates, *times, of_copies, f"{each['of_parts']:.2f}"])
    headings = ["MB", "to host GB/s", "to device GB/s", "host sum ms", "GPU sum ms", "of copies", "of parts"]
    return tabulate(lines, headings, "github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--nbytes", type=int, nargs="+", default=list(NBYTES))
    args: argparse.Namespace = options.parse_args(argv)
    # A sum on the GPU itself would not be staged.
    os.environ["OCOMM_NCCL"] = "0"
    device = opened(args)
    hvd.init()
    rows = [row(device, nbytes, args.rounds) for nbytes in (REHEARSED if device.is_rehearsal else args.nbytes)]
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {device.name()}, rank 0's medians\n\n{show(rows)}")
        write(args, device, {"ranks": hvd.size(), "rows": rows})
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
