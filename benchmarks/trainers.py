"""A training step through Lightning and Hugging Face's Trainer on a slow network: their own DDP against 1-bit Adam.

    python -m benchmarks.trainers --hosts 2 --rate 160mbit [--json FILE]

makes a lab of namespaces on this machine (exit status 77 where it cannot be had, or neither package is installed) and
trains the BERT-like model of ``benchmarks.step``, 13.8 M parameters, one rank and one thread per host. Every trainer is
there twice: with the DistributedDataParallel that the package itself makes, over gloo, and with ``OcommStrategy`` or
``OcommCallback``. All live in one job and take turns: the loop of each is in a thread of its own, which stands still
while another one has its turn. As ranks of a job that is already running it measures there.

step       milliseconds from the end of a step to the end of the next, slowest rank, median over rounds; of 1-bit Adam
           its compressed stage. What the trainer does between two steps is in it
exposed    step - step of "local", a plain loop without any communication
sent       bytes that crossed a host's interface per step, all headers included
x own DDP  speed over the same package's DDP
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.models import TASKS
from benchmarks.ranks import start
from benchmarks.step import FREEZE_STEP, WARMUP, adam, digest, plain
from benchmarks.turns import LOCAL, Method, Result


@dataclass(frozen=True)
class Training:
    """What a trainer is given.

    ``loss(model, number)`` is that of a batch, by its number; each rank has ``steps`` numbers of its own. ``onebit``
    has the options of 1-bit Adam; None for the DistributedDataParallel that the package makes. ``pause`` is called
    before the first step and after each.
    """

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    onebit: Mapping[str, Any] | None
    pause: Callable[[], None] = lambda: None


class Loop:
    """The loop of a trainer, in a thread of its own: it goes on for as many steps as it is told.

    The trainer calls ``pause()`` before its first step and after each.
    """

    def __init__(self, train: Callable[[Loop], object], patience_s: float) -> None:
        self._permits = threading.Semaphore(0)
        self._paused: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._patience_s = patience_s

        def run() -> None:
            try:
                train(self)
            except BaseException as error:
                self._paused.put(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._await_pause()  # all ranks make what the trainers need in one order

    def _await_pause(self) -> None:
        error = self._paused.get(timeout=self._patience_s)
        if error is not None:
            raise error

    def pause(self) -> None:
        """Called by the trainer: waits for this loop's next step."""
        self._paused.put(None)
        self._permits.acquire()

    def run(self, steps: int) -> float:
        """Takes steps, and returns their seconds."""
        started = time.perf_counter()
        for _ in range(steps):
            self._permits.release()
            self._await_pause()
        return time.perf_counter() - started

    def finish(self) -> None:
        """Lets the trainer end, after the last of its steps."""
        self._permits.release()
        self._thread.join(self._patience_s)


def lightning(training: Training) -> None:
    """Trains in Lightning."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from ocomm_torch.lightning import OcommEnvironment, OcommStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return training.loss(self.model, int(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer(self.model)

    class Pauses(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number == 0:
                training.pause()

        def on_train_batch_end(self, *_: Any) -> None:
            training.pause()

    strategy: Any = DDPStrategy(cluster_environment=OcommEnvironment(), process_group_backend="gloo")
    if training.onebit is not None:
        strategy = OcommStrategy("onebit_adam", **training.onebit)
    first = hvd.rank() * training.steps
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(
        accelerator="cpu",
        devices=hvd.local_size(),
        num_nodes=hvd.cross_size(),
        strategy=strategy,
        max_steps=training.steps,
        use_distributed_sampler=False,
        callbacks=[Pauses()],
        **quiet,
    ).fit(Module(), torch.utils.data.DataLoader(range(first, first + training.steps), batch_size=1))


def transformers(training: Training) -> None:
    """Trains in Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ocomm_torch.transformers import OcommCallback

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def forward(self, number: Tensor) -> dict[str, Tensor]:
            return {"loss": training.loss(self.model, int(number))}

    class Pauses(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                training.pause()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            training.pause()

    arguments = TrainingArguments(
        "unused",
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=training.steps,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
    )
    data: Any = [{"number": number} for number in range(training.steps * hvd.size())]
    whole, optimizer = Module(), training.optimizer(training.model)
    trainer = Trainer(whole, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[Pauses()])
    if training.onebit is not None:
        OcommCallback(trainer, "onebit_adam", **training.onebit)
    trainer.train()


#: By name: how it is called, the package that it needs, its trainer, and whether it compresses.
METHODS: dict[str, tuple[str, str, Callable[[Training], None], bool]] = {
    "lightning-ddp": ("Lightning, DDP", "lightning", lightning, False),
    "lightning-onebit": ("Lightning, 1-bit Adam", "lightning", lightning, True),
    "trainer-ddp": ("Trainer, DDP", "transformers", transformers, False),
    "trainer-onebit": ("Trainer, 1-bit Adam", "transformers", transformers, True),
}


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is the same on all of them."""
    warnings.filterwarnings("ignore", module="lightning|transformers|accelerate")
    rank, ranks = start(args.threads)
    task = TASKS["bert"]
    batch = task.batch(args.batch or task.samples, torch.Generator().manual_seed(rank))
    steps = WARMUP + args.rounds * args.steps

    def loss(model: nn.Module, number: int = 0) -> Tensor:
        return task.loss(model, batch)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return task.model()

    local = model()
    methods = [Method(LOCAL, turns.timed(plain(local, loss, local, None)), lambda: digest(local))]
    loops = []
    for name in args.methods:
        title, _, train, compresses = METHODS[name]
        trained = model()

        options = {"freeze_step": FREEZE_STEP} if compresses else None

        def run(loop: Loop, train: Any = train, trained: Any = trained, options: Any = options) -> None:
            train(Training(trained, loss, adam, steps, options, loop.pause))

        loops.append(Loop(run, args.timeout))
        methods.append(Method(title, loops[-1].run, lambda trained=trained: digest(trained)))
    for method in methods:
        method.run(WARMUP)
    rows = turns.take_turns(methods, args.rounds, args.steps)
    for loop in loops:
        loop.finish()
    dist.destroy_process_group()
    hvd.shutdown()
    parameters = sum(p.numel() for p in local.parameters())
    return [{"ranks": ranks, "rate": args.rate[0], "parameters": parameters, "rows": rows}]


def show(result: Result) -> str:
    """A table, and how much of the steps with DDP is communication."""
    local = turns.step_ms(result, LOCAL)
    assert local is not None
    rows, said = [], []
    for row in result["rows"]:
        package = row["method"].split(",")[0]
        own = turns.step_ms(result, f"{package}, DDP")
        ms = row["step_ms"]
        ratio = f"{own / ms:.2f}" if own else ""
        rows.append([row["method"], f"{ms:.1f}", f"{ms - local:.1f}", f"{row['sent'] / 1e6:.2f}", ratio])
        if own == ms:
            said.append(f"{1 - local / ms:.0%} of the step of {row['method']} is communication")
    head = [f"{result['ranks']} ranks at {result['rate']}", f"{result['parameters'] / 1e6:.1f} M parameters", *said]
    columns = ["method", "step ms", "exposed ms", "sent MB", "x own DDP"]
    return ", ".join(head) + "\n\n" + tabulate(rows, columns, "github")


def main() -> int:
    parser = turns.parser(__doc__, list(METHODS), None, "samples")
    args = parser.parse_args()
    here = [name for name in METHODS if find_spec(METHODS[name][1])]
    args.methods = [name for name in here if name in (args.methods or METHODS)]
    if not args.methods:
        print("no trainer is installed: pip install 'ocomm[lightning,transformers]'", file=sys.stderr)
        return turns.SKIPPED
    versions = {package: metadata.version(package) for package in {METHODS[name][1] for name in args.methods}}
    job = "benchmarks.trainers"
    return turns.main(args, measure, lambda args, rate: turns.in_lab(job, args, rate), show, versions)


if __name__ == "__main__":
    sys.exit(main())
