"""How many parameters train in the GPU memory that plain Adam takes, and how long a step takes.

    python -m benchmarks.gpu.offload [--layers 4] [--json FILE]

The model is a chain of layers of 16.8 M parameters, with hardly any activations. Torch's Adam in float32 trains one of
``--layers``, and its peak, of Torch and ocomm together, is what the others may use. Each then grows while its own peak
stays below that. One rank. The first step is dense, so the peak is that of a whole run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import ocomm_torch as hvd
from benchmarks.gpu.device import Gpu, opened, parser, write

WIDTH, REHEARSED_WIDTH = 4096, 32
STEPS = 3
LR = 1e-4
BASE = "Adam, float32"
FLOAT, HALF = torch.float32, torch.bfloat16
#: Dtype of the parameters; options of DistributedOneBitAdam, or None for torch's fused AdamW.
METHODS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    BASE: (FLOAT, None),
    "AdamW, bfloat16 and no masters": (HALF, None),
    "1-bit Adam, float32": (FLOAT, {}),
    "1-bit Adam, bfloat16": (HALF, {}),
    "offload, float32": (FLOAT, {"offload": True}),
    "offload, bfloat16": (HALF, {"offload": True}),
    "offload, bfloat16, free_gradients": (HALF, {"offload": True, "free_gradients": True}),
}
#: The fake device has no tensors of Torch's, so what moves those between memories is not rehearsed there.
REHEARSED = (BASE, "1-bit Adam, float32")
#: Sizes that are tried for the largest one that fits.
TRIALS = 2


class Peak(threading.Thread):
    """Looks again and again at how much of the GPU is in use."""

    def __init__(self, device: Gpu) -> None:
        super().__init__(name="peak", daemon=True)
        self._device, self._ended = device, threading.Event()
        self.nbytes = 0

    def run(self) -> None:
        while not self._ended.wait(1e-2):
            self.nbytes = max(self.nbytes, self._device.used())

    def end(self) -> None:
        self._ended.set()
        self.join()


def train(device: Gpu, method: str, layers: int, width: int) -> tuple[float, int]:
    """Seconds of a compressed step, and bytes of the GPU in use at most, besides what was in use before."""
    dtype, options = METHODS[method]
    gc.collect()
    device.empty_cache()
    before, peak = device.used(), Peak(device)
    peak.start()
    try:
        model = nn.Sequential(
            *(nn.Linear(width, width, bias=False, device=device.torch, dtype=dtype) for _ in range(layers))
        )
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        if options is not None:
            optimizer = hvd.DistributedOneBitAdam(optimizer, model.named_parameters(), freeze_step=1, **options)
        data, times = torch.randn(4, width, device=device.torch, dtype=dtype), []
        for _ in range(1 + STEPS):
            device.synchronize()
            started = time.perf_counter()
            optimizer.zero_grad()
            model(data).float().square().mean().backward()
            optimizer.step()
            device.synchronize()
            times.append(time.perf_counter() - started)
    finally:
        peak.end()
    return median(times[1:]), peak.nbytes - before


def measure(device: Gpu, layers: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """A line of the table per method; the first is ``BASE``."""
    width = REHEARSED_WIDTH if device.is_rehearsal else WIDTH
    train(device, names[-1], 1, width)  # what every process has: contexts, compiled kernels, libraries
    rows: list[dict[str, Any]] = []
    for name in names:
        seconds, nbytes = train(device, name, layers, width)
        limit = rows[0]["nbytes"] if rows else nbytes
        fits = tried = layers
        for _ in range(TRIALS if name != BASE and nbytes else 0):
            number = int(tried * limit / nbytes)
            if number <= fits:
                break
            later_s, nbytes = train(device, name, number, width)
            tried = number
            if nbytes <= limit:
                fits, seconds = number, later_s
        rows.append(
            {"method": name, "parameters": fits * width * width, "nbytes": nbytes, "step_ms": 1e3 * seconds,
             "bytes_per_parameter": nbytes / (tried * width * width)}
        )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            each["method"],
            f"{each['bytes_per_parameter']:.2f}",
            f"{each['parameters'] / 1e6:.0f}",
            f"{each['parameters'] / rows[0]['parameters']:.2f}",
            f"{each['step_ms']:.1f}",
        ]
        for each in rows
    ]
    headings = ["method", "B per parameter", "M parameters", f"x {BASE}", "step ms"]
    return tabulate(lines, headings, "github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=4, help="of Adam's model (default 4)")
    args: argparse.Namespace = options.parse_args(argv)
    device = opened(args)
    hvd.init()
    rows = measure(device, args.layers, REHEARSED if device.is_rehearsal else tuple(METHODS))
    print(f"{rows[0]['nbytes'] / 1e9:.2f} GB of {device.name()}\n\n{show(rows)}")
    write(args, device, {"rows": rows})
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
