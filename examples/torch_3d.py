"""A small GPT on a grid of ranks: pipeline stages, shards and tensor parallelism of torch, 1-bit Adam between replicas.

    ocommrun -np 4 python examples/torch_3d.py --grid pp=2,dp=2
    ocommrun -np 8 python examples/torch_3d.py --grid pp=2,dp=2,tp=2
    ocommrun -np 4 python examples/torch_3d.py --grid dp=2,fsdp=2

It learns to write Python's own source, byte by byte. ``pp=2,dp=2`` has the parameters of ``dp=2``, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import ocomm_torch as hvd

AXES = ("pp", "dp", "fsdp", "tp")
CONTEXT, BATCH, MICROBATCHES, HEADS = 32, 8, 4, 4


class Block(nn.Module):
    """A layer of a transformer. ``heads`` are those of this rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = HEADS
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Ends(nn.Module):
    """Token and place to a vector at the start, a vector to the next token at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.place(torch.arange(x.shape[1]))


def make_layers(options: argparse.Namespace) -> dict[str, nn.Module]:
    """All layers of the model by name, the same on all ranks."""
    torch.manual_seed(options.seed)
    layers: dict[str, nn.Module] = {"start": Ends(options.width)}
    layers |= {f"block{number}": Block(options.width) for number in range(options.layers)}
    return layers | {"end": nn.Linear(options.width, 256)}


def make_stage(options: argparse.Namespace, mesh: Any) -> nn.Sequential:
    """This rank's layers, and of these its parts."""
    stages, stage = mesh.size(AXES.index("pp")), mesh.get_local_rank("pp")
    layers = list(make_layers(options).items())
    # The start and the end are cheap, so stages have equally many blocks.
    bounds = [0, *(1 + options.layers * k // stages for k in range(1, stages)), len(layers)]
    module = nn.Sequential()
    for name, layer in layers[bounds[stage] : bounds[stage + 1]]:
        module.add_module(name, layer)
    blocks = [layer for layer in module if isinstance(layer, Block)]
    if (tp := mesh["tp"]).size() > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in blocks:
            block.heads = HEADS // tp.size()
            plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(
                ("out", "down"), RowwiseParallel()
            )
            parallelize_module(block, tp, plan)
    if (fsdp := mesh["fsdp"]).size() > 1:
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block, mesh=fsdp)
        fully_shard(module, mesh=fsdp)
    return module


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICROBATCHES


def text() -> Tensor:
    """The bytes of a module that comes with Python."""
    return torch.frombuffer(bytearray(Path(tarfile.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(data: Tensor, step: int, replica: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1_000_003 * step + replica)
    first = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
    rows = torch.stack([data[k : k + CONTEXT + 1] for k in first.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(options: argparse.Namespace, mesh: Any) -> tuple[nn.Module, Any, float | None]:
    """Returns this rank's layers, their optimizer, and the mean loss of the last steps where this is the last stage."""
    module = make_stage(options, mesh)
    named = list(module.named_parameters())
    optimizer = hvd.DistributedOneBitAdam(
        torch.optim.Adam([p for _, p in named], lr=options.lr),
        named,
        mesh=mesh,
        data="dp",
        freeze_step=options.freeze_step,
        backward_passes_per_step=MICROBATCHES,
        max_grad_norm=options.max_grad_norm,
    )
    stages, stage = mesh.size(AXES.index("pp")), mesh.get_local_rank("pp")
    schedule: Any = None
    if stages > 1:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        part = PipelineStage(module, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        # Gradients that were scaled after backward would have to be exchanged once more.
        schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    replica = mesh.get_local_rank("dp") * mesh["fsdp"].size() + mesh.get_local_rank("fsdp")
    data, recent = text(), []
    with tqdm(range(options.steps), unit="step", disable=hvd.rank() > 0, mininterval=1) as bar:
        for step in bar:
            optimizer.zero_grad()
            x, y = batch(data, step, replica, options.seed)
            losses: list[Tensor] = []
            if schedule is None:
                for inputs, targets in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                    losses.append(loss_of(module(inputs), targets))
                    losses[-1].backward()
            else:
                schedule.step(*([x] if stage == 0 else []),
                              **({"target": y, "losses": losses} if stage == stages - 1 else {}))  # fmt: skip
            optimizer.step()
            if losses:
                recent = [*recent[-19:], sum(loss.item() for loss in losses)]
    return module, optimizer, sum(recent) / len(recent) if recent else None


def report(mesh: Any, module: nn.Module, optimizer: Any, loss: float | None, steps: int) -> None:
    """Prints a row for each rank, and a hash of all parameters of a replica."""
    local = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in module.named_parameters()}
    said = optimizer.compression_report()
    sizes = dict(zip(AXES, mesh.mesh.shape, strict=True))
    place = " ".join(f"{axis}={mesh.get_local_rank(axis)}" for axis in AXES if sizes[axis] > 1)
    hashes = {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in local.items()}
    mine = {
        "rank": hvd.rank(),
        "place": place or "alone",
        "parameters": sum(p.numel() for p in local.values()),
        "state, MB": f"{sum(said['memory_bytes'].values()) / 1e6:.2f}",
        "sent per step, kB": f"{said['bytes_sent'] / steps / 1e3:.1f}",
        "last step, kB": f"{said['last_bytes_sent'] / 1e3:.1f}",
        "loss": "" if loss is None else f"{loss:.3f}",
    }
    found = hvd.allgather_object((mine, mesh.get_local_rank("dp"), hashes))
    if hvd.rank():
        return
    print(tabulate([row for row, _, _ in found], "keys", disable_numparse=True))
    replicas: dict[int, list[str]] = {}
    for _, replica, hashes in found:
        replicas.setdefault(replica, []).extend(f"{name} {value}" for name, value in hashes.items())
    digests = {hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] for lines in replicas.values()}
    equal = "equal bit for bit" if len(digests) == 1 else "DIFFERENT"
    print(f"\nThe parameters of {len(replicas)} replica(s) are {equal}, sha256 {' '.join(sorted(digests))}")


def grid(text: str) -> dict[str, int]:
    """The sizes of all axes from "pp=2,dp=2"."""
    try:
        chosen = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write pp=2,dp=2, for instance") from None
    if unknown := sorted(set(chosen) - set(AXES)):
        raise argparse.ArgumentTypeError(f"unknown axis {unknown[0]!r}; there are {', '.join(AXES)}")
    return {name: chosen.get(name, 1) for name in AXES}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT on a grid of ranks.")
    parser.add_argument("--grid", type=grid, default="dp=1", help="sizes of axes, of pp, dp, fsdp and tp: pp=2,dp=2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--freeze-step", type=int, help="number of dense steps; a fifth of all if not given")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-grad-norm", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.freeze_step = options.freeze_step or max(1, options.steps // 5)
    if options.layers < options.grid["pp"]:
        parser.error(f"--layers {options.layers} are too few for {options.grid['pp']} stages")
    if HEADS % options.grid["tp"]:
        parser.error(f"the {HEADS} heads cannot be divided among tp={options.grid['tp']} ranks")
    return options


def main() -> int:
    options = parse()
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    mesh = hvd.init_device_mesh(options.grid, device_type="cpu")
    module, optimizer, loss = train(options, mesh)
    report(mesh, module, optimizer, loss, options.steps)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
