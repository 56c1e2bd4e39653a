"""Trains on scikit-learn's handwritten digits; the ranks meet once in 20 steps, and send 1 bit per parameter then.

ocommrun -np 2 python examples/torch_diloco.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ocomm_torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sync-every", type=int, default=20, help="steps from one sync to the next")
    parser.add_argument("--bits", type=int, choices=(32, 8, 4, 1), default=1, help="bits per parameter of a sync")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = hvd.DistributedDiLoCo(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        model.named_parameters(),
        sync_every=args.sync_every,
        bits=args.bits,
        named_buffers=model.named_buffers(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    draw = torch.Generator().manual_seed(hvd.rank())
    for _ in range(args.steps):
        mine = torch.randint(300, len(labels), (24,), generator=draw)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    optimizer.finish()

    model.eval()
    accuracy = (model(images[:300]).argmax(1) == labels[:300]).float().mean().item()
    hvd.check_replicas(model.parameters())
    if hvd.rank() == 0:
        report = optimizer.compression_report()
        print(f"test accuracy {100 * accuracy:.1f} %; the parameters of all {hvd.size()} ranks are equal bit for bit")
        fewer = report["ratio"] or 1.0  # None for a rank that is alone
        print(f"{report['step']} steps, {report['syncs']} syncs: {fewer:.0f} times fewer bytes than dense steps")


if __name__ == "__main__":
    main()
