"""Hugging Face's Trainer with ``OcommCallback``, and Accelerate: real jobs of two ranks, with the real packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import LIMIT_S, MPICH, launchers, run_by, run_job, without_launcher

HAS_PACKAGES = bool(find_spec("transformers") and find_spec("accelerate"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not HAS_PACKAGES, reason="no transformers or accelerate: pip install 'ocomm[transformers]'"),
]
TRAIN = str(Path(__file__).with_name("train_transformers.py"))


def accelerate_launch(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Accelerate's launcher, which on CPUs starts mpirun if it has a hostfile."""
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    environ = launchers(2)["mpirun"][1]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_machines",
        "1",
        "--num_processes",
        "2",
    ]
    environ = {**environ, "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}
    return [*command, "--mixed_precision", "no", "--dynamo_backend", "no", "--mpirun_hostfile", str(hosts)], environ


def trained(folder: Path, *arguments: str, launcher: str = "mpirun") -> dict[str, Any]:
    """What rank 0 says of its run, if both ranks have the same parameters and losses."""
    folder.mkdir(exist_ok=True)
    started_by = accelerate_launch(folder) if launcher == "accelerate" else launchers(2)[launcher]
    done = run_by(started_by, TRAIN, str(folder), *arguments)
    assert done.returncode == 0, f"{launcher}: {done.stdout} {done.stderr}"
    first, second = (json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1))
    assert first["size"] == 2 and first["sha256"] == second["sha256"] and first["loss"] == second["loss"]
    assert "this rank has sent" in done.stdout
    found: dict[str, Any] = first
    return found


@pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one")
def test_one_script_has_one_result_under_three_launchers(tmp_path: Path) -> None:
    said = {name: trained(tmp_path / name, launcher=name) for name in launchers(2)}
    assert len({each["sha256"] for each in said.values()}) == 1
    one = said["mpirun"]
    assert one["loss"] < 1.5 < 3.4 < one["log"][0]["loss"] * 2  # ln 32 is 3.47
    assert one["report"]["compressed_steps"] == 17 and one["report"]["redone_steps"] == 0
    assert one["log"][-3]["grad_norm"] > 0


def test_accelerate_launch_has_the_result_of_mpirun(tmp_path: Path) -> None:
    one, other = (trained(tmp_path / name, "--epochs", "1", launcher=name) for name in ("mpirun", "accelerate"))
    assert one["sha256"] == other["sha256"]


def test_it_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "--epochs", "3")
    # A job that is killed while it saves has a checkpoint with all ranks' files, or one that the Trainer does not load.
    assert whole["files"] == [4, 4, 4]
    checkpoint = tmp_path / "whole" / "out" / "checkpoint-22"
    resumed = trained(tmp_path / "resumed", "--epochs", "3", "--resume", str(checkpoint))
    assert resumed["sha256"] == whole["sha256"]
    assert resumed["report"]["resumed"]["rank_state"] == "loaded"
    shutil.copytree(checkpoint, tmp_path / "checkpoint-22")
    os.remove(tmp_path / "checkpoint-22" / "ocomm_rank1.pt")
    without = trained(tmp_path / "without", "--epochs", "3", "--resume", str(tmp_path / "checkpoint-22"))
    assert without["report"]["resumed"]["rank_state"] == "reset" and without["sha256"] != whole["sha256"]


def test_accumulated_gradients_travel_once_also_where_the_last_step_has_fewer(tmp_path: Path) -> None:
    said = trained(tmp_path / "four", "--accumulate", "4", "--norm", "0")
    assert said["report"]["step"] == 6 and said["report"]["redone_steps"] == 0 and said["report"]["overlap"]
    assert not any("grad_norm" in line for line in said["log"])


def test_a_rank_that_crashes_ends_the_other_by_name(tmp_path: Path) -> None:
    done = run_by(launchers(2)["mpirun"], TRAIN, str(tmp_path), "--crash", "1")
    assert done.returncode != 0
    assert "PeerError" in done.stderr and "rank 1" in done.stderr, done.stderr
    assert "RuntimeError: a sample that cannot be read" in done.stderr


REFUSED = """
import sys
import torch, transformers
from torch import nn
import ocomm_torch as hvd
from ocomm_torch.transformers import OcommCallback

def said(name, call):
    try:
        call()
    except Exception as error:
        print(f"[{name} {hvd.rank()}] {type(error).__name__}: {error}".replace("\\n", " "), flush=True)

def trainer(**options):
    args = transformers.TrainingArguments(sys.argv[1], report_to=[], **{"use_cpu": True, **options})
    return transformers.Trainer(nn.Linear(1, 1), args)

def clip():
    one = trainer(max_grad_norm=0.0)
    OcommCallback(one)
    one.create_optimizer()
    one.accelerator.clip_grad_norm_(one.model.parameters(), 0.5)

def late():
    one = trainer()
    one.optimizer = one.accelerator.prepare(one.create_optimizer())  # as train() does
    OcommCallback(one)

def twice():
    one = trainer()
    OcommCallback(one)
    OcommCallback(one)

hvd.init()
said("late", late)
said("twice", twice)
said("dense", lambda: OcommCallback(trainer(), "dense"))
said("norms", lambda: OcommCallback(trainer(), max_grad_norm=2.0)._create_optimizer())
said("kind", lambda: OcommCallback(trainer(optim="adafactor"))._create_optimizer())
said("clip", clip)
said("alone", lambda: OcommCallback(trainer(use_cpu=False)))
"""


def test_what_would_train_wrongly_is_refused(tmp_path: Path) -> None:
    done = run_job(2, REFUSED, str(tmp_path), OMP_NUM_THREADS="1")
    for rank in (0, 1):
        assert f"[dense {rank}] InvalidRequestError: the Trainer's DistributedDataParallel averages" in done.stdout
        assert f"[late {rank}] InvalidRequestError: the Trainer has handed its optimizer to Accelerate" in done.stdout
        assert f"[twice {rank}] InvalidRequestError: the Trainer has an OcommCallback already." in done.stdout
        assert f"[norms {rank}] InvalidRequestError: gradients are to be clipped to max_grad_norm=2.0" in done.stdout
        assert f"[kind {rank}] InvalidRequestError: DistributedOneBitAdam wraps Adam or AdamW" in done.stdout
        assert f"[clip {rank}] InvalidRequestError: a call of accelerator.clip_grad_norm_ in the script" in done.stdout
        assert f"[alone {rank}] InvalidRequestError: the Trainer sees 1 process(es)" in done.stdout
    for advice in (
        "Make OcommCallback before the first train()",
        "Leave OcommCallback out: ",
        "name 'ef_sgd'",
        "TrainingArguments(use_cpu=True)",
    ):
        assert advice in done.stdout


SUBCLASSES = """
import sys
import torch, transformers
from torch import nn
import ocomm_torch as hvd
from ocomm_torch.transformers import OcommCallback

torch.distributed.init_process_group("ocomm", init_method="ocomm://")
torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.net(x)}

class Trainer(transformers.Trainer):
    \"\"\"Its loss has a parameter, with which it returns no optimizer, as scripts may do.\"\"\"

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.scale = nn.Parameter(torch.full((2,), 1.0 + hvd.rank()))
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.scale], lr=1e-2)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return (model(inputs["x"])["logits"] * self.scale).square().mean()

def trainer(**options):
    args = transformers.TrainingArguments(
        sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    )
    rows = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    return Trainer(Model(), args, train_dataset=[{"x": row} for row in rows])

one = trainer(num_train_epochs=1)
OcommCallback(one, freeze_step=3)
one.train()
hvd.check_replicas([*one.model.named_parameters(), ("scale", one.scale)])
report = one.optimizer.optimizer.compression_report()
assert one.scale.tolist() != [1.0, 1.0]
assert (report["step"], report["redone_steps"]) == (10, 0), report

def total_steps(make, **options):
    early = trainer(**options)
    OcommCallback(early)
    make(early)
    return early.optimizer._driver.options["total_steps"]

assert total_steps(lambda early: early.create_optimizer_and_scheduler(40), num_train_epochs=3) == 40
assert total_steps(lambda early: early.create_optimizer(), max_steps=20) == 20
assert total_steps(lambda early: early.create_optimizer(), num_train_epochs=3) is None
print("SAME", flush=True)
"""


def test_a_subclass_may_train_parameters_of_its_loss_and_make_its_optimizer_early(tmp_path: Path) -> None:
    done = run_job(2, SUBCLASSES, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout.count("SAME") == 2, done.stdout + done.stderr


ACCELERATE = """
import hashlib
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ocomm_torch as hvd

hvd.init()
torch.set_num_threads(1)
inputs = torch.randn(352, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

def wrapped(module):
    return hvd.DistributedOneBitAdam(
        torch.optim.Adam(module.parameters(), 1e-2), module.named_parameters(), freeze_step=3, max_grad_norm=0.5
    )

def digest(module):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = net()
model, optimizer, loader = accelerator.prepare(model, wrapped(model), DataLoader(data, 16))
model.register_comm_hook(optimizer, hvd.optimizer_hook)
batches = []
for epoch in range(2):
    for x, y in loader:
        batches.append((x, y))
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

plain = net()
own = wrapped(plain)
for first in [0, 3, 6, 9, 11, 14, 17, 20]:
    own.zero_grad()
    passes = batches[first : first + (2 if first in (9, 20) else 3)]
    for x, y in passes[:-1]:
        with own.no_sync():
            (nn.functional.cross_entropy(plain(x), y) / 3).backward()
    (nn.functional.cross_entropy(plain(passes[-1][0]), passes[-1][1]) / 3).backward()
    own.step()
report = optimizer.optimizer.compression_report()
assert (report["step"], report["redone_steps"], report["overlap"]) == (8, 0, True), report
assert digest(model) == digest(plain), "not the parameters of the optimizer alone"
print("SAME", flush=True)
"""


def test_accelerate_has_the_parameters_of_a_loop_without_it() -> None:
    done = run_job(2, ACCELERATE, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout.count("SAME") == 2, done.stdout + done.stderr


SAVED = """
import hashlib, os, shutil, sys
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ocomm_torch as hvd
from ocomm_torch.accelerate import keep_rank_states

hvd.init()
torch.set_num_threads(1)
inputs = torch.randn(352, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
folder = os.path.join(sys.argv[1], "state")

def prepared(keeps=True):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    adam = torch.optim.Adam(module.parameters(), 1e-2)
    optimizer = hvd.DistributedOneBitAdam(adam, module.named_parameters(), freeze_step=3)
    model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(data, 16))
    model.register_comm_hook(optimizer, hvd.optimizer_hook)
    if keeps:
        keep_rank_states(accelerator)
    return accelerator, model, optimizer, loader

def train(accelerator, model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

def resumed(keeps=True):
    run = prepared(keeps)
    run[0].load_state(folder)
    result = train(*run)
    return result, run[2].optimizer.compression_report()["resumed"].get("rank_state")

run = prepared()
train(*run)
run[0].save_state(folder)
whole = train(*run)
run[0].wait_for_everyone()
assert sorted(name for name in os.listdir(folder) if "ocomm" in name) == ["ocomm_rank0.pt", "ocomm_rank1.pt"]
assert resumed() == (whole, "loaded")
assert resumed(keeps=False)[0] != whole
hvd.barrier()
if hvd.rank() == 1:
    os.remove(os.path.join(folder, "ocomm_rank1.pt"))
hvd.barrier()
result, how = resumed()
assert result != whole and how == "reset", (result, how)
print("SAME", flush=True)
"""


def test_accelerate_goes_on_from_a_saved_state_bit_for_bit(tmp_path: Path) -> None:
    done = run_job(2, SAVED, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout.count("SAME") == 2, done.stdout + done.stderr
    assert "rank states loaded" in done.stdout and "load_rank_state_dict was not called" in done.stderr, done.stderr


def test_the_example_learns(tmp_path: Path) -> None:
    example = ["examples/torch_transformers.py", "--steps", "40", "--output", str(tmp_path)]
    done = run_by(launchers(2)["mpirun"], *example)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("'loss': '")[1].split("'")[0]) for line in done.stdout.splitlines() if "'loss'" in line]
    assert losses[-1] < losses[0] - 0.5, losses


LAUNCHED = """
import accelerate

def train():
    accelerate.Accelerator(cpu=True)
    import ocomm_torch as hvd
    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    print("RANK", hvd.rank(), flush=True)
    hvd.shutdown()

if __name__ == "__main__":
    accelerate.notebook_launcher(train, num_processes=2)
"""


@pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one")
def test_accelerates_launcher_for_notebooks_starts_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    done = subprocess.run(
        [sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=without_launcher(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("RANK")) == ["RANK 0", "RANK 1"]
