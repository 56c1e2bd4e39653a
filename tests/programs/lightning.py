"""Random runs of Lightning's Trainer, held to a loop by hand that calls the same optimizers.

The law: after each ``fit`` all ranks have the same parameters, bit for bit, and in automatic optimization those of the
loop by hand. It knows of each fit, when it begins, how many steps are to come, so it makes optimizers with that
``total_steps``, and ends with ``finish()``. Ranks are processes (``trainer_jobs``): a Trainer is made for one rank of a
process, so programs come in batches, and a batch is one job.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.programs import trainer_jobs

#: Batches of ``make test``, where Lightning is installed.
FEW = 1
NEEDS = ("lightning",)
BATCH, WIDTH = 4, 6
ADAMS = ("zero_one_adam", "onebit_adam", "onebit_lamb")
#: Optimizers with the options of a run, those that step locally most often.
KINDS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("zero_one_adam", ()),
    ("zero_one_adam", ()),
    ("zero_one_adam", ()),
    ("zero_one_adam", (("local_step_start", 1), ("local_step_doubling", 1), ("local_step_clip", 4))),
    ("zero_one_adam", (("local_step_start", 1), ("local_step_doubling", 1), ("local_step_clip", 4))),
    ("zero_one_adam", (("vote", "sync"),)),
    ("onebit_adam", ()),
    ("onebit_adam", ()),
    ("onebit_lamb", ()),
    ("lion", ()),
    ("ef_sgd", ()),
    ("birder", ()),
    ("softsign_sgd", ()),
    ("dense", ()),
    ("diloco", (("sync_every", 3),)),
)


@dataclass(frozen=True)
class Fit:
    """One call of ``fit``.

    ``source``: "same" for the same Trainer and module, "checkpoint" for new ones that go on from the last checkpoint.
    ``epochs`` are more than those that are over. ``accumulate`` has numbers of batches for a step, each from an epoch
    on. ``stop`` is the number of batches after which ``should_stop`` is set. ``steps`` is ``max_steps``, counted from
    those that are over.
    """

    source: str = "same"
    epochs: int = 1
    accumulate: tuple[tuple[int, int], ...] = ((0, 1),)
    stop: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Program:
    """A run. ``manual`` is the number of optimizers in manual optimization, 0 for automatic. ``save_every`` is the
    number of steps between checkpoints, None for the ends of epochs. ``ddp``: the first fit is one of strategy "ddp"
    and Adam.
    """

    optimizer: str = "zero_one_adam"
    options: tuple[tuple[str, Any], ...] = ()
    clip: float | None = None
    batches: int = 1
    manual: int = 0
    equal_replicas: bool = False
    validates: bool = False
    save_every: int | None = None
    ddp: bool = False
    fits: tuple[Fit, ...] = (Fit(),)


def _rarely(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.none(), value)


@st.composite
def program(draw: st.DrawFn) -> Program:
    """Draws a run."""
    kind, options = draw(st.sampled_from(KINDS))
    # Of two optimizers one leaves steps out, which an optimizer that averages in backward refuses.
    manual = draw(st.sampled_from((0, 0, 0, 0, 1, 1 if kind == "dense" else 2)))
    is_sync = ("vote", "sync") in options
    ddp = kind in ADAMS and not manual and draw(st.integers(0, 4)) == 4
    fits = []
    for position in range(draw(st.integers(1, 4))):
        accumulate: tuple[tuple[int, int], ...] = ((0, 1),)
        if not manual:
            accumulate = ((0, draw(st.integers(1, 4))),)
            if draw(st.integers(0, 2)) == 2:
                accumulate += ((draw(st.integers(1, 3)), draw(st.integers(1, 4))),)
        resumes = position and not manual and ((ddp and position == 1) or draw(st.booleans()))
        stop, steps = draw(_rarely(st.integers(1, 12))), draw(_rarely(st.integers(1, 12)))
        source = "checkpoint" if resumes else "same"
        fits.append(Fit(source, draw(st.integers(1, 3)), accumulate, stop, steps))
    can_clip = not manual and kind != "diloco" and not is_sync
    return Program(
        kind,
        options,
        draw(_rarely(st.just(0.5))) if can_clip else None,
        draw(st.integers(1, 9)),
        manual,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(_rarely(st.integers(1, 5))),
        ddp,
        tuple(fits),
    )


def programs() -> st.SearchStrategy[tuple[Program, ...]]:
    """Returns batches of runs."""
    return st.lists(program(), min_size=1, max_size=8).map(tuple)


def run(batch: tuple[Program, ...]) -> None:
    """Runs a batch on two ranks. Raises AssertionError that names the runs that break the law, and how."""
    trainer_jobs.run(__name__, batch)


def passes_in(fit: Fit, epoch: int) -> int:
    """Returns the number of batches for a step in an epoch."""
    return next(passes for first, passes in sorted(fit.accumulate, reverse=True) if epoch >= first)


# What follows runs on every rank of a job.


def runner() -> Callable[[Program, str], Iterator[str]]:
    """Returns what runs a program on a rank, with a folder that all ranks have, and yields what breaks the law."""
    import logging

    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import ocomm_torch as hvd
    from ocomm_torch.lightning import OcommEnvironment, OcommStrategy

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    wrappers: dict[str, Callable[..., Any]] = {
        "zero_one_adam": hvd.DistributedZeroOneAdam,
        "onebit_adam": hvd.DistributedOneBitAdam,
        "onebit_lamb": hvd.DistributedOneBitLamb,
        "lion": hvd.DistributedLion,
        "ef_sgd": hvd.DistributedEFSGD,
        "birder": hvd.DistributedBirder,
        "softsign_sgd": hvd.DistributedSoftSignSGD,
        "dense": hvd.DistributedOptimizer,
        "diloco": hvd.DistributedDiLoCo,
    }
    counted = ("zero_one_adam", "onebit_adam", "onebit_lamb")

    def data(program: Program) -> Any:
        rows = torch.randn(program.batches * BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + rank))
        return TensorDataset(rows, (rows.sum(1) > 0).long())

    def loader(program: Program) -> Any:
        return DataLoader(data(program), BATCH)

    class Net(pl.LightningModule):
        def __init__(self, program: Program, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))
            self.program, self.seen = program, 0
            self.automatic_optimization = not program.manual
            self.validated: list[str] = []

        def loss(self, batch: Any) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.loss(batch)
            if not self.automatic_optimization:
                found = self.optimizers()
                optimizers = found if isinstance(found, list) else [found]
                takes = optimizers if number % 2 or len(optimizers) == 1 else optimizers[:1]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in takes:
                    optimizer.step()
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.validated.append(digest(self))

        def configure_optimizers(self) -> Any:
            parts = [self.net.parameters()]
            if self.program.manual == 2:
                parts = [self.net[0].parameters(), self.net[2].parameters()]
            return [inner(self.program, part) for part in parts]

    def inner(program: Program, parameters: Any) -> Any:
        if program.optimizer in ADAMS or program.optimizer in ("dense", "diloco"):
            return torch.optim.Adam(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=1e-2)

    def digest(module: Any) -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()[:12]

    class Stopping(Callback):
        def __init__(self, after: int) -> None:
            self.left = after

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.left -= 1
            if self.left == 0:
                trainer.should_stop = True

    class ByHand:
        """The same run without a Trainer: what Lightning documents of epochs, accumulation and ends."""

        def __init__(self, program: Program) -> None:
            self.program = program
            self.net = Net(program, 7)
            self.batches = list(loader(program))
            self.epoch = self.step = 0
            self.saved: list[dict[str, Any]] = []

        def left(self, fit: Fit, epochs: int, done: int = 0, limit: int | None = None) -> int:
            found = sum(-(-len(self.batches) // passes_in(fit, epoch)) for epoch in range(self.epoch, epochs))
            found -= done // passes_in(fit, self.epoch)
            return found if limit is None else min(found, limit)

        def wrap(self, total: int, state: Any = None) -> None:
            program, more = self.program, dict(self.program.options)
            if program.optimizer in counted:
                more["total_steps"] = max(total, 1)
            if program.clip is not None and program.optimizer != "dense":
                more["max_grad_norm"] = program.clip
            adam = inner(program, self.net.parameters())
            self.optimizer = wrappers[program.optimizer](adam, self.net.named_parameters(), **more)

        def resume(self, fit: Fit, place: str, steps: int | None) -> int:
            """Goes on from the last checkpoint. Returns the number of batches of the epoch that are over."""
            saved = self.saved[-1]
            checkpoint = torch.load(place, weights_only=False)
            with torch.no_grad():
                for parameter, value in zip(self.net.parameters(), checkpoint["state_dict"].values(), strict=True):
                    parameter.copy_(value)
            self.epoch, self.step, done = saved["epoch"], saved["step"], saved["done"]
            if done == len(self.batches):
                self.epoch, done = self.epoch + 1, 0
            begun = saved["taken"]
            if saved["own"] is None and self.program.optimizer == "zero_one_adam":
                begun = 0
            self.wrap(begun + self.left(fit, self.epoch + fit.epochs, done, steps))
            self.optimizer.load_state_dict(saved["state"] or checkpoint["optimizer_states"][0])
            if saved["own"] is not None:
                self.optimizer.load_rank_state_dict(saved["own"])
            return done

        def save(self, done: int, plain: bool = False) -> None:
            if plain:
                self.saved.append({"state": None, "own": None, "taken": self.step})
            else:
                if self.program.equal_replicas and hasattr(self.optimizer, "finish"):
                    self.optimizer.finish()
                has_own = hasattr(self.optimizer, "rank_state_dict")
                own = self.optimizer.rank_state_dict() if has_own else None
                taken = self.optimizer._driver.steps if has_own else self.step
                self.saved.append({"state": self.optimizer.state_dict(), "own": own, "taken": taken})
            self.saved[-1].update(epoch=self.epoch, step=self.step, done=done)

        def fit(self, fit: Fit, begin: int, steps: int | None) -> None:
            done, last = begin, self.epoch + fit.epochs
            limit = None if steps is None else self.step + steps
            left, net = fit.stop, self.net
            while self.epoch < last and (limit is None or self.step < limit):
                passes = passes_in(fit, self.epoch)
                net.zero_grad()
                for number in range(done, len(self.batches)):
                    is_last = (number + 1) % passes == 0 or number + 1 == len(self.batches)
                    loss = net.loss(self.batches[number]) / passes
                    if is_last or not hasattr(self.optimizer, "no_sync"):
                        loss.backward()
                    else:
                        with self.optimizer.no_sync():
                            loss.backward()
                    if is_last:
                        self.clip()
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                        self.step += 1
                        every = self.program.save_every
                        if every is not None and self.step % every == 0:
                            self.save(number + 1)
                    left = None if left is None else left - 1
                    if left == 0 or (limit is not None and self.step >= limit):
                        break
                if (
                    self.program.validates
                    and left != 0
                    and number + 1 == len(self.batches)
                    and self.program.equal_replicas
                ):
                    self.finish()
                if self.program.save_every is None:
                    self.save(len(self.batches))
                self.epoch, done = self.epoch + 1, 0
                if left is not None and left <= 0:
                    break
            self.finish()

        def clip(self) -> None:
            if self.program.clip is not None and self.program.optimizer == "dense":
                self.optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.program.clip)

        def finish(self) -> None:
            if hasattr(self.optimizer, "finish"):
                self.optimizer.finish()

    def run(program: Program, folder: str) -> Iterator[str]:
        """Runs a program, and yields what breaks the law."""
        net, hand, trainer = Net(program, 7 + rank), ByHand(program), None
        callbacks: list[Any] = []
        #: Whether the loop by hand goes on.
        follows = not program.manual
        for position, fit in enumerate(program.fits):
            is_ddp = program.ddp and position == 0
            saved_at = sorted(Path(folder).glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns)
            hvd.barrier()
            place = str(saved_at[-1]) if fit.source == "checkpoint" and saved_at else None
            if trainer is None or place is not None:
                strategy: Any
                wrapper = program.optimizer if program.optimizer != "diloco" else hvd.DistributedDiLoCo
                strategy = OcommStrategy(wrapper, equal_replicas=program.equal_replicas, **dict(program.options))
                if is_ddp:
                    strategy = DDPStrategy(process_group_backend="ocomm", cluster_environment=OcommEnvironment())
                every = {"every_n_train_steps": program.save_every} if program.save_every else {"every_n_epochs": 1}
                checkpoints = ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **every)
                scheduler = GradientAccumulationScheduler(dict(fit.accumulate))
                callbacks = [*([scheduler] if not program.manual else []), checkpoints]
                trainer = pl.Trainer(
                    accelerator="cpu",
                    devices=2,
                    strategy=strategy,
                    logger=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    num_sanity_val_steps=0,
                    use_distributed_sampler=False,
                    max_epochs=-1,
                    gradient_clip_val=program.clip,
                    callbacks=callbacks,
                    limit_val_batches=1,
                )
                if place is not None:
                    net = Net(program, 70 + rank)
            for callback in trainer.callbacks:
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.scheduling = dict(fit.accumulate)
                    callback.epochs = sorted(callback.scheduling)
            trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, Stopping)]
            if fit.stop is not None:
                trainer.callbacks.insert(0, Stopping(fit.stop))
            was_cut = position > 0 and (program.fits[position - 1].stop or program.fits[position - 1].steps)
            if place is not None and (program.save_every or program.validates or fit.steps or was_cut):
                follows = False  # what Lightning then takes for the rest of an epoch is no business of ocomm's
            begin = 0
            over = trainer.fit_loop.epoch_progress.current.processed
            step = trainer.global_step
            if place is not None:
                saved = torch.load(place, weights_only=False)
                over, step = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"], saved["global_step"]
            if place is not None and follows:
                begin = hand.resume(fit, place, fit.steps)
            elif not is_ddp and follows:
                hand.wrap(hand.left(fit, hand.epoch + fit.epochs, 0, fit.steps))
            trainer.accumulate_grad_batches = 1  # the scheduler of the last fit has set it
            trainer.fit_loop.max_epochs = over + fit.epochs
            trainer.fit_loop.epoch_loop.max_steps = -1 if fit.steps is None else step + fit.steps
            trainer.fit(net, loader(program), loader(program) if program.validates else None, ckpt_path=place)
            found = hvd.allgather_object(digest(net))
            if len(set(found)) > 1:
                yield f"fit {position}: parameters differ between ranks: {found}"
                return
            if program.equal_replicas and len({tuple(v) for v in hvd.allgather_object(net.validated)}) > 1:
                yield f"fit {position}: validation saw other parameters on each rank"
            if place is None and not is_ddp and not program.manual and fit.stop is None:
                for optimizer in trainer.optimizers:
                    report = getattr(optimizer, "compression_report", dict)()
                    total = optimizer._driver.options.get("total_steps") if report else None
                    if total is not None and total != max(report["step"], 1):
                        yield f"fit {position}: total_steps is {total} of {report['step']} steps"
            if not follows:
                continue
            if is_ddp:
                saved_at = sorted(Path(folder).glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns)
                if not saved_at:
                    return
                checkpoint = torch.load(saved_at[-1], weights_only=False)
                progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
                hand.save(program.batches, plain=True)
                hand.saved[-1].update(
                    epoch=progress - 1, step=checkpoint["global_step"], taken=checkpoint["global_step"]
                )
                continue
            hand.fit(fit, begin, fit.steps)
            if hand.step != trainer.global_step:
                yield f"fit {position}: {trainer.global_step} steps, by hand {hand.step}"
                return
            if digest(hand.net) != found[0]:
                yield f"fit {position}: parameters are not those of the loop by hand"
                return

    return run
