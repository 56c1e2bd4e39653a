"""Memory of DistributedOneBitAdam by mode: what its buffers should take, what they take, what the process takes.

    ocommrun -np 2 python benchmarks/memory.py [--parameters 41943040] [--dtype bfloat16]

First a model of a few large tensors, so that its state stands out from that of Python and Torch; then the demo's model
as the demo trains it. Figures are of rank 0, in bytes per parameter where not said otherwise. docs/memory.md explains
the rows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

import ocomm_torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch_digits as digits

BLOCK = 4096
TENSORS = 4


def expected(mode: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Bytes per parameter and rank, by buffer, as docs/memory.md has them."""
    ranks, packed = hvd.size(), 1 / 8 + 4 / BLOCK
    adam = {"wrapped Adam's m and v": 8.0}
    masters = {} if dtype is torch.float32 else {"masters": 4.0, "widened_gradients": 4.0}
    if mode == "warm-up":
        return {**adam, "averages": 4.0, "dense_staging": 8.0, **masters}
    return {
        **masters,
        "denominator": 4.0,
        "worker_error": 2 * 4.0,
        "server_error": 2 * 4.0 / ranks,
        "packed_momentum": 2 * packed,
        "mask": 1 / 8,
        "send": packed,
        "receive": packed,
    }


def measured(optimizer: torch.optim.Optimizer, numel: int) -> dict[str, float]:
    state = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    report = optimizer.compression_report()["memory_bytes"]
    return {"wrapped Adam's m and v": state / numel, **{key: nbytes / numel for key, nbytes in report.items()}}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Gives freed memory back to the system, where the C library can: what is left is in use."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def peak() -> int:
    """Most bytes of this process that were ever in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(mode: str, optimizer: torch.optim.Optimizer, numel: int, before: int, dtype: torch.dtype) -> None:
    """One mode's table: formula, buffers, and by how much the process has grown over ``before``."""
    held = resident() - before
    trim()
    used = resident() - before
    formula, found = expected(mode, dtype), measured(optimizer, numel)
    names = [name for name in {**formula, **found} if formula.get(name) or found.get(name)]
    rows = [[name, f"{formula.get(name, 0):.3f}", f"{found.get(name, 0):.3f}"] for name in names]
    rows.append(["all", f"{sum(formula.values()):.3f}", f"{sum(found.values()):.3f}"])
    rows.append(["process, memory in use", "", f"{used / numel:.3f}"])
    rows.append(["process, with what is free again", "", f"{held / numel:.3f}"])
    print(f"\n{mode}")
    print(tabulate(rows, ["", "formula", "measured"], tablefmt="github", disable_numparse=True), flush=True)


def large(numel: int, mask: bool, dtype: torch.dtype) -> None:
    """Six steps, three of them dense. With ``mask`` some elements have no gradient in them, and are masked.

    Parameters and gradients are of type ``dtype``.
    """
    torch.manual_seed(0)
    shape = (TENSORS * 64, numel // (TENSORS * TENSORS * 64))
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(TENSORS)]
    numel = sum(p.numel() for p in parameters)
    for p in parameters:
        p.grad = (torch.randn(shape) * 1e-3).to(dtype)
        if mask:
            p.grad[:6] = 0.0
    trim()
    before = resident()
    optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-4), freeze_step=3)
    for step in range(1, 7):
        optimizer.step()
        if hvd.rank() == 0 and step == 2 and not mask:
            print(
                f"\n{numel} {dtype} parameters in {TENSORS} tensors, {hvd.size()} ranks, bytes per parameter on rank 0"
            )
            show("warm-up", optimizer, numel, before, dtype)
    if hvd.rank() == 0:
        share = optimizer.compression_report()["masked_elements"] / numel
        name = f"compressed, {100 * share:.1f} % of the elements masked" if mask else "compressed"
        show(name, optimizer, numel, before, dtype)


def demo() -> None:
    data = digits.load_data()
    wraps = {
        "torch.optim.Adam alone": lambda adam, model: adam,
        "Adam": lambda adam, model: hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters()),
        "1-bit Adam": lambda adam, model: hvd.DistributedOneBitAdam(
            adam, named_parameters=model.named_parameters(), freeze_step=20
        ),
    }
    rows = []
    for name, wrap in wraps.items():
        run = digits.train(name, wrap, data, steps=100, batch=32, lr=2e-3, seed=0, progress=False)
        rows.append([f"peak after {name}", f"{peak() / 1e6:.1f}"])
    if hvd.rank() == 0:
        numel = sum(p.numel() for p in digits.make_model(0).parameters())
        own = sum(expected("warm-up").values()), sum(run.report["memory_bytes"].values()) / numel
        rows.append(["1-bit Adam's warm-up, by formula", f"{numel * own[0] / 1e6:.1f}"])
        rows.append(["1-bit Adam compressed, by its report", f"{numel * own[1] / 1e6:.1f}"])
        print(f"The demo's model, {numel} parameters, and training as in the demo; MB of rank 0's process")
        print(tabulate(rows, tablefmt="plain", disable_numparse=True), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory of 1-bit Adam by mode.")
    parser.add_argument("--parameters", type=int, default=5 << 23)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    demo()
    for mask in (False, True):
        large(options.parameters, mask, getattr(torch, options.dtype))
        gc.collect()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
