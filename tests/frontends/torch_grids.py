"""Programs for jobs of four ranks in a grid: pipelines, shards, mistakes. Each prints a line per rank."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import ocomm_torch as hvd

WIDTH, BATCH, MICRO, STEPS, DENSE = 24, 8, 4, 10, 4
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(call: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[call.__name__] = call
    return call


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def data(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def stages() -> list[nn.Module]:
    """The two stages of a model, the same on all ranks."""
    torch.manual_seed(11)
    return [nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH)) for _ in range(2)]


def adam(named: list[tuple[str, Any]], wrapper: Any = hvd.DistributedOneBitAdam, **options: Any) -> Any:
    chosen = {"freeze_step": DENSE, "block_size": 64} | options
    return wrapper(torch.optim.Adam([p for _, p in named], lr=1e-2), named, **chosen)


def named(stage: int, module: nn.Module) -> list[tuple[str, Any]]:
    return [(f"stage{stage}.{name}", p) for name, p in module.named_parameters()]


def micro_step(modules: list[nn.Module], step: int, replica: int) -> None:
    """What ``Schedule1F1B`` computes, on a rank that has both stages."""
    x, y = data(step, replica)
    for part, target in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        for module in modules:
            part = module(part)
        (F.mse_loss(part, target) / MICRO).backward()


class Pipeline:
    """One rank of PP2 x DP2."""

    def __init__(self, mesh: Any, **options: Any) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.pp, self.dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self.module = stages()[self.pp]
        stage = PipelineStage(self.module, self.pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        # Gradients that were scaled after backward would be exchanged again.
        self.schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda a, b: F.mse_loss(a, b) / MICRO, scale_grads=False)
        self.optimizer = adam(
            named(self.pp, self.module), mesh=mesh, data="dp", backward_passes_per_step=MICRO, **options
        )

    def backward(self, step: int) -> None:
        x, y = data(step, self.dp)
        self.schedule.step(*([x] if self.pp == 0 else []), **({} if self.pp == 0 else {"target": y}))

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@program
def pipeline() -> dict[str, Any]:
    """PP2 x DP2; DP2 of the same microbatches; then what one rank alone does to a step of all."""
    mesh = hvd.init_device_mesh({"pp": 2, "dp": 2})
    job = Pipeline(mesh)
    job.train(range(STEPS))
    report = job.optimizer.compression_report()
    both = stages()
    optimizer = adam(
        [*named(0, both[0]), *named(1, both[1])],
        process_set=hvd.ProcessSet([2 * job.pp, 2 * job.pp + 1]),  # which the mesh has registered
        backward_passes_per_step=MICRO,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        micro_step(both, step, job.dp)
        optimizer.step()
    found = {
        "mine": digest(job.parameters),
        "expected": digest(both[job.pp].parameters()),
        "began": digest(stages()[job.pp].parameters()),
        "share": report["bytes_sent"] / optimizer.compression_report()["bytes_sent"],
        "redone": report["redone_steps"],
    }
    job.backward(STEPS)
    if hvd.rank() == 3:
        job.parameters[0].grad[0, 0] = float("nan")
    found["nan"] = said(job.optimizer.step)
    job.optimizer.zero_grad()
    job.backward(STEPS)
    if hvd.rank() == 2:
        job.optimizer.skip()
    else:
        job.optimizer.step()

    def skipped_by() -> str | None:
        return job.optimizer.compression_report()["skipped_by"]

    found["skipped"] = [str(job.optimizer.outcome), digest(job.parameters) == found["mine"], skipped_by()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    job.optimizer.zero_grad()
    job.backward(STEPS)
    if hvd.rank() == 1:
        job.parameters[1].grad[0] = float("inf")
    scaler.scale(torch.ones(1))
    scaler.step(job.optimizer)
    scaler.update()
    stayed = digest(job.parameters) == found["mine"]
    found["overflow"] = [str(job.optimizer.outcome), scaler.get_scale(), stayed, skipped_by()]
    job.train([STEPS])
    found["goes on"] = digest(job.parameters) != found["mine"]
    return found


# Shards


def shard_of(tensor: Tensor, rank: int, size: int) -> Tensor:
    """What ``fully_shard`` gives a rank."""
    parts = tensor.detach().chunk(size)
    return (parts[rank] if rank < len(parts) else tensor.detach()[:0]).clone()


def narrow() -> nn.Module:
    """Ends in a layer of one output, whose second shard is empty; 7 rows are shards of unequal size."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))


def fully_sharded(module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    return module


class Sharded:
    """One rank of fully_shard over 2 x DP2."""

    def __init__(self, mesh: Any, kind: torch.dtype = torch.float32, wrap: Any = adam, **options: Any) -> None:
        self.kind = kind
        self.module = narrow().to(kind)
        if "fsdp" in mesh.mesh_dim_names:
            fully_sharded(self.module, mesh["fsdp"])
        self.parameters: list[Any] = list(self.module.parameters())
        self.optimizer = wrap(named(0, self.module), mesh=mesh, data="dp", **options)

    def backward(self, step: int) -> None:
        x, y = data(step, hvd.rank())
        F.mse_loss(self.module(x.to(self.kind)), y[:, :1].to(self.kind)).backward()

    def train(self, steps: Iterable[int], clip: float | None = None) -> str:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            if clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, clip)
            self.optimizer.step()
        return digest(getattr(p, "to_local", lambda p=p: p)().float() for p in self.parameters)

    def save(self) -> str:
        """Saves parameters and dense state by torch.distributed.checkpoint. Returns where."""
        path = hvd.broadcast_object(tempfile.mkdtemp(dir=tempfile.gettempdir()) if hvd.rank() == 0 else None)
        dcp.save({"model": self.module.state_dict(), "adam": self.optimizer.dense_state_dict()}, checkpoint_id=path)
        return path

    def load(self, path: str) -> None:
        state = {"model": self.module.state_dict(), "adam": self.optimizer.dense_state_dict()}
        dcp.load(state, checkpoint_id=path)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_dense_state_dict(state["adam"])

    def whole(self, *keys: str) -> list[Tensor]:
        """All elements of the parameters, or of what their dense state has."""
        entries = self.optimizer.dense_state_dict()["state"].values()
        parts = [entry[key] for entry in entries for key in keys] if keys else self.parameters
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in parts]


@program
def across() -> dict[str, Any]:
    """fully_shard over 2, dense averages over 2, torch's SGD, against one process with the batches of all ranks."""
    from torch.distributed.fsdp import FSDPModule

    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    module, plain = fully_sharded(narrow(), mesh["fsdp"]), narrow()
    hook = hvd.across_hook(mesh=mesh, data="dp")
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(hook)
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, plain))
    for step in range(STEPS):
        for each in (optimizer, twin):
            each.zero_grad()
        x, y = data(step, hvd.rank())
        F.mse_loss(module(x), y[:, :1]).backward()
        batches = [data(step, rank) for rank in range(4)]
        F.mse_loss(plain(torch.cat([x for x, _ in batches])), torch.cat([y[:, :1] for _, y in batches])).backward()
        for each in (optimizer, twin):
            each.step()
    mine: list[Any] = list(module.parameters())
    shards = [shard_of(p, mesh.get_local_rank("fsdp"), 2) for p in plain.parameters()]
    gaps = [float((p.to_local() - shard).abs().max()) for p, shard in zip(mine, shards, strict=True) if shard.numel()]
    return {"place": mesh.get_local_rank("fsdp"), "gap": max(gaps), "digest": digest(p.to_local() for p in mine)}


def sgd(module: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(inner, module.named_parameters(), **options) if options else inner


def everywhere(step: int, count: int) -> tuple[Tensor, Tensor]:
    """The batches of ``count`` ranks as one."""
    parts = [data(step, rank) for rank in range(count)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@program
def dense() -> dict[str, Any]:
    """DistributedOptimizer on fully_shard over 2 x DP2, against one process with the batches of all ranks, and against
    averages by a hook.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    on = {"mesh": mesh, "data": "dp"}
    module, hooked, plain = fully_sharded(narrow(), mesh["fsdp"]), fully_sharded(narrow(), mesh["fsdp"]), narrow()
    for part in hooked.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(hvd.across_hook(**on))
    mine: list[Any] = list(module.parameters())
    optimizers = sgd(module, **on), sgd(hooked), sgd(plain)
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    submitted, norms = [], []
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        x, y = data(step, hvd.rank())
        F.mse_loss(module(x), y[:, :1]).backward()
        submitted.append(len(optimizers[0]._exchanges))
        F.mse_loss(hooked(x), y[:, :1]).backward()
        x, y = everywhere(step, 4)
        F.mse_loss(plain(x), y[:, :1]).backward()
        if step >= STEPS // 2:
            found = [clip(each.parameters()) for each in (module, hooked, plain)]
            norms.append([float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) for norm in found])
        for each in optimizers:
            each.step()
    shards = [shard_of(p, mesh.get_local_rank("fsdp"), 2) for p in plain.parameters()]
    gaps = [float((p.to_local() - shard).abs().max()) for p, shard in zip(mine, shards, strict=True) if shard.numel()]
    result = {
        "gap": max(gaps),
        "digest": digest(p.to_local() for p in mine),
        "hooked": digest(p.to_local() for p in hooked.parameters()),
        "submitted in backward": min(submitted),
        "norms": max(abs(norm / norms[k][2] - 1) for k in range(len(norms)) for norm in norms[k][:2]),
    }
    # Gradients that are used after backward, when averages are not there yet
    optimizers[0].zero_grad()
    x, y = data(STEPS, hvd.rank())
    F.mse_loss(module(x), y[:, :1]).backward()
    own = [p.grad for p in mine]
    result["watched"] = type(own[1]).__name__
    result["used"] = digest([own[1].to_local(), own[2].to_local()])
    result["then"] = type(own[1]).__name__
    optimizers[0].step()
    # An overflow on one shard of one replica
    before = digest(p.to_local() for p in mine)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers[0].zero_grad()
    F.mse_loss(module(x), y[:, :1]).backward()
    if hvd.rank() == 1:
        mine[0].grad.to_local()[0, 0] = float("inf")
    scaler.scale(torch.ones(1))
    scaler.step(optimizers[0])
    scaler.update()
    result["overflow"] = [scaler.get_scale(), digest(p.to_local() for p in mine) == before]
    # A partial sum
    whole = [nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh["fsdp"], [Replicate()])) for _ in range(2)]
    for parameter, kind, share in zip(whole, (Partial(), Replicate()), (1.0, 2.0), strict=True):
        each = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), **on)
        local = share * (torch.arange(15.0).view(5, 3) + mesh.get_local_rank("dp"))
        factor = DTensor.from_local(local, mesh["fsdp"], [kind])
        parameter.register_hook(lambda grad, factor=factor: factor)
        (parameter * 1.0).sum().backward()
        each.step()
    result["partial"] = torch.equal(*(p.to_local() for p in whole)) and bool((whole[0].to_local()[1:] < 1).all())
    return result


@program
def tensors() -> dict[str, Any]:
    """DP2 x TP2, dense SGD, against one process with the batches of both replicas."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = hvd.init_device_mesh({"dp": 2, "tp": 2})
    module = parallelize_module(stages()[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plain = stages()[0]
    optimizers = sgd(module, mesh=mesh, data="dp"), sgd(plain)
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        x, y = data(step, mesh.get_local_rank("dp"))
        F.mse_loss(module(x), y).backward()
        x, y = everywhere(step, 2)
        F.mse_loss(plain(x), y).backward()
        for each in optimizers:
            each.step()
    whole = [p.full_tensor() for p in module.parameters()]
    moved = max(float((p - q).abs().max()) for p, q in zip(whole, stages()[0].parameters(), strict=True))
    gap = max(float((p - q).abs().max()) for p, q in zip(whole, plain.parameters(), strict=True))
    return {"gap": gap, "moved": moved}


@program
def placed() -> dict[str, Any]:
    """DTensors that all ranks of TP2 have whole: two passes in a step, as for plain tensors; and a rank that skips a
    step whose gradients torch has yet to add up.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = hvd.init_device_mesh({"dp": 2, "tp": 2})
    tp, pair = mesh["tp"], hvd.ProcessSet([hvd.rank() % 2, 2 + hvd.rank() % 2])
    rng = torch.Generator().manual_seed(1)
    began = [torch.randn(8, 4, generator=rng) for _ in range(2)]
    whole = [nn.Parameter(distribute_tensor(w, tp, [Replicate()])) for w in began]
    plain = [nn.Parameter(w.clone()) for w in began]
    optimizers = [
        adam([(str(k), p) for k, p in enumerate(each)], **on)
        for each, on in ((whole, {"mesh": mesh, "data": "dp"}), (plain, {"process_set": pair}))
    ]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(4 * step + 2 * number + hvd.rank() // 2))
            spread = distribute_tensor(x, tp, [Replicate()])
            sum((p * spread).sum() for p in whole).full_tensor().backward()
            sum((p * x).sum() for p in plain).backward()
        for optimizer in optimizers:
            optimizer.step()
    reports = [optimizer.compression_report() for optimizer in optimizers]
    result: dict[str, Any] = {
        "same": all(torch.equal(p.to_local(), q) for p, q in zip(whole, plain, strict=True)),
        "again": [[report[key] for key in ("step", "skipped_steps", "redone_steps")] for report in reports],
    }
    before, outcomes = digest(p.to_local() for p in whole), []
    for step in range(2):
        for p in whole:
            p.grad = DTensor.from_local(torch.full((8, 4), 1.0 + hvd.rank()), tp, [Partial()])
        if step == 0 and hvd.rank() == 1:
            optimizers[0].skip()
        else:
            optimizers[0].step()
        outcomes.append([str(optimizers[0].outcome), digest(p.to_local() for p in whole) == before])
    result["outcomes"] = outcomes
    # A loss scale that is divided out between backward and step()
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ocomm").addHandler(handler)
    fresh = [nn.Parameter(distribute_tensor(w, tp, [Replicate()])) for w in began]
    optimizer = adam([(str(k), p) for k, p in enumerate(fresh)], mesh=mesh, data="dp")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in fresh).full_tensor() * (1 + hvd.rank() // 2)).backward()
        scaler.step(optimizer)
        scaler.update()
    logging.getLogger("ocomm").removeHandler(handler)
    result["scaled"] = [text for text in heard if "changed" in text]
    return result


@program
def shards() -> dict[str, Any]:
    """fully_shard over 2 x 1-bit Adam over 2, against the simulation of 1-bit Adam on each shard."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    from tests.oracle.onebit_adam import Simulation

    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    fsdp = mesh.get_local_rank("fsdp")
    pair = hvd.ProcessSet([fsdp, 2 + fsdp])
    began = [shard_of(p, fsdp, 2) for p in narrow().parameters()]
    job = Sharded(mesh)
    parameters, optimizer = job.parameters, job.optimizer
    history: list[list[list[Tensor]]] = []
    values, posted = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        job.backward(step)
        mine = [p.grad.to_local().clone() for p in parameters]
        both = [hvd.allgather(g.reshape(-1), name=f"g{step}.{k}", process_set=pair) for k, g in enumerate(mine)]
        history.append(
            [
                [part.view(g.shape) for part in g2.chunk(2)] if g.numel() else [g, g]
                for g, g2 in zip(mine, both, strict=True)
            ]
        )
        posted.append(optimizer._stepper.buckets.posted)
        optimizer.step()
        values.append([p.to_local().detach().clone() for p in parameters])
    twins = [nn.Parameter(p.clone()) for p in began]
    plain = torch.optim.Adam(twins, lr=1e-2)
    same = []
    for step in range(DENSE):
        for twin, grads in zip(twins, history[step], strict=True):
            twin.grad = (grads[0] + grads[1]) / 2
        plain.step()
        same.append(all(map(torch.equal, twins, values[step])))
    simulation = Simulation([p.numpy() for p in began], 2, freeze_step=DENSE, lr=1e-2, block_size=64)
    for index, twin in enumerate(twins):
        state = plain.state[twin]
        simulation.adopt(
            index,
            param=twin.detach().numpy(),
            momentum=state["exp_avg"].numpy(),
            variance=state["exp_avg_sq"].numpy(),
            step=DENSE,
        )
    simulation.end_warmup()
    for step in range(DENSE, STEPS):
        simulation.step([[grads[rank].numpy() for grads in history[step]] for rank in (0, 1)])
        same.append(all((a == b.numpy()).all() for a, b in zip(simulation.params, values[step], strict=True)))
    report = optimizer.compression_report()
    # Saved, loaded, and trained on.
    saved = copy.deepcopy([job.module.state_dict(), optimizer.state_dict(), optimizer.rank_state_dict()])
    others = [None] * 4
    dist.all_gather_object(others, saved[1])
    gone_on = job.train(range(STEPS, STEPS + 3))
    again = Sharded(mesh)
    again.module.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.optimizer.load_rank_state_dict(saved[2])
    resumed = again.train(range(STEPS, STEPS + 3))
    partial, whole = (nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh["fsdp"], [Replicate()])) for _ in range(2))
    for parameter, kind, share in ((partial, Partial(), 1.0), (whole, Replicate(), 2.0)):
        lion = hvd.DistributedLion(torch.optim.SGD([parameter], lr=0.1), mesh=mesh, data="dp")
        parameter.grad = DTensor.from_local(share * (torch.arange(15.0).view(5, 3) - 6.5), mesh["fsdp"], [kind])
        lion.step()
    low, clipped = Sharded(mesh, torch.bfloat16), Sharded(mesh)
    # An overflow on one shard of one replica
    scaler, before = torch.amp.GradScaler("cpu", init_scale=2.0), digest(p.to_local() for p in again.parameters)
    again.optimizer.zero_grad()
    again.backward(STEPS)
    if hvd.rank() == 1:
        again.parameters[0].grad.to_local()[0, 0] = float("inf")
    scaler.scale(torch.ones(1))
    scaler.step(again.optimizer)
    scaler.update()
    stayed = digest(p.to_local() for p in again.parameters) == before
    return {
        "overflow": [str(again.optimizer.outcome), scaler.get_scale(), stayed],
        "partial": torch.equal(partial.to_local(), whole.to_local()) and not bool((whole.to_local() == 1).any()),
        "resumed": resumed == gone_on,
        "of another part": said(lambda: again.optimizer.load_state_dict(others[hvd.rank() ^ 1])),
        "bfloat16": low.train(range(STEPS)),
        "bfloat16 redone": low.optimizer.compression_report()["redone_steps"],
        "clipped": clipped.train(range(STEPS), clip=0.05),
        "clipped redone": clipped.optimizer.compression_report()["redone_steps"],
        "same": same,
        "values": digest(values[-1]),
        "empty": [p.to_local().numel() == 0 for p in parameters],
        "redone": report["redone_steps"],
        "posted in backward": posted[-1],
        "compressed": report["compressed_steps"],
        "state": sum(report["memory_bytes"].values()) / sum(p.to_local().numel() for p in parameters),
    }


def diloco(named: list[tuple[str, Any]], **options: Any) -> Any:
    inner = torch.optim.AdamW([p for _, p in named], lr=1e-2)
    return hvd.DistributedDiLoCo(inner, named, sync_every=4, fragments=2, delay=1, mix=0.25, block_size=64, **options)


@program
def local() -> dict[str, Any]:
    """fully_shard over 2 x DiLoCo over 2, against DiLoCo of plain tensors with the gradients of each shard."""
    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    fsdp = mesh.get_local_rank("fsdp")
    job = Sharded(mesh, wrap=diloco)
    twins = [nn.Parameter(shard_of(p, fsdp, 2)) for p in narrow().parameters()]
    plain = diloco([(f"stage0.{k}", p) for k, p in enumerate(twins)], process_set=hvd.ProcessSet([fsdp, 2 + fsdp]))
    same = []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(step)
        for twin, p in zip(twins, job.parameters, strict=True):
            twin.grad = p.grad.to_local().clone()
        job.optimizer.step()
        plain.step()
        same.append(all(torch.equal(p.to_local(), twin) for p, twin in zip(job.parameters, twins, strict=True)))
    # Saved between two syncs, loaded, and trained on.
    job.train([STEPS])
    saved = copy.deepcopy([job.module.state_dict(), job.optimizer.state_dict(), job.optimizer.rank_state_dict()])
    others = [None] * 4
    dist.all_gather_object(others, saved[1]["ocomm"])
    gone_on = job.train(range(STEPS + 1, STEPS + 8))
    again = Sharded(mesh, wrap=diloco)
    again.module.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.optimizer.load_rank_state_dict(saved[2])
    resumed = again.train(range(STEPS + 1, STEPS + 8))
    # A NaN on one shard of one replica
    before = digest(p.to_local() for p in job.parameters)
    job.optimizer.zero_grad()
    job.backward(STEPS + 8)
    if hvd.rank() == 1:
        job.parameters[0].grad.to_local()[0, 0] = float("nan")
    job.optimizer.step()
    stayed = digest(p.to_local() for p in job.parameters) == before
    counted = job.optimizer.compression_report()["non_finite_steps"]
    job.train(range(STEPS + 9, STEPS + 12))
    other = {**saved[1], "ocomm": others[hvd.rank() ^ 1]}
    with job.optimizer.evaluation_parameters():
        anchors = digest(p.to_local() for p in job.parameters)
    job.optimizer.finish()
    return {
        "same": same,
        "resumed": resumed == gone_on,
        "stayed": [stayed, counted],
        "of another part": said(lambda: again.optimizer.load_state_dict(other)),
        "anchors": anchors,
        "finished": digest(p.to_local() for p in job.parameters),
        "lone": said(lambda: diloco(named(0, job.module))),
    }


@program
def offload() -> dict[str, Any]:
    """fully_shard over 2 x 1-bit Adam over 2, with and without parameters that torch keeps in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    found: dict[str, Any] = {}
    for name, options in {"plain": {}, "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}.items():
        torch.manual_seed(11)
        module = nn.Sequential(nn.Linear(256, 384), nn.Tanh(), nn.Linear(384, 256))
        count = sum(p.numel() for p in module.parameters())
        fully_sharded(module, mesh["fsdp"], **options)
        optimizer = adam(list(module.named_parameters()), mesh=mesh, data="dp", block_size=4096)
        digests = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
            module(x).square().mean().backward()
            optimizer.step()
            local: list[Any] = list(module.parameters())
            digests.append(digest(p.to_local() for p in local))
        report = optimizer.compression_report()
        found[name] = digests
        found["state"] = sum(report["memory_bytes"].values()) / count
        found["compressed"], found["redone"] = report["compressed_steps"], report["redone_steps"]
    return found


@program
def regrid() -> dict[str, Any]:
    """Dense states of fully_shard over 2 x DP2 in other grids: in the warm-up, after it, and with masters."""
    first = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    grids = [hvd.init_device_mesh({"dp": 4}), hvd.init_device_mesh({"dp": 1, "fsdp": 4}), first]
    found: dict[str, Any] = {"warm-up": [], "compressed": [], "bfloat16": []}

    def gap(mine: list[Tensor], others: list[Tensor]) -> float:
        return max(float(((a - b).abs() / (b.abs() + 1e-12)).max()) for a, b in zip(mine, others, strict=True))

    for what, kind, steps in (
        ("warm-up", torch.float32, DENSE - 2),
        ("compressed", torch.float32, DENSE + 3),
        ("bfloat16", torch.bfloat16, DENSE - 2),
    ):
        job = Sharded(first, kind)
        job.train(range(steps))
        path = job.save()
        moments = ("exp_avg", "step", "beta2") + (("master",) if what == "bfloat16" else ())
        before, variance = [*job.whole(), *job.whole(*moments)], job.whole("exp_avg_sq")
        others = [Sharded(mesh, kind) for mesh in grids]
        for other in others:
            other.load(path)
        loaded = [list(map(torch.equal, [*o.whole(), *o.whole(*moments)], before)) for o in others]
        gaps = [gap(o.whole("exp_avg_sq"), variance) for o in others]
        twin = job
        if what == "compressed":  # which has lost its errors, as the others have
            twin = Sharded(first)
            dcp.load({"model": twin.module.state_dict()}, checkpoint_id=path)
            twin.optimizer.load_state_dict(job.optimizer.state_dict())
            twin.optimizer.load_rank_state_dict(None)
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(path)
        for each in (twin, *others):
            each.train(range(steps, max(DENSE, steps + 1)))
        reports = [o.optimizer.compression_report() for o in others]
        found[what] = [
            {
                "loaded": all(same),
                "variance": of_variance,
                "gap": max(float((a - b).abs().max()) for a, b in zip(o.whole(), twin.whole(), strict=True)),
                "step": report["step"],
                "freeze": report["freeze_step"],
                "stage": report["stage"],
                "compressed": report["compressed_steps"],
            }
            for o, same, of_variance, report in zip(others, loaded, gaps, reports, strict=True)
        ]
    state = job.optimizer.dense_state_dict()
    name = next(iter(state["state"]))
    lion = hvd.DistributedZeroOneAdam(torch.optim.Adam(job.parameters), named(0, job.module), mesh=first, data="dp")
    narrower = {**state["state"], name: {**state["state"][name], "exp_avg": torch.zeros(3)}}
    found["wrong"] = [
        said(lambda: lion.load_dense_state_dict(state)),
        said(lambda: job.optimizer.load_dense_state_dict({**state, "state": {}})),
        said(lambda: job.optimizer.load_dense_state_dict({**state, "state": narrower})),
        said(lambda: job.optimizer.load_dense_state_dict(job.optimizer.state_dict())),
    ]
    return found


@program
def norms() -> dict[str, Any]:
    """PP2 x TP2 against one process: clipping, and the step at which the variance is frozen."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make() -> list[nn.Module]:
        torch.manual_seed(11)
        sizes = (WIDTH, 40), (40, WIDTH)
        return [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(*sizes[0]), nn.Tanh(), nn.Linear(*sizes[1])) for _ in range(2)
        ]

    def wrap(named: list[tuple[str, Any]], **options: Any) -> Any:
        inner = torch.optim.Adam([p for _, p in named], lr=1e-3, betas=(0.9, 0.8))
        return hvd.DistributedOneBitAdam(inner, named, max_grad_norm=0.3, backward_passes_per_step=MICRO, **options)

    mesh = hvd.init_device_mesh({"pp": 2, "dp": 1, "tp": 2})
    pp = mesh.get_local_rank("pp")
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    module = parallelize_module(make()[pp], mesh["tp"], plan)
    stage = PipelineStage(module, pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda a, b: F.mse_loss(a, b) / MICRO, scale_grads=False)
    optimizer = wrap(named(pp, module), mesh=mesh, data="dp")
    both = make()
    alone = wrap([*named(0, both[0]), *named(1, both[1])], process_set=hvd.ProcessSet([hvd.rank()]))
    found: list[list[float]] = []
    for step in range(20):
        optimizer.zero_grad()
        alone.zero_grad()
        x, y = data(step, 0)
        schedule.step(*([x] if pp == 0 else []), **({} if pp == 0 else {"target": y}))
        optimizer.step()
        micro_step(both, step, 0)
        expected = sum(p.grad.double().square().sum() for m in both for p in m.parameters()).sqrt().item()
        alone.step()
        found.append([optimizer._driver.stepper.norm, expected])
    frozen = [each.compression_report()["freeze_step"] for each in (optimizer, alone)]
    gaps = [abs(a - b) / b for a, b in found[: frozen[1] + 1]]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return {
        "freeze": frozen,
        "gap": max(gaps),
        "steps": len(gaps),
        "counted": optimizer.grid.counted,
        "shared": digest(local[k] for k in (0, 1, 5)),  # of the norm, and the bias after the rows
    }


@program
def mistakes() -> dict[str, str]:
    """What cannot be right, on four ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 2})
    linear = functools.partial(nn.Linear, WIDTH, 8)
    plain = list(linear().named_parameters())
    lone = list(fully_sharded(nn.Sequential(linear(bias=False)), mesh["fsdp"]).named_parameters())
    both = list(fully_shard(linear(), mesh=mesh).named_parameters())
    ours = list(fully_shard(linear(), mesh=mesh["dp"]).named_parameters())
    on = {"mesh": mesh, "data": "dp"}
    dense = torch.optim.SGD([p for _, p in plain])
    return {
        "dense lone": said(lambda: hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in lone]), lone)),
        "dense HSDP": said(lambda: hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in both]), both, **on)),
        "adasum": said(lambda: hvd.DistributedOptimizer(dense, plain, op=hvd.Adasum, **on)),
        "size": said(lambda: hvd.init_device_mesh({"pp": 3, "dp": 2})),
        "part": said(lambda: adam(plain, mesh=mesh["dp"], data="dp")),
        "lone": said(lambda: adam(lone)),
        "HSDP": said(lambda: adam(both, **on)),
        "on data": said(lambda: adam(ours, **on)),
        "LAMB": said(lambda: adam(lone, hvd.DistributedOneBitLamb, **on)),
    }


def main(*names: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in names:
        said = json.dumps(PROGRAMS[name]())
        print(f"[{name} {hvd.rank()}] {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
