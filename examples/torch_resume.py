"""Trains on scikit-learn's handwritten digits with 1-bit Adam, saves every few steps, and goes on where it was.

    ocommrun -np 2 python examples/torch_resume.py --checkpoints /tmp/digits
    ocommrun -np 2 python examples/torch_resume.py --checkpoints /tmp/digits      # after a stop, wanted or not
    ocommrun -np 4 python examples/torch_resume.py --checkpoints /tmp/digits      # on another number of ranks

On as many ranks as before the losses are those of a run that was never stopped, in every bit. On others they lie beside
them. All ranks must see the folder. ``--optimizer`` takes any optimizer of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ocomm_torch as hvd

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[nn.Module, int], Optimizer]] = {
    "onebit": lambda model, steps: hvd.DistributedOneBitAdam(
        torch.optim.Adam(model.parameters(), lr=2e-3), model.named_parameters(), freeze_step=max(1, steps // 5)
    ),
    "zeroone": lambda model, steps: hvd.DistributedZeroOneAdam(
        torch.optim.Adam(model.parameters(), lr=2e-3),
        model.named_parameters(),
        local_step_start=steps // 4,
        local_step_doubling=max(1, steps // 4),
        local_step_clip=4,
    ),
    "birder": lambda model, steps: hvd.DistributedBirder(
        torch.optim.SGD(model.parameters(), lr=5e-4), model.named_parameters(), beta=0.9
    ),
    "softsign": lambda model, steps: hvd.DistributedSoftSignSGD(
        torch.optim.SGD(model.parameters(), lr=5e-4), model.named_parameters(), beta=0.9
    ),
}
BATCH = 48  # of all ranks together: the same samples in each step, on however many ranks


def save(folder: Path, step: int, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Writes a checkpoint of all ranks beside the last one; ``latest`` names it once it is whole."""
    place = folder / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.rank_state_dict(), place / f"rank{hvd.rank()}.pt")
    if hvd.rank() == 0:
        common = {"step": step, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({k: v if k == "step" else v.state_dict() for k, v in common.items()}, place / "common.pt")
    hvd.barrier()
    if hvd.rank() == 0:
        (folder / "latest.new").write_text(place.name)
        os.replace(folder / "latest.new", folder / "latest")
        for old in folder.glob("step-*"):
            if old != place:
                shutil.rmtree(old)


def load(folder: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> int:
    """Goes back to the last checkpoint; the step that it was saved after, 0 without any."""
    if not (folder / "latest").exists():
        return 0
    place = folder / (folder / "latest").read_text()
    common = torch.load(place / "common.pt", weights_only=True)
    model.load_state_dict(common["model"])
    optimizer.load_state_dict(common["optimizer"])
    scheduler.load_state_dict(common["scheduler"])
    done = optimizer.load_rank_state_dict(place / "rank{rank}.pt")
    if hvd.rank() == 0:
        print(f"goes on after step {done['step']}: errors {done['rank_state']} {done['why']}".strip(), flush=True)
    return common["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all ranks see")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="onebit")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    if BATCH % hvd.size():
        raise SystemExit(f"{hvd.size()} ranks cannot share batches of {BATCH}")

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = OPTIMIZERS[args.optimizer](model, args.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for step in range(load(args.checkpoints, model, optimizer, scheduler) + 1, args.steps + 1):
        chosen = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
        mine = chosen[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {step}: loss {mean.item():.9g}", flush=True)
        if step % args.every == 0 or step == args.steps:
            save(args.checkpoints, step, model, optimizer, scheduler)

    held = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    equal = len(set(hvd.allgather_object(held))) == 1
    if hvd.rank() == 0:
        where = f"parameters of all {hvd.size()} ranks"
        if equal:
            print(f"{where} are equal, sha256 {held[:16]}", flush=True)
        elif optimizer.compression_report().get("synced", True):
            print(f"{where}: THEY DIFFER", flush=True)
        else:
            print(f"{where} will be equal after the next sync", flush=True)


if __name__ == "__main__":
    main()
