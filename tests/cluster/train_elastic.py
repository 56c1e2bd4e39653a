"""An elastic training to which something is done (see chaos_elastic.py): python train_elastic.py FOLDER STEPS.

What a rank does and says is in files of FOLDER: ``pid-R``, ``doing-R`` (generation and step) and, at the end, ``end-R``
(number of ranks, generation, the commit that it began with, digest of its parameters). The data depends on the step and
the sample alone, and every step checks a sum.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch

import ocomm_torch as hvd

WIDTH, BATCH, COMMIT_EVERY = 192, 48, 5


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    generation = int(os.environ["OCOMM_ELASTIC_GENERATION"])
    # Hosts of a lab have one file system: here each has a disk of its own.
    os.environ["OCOMM_ELASTIC_FOLDER"] += "/" + os.uname().nodename
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    me, size = hvd.rank(), hvd.size()
    (folder / f"pid-{me}").write_text(str(os.getpid()))
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = hvd.DistributedOneBitAdam(
        torch.optim.Adam(model.parameters(), lr=1e-4), model.named_parameters(), freeze_step=steps // 5
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < steps:
            beside = folder / f"doing-{me}.new"
            beside.write_text(f"{generation} {state.step}")
            beside.replace(folder / f"doing-{me}")
            inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(state.step))
            optimizer.zero_grad()
            model(inputs[me::size]).square().mean().backward()
            optimizer.step()
            total = hvd.allreduce(torch.full((1000,), me + 1.0), name="sum", op=hvd.Sum)
            assert bool((total == size * (size + 1) / 2).all()), total
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)
    held = hashlib.sha256()
    for parameter in model.parameters():
        held.update(parameter.detach().numpy().tobytes())
    digests = hvd.allgather_object(held.hexdigest())
    assert len(set(digests)) == 1, digests
    commit = state.resumed["commit"] if state.resumed else 0
    (folder / f"end-{me}").write_text(f"{size} {generation} {commit} {digests[0]}")


if __name__ == "__main__":
    main()
