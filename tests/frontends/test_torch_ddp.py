"""DDP with a 1-bit optimizer, whose gradients DDP leaves alone: real jobs of two ranks."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cluster.jobs import run_job
from tests.worlds import MPI_SIZE

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="starts jobs of its own")

COMMON = """
import contextlib, json, os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
import ocomm_torch as hvd

torch.set_num_threads(1)
dist.init_process_group("ocomm", init_method="ocomm://")
rank = dist.get_rank()

def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 240), nn.ReLU(), nn.Linear(240, 4))

def data(step, seed=None):
    generator = torch.Generator().manual_seed(1000 * step + (rank if seed is None else seed))
    return torch.randn(16, 12, generator=generator), torch.randn(16, 4, generator=generator)
"""

EQUAL = """
def run(hook, wrap=hvd.DistributedOneBitAdam, passes=1, counted=True, kind=torch.float32, **options):
    network = model().to(kind)
    inner = torch.optim.SGD if wrap is hvd.DistributedEFSGD else torch.optim.Adam
    extra = {"freeze_step": 3} if wrap is hvd.DistributedOneBitAdam else {}
    optimizer = wrap(inner(network.parameters(), lr=1e-3), network.named_parameters(),
                     backward_passes_per_step=passes if counted else 1, **extra)
    module = network
    if hook is not None:
        module = DistributedDataParallel(network, bucket_cap_mb=0.05, **options)
        module.register_comm_hook(None if hook is noop_hook else optimizer, hook)
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = data(passes * step + part)
            if part < passes - 1 and (hook is not None or not counted):
                with (optimizer if hook is None else module).no_sync():
                    loss = F.mse_loss(module(x.to(kind)), y.to(kind))
                    loss.backward()
            else:
                loss = F.mse_loss(module(x.to(kind)), y.to(kind))
                loss.backward()
        if step == 6:
            redone = optimizer.compression_report()["redone_steps"]
            nn.utils.clip_grad_norm_(network.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in network.parameters()], redone

said = {}
for name, options in {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "passes": {"passes": 2},
    "passes that nobody counts": {"passes": 3, "counted": False},
    "passes of views": {"passes": 2, "gradient_as_bucket_view": True},
    "bfloat16": {"kind": torch.bfloat16},
    "EF-SGD": {"wrap": hvd.DistributedEFSGD},
}.items():
    own = {key: options.pop(key) for key in ("passes", "counted", "kind", "wrap") if key in options}
    bare, hooked = run(None, **own), run(hvd.optimizer_hook, **own, **options)
    same = bare[0] == hooked[0] and all(map(torch.equal, bare[1], hooked[1]))
    said[name] = [same, bare[2], hooked[2]]
said["noop"] = [True, 0, run(noop_hook)[2]]
if rank == 0:
    print("EQUAL", json.dumps(said))
"""

ALIKE = """
import logging

class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []
    def emit(self, record):
        if "the same gradients" in record.getMessage():
            self.said.append(record.getMessage())

def run(ddp, same_data=False, hook=False, scale=1.0):
    heard = Heard()
    logging.getLogger("ocomm").addHandler(heard)
    network = model()
    optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(network.parameters()), freeze_step=10, overlap=False)
    module = DistributedDataParallel(network) if ddp else network
    if hook:
        module.register_comm_hook(optimizer, hvd.optimizer_hook)
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step, 0 if same_data else None)
        (scale * F.mse_loss(module(x), y)).backward()
        optimizer.step()
    logging.getLogger("ocomm").removeHandler(heard)
    return heard.said

said = [run(False), run(True, hook=True), run(False, scale=0.0), run(False, same_data=True)]
if rank == 0:
    print("ALIKE", json.dumps(said))
else:
    assert said == [[]] * 4
"""

REFUSED = """
def said(name, call):
    try:
        call()
    except Exception as error:
        print(f"[{name} {rank}] {type(error).__name__}: {error}".replace("\\n", " "), flush=True)

def train(optimizer_of, parts=slice(None)):
    network = model()
    optimizer = optimizer_of(network)
    module = DistributedDataParallel(network)
    module.register_comm_hook(optimizer, hvd.optimizer_hook)
    x, y = data(0)
    F.mse_loss(module(x), y).backward()

def train_dense(views, hook=None):
    network = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1))
    module = DistributedDataParallel(network, gradient_as_bucket_view=views)
    if hook is not None:
        module.register_comm_hook(None, hook)
    for step in range(2):
        optimizer.zero_grad()
        x, y = data(step)
        F.mse_loss(module(x), y).backward()
        optimizer.step()

def train_onebit(context=contextlib.nullcontext, hook=None):
    network = model()
    optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(network.parameters()))
    module = DistributedDataParallel(network)
    if hook is not None:
        module.register_comm_hook(None, hook)
    before = [p.detach().clone() for p in network.parameters()]
    with context(module):
        try:
            F.mse_loss(module(data(0)[0]), data(0)[1]).backward()
        except ValueError:
            assert all(torch.equal(p, q) for p, q in zip(before, network.parameters()))
            raise
    optimizer.step()
    raise SystemError("trains")

said("averaged", train_onebit)
dist.barrier()
said("averaged by fp16", lambda: train_onebit(hook=default_hooks.fp16_compress_hook))
dist.barrier()
said("not synced", lambda: train_onebit(lambda module: module.no_sync()))
said("dense", lambda: train(lambda network: hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1))))
said("twice", lambda: train_dense(False))
dist.barrier()
said("views twice", lambda: train_dense(True))
dist.barrier()
said("plain", lambda: train(lambda network: torch.optim.SGD(network.parameters(), 0.1)))
said("part", lambda: train(lambda network: hvd.DistributedOneBitAdam(torch.optim.Adam(network[0].parameters()))))
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """A job of all three scripts: to import Torch takes longer than each of them."""
    return run_job(2, COMMON + EQUAL + ALIKE + REFUSED, PYTHONWARNINGS="ignore")


def told(done: subprocess.CompletedProcess[str], title: str) -> Any:
    lines = [line for line in done.stdout.splitlines() if line.startswith(title)]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix(title))


@pytest.mark.long
def test_with_the_hook_losses_are_those_of_the_bare_optimizer_and_steps_overlap(
    done: subprocess.CompletedProcess[str],
) -> None:
    said = told(done, "EQUAL")
    for name, (same, redone_bare, redone) in said.items():
        assert same, (name, said)
        if name != "noop":
            assert redone == redone_bare == 0, (name, said)  # what is sent again in step() has not overlapped
    assert said["noop"][2] > 0  # DDP writes over the gradients, and the optimizer gives overlap up


@pytest.mark.long
def test_what_nobody_would_average_is_an_error(done: subprocess.CompletedProcess[str]) -> None:
    for rank in (0, 1):
        assert f"[dense {rank}] " in done.stdout and "averages what DDP averages" in done.stdout, done.stdout
        assert f"[plain {rank}] " in done.stdout and "got SGD" in done.stdout, done.stdout
        for name in ("twice", "views twice"):
            assert f"[{name} {rank}] InvalidRequestError" in done.stdout, done.stdout
        assert "or leave it out" in done.stdout
        assert f"[part {rank}] " in done.stdout and "nobody would average it" in done.stdout, done.stdout
        assert re.search(r"the gradient of '[24]\.(weight|bias)', of shape \(", done.stdout), done.stdout


@pytest.mark.long
def test_a_module_whose_gradients_ddp_averages_is_an_error_before_anything_moves(
    done: subprocess.CompletedProcess[str],
) -> None:
    for rank in (0, 1):
        for name, words in {
            "averaged": ["averages. Add ddp.register_comm_hook(optimizer, ocomm_torch.optimizer_hook), or"],
            "averaged by fp16": [
                "averages, by its hook fp16_compress_hook. ",
                "takes one hook only",
                "take out register_comm_hook of that one",
                "comm_hook= of DistributedDataParallelKwargs",
                "and add ddp.register_comm_hook(optimizer, ocomm_torch.optimizer_hook), or",
            ],
        }.items():
            (said,) = [line for line in done.stdout.splitlines() if line.startswith(f"[{name} {rank}]")]
            assert "InvalidRequestError: DistributedDataParallel averages the gradients that" in said
            for word in words:
                assert word in said, said
        assert f"[not synced {rank}] SystemError: trains" in done.stdout, "nothing is averaged inside no_sync"


@pytest.mark.long
def test_equal_gradients_on_all_ranks_are_a_warning_that_says_what_they_mean(
    done: subprocess.CompletedProcess[str],
) -> None:
    bare, hooked, zeros, same_data = told(done, "ALIKE")
    assert bare == hooked == zeros == []
    assert len(same_data) == 1 and "averages by itself" in same_data[0] and "DistributedSampler" in same_data[0]
