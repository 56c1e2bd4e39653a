"""Lightning with 1-bit Adam on scikit-learn's handwritten digits.

    ocommrun -np 2 python examples/torch_lightning.py       # or mpirun, or torchrun with ocomm[mpich]
    python examples/torch_lightning.py                      # Lightning starts the second process; with ocomm[mpich]

A script that trains with Lightning's strategy "ddp" needs the import and the strategy, nothing else.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ocomm_torch.lightning import OcommStrategy


class Digits(pl.LightningModule):
    """A network of one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2, help="ranks per host")
    parser.add_argument("--optimizer", default="onebit_adam")
    args = parser.parse_args()
    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(data, [1500, len(labels) - 1500])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=OcommStrategy(args.optimizer),
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(train, 24, shuffle=True), DataLoader(test, 24))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.4f}", flush=True)


if __name__ == "__main__":
    main()
