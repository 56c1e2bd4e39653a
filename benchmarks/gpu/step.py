"""A training step on a GPU with each optimizer, beside torch's fused AdamW: what ocomm itself costs.

    python -m benchmarks.gpu.step [--methods ...] [--rounds 9] [--json FILE]

GPT-2's smallest model (124 M parameters), bfloat16, 8 sequences of 1,024 tokens, on one rank, which has nobody to talk
to: so what is left of a step is copies, kernels, and the runtime. Methods take turns, and each ratio is of one round.

step      ms, with the device's work: median, and of the ratio to AdamW's the median and an interval of 95 %
host      ms of processor time of the thread that trains, and of all threads
calls     per step, counted in other steps: kernels launched, copies, times that a thread waited for a device or
          stream, and asked whether an event is over
memory    bytes per parameter: what Torch has allocated, and what ocomm says that it has (docs/memory.md)
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import ocomm_torch as hvd
from benchmarks.gpu.calls import Driver, count
from benchmarks.gpu.device import Gpu, opened, parser, write
from benchmarks.launchers import interval_of_median
from benchmarks.models import GPT2, Gpt, GptSize

LR = 1e-4
WARMUP, STEPS, COUNTED = 4, 5, 3
REHEARSED = GptSize(vocabulary=64, width=16, layers=1, heads=2, context=8)
BASE = "AdamW"

Wrap = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def wrapped(wrap: Callable[..., Any], inner: Wrap, **options: Any) -> Wrap:
    return lambda model: wrap(inner(model), model.named_parameters(), **options)


#: The freeze comes before anything is timed, or never.
COMPRESSED, WARM = {"freeze_step": 2}, {"freeze_step": 10**9}
METHODS: dict[str, Wrap] = {
    BASE: adamw,
    "ocomm dense": wrapped(hvd.DistributedOptimizer, adamw),
    "1-bit Adam": wrapped(hvd.DistributedOneBitAdam, adamw, **COMPRESSED),
    "1-bit Adam, warm-up": wrapped(hvd.DistributedOneBitAdam, adamw, **WARM),
    "1-bit Adam, offload": wrapped(hvd.DistributedOneBitAdam, adamw, **COMPRESSED, offload=True),
    "0/1 Adam": wrapped(hvd.DistributedZeroOneAdam, adamw, var_freeze_step=2),
    "Birder": wrapped(hvd.DistributedBirder, sgd),
    "Lion": wrapped(hvd.DistributedLion, sgd),
}
#: The fake device has no tensors of Torch's, so what moves those between memories is not rehearsed there.
NOT_REHEARSED = ("1-bit Adam, offload",)


@dataclass(eq=False)
class Timed:
    """One method's model, and what was measured of it. Times are in seconds per step, one per round."""

    name: str
    step: Callable[[], object]
    optimizer: torch.optim.Optimizer
    allocated: int
    times: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    all_threads: list[float] = field(default_factory=list)

    def run(self, device: Gpu, steps: int) -> None:
        device.synchronize()
        started, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(steps):
            self.step()
        self.training.append((time.thread_time() - thread) / steps)
        device.synchronize()
        self.times.append((time.perf_counter() - started) / steps)
        self.all_threads.append((time.process_time() - process) / steps)


def make(name: str, device: Gpu, size: GptSize, batch: int) -> Timed:
    """A model of its own and its optimizer, after the steps in which memory is made and kernels are compiled."""
    torch.manual_seed(0)
    before = device.allocated()
    model = Gpt(size).to(device.torch, torch.float32 if device.is_rehearsal else torch.bfloat16)
    optimizer = METHODS[name](model)
    tokens = torch.randint(size.vocabulary, (batch, size.context + 1), device=device.torch)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    device.synchronize()
    optimizer.zero_grad()
    gc.collect()
    return Timed(name, step, optimizer, device.allocated() - before)


def row(device: Gpu, method: Timed, base: Timed, driver: Driver, numel: int) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(method.times, base.times, strict=True)]
    low, high = interval_of_median(ratios)
    report = getattr(method.optimizer, "compression_report", dict)()
    return {
        "method": method.name,
        "step_ms": 1e3 * median(method.times),
        "ratio": median(ratios),
        "low": low,
        "high": high,
        "training_ms": 1e3 * median(method.training),
        "all_threads_ms": 1e3 * median(method.all_threads),
        "torch_bytes": method.allocated / numel,
        "ocomm_bytes": sum(report.get("memory_bytes", {}).values()) / numel,
        "calls": count(driver, method.step, COUNTED, device.calls_in_c),
    }


def show(rows: list[dict[str, Any]]) -> str:
    lines = []
    for each in rows:
        calls = each["calls"]

        def of(kind: str, calls: dict[str, float] = calls) -> str:
            return " / ".join(f"{calls[f'{thread} {kind}']:.0f}" for thread in ("training", "engine", "others"))

        lines.append(
            [
                each["method"],
                f"{each['step_ms']:.2f}",
                f"{each['ratio']:.3f} ({each['low']:.3f} to {each['high']:.3f})",
                f"{each['training_ms']:.2f} / {each['all_threads_ms']:.2f}",
                *(of(kind) for kind in ("launches", "copies", "waits", "asks")),
                f"{each['torch_bytes']:.1f} + {each['ocomm_bytes']:.1f}",
            ]
        )
    headings = ["method", "step ms", "x AdamW", "host ms", "launches", "copies", "waits", "asks", "B per parameter"]
    return tabulate(lines, headings, "github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    options.add_argument("--batch", type=int, default=8, help="sequences (default 8)")
    options.add_argument(
        "--seconds", type=float, default=math.inf, help="after which no round begins (default: no limit)"
    )
    args: argparse.Namespace = options.parse_args(argv)
    driver = Driver()
    device = opened(args)
    hvd.init()
    size, steps = (REHEARSED, 1) if device.is_rehearsal else (GPT2, STEPS)
    names = [BASE, *(name for name in args.methods if name != BASE)]
    methods = [
        make(name, device, size, args.batch) for name in names if not (device.is_rehearsal and name in NOT_REHEARSED)
    ]
    end = time.monotonic() + args.seconds
    for number in range(args.rounds):
        if number and time.monotonic() > end:
            break
        for method in methods:
            method.run(device, steps)
    numel = sum(p.numel() for p in Gpt(size).parameters())
    rows: list[dict[str, Any]] = []
    for method in methods:  # a trace takes seconds, and a machine may be there for minutes
        print(f"{method.name}: {1e3 * median(method.times):.2f} ms, in {len(method.times)} rounds", flush=True)
        rows.append(row(device, method, methods[0], driver, numel))
        write(args, device, {"parameters": numel, "rounds": len(method.times), "rows": rows})
    print(f"\n{device.name()}, {numel / 1e6:.1f} M parameters, calls of training / engine / other threads\n")
    print(show(rows))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
