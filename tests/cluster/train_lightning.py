"""A LightningModule, trained on two ranks however they are started; each rank writes its parameters' sha256.

train_lightning.py FOLDER [ocomm] [--crash RANK]
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ocomm_torch.lightning import OcommStrategy


class Net(pl.LightningModule):
    """Says whether the sum of its inputs is positive."""

    def __init__(self, crashes_on: int) -> None:
        super().__init__()
        self.crashes_on = crashes_on
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.global_step == 5 and self.global_rank == self.crashes_on:
            raise RuntimeError("a sample that cannot be read")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Trains, and writes the result."""
    torch.set_num_threads(1)
    pl.seed_everything(0)
    inputs = torch.randn(256, 20)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    net = Net(int(sys.argv[-1]) if "--crash" in sys.argv else -1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ocomm" if "ocomm" in sys.argv else OcommStrategy("onebit_adam"),
        max_epochs=3,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(net, DataLoader(data, 16, shuffle=True), DataLoader(data, 16))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    said = f"{trainer.world_size} {trainer.global_step} {digest} {trainer.callback_metrics['loss'].item()}"
    (Path(sys.argv[1]) / f"rank{trainer.global_rank}").write_text(said)


if __name__ == "__main__":
    main()
