"""A training step on a slow network: torch's DDP and its hooks against ocomm's optimizers, on the same links, in turn.

    python -m benchmarks.step --hosts 2 --rate 160mbit 850mbit [--model resnet] [--json FILE]

makes a lab of namespaces on this machine (root, or a kernel that allows it; exit status 77 where it cannot be had) and
trains a BERT-like model of 13.8 M parameters or ResNet-18 of 11.2 M, one rank and one thread per host. All methods live
in one job and take turns (A B C A B C), so that whatever else the machine does, it does to all of them. As ranks of a
job that is already running (ocommrun -np 4 -H a:1,b:1 ... python -m benchmarks.step --rate 10gbit) it measures there.
With several ranks per host (--slots 2) 1-bit Adam is there twice, as is the dense path, which then has a job of its own
without sums inside hosts first. Horovod and DeepSpeed (0.19.6, see deepspeed_onebit.py) have a row where they can be
imported.

step     milliseconds, slowest rank, median over rounds; of 1-bit Adam its compressed stage
exposed  step - step of "local", the same training without any communication
sent     bytes that crossed a host's interface per step, all headers included
limits   what a perfect 1-bit exchange would reach: after backward, and overlapped with it. The second is simulated
         from the moments at which gradients arrived in "local": bytes leave in that order, none before they are there
         speed of ours over that of the second is "of limit"
predict  what ocomm.predict makes of the rate and of "local", with the codec of one core, or of its share of one
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.models import TASKS
from benchmarks.muon import MuonAndAdam
from benchmarks.ranks import start
from benchmarks.turns import DDP, DENSE, LOCAL, LOCAL_MUON, Method, Result
from ocomm.bench._lab import PAYLOAD_FRACTION, bits_per_second
from ocomm.predict import model as predict

LR = 1e-4
#: Steps before a method is timed: enough for PowerSGD to begin, and for 1-bit optimizers to freeze.
WARMUP = 6
FREEZE_STEP = 2

#: Of a batch: the loss of the model that backward starts at.
Loss = Callable[[nn.Module], torch.Tensor]
#: Trains a model once.
Step = Callable[[], object]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return MuonAndAdam(model, LR, fused=True)


def plain(
    model: nn.Module,
    loss: Loss,
    wrapped: nn.Module,
    clip: float | None,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> Step:
    """A step whose communication, if any, hangs in backward. ``clip``: largest norm of the averaged gradient."""
    optimizer = inner(model)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def ddp(
    hook: Callable[..., Any] | None = None, state: Callable[[], object] = lambda: None, bucket_mb: float = 25
) -> Callable[[nn.Module, Loss, float | None], Step]:
    def make(model: nn.Module, loss: Loss, clip: float | None) -> Step:
        # Statistics of batch normalization stay with their rank, as with everybody else here.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, broadcast_buffers=False)
        if hook is not None:
            wrapped.register_comm_hook(state(), hook)
        return plain(model, loss, wrapped, clip)

    return make


def power_sgd() -> Callable[[nn.Module, Loss, float | None], Step]:
    def state() -> object:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    # One bucket: with several, its second allreduce of one bucket meets the first of another on gloo, and ranks abort.
    return ddp(powerSGD_hook.powerSGD_hook, state, bucket_mb=1000)


class _LikeNccl:
    """``torch.distributed`` for torch's quantization hook, which takes apart what NCCL's all_gather returns: on gloo
    the result has one list less.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        future = dist.all_gather(outputs, tensor, group=group, async_op=async_op).get_future()
        return types.SimpleNamespace(get_future=lambda: future.then(lambda _: [outputs]))


def quantized(model: nn.Module, loss: Loss, clip: float | None) -> Step:
    """torch's hook: each bucket gathers its range and then its codes, so there is one, as of PowerSGD."""
    quantization_hooks.dist = _LikeNccl()
    return ddp(quantization_hooks.quantization_pertensor_hook, bucket_mb=1000)(model, loss, clip)


def averaged(framework: str, compression: str = "none") -> Callable[[nn.Module, Loss, float | None], Step]:
    """DistributedOptimizer of ocomm or Horovod; it has to wait for all gradients before it can clip them."""

    def make(model: nn.Module, loss: Loss, clip: float | None) -> Step:
        peer = importlib.import_module(framework)
        peer.init()
        chosen = getattr(peer.Compression, compression)
        optimizer = peer.DistributedOptimizer(adam(model), model.named_parameters(), chosen)

        def step() -> None:
            optimizer.zero_grad()
            loss(model).backward()
            if clip is None:
                optimizer.step()
                return
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()

        return step

    return make


def compressed(
    wrap: Callable[..., Any], inner: Callable[[nn.Module], torch.optim.Optimizer], how: str = "previous", **options: Any
) -> Callable[[nn.Module, Loss, float | None], Step]:
    """A 1-bit optimizer of ocomm. ``how`` to clip: by the last step's norm, which keeps the overlap, or exactly."""

    def make(model: nn.Module, loss: Loss, clip: float | None) -> Step:
        optimizer = wrap(inner(model), model.named_parameters(), max_grad_norm=clip, clip=how, **options)

        def step() -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        step.report = optimizer.compression_report  # type: ignore[attr-defined]
        return step

    return make


def synced(bits: int) -> Callable[[nn.Module, Loss, float | None], Step]:
    """DiLoCo with a sync after every step: a local step, and what the step that syncs adds to it."""

    def make(model: nn.Module, loss: Loss, clip: float | None) -> Step:
        optimizer = hvd.DistributedDiLoCo(adam(model), model.named_parameters(), sync_every=1, bits=bits)

        def step() -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        return step

    return make


def deepspeed(model: nn.Module, loss: Loss, clip: float | None) -> Step:
    """DeepSpeed's own 1-bit Adam, which communicates when backward is over, and does not clip."""
    peer = importlib.import_module(DEEPSPEED)
    optimizer = peer.OnebitAdam(model, LR, FREEZE_STEP)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def hivemind(model: nn.Module, loss: Loss, clip: float | None) -> Step:
    """hivemind's averages of gradients, which does not clip."""
    averager = importlib.import_module(HIVEMIND).Averager(model)
    optimizer = adam(model)

    def step() -> None:
        optimizer.zero_grad()
        averager.begin()
        loss(model).backward()
        averager.finish()
        optimizer.step()

    return step


FREEZE = {"freeze_step": FREEZE_STEP}
#: Never frozen: all steps are those of the warm-up.
WARM = {"freeze_step": 10**9}
HOROVOD, DEEPSPEED, HIVEMIND = "horovod.torch", "benchmarks.deepspeed_onebit", "benchmarks.hivemind_averages"
#: What they are called, and how a model gets its step.
METHODS: dict[str, tuple[str, Callable[[nn.Module, Loss, float | None], Step]]] = {
    LOCAL: (LOCAL, lambda model, loss, clip: plain(model, loss, model, clip)),
    "local-muon": (LOCAL_MUON, lambda model, loss, clip: plain(model, loss, model, clip, muon)),
    "ddp": (DDP, ddp()),
    "ddp-fp16": ("DDP fp16", ddp(default_hooks.fp16_compress_hook)),
    # By its own name DDP refuses this hook without NCCL, though gloo adds bfloat16.
    "ddp-bf16": ("DDP bf16", ddp(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))),
    "ddp-int8": ("DDP quantized to 8 bits", quantized),
    "powersgd": ("DDP PowerSGD rank 1", power_sgd()),
    "horovod": ("Horovod", averaged(HOROVOD)),
    "deepspeed": ("DeepSpeed 1-bit Adam", deepspeed),
    "hivemind": ("hivemind, 8 bits", hivemind),
    "dense": (DENSE, averaged("ocomm_torch")),
    "dense-flat": ("ocomm dense, flat", averaged("ocomm_torch")),
    "int8": ("ocomm int8", averaged("ocomm_torch", "int8")),
    "int4": ("ocomm int4", averaged("ocomm_torch", "int4")),
    "onebit": ("1-bit Adam", compressed(hvd.DistributedOneBitAdam, adam, **FREEZE)),
    "onebit-flat": ("1-bit Adam, flat", compressed(hvd.DistributedOneBitAdam, adam, **FREEZE, hierarchical=False)),
    "onebit-exact": ("1-bit Adam, exact clip", compressed(hvd.DistributedOneBitAdam, adam, "exact", **FREEZE)),
    "zero-one": ("0/1 Adam", compressed(hvd.DistributedZeroOneAdam, adam, var_freeze_step=FREEZE_STEP)),
    "birder": ("Birder", compressed(hvd.DistributedBirder, sgd)),
    "onebit-warm-8": ("1-bit Adam, 8-bit warm-up", compressed(hvd.DistributedOneBitAdam, adam, **WARM, dense_bits=8)),
    **{f"diloco-{bits}": (f"DiLoCo sync, {bits} bit(s)", synced(bits)) for bits in (32, 4, 1)},
}
#: Titles of methods: of those which the limit is for, and what the cost model calls some.
COMPRESSED = tuple(METHODS[name][0] for name in ("onebit", "onebit-flat", "onebit-exact", "zero-one", "birder"))
MODELLED = {DENSE: "dense", "1-bit Adam": "hierarchical", "1-bit Adam, flat": "flat"}
OVERLAPPED = "limit, overlapped"
#: In these no host adds up by itself first: where it has several ranks that is another method.
FLAT = ("dense-flat", "onebit-flat")
#: Only measured where they are asked for, as ``benchmarks.time_to_loss`` does.
ON_REQUEST = ("local-muon", "hivemind", "onebit-warm-8", "diloco-32", "diloco-4", "diloco-1")
#: How all sums of a job are made is the job's choice.
NO_HIERARCHY = {"OCOMM_HIERARCHICAL_ALLREDUCE": "0"}


def can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def arrivals(model: nn.Module, step: Step) -> list[tuple[float, int]]:
    """When each gradient of a step arrived, in seconds from its begin, with its number of elements."""
    seen: list[tuple[float, int]] = []
    started = 0.0

    def hook(parameter: torch.Tensor) -> None:
        seen.append((time.perf_counter() - started, parameter.numel()))

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    runs = []
    for _ in range(3):
        seen.clear()
        started = time.perf_counter()
        step()
        runs.append((time.perf_counter() - started, list(seen)))
    for handle in handles:
        handle.remove()
    return sorted(runs)[1][1]


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


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is the same on all of them."""
    rank, ranks = start(args.threads)
    task = TASKS[args.model]
    batch = task.batch(args.batch or task.samples, torch.Generator().manual_seed(rank))
    methods, steps, models = [], [], []
    for name in args.methods:
        torch.manual_seed(0)
        models.append(task.model())
        title, make = METHODS[name]
        steps.append(make(models[-1], lambda model: task.loss(model, batch), args.clip))
        report = getattr(steps[-1], "report", dict)
        methods.append(Method(title, turns.timed(steps[-1]), functools.partial(digest, models[-1]), report))
    for method in methods:
        method.run(args.warmup)
    moments = arrivals(models[0], steps[0])
    # Ranks of one host share its cable.
    hosts = hvd.cross_size()
    result: Result = {
        "model": args.model,
        "ranks": ranks,
        "hosts": hosts,
        "rate": args.rate[0],
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "clip": args.clip,
        "last": moments[-1][1] / sum(numel for _, numel in moments),
        "cores": min(1.0, (os.cpu_count() or 1) / (ranks if "BENCH_MASTER" in os.environ else hvd.local_size())),
        "rows": turns.take_turns(methods, args.rounds, args.steps),
    }
    local = turns.step_ms(result, LOCAL)
    assert local is not None
    after, overlapped = limits(local / 1e3, moments, hosts, bits_per_second(args.rate[0]))
    result["limits"] = {"limit, after backward": 1e3 * after, OVERLAPPED: 1e3 * overlapped}
    dist.destroy_process_group()
    hvd.shutdown()
    return [result]


def predicted_ms(result: Result, method: str) -> float:
    """Of ``predict.METHODS``."""
    local = turns.step_ms(result, LOCAL)
    assert local is not None
    training = predict.Training(result["parameters"], local / 1e3, last=result["last"])
    network = predict.Network(bits_per_second(result["rate"]))
    slower = 1 / result["cores"]
    codec = predict.CodecTimes(*(slower * seconds for seconds in dataclasses.astuple(predict.CodecTimes())))
    hosts = result["hosts"]
    return 1e3 * predict.predict(method, hosts, result["ranks"] // hosts, training, network, codec).step_s


def show(result: Result) -> str:
    limit, of_limit, predictions = result["limits"][OVERLAPPED], {}, {}
    for row in result["rows"]:
        name = row["method"]
        if name in COMPRESSED:
            of_limit[name] = f"{limit / row['step_ms']:.2f}"
        method = "flat" if result["ranks"] == result["hosts"] and name == "1-bit Adam" else MODELLED.get(name)
        if method is not None and result["hosts"] > 1:
            guess = predicted_ms(result, method)
            predictions[name] = f"{guess:.1f} ({guess / row['step_ms'] - 1:+.0%})"
    notes = [f"gradients clipped at {result['clip']:g}"] if result["clip"] is not None else []
    if result["ranks"] > result["hosts"]:
        notes.append(f"{result['ranks'] // result['hosts']} on each host")
    further = {"of limit": of_limit, "predicted ms": predictions}
    return turns.show(result, DDP, result["limits"], notes, further)


def in_lab(args: argparse.Namespace, rate: str) -> list[Result]:
    """A job, and one more for what the whole job has to choose."""

    def job(methods: list[str], environ: dict[str, str]) -> list[Result]:
        chosen = argparse.Namespace(**{**vars(args), "methods": methods})
        return turns.in_lab("benchmarks.step", chosen, rate, environ)

    results = job([name for name in args.methods if name != "dense-flat"], {})
    if "dense-flat" in args.methods:
        flat = [name for name in args.methods if name in (LOCAL, "ddp", "dense-flat")]
        results += job(flat, NO_HIERARCHY)
    return results


def main() -> int:
    parser = turns.parser(__doc__, list(METHODS), None, "samples")
    parser.add_argument("--model", choices=list(TASKS), default="bert")
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, help="steps before anything is timed (default %(default)s)"
    )
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients at this norm (default: not at all)")
    args = parser.parse_args()
    if args.methods is None:
        without = [*ON_REQUEST, *(name for name in FLAT if args.slots == 1)]
        without += ["onebit-exact"] if args.clip is None else ["deepspeed"]
        without += [name for name, module in (("horovod", HOROVOD), ("deepspeed", DEEPSPEED)) if not can_import(module)]
        args.methods = [name for name in METHODS if name not in without]
    args.methods = [name for name in METHODS if name in (LOCAL, *args.methods)]
    return turns.main(args, measure, in_lab, show, {"torch": torch.__version__})


if __name__ == "__main__":
    sys.exit(main())
