"""Trains a small network for 30 steps on all ranks, however they were started; rank 0 writes the parameters' sha256.

    train_anywhere.py FILE [kill RANK STEP]

With ``kill`` that rank is killed in that step, once, however often the job is started again.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn

import ocomm_torch as hvd


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's data: a function of its number."""
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(30, 16, 20, generator=generator)
    return [(x, (x.sum(1) > 0).long()) for x in inputs]


def main() -> None:
    """Trains, and writes the result."""
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = hvd.DistributedOneBitAdam(
        torch.optim.Adam(model.parameters(), lr=1e-2), named_parameters=model.named_parameters(), freeze_step=5
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    killed = f"{sys.argv[1]}.killed"
    kill = [int(word) for word in sys.argv[3:]] if sys.argv[2:3] == ["kill"] else [-1, -1]
    for step, (x, y) in enumerate(batches(hvd.rank())):
        if [hvd.rank(), step] == kill and not os.path.exists(killed):
            open(killed, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests = hvd.allgather_object(digest.hexdigest())
    assert len(set(digests)) == 1, digests
    if hvd.rank() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(f"{hvd.size()} {digests[0]}")


if __name__ == "__main__":
    main()
