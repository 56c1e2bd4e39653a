"""A training of PyTorch Ignite with its backend "horovod", as its documentation has it. Arguments: a folder, and
"spawn" if Ignite is to start the ranks. Each rank writes what it has learnt to a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy


def train(local_rank: int, folder: str) -> None:
    rank = idist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = idist.auto_dataloader(data, batch_size=32, shuffle=True)
    model = idist.auto_model(torch.nn.Linear(8, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy).run(loader, max_epochs=3)
    evaluated = create_supervised_evaluator(model, {"accuracy": Accuracy()}).run(loader)
    mine = torch.tensor([rank + 1.0])
    learnt = {
        "model": idist.model_name(),
        "ranks": [idist.get_world_size(), idist.get_nproc_per_node(), idist.get_nnodes()],
        "accuracy": evaluated.metrics["accuracy"],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "reduced": {op: idist.all_reduce(mine, op).item() for op in ("SUM", "AVERAGE", "MIN", "MAX", "PRODUCT")},
        "gathered": [idist.all_gather(mine).tolist(), idist.all_gather(f"rank {rank}")],
        "broadcast": [idist.broadcast(mine, 1).item(), idist.broadcast("from 0" if rank == 0 else "", 0)],
        "group": [idist.all_gather(mine, group=group).tolist() for group in map(idist.new_group, ([0], [1]))][rank],
    }
    idist.barrier()
    (Path(folder) / f"rank-{rank}").write_text(json.dumps(learnt))


if __name__ == "__main__":
    with idist.Parallel(backend="horovod", nproc_per_node=2 if "spawn" in sys.argv else None) as parallel:
        parallel.run(train, sys.argv[1])
