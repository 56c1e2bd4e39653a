"""Trains a model of a million parameters with DistributedAuto; rank 0 writes what all ranks have chosen.

train_auto.py RESULT
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import ocomm_torch as hvd

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(500, 1500), torch.nn.ReLU(), torch.nn.Linear(1500, 200))
inner = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedAuto(inner, model.named_parameters(), total_steps=200, max_loss_gap=1.0)
first = optimizer.method.name
torch.manual_seed(hvd.rank())
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(32, 500)).square().mean().backward()
    optimizer.step()
optimizer.finish()
while not optimizer.compression_report().get("synced", True):  # 0/1 Adam, between two syncs
    optimizer.zero_grad()
    model(torch.randn(32, 500)).square().mean().backward()
    optimizer.step()
place = optimizer._place
found = {
    "first": first,
    "method": optimizer.method.name,
    "decision": optimizer.decision,
    "rate": place.network.rate,
    "parameters": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
}
everyone = hvd.allgather_object(found)
if hvd.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(everyone))
hvd.shutdown()
