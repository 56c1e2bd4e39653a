"""A rank that trains a model of more than 10 M parameters with 1-bit Adam and counts what its steps send.

Started by ``test_wire_bytes.py`` on the hosts of a lab: python train_counting_bytes.py FILE [SHARDS]. With SHARDS torch
divides the model among that many ranks, those of a host, by ``fully_shard``. Rank 0 writes to FILE, as JSON, lists over
ranks of mean bytes per compressed step: of the engine, of what the optimizer says has gone to other nodes, of the
interface, of frames on the cable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ocomm import bootstrap
from ocomm import session as sessions
from ocomm.bench._lab import interface_sent_bytes
from ocomm.types import ReduceOp
from ocomm_torch.mesh import init_device_mesh
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam

WARMUP, COUNTED = 2, 5
BLOCK_SIZE = 4096


def formula(model: torch.nn.Module, nodes: int) -> float:
    """2 (N-1)/N times the sum over blocks of ceil(length / 8) + 4, from the shapes alone: what leaves a node."""
    total = 0
    for parameter in model.parameters():
        full, rest = divmod(parameter.numel(), BLOCK_SIZE)
        total += full * (BLOCK_SIZE // 8 + 4) + (-(-rest // 8) + 4 if rest else 0)
    return 2 * (nodes - 1) / nodes * total


def counts(optimizer: DistributedOneBitAdam) -> np.ndarray:
    """Bytes sent so far: by the engine, by the optimizer to other nodes, by the interface, and as frames of at most
    1514 bytes (the shaper's count)."""
    engine = sessions.current().engine
    assert engine is not None
    asked = ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"]
    shaper = json.loads(subprocess.run(asked, capture_output=True, check=True, timeout=10).stdout)[0]
    interface = interface_sent_bytes(Path("/proc/self/net/dev").read_text())
    across = optimizer.compression_report()["bytes_sent"]
    return np.array([engine.counters()["bytes_sent"], across, interface, shaper["bytes"]], np.float64)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bootstrap.initialize()
    session = sessions.current()
    topology = session.require_topology()
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2048, 2048), torch.nn.ReLU()),
        *(torch.nn.Linear(2048, 2048), torch.nn.ReLU()),
        torch.nn.Linear(2048, 1001),
    )
    grid: dict[str, Any] = {}
    if len(sys.argv) > 2:
        from torch.distributed.fsdp import fully_shard

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        shards = int(sys.argv[2])
        grid = {"mesh": init_device_mesh({"dp": topology.size // shards, "fsdp": shards}), "data": "dp"}
        fully_shard(model, mesh=grid["mesh"]["fsdp"])
    optimizer = DistributedOneBitAdam(
        torch.optim.Adam(model.parameters(), lr=1e-4),
        named_parameters=model.named_parameters(),
        freeze_step=WARMUP,
        block_size=BLOCK_SIZE,
        **grid,
    )
    generator = torch.Generator().manual_seed(1 + topology.rank)

    def step() -> None:
        optimizer.zero_grad()
        inputs = torch.randn(4, 2048, generator=generator)
        torch.nn.functional.cross_entropy(model(inputs), torch.arange(4)).backward()
        optimizer.step()

    def barrier() -> None:
        session.reduce(0, "barrier", np.zeros(1, np.float32), ReduceOp.SUM)

    for _ in range(WARMUP + 1):  # and the first compressed step, after which buffers and plans are in place
        step()
    barrier()
    before = counts(optimizer)
    for _ in range(COUNTED):
        step()
    barrier()
    table = np.zeros((topology.size, 4))
    table[topology.rank] = (counts(optimizer) - before) / COUNTED
    session.reduce(0, "table", table, ReduceOp.SUM)
    if topology.rank == 0:
        engine, across, interface, frames = table.T.tolist()
        report = optimizer.compression_report()
        result = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "stage": report["stage"],
            "form": report["form"],
            "formula": formula(model, len(set(topology.hosts))),
            "engine": engine,
            "across": across,
            "interface": interface,
            "frames": frames,
        }
        Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
