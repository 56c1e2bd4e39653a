"""A training step on a slow network: torch's DDP and its hooks against ocomm's optimizers, on the same links, in turn.

    python benchmarks/step.py --hosts 2 --rate 160mbit 850mbit [--json FILE]

makes a lab of namespaces on this machine (root, or a kernel that allows it; exit status 77 where it cannot be had) and
trains a BERT-like model of 13.8 M parameters, one rank and one thread per host. All methods live in one job and take
turns (A B C A B C), so that whatever else the machine does, it does to all of them. As ranks of a job that is already
running (ocommrun -np 4 -H a:1,b:1,c:1,d:1 python benchmarks/step.py --rate 10gbit) it measures there.

step     milliseconds, slowest rank, median over rounds; of 1-bit Adam its compressed stage
exposed  step - step of "local", the same training without any communication
sent     bytes that crossed a host's interface per step, all headers included
limits   what a perfect 1-bit exchange would reach: after backward, and overlapped with it. The second is simulated
         from the moments at which gradients arrived in "local": bytes leave in that order, none before they are there
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch as hvd
from ocomm.bench._lab import PAYLOAD_FRACTION, Lab, LabError, bits_per_second, interface_sent_bytes, why_not
from ocomm.bench.kernels import commit, processor

SKIPPED = 77
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 8192, 384, 6, 6, 64
LR = 1e-4
#: Steps before a method is timed: enough for PowerSGD to begin and for 1-bit Adam to freeze.
WARMUP = 6
FREEZE_STEP = 2


class Bert(nn.Module):
    """An encoder with a tied output layer: its embedding is a quarter of the bytes and its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.tokens(tokens) + self.positions)
        return hidden @ self.tokens.weight.T


@dataclass(slots=True, eq=False)
class Method:
    """``step(tokens)`` trains ``model`` once. ``times`` are of this rank, in seconds per step, one per round."""

    name: str
    model: nn.Module
    step: Callable[[torch.Tensor], object]
    report: Callable[[], dict[str, Any]] = dict
    times: list[float] = field(default_factory=list)
    sent: int = 0
    steps: int = 0


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of guessing each token's successor."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, fused=True)


def plain(name: str, model: nn.Module, wrapped: nn.Module, clip: float | None) -> Method:
    """A method whose communication, if any, hangs in backward. ``clip``: largest norm of the averaged gradient."""
    optimizer = adam(model)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(wrapped, tokens).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return Method(name, model, step)


def ddp(
    name: str,
    model: nn.Module,
    clip: float | None,
    hook: Callable[..., Any] | None = None,
    state: object = None,
    bucket_mb: float = 25,
) -> Method:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return plain(name, model, wrapped, clip)


def power_sgd(model: nn.Module, clip: float | None) -> Method:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    # One bucket: with several, its second allreduce of one bucket meets the first of another on gloo, and ranks abort.
    return ddp("DDP PowerSGD rank 1", model, clip, powerSGD_hook.powerSGD_hook, state, bucket_mb=1000)


def dense(model: nn.Module, clip: float | None) -> Method:
    """DistributedOptimizer; it has to wait for all gradients before it can clip them."""
    optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        if clip is None:
            optimizer.step()
            return
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()

    return Method("ocomm dense", model, step)


def ours(name: str, model: nn.Module, wrap: Callable[..., Any], inner: torch.optim.Optimizer, **options: Any) -> Method:
    optimizer = wrap(inner, named_parameters=model.named_parameters(), **options)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()

    return Method(name, model, step, getattr(optimizer, "compression_report", dict))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def one_bit(model: nn.Module, clip: float | None, how: str = "previous") -> Method:
    name = "1-bit Adam" if how == "previous" else "1-bit Adam, exact clip"
    options = {"freeze_step": FREEZE_STEP, "max_grad_norm": clip, "clip": how}
    return ours(name, model, hvd.DistributedOneBitAdam, adam(model), **options)


#: With a norm to clip at, the 1-bit optimizers take the last step's to keep their overlap, unless it says exact.
METHODS: dict[str, Callable[[nn.Module, float | None], Method]] = {
    "local": lambda m, c: plain("local", m, m, c),
    "ddp": lambda m, c: ddp("DDP fp32", m, c),
    "ddp-fp16": lambda m, c: ddp("DDP fp16", m, c, default_hooks.fp16_compress_hook),
    "powersgd": power_sgd,
    "dense": dense,
    "onebit": one_bit,
    "onebit-exact": lambda m, c: one_bit(m, c, "exact"),
    "zero-one": lambda m, c: ours(
        *("0/1 Adam", m, hvd.DistributedZeroOneAdam, adam(m)),
        var_freeze_step=FREEZE_STEP,
        max_grad_norm=c,
        clip="previous",
    ),
    "birder": lambda m, c: ours("Birder", m, hvd.DistributedBirder, sgd(m), max_grad_norm=c, clip="previous"),
}


def arrivals(method: Method, tokens: torch.Tensor) -> tuple[list[tuple[float, int]], float]:
    """When each gradient of a step arrived, in seconds from its begin, with its number of elements; and the step."""
    seen: list[tuple[float, int]] = []
    started = 0.0

    def hook(parameter: torch.Tensor) -> None:
        seen.append((time.perf_counter() - started, parameter.numel()))

    handles = [p.register_post_accumulate_grad_hook(hook) for p in method.model.parameters()]
    runs = []
    for _ in range(3):
        seen.clear()
        started = time.perf_counter()
        method.step(tokens)
        runs.append((time.perf_counter() - started, list(seen)))
    for handle in handles:
        handle.remove()
    seconds, moments = sorted(runs)[1]
    return moments, seconds


def limits(local_s: float, moments: list[tuple[float, int]], ranks: int, bits: float) -> tuple[float, float]:
    """Seconds of a step with a perfect 1-bit exchange: after backward, and overlapped with it."""
    rate = PAYLOAD_FRACTION * bits / 8
    wire = [2 * (ranks - 1) / ranks * numel * (1 / 8 + 4 / 4096) / rate for _, numel in moments]
    backward = moments[-1][0]
    free = 0.0
    for (arrived, _), seconds in zip(moments, wire, strict=True):
        free = max(free, arrived) + seconds
    return local_s + sum(wire), local_s - backward + max(free, backward)


def digest(model: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()


def sent_bytes() -> int:
    return interface_sent_bytes(Path("/proc/self/net/dev").read_text())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs as every rank of a job; the result is the same on all of them."""
    torch.set_num_threads(args.threads)
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    address = hvd.broadcast_object(os.environ.get("STEP_MASTER", "127.0.0.1"), 0)
    store = dist.TCPStore(address, 29511, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(VOCABULARY, (args.batch, LENGTH), generator=generator)
    methods = []
    for name in args.methods:
        torch.manual_seed(0)
        methods.append(METHODS[name](Bert(), args.clip))
    for method in methods:
        for _ in range(WARMUP):
            method.step(batch)
    moments, _ = arrivals(methods[0], batch)
    gc.collect()
    gc.disable()
    for _ in range(args.rounds):
        for method in methods:
            hvd.barrier()
            before, started = sent_bytes(), time.perf_counter()
            for _ in range(args.steps):
                method.step(batch)
            method.times.append((time.perf_counter() - started) / args.steps)
            hvd.barrier()  # whoever is done sooner must not take the others' share of a processor
            method.sent += sent_bytes() - before
            method.steps += args.steps
    table = hvd.allgather_object([(m.times, m.sent / m.steps, digest(m.model)) for m in methods])
    rows = []
    for number, method in enumerate(methods):
        of = [said[number] for said in table]
        times = [max(each) for each in zip(*(t for t, _, _ in of), strict=True)]
        if method.name != "local" and len({replica for _, _, replica in of}) > 1:
            raise SystemExit(f"step: the replicas of {method.name} differ")
        rows.append(
            {
                "method": method.name,
                "step_ms": 1e3 * median(times),
                "best_ms": 1e3 * min(times),
                "sent": max(sent for _, sent, _ in of),
                "report": {k: v for k, v in method.report().items() if isinstance(v, (int, float, str))},
            }
        )
    local = rows[0]["step_ms"]
    after, overlapped = limits(local / 1e3, moments, ranks, bits_per_second(args.rate[0]))
    dist.destroy_process_group()
    hvd.shutdown()
    return {
        "ranks": ranks,
        "rate": args.rate[0],
        "parameters": sum(p.numel() for p in methods[0].model.parameters()),
        "clip": args.clip,
        "rows": rows,
        "limit_after_ms": 1e3 * after,
        "limit_overlapped_ms": 1e3 * overlapped,
    }


def show(result: dict[str, Any]) -> str:
    rows = result["rows"]
    local = rows[0]["step_ms"]
    base = next((row["step_ms"] for row in rows if row["method"] == "DDP fp32"), None)

    def speed(step_ms: float) -> str:
        return f"{base / step_ms:.2f}" if base else "-"

    lines = [
        [
            r["method"],
            f"{r['step_ms']:.1f}",
            f"{r['step_ms'] - local:.1f}",
            f"{r['sent'] / 1e6:.2f}",
            speed(r["step_ms"]),
        ]
        for r in rows
    ]
    for name, key in (("limit, after backward", "limit_after_ms"), ("limit, overlapped", "limit_overlapped_ms")):
        lines.append([name, f"{result[key]:.1f}", f"{result[key] - local:.1f}", "", speed(result[key])])
    share = f", {1 - local / base:.0%} of DDP's step is communication" if base else ""
    clipped = "" if result["clip"] is None else f", gradients clipped at {result['clip']:g}"
    head = f"{result['ranks']} ranks at {result['rate']}, {result['parameters'] / 1e6:.1f} M parameters{clipped}{share}"
    return head + "\n" + tabulate(lines, ["method", "step ms", "exposed ms", "sent MB", "x DDP fp32"], "github")


def in_lab(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for rate in args.rate:
        with Lab(args.hosts, rate) as lab, tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.json"
            program = [sys.executable, __file__, "--rate", rate, "--json", str(output), "--methods", *args.methods]
            for name in ("steps", "rounds", "batch", "threads", "clip"):
                program += [f"--{name}", str(getattr(args, name))] if getattr(args, name) is not None else []
            environ = {"STEP_MASTER": lab.address(0), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            options = [word for name in environ for word in ("-x", name)]
            command = lab.mpirun(args.hosts * args.slots, program, slots=args.slots, options=options)
            done = lab.run(command, args.timeout, environ)
            if not output.exists():
                raise LabError(f"the ranks have written no result:\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
            results += json.loads(output.read_text())["results"]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, metavar="N", help="make a lab of N hosts, and measure there")
    parser.add_argument("--slots", type=int, default=1, help="ranks on each host of the lab (default 1)")
    parser.add_argument("--rate", nargs="+", default=["160mbit"], help="nominal rate of a host's network")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all that differ")
    parser.add_argument("--steps", type=int, default=4, help="of a method in one round (default 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients at this norm (default: not at all)")
    parser.add_argument("--batch", type=int, default=2, help=f"sequences of {LENGTH} tokens per rank (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, per rank (default 1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one rate (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.methods is None:
        args.methods = [name for name in METHODS if name != "onebit-exact" or args.clip is not None]
    if "local" not in args.methods:
        args.methods = ["local", *args.methods]
    args.methods.sort(key=list(METHODS).index)
    if args.hosts:
        if reason := why_not():
            print(f"step: no lab here: {reason}", file=sys.stderr)
            return SKIPPED
        try:
            results = in_lab(args)
        except LabError as error:
            print(f"step: {error}", file=sys.stderr)
            return 1
        is_writer = True
    else:
        is_writer = "OMPI_COMM_WORLD_RANK" not in os.environ or os.environ["OMPI_COMM_WORLD_RANK"] == "0"
        results = [measure(args)]
    if is_writer:
        for result in results:
            print(show(result), end="\n\n")
        if args.json:
            versions = {name: metadata.version(name) for name in ("torch", "numpy", "mpi4py")}
            about = {"processor": processor(), "python": platform.python_version(), **versions, "commit": commit()}
            arguments = {k: v for k, v in vars(args).items() if k != "json"}
            args.json.write_text(json.dumps({"about": about, "arguments": arguments, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
