"""What the host does in a step of 1-bit Adam on a GPU, where the GPU takes no time: no GPU is needed.

    python -m benchmarks.gpu.host [--rounds 40] [--json FILE]

GPT-2's smallest model (124 M parameters, 148 tensors) in bfloat16, on one rank. CUDA's driver is that of the tests
(``tests/fake_driver.c``), whose device computes nothing. Medians in microseconds; on a GPU what comes first and last is
hidden, because Torch's calls run ahead of it.

backward   hooks, and autograd's own work
before     from the call of step() to where it waits for the exchange
between    from the end of the exchange to the launch of what moves parameters: a GPU has nothing to do meanwhile
after      from there to the end of step(), without Torch's copies of masters to 16 bits
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks.gpu.device import PACKAGES, versions
from benchmarks.models import GPT2, Gpt
from benchmarks.turns import command
from ocomm.bench.kernels import commit, processor
from ocomm.kernels.cuda_work import CudaWork
from ocomm.kernels.device import device_kernels
from ocomm.optim.vote import Vote
from ocomm_torch.memory import placement as placements
from ocomm_torch.optimizers import compressed

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("backward", "before", "between", "after")
WARMUP = 6
#: A step takes 0.2 s, and to compile the kernels half a minute.
LIMIT_S = 600


class OnFakeDriver(placements.CudaPlacement):
    """Torch's tensors of the host, on the driver's device, whose memory is the host's."""

    def __init__(self, kernels: Any) -> None:
        placements.Placement.__init__(self, kernels)
        self._memory, self._noted = kernels.memory, set()

    @property
    def _stream(self) -> int:
        return 1

    @property
    def is_captured(self) -> bool:
        return False

    def tensor(self, array: Any) -> torch.Tensor:
        memory = SimpleNamespace(__array_interface__=array.__cuda_array_interface__)
        return torch.from_numpy(np.asarray(memory))


class Clock:
    """When things happened in a step, by their names."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.at[name] = time.perf_counter()

    def around(self, owner: Any, name: str) -> None:
        """Marks when each call of a function begins and ends."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self.mark(f"{name} begins")
            try:
                return function(*arguments, **named)
            finally:
                self.mark(f"{name} ends")

        setattr(owner, name, timed)

    def parts(self) -> dict[str, float]:
        """Microseconds of each part of the step."""
        at = self.at
        copying = at["_foreach_copy_ ends"] - at["_foreach_copy_ begins"]
        seconds = (
            at["step begins"] - at["backward begins"],
            at["hold begins"] - at["step begins"],
            at["launched"] - at["hold ends"],
            at["step ends"] - at["launched"] - copying,
        )
        return {name: 1e6 * part for name, part in zip(PARTS, seconds, strict=True)}


class Given(torch.autograd.Function):
    """Gives a parameter a gradient, and passes on that of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.gradient = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape).contiguous()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.gradient


def measured(rounds: int) -> dict[str, list[float]]:
    parameters = list(Gpt(GPT2).to(torch.bfloat16).parameters())
    named = [(f"p{k}", p) for k, p in enumerate(parameters)]
    adam = torch.optim.AdamW(parameters, lr=1e-4)
    state = adam.state_dict()
    state["state"] = {
        k: {"step": torch.tensor(5.0), "exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
        for k, p in enumerate(parameters)
    }
    optimizer = hvd.DistributedOneBitAdam(adam, named, freeze_step=2, warm_start=state)
    clock = Clock()
    clock.around(Vote, "hold")
    clock.around(torch, "_foreach_copy_")
    queue = CudaWork.queue

    def queued(work: CudaWork, memory: Any) -> None:
        queue(work, memory)
        if "hold ends" in clock.at and "launched" not in clock.at:
            clock.mark("launched")

    CudaWork.queue = queued  # type: ignore[method-assign]
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for number in range(WARMUP + rounds):
        optimizer.zero_grad()
        x = torch.ones((), requires_grad=True)
        for parameter in parameters:
            x = Given.apply(x, parameter)
        clock.at.clear()
        clock.mark("backward begins")
        x.backward()
        clock.mark("step begins")
        optimizer.step()
        clock.mark("step ends")
        if number >= WARMUP:
            for name, part in clock.parts().items():
                found[name].append(part)
    if optimizer.compression_report()["stage"] != "compressed":
        raise RuntimeError("steps that were to be compressed were not")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps (default 40)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the driver is there
    args = parser.parse_args(argv)
    if not args.here:
        with tempfile.TemporaryDirectory() as folder:
            source, library = ROOT / "tests" / "fake_driver.c", Path(folder) / "libcuda.so.1"
            flags = ["-O2", "-DINSTANT", "-shared", "-fPIC"]
            subprocess.run(["gcc", *flags, source, "-o", library, "-ldl"], check=True)
            environ = {**os.environ, "LD_LIBRARY_PATH": folder}
            words = [sys.executable, "-m", "benchmarks.gpu.host", "--here", *(sys.argv[1:] if argv is None else argv)]
            return subprocess.run(words, env=environ, timeout=LIMIT_S, check=False).returncode
    from ocomm.kernels.cuda_device import CudaDevice

    torch.set_num_threads(1)
    compressed.placement = lambda *_: OnFakeDriver(device_kernels(CudaDevice(0)))  # type: ignore[assignment]
    placements.refuse_in_a_graph = lambda: None
    hvd.init()
    found = measured(args.rounds)
    hvd.shutdown()
    rows = [[name, f"{median(found[name]):.0f}", f"{min(found[name]):.0f}"] for name in PARTS]
    print(tabulate(rows, ["", "us", "least"], "github", disable_numparse=True))
    if args.json is not None:
        about = {"processor": processor(), **versions(PACKAGES), "commit": commit()}
        args.json.write_text(json.dumps({"about": about, "command": command(), "us": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
