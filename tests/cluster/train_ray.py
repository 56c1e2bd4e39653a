"""The loop of ``train_anywhere`` in two workers of Ray's; rank 0 writes the sha256 of the parameters.

    train_ray.py FOLDER

FOLDER/trainer is of Ray Train, which makes torch.distributed's group before the loop; FOLDER/tasks is of plain tasks,
which have no group and pass a store to ``init()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ocomm.runtime.own_address import free_port
from tests.cluster import train_anywhere


def train(config: dict[str, Any]) -> None:
    """Trains in a worker of Ray Train."""
    sys.argv = ["train_anywhere.py", config["file"]]
    train_anywhere.main()


def train_in_task(rank: int, port: int, file: str) -> None:
    """Trains in a task."""
    import torch.distributed as dist

    import ocomm_torch as hvd

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    hvd.init(store=dist.TCPStore("127.0.0.1", port, 2, rank == 0))
    sys.argv = ["train_anywhere.py", file]
    train_anywhere.main()
    hvd.shutdown()


def main() -> None:
    """Starts Ray on this machine, and the workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False)
    task = ray.remote(num_cpus=1, max_calls=1)(train_in_task)
    port = free_port()
    ray.get([task.remote(rank, port, str(folder / "tasks")) for rank in range(2)])
    TorchTrainer(
        train,
        train_loop_config={"file": str(folder / "trainer")},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
