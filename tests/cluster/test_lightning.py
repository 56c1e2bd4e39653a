"""Lightning's Trainer with ``OcommStrategy``: real jobs of two ranks, with the real package."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.jobs import MPICH, launchers, run_by, run_job, without_launcher

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="no Lightning: pip install 'ocomm[lightning]'"),
]
needs_mpich = pytest.mark.skipif(not (MPICH / "lib").is_dir(), reason="no MPICH: make test-mpich installs one")
TRAIN = str(Path(__file__).with_name("train_lightning.py"))


def own_launcher() -> tuple[list[str], dict[str, str]]:
    """Lightning's, which starts the other ranks when the Trainer is to fit."""
    return [sys.executable], without_launcher()


@needs_mpich
def test_one_script_has_one_result_under_four_launchers(tmp_path: Path) -> None:
    jobs = [(name, launcher, "") for name, launcher in launchers(2).items()]
    jobs += [("Lightning's own", own_launcher(), ""), ("Lightning's own by name", own_launcher(), "ocomm")]
    jobs += [("mpirun by name", launchers(2)["mpirun"], "ocomm")]
    said = {}
    for name, launcher, strategy in jobs:
        folder = tmp_path / name
        folder.mkdir()
        done = run_by(launcher, TRAIN, str(folder), strategy)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "this rank has sent" in done.stdout + done.stderr
        for rank in (0, 1):
            said[name, rank] = (folder / f"rank{rank}").read_text()
    assert len(set(said.values())) == 1, said
    assert said["mpirun", 0].startswith("2 9 ")  # ranks; steps: three epochs of 8 batches, by 3, 3 and 2


@needs_mpich
@pytest.mark.parametrize("name", ["mpirun", "Lightning's own"])
def test_a_rank_that_crashes_ends_the_other_by_name(name: str, tmp_path: Path) -> None:
    done = run_by({**launchers(2), "Lightning's own": own_launcher()}[name], TRAIN, str(tmp_path), "--crash", "1")
    assert done.returncode != 0
    assert "PeerError" in done.stderr and "rank 1" in done.stderr, done.stderr
    assert "RuntimeError: a sample that cannot be read" in done.stderr


COMMON = """
import hashlib, json, logging, os, sys, tempfile, warnings
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import ocomm_torch as hvd
from ocomm_torch.lightning import OcommStrategy

warnings.filterwarnings("ignore", module="lightning")
torch.set_num_threads(1)
hvd.init()
inputs = torch.randn(352, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

class Net(pl.LightningModule):
    def __init__(self, **given):
        super().__init__()
        torch.manual_seed(7 + given.get("seed", 0) * hvd.rank())
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
        self.given, self.seen = given, []
        self.automatic_optimization = not given.get("manual")
    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def training_step(self, batch, number):
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss
    def validation_step(self, batch, number):
        self.log("val", self.loss(batch), sync_dist=True)
        self.seen.append(self.net[1].running_mean.sum().item())
    def configure_optimizers(self):
        kind = self.given.get("kind", torch.optim.Adam)
        optimizer = kind(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

def digest(module):
    held = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    assert len(set(hvd.allgather_object(held))) == 1
    return held

def trainer(strategy, epochs=2, **options):
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
               "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False, **options}
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, **options)

def loader():
    return DataLoader(data, 16, sampler=DistributedSampler(data, 2, hvd.rank(), shuffle=False))

def say(**said):
    if hvd.rank() == 0:
        print("SAID", json.dumps(said), flush=True)
"""


def said_by(script: str, *arguments: str) -> dict[str, object]:
    done = run_job(2, COMMON + script, *arguments, OMP_NUM_THREADS="1")
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert done.returncode == 0 and lines, done.stdout + done.stderr
    found: dict[str, object] = json.loads(lines[-1][4:])
    return found


ALIKE = """
def by_hand(passes, clip):
    net = Net()
    inner = torch.optim.Adam(net.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOneBitAdam(inner, net.named_parameters(), freeze_step=3, max_grad_norm=clip)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)
    for epoch in range(2):
        batches = list(loader())
        for first in range(0, len(batches), passes):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for batch in batches[first : first + passes][:-1]:
                    (net.loss(batch) / passes).backward()
            (net.loss(batches[first : first + passes][-1]) / passes).backward()
            optimizer.step()
        scheduler.step()
    return digest(net), optimizer.compression_report()["redone_steps"]

said = {}
for name, passes, clip in (("plain", 1, None), ("accumulated", 4, None), ("clipped", 1, 0.05), ("both", 4, 0.05)):
    net = Net(seed=1)  # the strategy gives all ranks rank 0's
    options = {"accumulate_grad_batches": passes, "gradient_clip_val": clip}
    run = trainer(OcommStrategy(freeze_step=3), **options)
    run.fit(net, loader(), loader())
    report = run.optimizers[0].compression_report()
    said[name] = [digest(net), report["redone_steps"]], by_hand(passes, clip)
    assert all(len(set(sums)) == 1 for sums in zip(*hvd.allgather_object(net.seen)))  # buffers, when it is evaluated
    assert len(set(hvd.allgather_object(run.callback_metrics["val"].item()))) == 1
    assert (report["grad_norm"] is None) == (clip is None)
say(**said)
"""


def test_parameters_are_those_of_a_loop_without_a_trainer() -> None:
    for name, (lightnings, by_hand) in said_by(ALIKE).items():  # type: ignore[misc]
        assert lightnings == by_hand and by_hand[1] == 0, (name, lightnings, by_hand)


AVERAGED = """
from lightning.pytorch.callbacks import EMAWeightAveraging
for name in ("dense", "onebit_adam"):
    net = Net()
    trainer(OcommStrategy(name), callbacks=[EMAWeightAveraging(decay=0.9)]).fit(net, loader(), loader())
    net.seen.append(net.net[1].running_mean.sum().item())  # of the averaged model, which the run ends with
    assert len(net.seen) == 2 * 11 + 1 and all(len(set(sums)) == 1 for sums in zip(*hvd.allgather_object(net.seen)))
    digest(net)
say()
"""


def test_an_averaged_model_is_evaluated_with_the_buffers_of_rank_0() -> None:
    assert said_by(AVERAGED) == {}


AVERAGED_BETWEEN_SYNCS = """
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

class Plain(Net):
    def __init__(self, **given):
        super().__init__(**given)
        self.net[1] = nn.Identity()
    def validation_step(self, batch, number):
        self.seen.append(self.net(batch[0]).sum().item() if number == 0 else 0.0)

rows = DataLoader(data, 16)  # the same on all ranks
rare = {"local_step_start": 1, "local_step_doubling": 1, "local_step_clip": 4}
said = {}
averages = [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)]
for number, average in enumerate(averages):
    for equal in (False, True):
        net, plain = Plain(), Plain()
        strategy = OcommStrategy("zero_one_adam", equal_replicas=equal, **rare)
        trainer(strategy, 3, callbacks=[average()]).fit(net, loader(), rows)
        assert digest(net), number
        alike = len(set(hvd.allgather_object(tuple(net.seen)))) == 1
        assert alike or not equal, net.seen
        said[f"{number} {equal}"] = alike
        trainer(OcommStrategy("zero_one_adam", equal_replicas=equal, **rare), 3).fit(plain, loader(), rows)
        assert digest(plain) != digest(net)  # the average is what the run ends with
say(**said)
"""


def test_averages_of_parameters_that_differ_between_syncs_end_alike() -> None:
    assert said_by(AVERAGED_BETWEEN_SYNCS) == {"0 False": False, "0 True": True, "1 False": False, "1 True": True}


USES = """
said = {}
def refused(name, call):
    try:
        call()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"

# Each kind; what a module reads of its optimizer; a second fit with the same trainer.
for name, kind in (("dense", torch.optim.Adam), ("zero_one_adam", torch.optim.Adam), ("lion", torch.optim.SGD)):
    for manual in (False, True):
        net = Net(kind=kind, manual=manual)
        run = trainer(OcommStrategy(name), gradient_clip_val=None if manual else 0.5)
        run.fit(net, loader())
        run.fit_loop.max_epochs = 3
        run.fit(net, loader())
        digest(net)
        assert run.global_step == (33 if not manual else run.global_step), run.global_step
        assert not manual or net.seen[0] == 0.01, net.seen

strategy = run.strategy
assert strategy.reduce(torch.tensor(1.0 + hvd.rank())).item() == 1.5
assert strategy.broadcast(["of", hvd.rank()]) == ["of", 0]
assert strategy.all_gather(torch.tensor([hvd.rank()])).flatten().tolist() == [0, 1]
assert strategy.reduce_boolean_decision(hvd.rank() == 0) is False
assert torch.distributed.get_backend() == "ocomm"
run.validate(Net(), loader(), verbose=False)

by_value = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
refused("value", lambda: trainer(OcommStrategy(), **by_value).fit(Net(), loader()))
hvd.barrier()
refused("two norms", lambda: trainer(OcommStrategy(max_grad_norm=1.0), gradient_clip_val=0.5).fit(Net(), loader()))
refused("kind", lambda: OcommStrategy("two_bits"))
alone = pl.Trainer(accelerator="cpu", devices=1, strategy="ocomm", logger=False)
refused("devices", lambda: alone.fit(Net(), loader()))
say(**said)
"""


def test_uses_of_a_trainer_work_or_say_what_to_do() -> None:
    said = said_by(USES)
    assert "InvalidRequestError" in str(said["value"]) and "max_grad_norm=0.5" in str(said["value"])
    assert "max_grad_norm=1.0 and to 0.5, by Trainer(gradient_clip_val=...)" in str(said["two norms"])
    assert "there are onebit_adam, onebit_lamb" in str(said["kind"])
    assert "Pass devices=2, num_nodes=1" in str(said["devices"])


RESUMED = """
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
folder = sys.argv[1]
def checkpoints(name):
    return ModelCheckpoint(os.path.join(folder, name), "{epoch}", save_top_k=2, monitor="epoch", mode="max")

whole = Net()
run = trainer(OcommStrategy(freeze_step=3), 4, enable_checkpointing=True, callbacks=[checkpoints("whole")])
run.fit(whole, loader())
kept = sorted(os.listdir(os.path.join(folder, "whole")))

stopped = Net()
run = trainer(OcommStrategy(freeze_step=3), 2, enable_checkpointing=True, callbacks=[checkpoints("stopped")])
run.fit(stopped, loader())
place = os.path.join(folder, "stopped", "epoch=1.ckpt")

def resume():
    net = Net(seed=3)
    run = trainer(OcommStrategy(freeze_step=3), 4)
    run.fit(net, loader(), ckpt_path=place)
    return digest(net), run.optimizers[0].compression_report()["resumed"]

resumed, how = resume()
hvd.barrier()

later = Net()
run = trainer(OcommStrategy(freeze_step=3, checkpoint_io=AsyncCheckpointIO(TorchCheckpointIO())), 2,
              enable_checkpointing=True, callbacks=[checkpoints("later")])
run.fit(later, loader())
hvd.barrier()
written = sorted(os.listdir(os.path.join(folder, "later", "epoch=1.ckpt.ranks")))
hvd.barrier()
if hvd.rank() == 1:
    os.remove(place + ".ranks/22.1.pt")
hvd.barrier()
without, how_without = resume()
say(whole=digest(whole), resumed=resumed, without=without, how=how, how_without=how_without, kept=kept,
    written=written)
"""


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    said = said_by(RESUMED, str(tmp_path))
    assert said["kept"] == ["epoch=2.ckpt", "epoch=2.ckpt.ranks", "epoch=3.ckpt", "epoch=3.ckpt.ranks"]
    assert said["written"] == ["22.0.pt", "22.1.pt"]
    assert said["resumed"] == said["whole"] != said["without"]
    how, without = said["how"], said["how_without"]
    assert isinstance(how, dict) and isinstance(without, dict)
    assert how["rank_state"] == "loaded" and without["rank_state"] == "reset"
    assert "epoch=1.ckpt.ranks/22.1.pt is missing" in without["why"]


STOPPED_WHILE_SAVING = """
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

place = os.path.join(sys.argv[1], "one")
def one_checkpoint():
    return ModelCheckpoint(place, "one", save_top_k=1, enable_version_counter=False)

def fit(net, epochs, **options):
    run = trainer(OcommStrategy(freeze_step=3), epochs, enable_checkpointing=True, callbacks=[one_checkpoint()])
    run.fit(net, loader(), **options)
    return run

whole = Net()
fit(whole, 4)
names = [sorted(os.listdir(place + "/one.ckpt.ranks"))]
hvd.barrier()

class Stop(Exception):
    pass

# In the third save, between rank 0's two files.
where, last = (TorchCheckpointIO, 6) if hvd.rank() == 0 else (DDPStrategy, 3)
calls = 0
save = where.save_checkpoint
def stopping(*args, **kwargs):
    global calls
    calls += 1
    if calls == last:
        raise Stop
    save(*args, **kwargs)
where.save_checkpoint = stopping
try:
    fit(Net(), 4)
except Stop:
    pass
where.save_checkpoint = save
hvd.barrier()
names.append(sorted(os.listdir(place + "/one.ckpt.ranks")))
hvd.barrier()
resumed = Net(seed=3)
run = fit(resumed, 4, ckpt_path=place + "/one.ckpt")
hvd.barrier()
names.append(sorted(os.listdir(place + "/one.ckpt.ranks")))
say(whole=digest(whole), resumed=digest(resumed), names=names, how=run.optimizers[0].compression_report()["resumed"])
"""


def test_a_run_that_was_stopped_while_it_saved_goes_on_from_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    said = said_by(STOPPED_WHILE_SAVING, str(tmp_path))
    assert said["how"] == {"step": 22, "ranks": 2, "rank_state": "loaded", "why": ""}
    assert said["resumed"] == said["whole"]
    old, new, last = (["22.0.pt", "22.1.pt"], ["33.0.pt", "33.1.pt"], ["44.0.pt", "44.1.pt"])
    assert said["names"] == [last, [*old, *new], last]


CRASHING = """
from lightning.pytorch.callbacks import OnExceptionCheckpoint

class Crashing(Net):
    def training_step(self, batch, number):
        if number == 3 and hvd.rank() == 1:
            raise RuntimeError("a sample that cannot be read")
        return super().training_step(batch, number)

callbacks = [OnExceptionCheckpoint(sys.argv[1], "failed")]
trainer(OcommStrategy(freeze_step=4), callbacks=callbacks, enable_checkpointing=True).fit(Crashing(), loader())
"""


def test_a_checkpoint_of_a_rank_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    done = run_job(2, COMMON + CRASHING, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert "RuntimeError: a sample that cannot be read" in done.stderr, done.stderr
    assert "PeerError" in done.stderr and (tmp_path / "failed.ckpt").exists()


def test_the_example_learns() -> None:
    done = run_by(launchers(2)["mpirun"], "examples/torch_lightning.py", "--epochs", "4")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("accuracy ")[1].split()[0]) > 0.9
