"""Trains a small network with one trainer and one optimizer on all ranks, and says what came of it.

    train_combination.py FOLDER TRAINER OPTIMIZER [HOW]

Each rank writes a JSON file into the folder: the error with which it ended; or ocomm's warnings, and whether its
parameters have the bits of the optimizer without a trainer, on the batches that this rank has trained on.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ocomm_torch as hvd

EPOCHS, STEPS = 2, 22
#: What wraps, what is wrapped, and options.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "onebit_adam": (hvd.DistributedOneBitAdam, torch.optim.Adam, {"freeze_step": 3}),
    "onebit_lamb": (hvd.DistributedOneBitLamb, torch.optim.Adam, {"freeze_step": 3}),
    "zero_one_adam": (hvd.DistributedZeroOneAdam, torch.optim.Adam, {"total_steps": STEPS}),
    "birder": (hvd.DistributedBirder, torch.optim.SGD, {}),
    "softsign_sgd": (hvd.DistributedSoftSignSGD, torch.optim.SGD, {}),
    "lion": (hvd.DistributedLion, torch.optim.SGD, {}),
    "ef_sgd": (hvd.DistributedEFSGD, torch.optim.SGD, {}),
    "dense": (hvd.DistributedOptimizer, torch.optim.Adam, {}),
    "diloco": (hvd.DistributedDiLoCo, torch.optim.Adam, {"sync_every": 4}),
}


class Net(nn.Module):
    """Says whether the sum of its inputs is positive. Keeps the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append((x.clone(), labels.clone()))
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def dataset() -> TensorDataset:
    inputs = torch.randn(352, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def inner(net: nn.Module, name: str) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = OPTIMIZERS[name][1](net.parameters(), lr=1e-2)
    return made


def wrapped(net: nn.Module, name: str, **more: Any) -> Any:
    wrap, _, options = OPTIMIZERS[name]
    return wrap(inner(net, name), net.named_parameters(), **options, **more)


def loop(call: nn.Module, optimizer: Any, before_step: Callable[[], object] = lambda: None) -> None:
    """Trains by hand, each rank on its part of the data."""
    sampler = DistributedSampler(dataset(), hvd.size(), hvd.rank(), shuffle=False)
    loader = DataLoader(dataset(), 16, sampler=sampler)
    for x, y in itertools.chain(loader, loader):
        optimizer.zero_grad()
        call(x, y)["loss"].backward()
        before_step()
        optimizer.step()


# Trainers: each trains the network, or raises.


def lightning(net: Net, name: str, how: str) -> None:
    import lightning.pytorch as pl

    from ocomm_torch.lightning import OcommStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.net(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            hvd.init()
            return wrapped(net, name) if how else inner(net, name)

    wrap, _, options = OPTIMIZERS[name]
    strategies = {
        "": lambda: OcommStrategy(wrap if name == "diloco" else name, **options),
        "wrapped already": lambda: OcommStrategy(name, **options),
        'strategy="ddp"': lambda: "ddp",
        "devices=1": lambda: "auto",
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if how == "devices=1" else 2,
        strategy=strategies[how](),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(dataset(), 16))


def transformers(net: Net, name: str, how: str) -> None:
    from transformers import Trainer, TrainingArguments

    from ocomm_torch.transformers import OcommCallback

    if how != "no init_process_group":
        dist.init_process_group("ocomm", init_method="ocomm://")
    arguments = TrainingArguments(
        sys.argv[1],
        use_cpu=True,
        per_device_train_batch_size=16,
        num_train_epochs=EPOCHS,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **({"fsdp": "full_shard"} if how == "fsdp" else {}),
    )
    given = wrapped(net, name) if how == "no OcommCallback" else inner(net, name)
    data = [{"x": x, "labels": y} for x, y in dataset()]
    trainer = Trainer(net, arguments, train_dataset=data, optimizers=(given, None))
    if how != "no OcommCallback":
        wrap, _, options = OPTIMIZERS[name]
        OcommCallback(trainer, wrap if name == "diloco" else name, **options)
    trainer.train()


def accelerate(net: Net, name: str, how: str) -> None:
    from accelerate import Accelerator

    if how != "no init()":
        hvd.init()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(net, wrapped(net, name), DataLoader(dataset(), 16))
    if how != "no hook":
        model.register_comm_hook(optimizer, hvd.optimizer_hook)
    for x, y in itertools.chain(loader, loader):
        accelerator.backward(model(x, y)["loss"])
        if how == "clip_grad_norm_":
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def ddp(net: Net, name: str, how: str) -> None:
    dist.init_process_group("gloo" if how == "gloo" else "ocomm", init_method=None if how == "gloo" else "ocomm://")
    hvd.init()
    optimizer = wrapped(net, name)
    model = DistributedDataParallel(net)
    if how != "no hook":
        model.register_comm_hook(optimizer, hvd.optimizer_hook)

    def clip() -> None:
        if how == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    loop(model, optimizer, clip)


def fsdp2(net: Net, name: str, how: str) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not how:
        dist.init_process_group("ocomm", init_method="ocomm://")
        fully_shard(net)
        loop(net, wrapped(net, name))
        return
    mesh = hvd.init_device_mesh({"dp": 2, "fsdp": 1})
    fully_shard(net, mesh=mesh["fsdp"])
    if how == "mesh":
        loop(net, wrapped(net, name, mesh=mesh, data="dp"))
        return
    assert isinstance(net, FSDPModule)
    net.set_all_reduce_hook(hvd.across_hook(mesh=mesh, data="dp"))
    loop(net, inner(net, name))


def fsdp1(net: Net, name: str, how: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("ocomm", init_method="ocomm://")
    model = FullyShardedDataParallel(net, use_orig_params=how == "use_orig_params", device_id=torch.device("cpu"))
    loop(model, wrapped(model, name))


def zero(net: Net, name: str, how: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("ocomm", init_method="ocomm://")
    wrap, kind, options = OPTIMIZERS[name]
    if how == "inside":
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), lambda p, **kwargs: wrap(kind(p, lr=1e-2), None, **options), lr=1e-2
        )
    else:
        optimizer = wrap(ZeroRedundancyOptimizer(net.parameters(), kind, lr=1e-2), net.named_parameters(), **options)
    loop(net, optimizer)


TRAINERS: dict[str, Callable[[Net, str, str], None]] = {
    "Lightning": lightning,
    "Trainer": transformers,
    "Accelerate": accelerate,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    "ZeRO": zero,
}


class Heard(logging.Handler):
    """Keeps ocomm's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def whole(parameter: Tensor) -> Tensor:
    return getattr(parameter, "full_tensor", lambda: parameter)().detach()


def main() -> None:
    """Trains, trains again without the trainer, and writes the result."""
    folder, trainer, name = sys.argv[1:4]
    how = sys.argv[4] if len(sys.argv) > 4 else ""
    torch.set_num_threads(1)
    heard = Heard()
    logging.getLogger("ocomm").addHandler(heard)
    net = Net()
    start = copy.deepcopy(net.state_dict())
    write = functools.partial(Path.write_text, Path(folder) / f"rank of process {os.getpid()}")
    try:
        TRAINERS[trainer](net, name, how)
    except Exception as error:
        write(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    seen, warned = list(net.seen), list(heard.said)
    alone = Net()
    alone.load_state_dict(start)
    optimizer = wrapped(alone, name)
    for x, y in seen:
        optimizer.zero_grad()
        alone(x, y)["loss"].backward()
        optimizer.step()
    same = all(map(torch.equal, map(whole, net.parameters()), alone.parameters()))
    write(json.dumps({"error": "", "warned": warned, "same": same, "steps": len(seen), "size": hvd.size()}))


if __name__ == "__main__":
    main()
