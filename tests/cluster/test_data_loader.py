"""Forked DataLoader workers live beside the background thread, know the rank, and never talk for it."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import run_job

SCRIPT = """
import torch
import ocomm_torch as hvd

hvd.init()
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)

class Mine(torch.utils.data.IterableDataset):
    def __iter__(self):  # in a worker, which shares the data out by itself
        return iter(range(hvd.rank() if hvd.is_initialized() else -1, 8, hvd.size()))

mine = torch.cat(list(torch.utils.data.DataLoader(Mine(), batch_size=4, num_workers=1)))
assert mine.tolist() == [*range(hvd.rank(), 8, hvd.size())], mine
model = torch.nn.Linear(10, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(model.parameters()), freeze_step=4)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
everyone = hvd.allgather(model.weight.detach())
assert torch.equal(everyone[0], everyone[1])
print(f"rank {hvd.rank()} took {optimizer.compression_report()['step']} steps")
"""


@pytest.mark.long  # two ranks import Torch; test_failures.py has a forked pool beside the background thread
def test_a_data_loader_with_forked_workers_feeds_every_rank() -> None:
    job = run_job(2, SCRIPT)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n"))[1:] == ["rank 0 took 16 steps", "rank 1 took 16 steps"]
