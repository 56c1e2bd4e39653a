"""Random runs of Hugging Face's Trainer, held to a loop by hand that calls the same optimizers.

The law: after each ``train()`` and each trial of ``hyperparameter_search`` all ranks have the same parameters, bit for
bit, and those of the loop by hand, which trains on the batches that the Trainer has trained on, without Accelerate and
without DistributedDataParallel. It knows when a training begins how many steps are to come, so its optimizer has that
``total_steps``, and it ends with ``finish()``. Ranks are processes, as in ``lightning``.
"""

from __future__ import annotations

import hashlib
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.programs import trainer_jobs

#: Batches of ``make test``, where transformers is installed.
FEW = 1
NEEDS = ("transformers", "accelerate")
BATCH, WIDTH = 4, 6
#: Optimizers with the options of a run, those that step locally most often.
KINDS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("zero_one_adam", ()),
    ("zero_one_adam", ()),
    ("zero_one_adam", ()),
    ("zero_one_adam", (("local_step_start", 1), ("local_step_doubling", 1), ("local_step_clip", 4))),
    ("zero_one_adam", (("local_step_start", 1), ("local_step_doubling", 1), ("local_step_clip", 4))),
    ("zero_one_adam", (("vote", "sync"),)),
    ("onebit_adam", ()),
    ("onebit_adam", (("overlap", False),)),
    ("onebit_lamb", ()),
    ("lion", ()),
    ("ef_sgd", ()),
    ("birder", ()),
    ("softsign_sgd", ()),
)
ADAMS = ("zero_one_adam", "onebit_adam", "onebit_lamb")


@dataclass(frozen=True)
class Training:
    """One training.

    ``how``: "train" for ``train()`` of the same Trainer, "trial" for a trial of a search with another learning rate,
    "checkpoint" for a new Trainer that goes on from the last checkpoint with ``epochs`` more. ``steps`` is
    ``max_steps``. ``stop`` is the number of steps after which a callback ends the training, ``fails`` that after which
    all ranks run out of memory once.
    """

    how: str = "train"
    epochs: int = 1
    steps: int | None = None
    stop: int | None = None
    fails: int | None = None


@dataclass(frozen=True)
class Program:
    """A run: ``rows`` is the number of each rank's rows. ``saves``: there is a checkpoint after each epoch."""

    optimizer: str = "zero_one_adam"
    options: tuple[tuple[str, Any], ...] = ()
    clip: float = 0.0
    rows: int = BATCH
    accumulate: int = 1
    equal_replicas: bool = False
    trainings: tuple[Training, ...] = (Training(),)


@st.composite
def program(draw: st.DrawFn) -> Program:
    """Draws a run."""
    kind, options = draw(st.sampled_from(KINDS))
    searches = draw(st.integers(0, 2)) == 2
    trainings = []
    for position in range(draw(st.integers(1, 3))):
        ways = ["train", "trial"] if searches else ["train", "checkpoint"] if position else ["train"]
        steps, stop, fails = (draw(st.one_of(st.none(), st.integers(1, 16))) for _ in range(3))
        how = draw(st.sampled_from(ways))
        fails = fails if not searches and how == "train" else None
        trainings.append(Training(how, draw(st.integers(1, 3)), None if how == "checkpoint" else steps, stop, fails))
    is_sync = ("vote", "sync") in options
    clip = 0.0 if is_sync else draw(st.sampled_from((0.0, 0.5, 1.0)))
    rows = BATCH * draw(st.integers(1, 7))
    return Program(kind, options, clip, rows, draw(st.integers(1, 3)), draw(st.booleans()), tuple(trainings))


def programs() -> st.SearchStrategy[tuple[Program, ...]]:
    """Returns batches of runs."""
    return st.lists(program(), min_size=1, max_size=8).map(tuple)


def run(batch: tuple[Program, ...]) -> None:
    """Runs a batch on two ranks. Raises AssertionError that names the runs that break the law, and how."""
    trainer_jobs.run(__name__, batch)


# What follows runs on every rank of a job.


def runner() -> Callable[[Program, str], Iterator[str]]:
    """Returns what runs a program on a rank, with a folder that all ranks have, and yields what breaks the law."""
    import torch
    import transformers
    from torch import nn
    from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
    from transformers.trainer_utils import HPSearchBackend

    import ocomm_torch as hvd
    from ocomm_torch.transformers import OcommCallback

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("ocomm", init_method="ocomm://")
    wrappers: dict[str, Callable[..., Any]] = {
        "zero_one_adam": hvd.DistributedZeroOneAdam,
        "onebit_adam": hvd.DistributedOneBitAdam,
        "onebit_lamb": hvd.DistributedOneBitLamb,
        "lion": hvd.DistributedLion,
        "ef_sgd": hvd.DistributedEFSGD,
        "birder": hvd.DistributedBirder,
        "softsign_sgd": hvd.DistributedSoftSignSGD,
    }

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def inner(program: Program, net: Any, rate: float) -> Any:
        kind = torch.optim.AdamW if program.optimizer in ADAMS else torch.optim.SGD
        return kind(list(net.parameters()), lr=rate, weight_decay=0.0)

    def digest(module: Any) -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()[:12]

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        """Notes the batches of each training since its last beginning."""

        program: Program

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = inner(self.program, self.model, self.args.learning_rate)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                self.seen.append({name: value.clone() for name, value in inputs.items()})
            return model(**inputs)["loss"]

    class Events(transformers.TrainerCallback):  # type: ignore[misc]
        """Ends trainings, or makes them fail once."""

        def __init__(self) -> None:
            self.stop: int | None = None
            self.fails: int | None = None
            self.attempts: list[int] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.attempts.append(0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.fails is not None and self.attempts[-1] >= self.fails:
                self.fails = None
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.attempts[-1] += 1
            if self.stop is not None and self.attempts[-1] >= self.stop:
                control.should_training_stop = True

    class Trial(dict[str, Any]):
        params: Any = types.MappingProxyType({})
        number = 0

    class Search:
        """Takes the place of Optuna."""

        @staticmethod
        def ensure_available() -> None:
            pass

        def run(self, trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> None:
            trainer.train(trial=Trial())

    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA] = Search

    class ByHand:
        """The same trainings in a plain loop."""

        def __init__(self, program: Program) -> None:
            self.program, self.optimizer = program, None
            self.saved: dict[str, Any] = {}

        def begin(self, rate: float, total: int, anew: bool, saved: Any = None) -> None:
            """Begins a training of ``total`` steps, with the same model or ``anew``, or from what was ``saved``."""
            program, kept, own = self.program, None, None
            if anew or saved is not None or self.optimizer is None:
                self.net = Net()
                steps = 0
            else:
                kept, own = self.optimizer.state_dict(), self.optimizer.rank_state_dict()
                steps = self.optimizer._driver.steps
            if saved is not None:
                with torch.no_grad():
                    for mine, value in zip(self.net.parameters(), saved["parameters"], strict=True):
                        mine.copy_(value)
                kept, own, steps = saved["state"], saved["own"], saved["steps"]
            more: dict[str, Any] = dict(program.options)
            if program.optimizer in ADAMS:
                more["total_steps"] = steps + total
            if program.clip:
                more["max_grad_norm"] = program.clip
            base = inner(program, self.net, rate)
            self.optimizer = wrappers[program.optimizer](base, self.net.named_parameters(), **more)
            if kept is not None and steps:
                self.optimizer.load_state_dict(kept)
                self.optimizer.load_rank_state_dict(own)
            for group in self.optimizer.param_groups:
                group["lr"] = rate

        def train(self, batches: list[Any], per_epoch: int, from_step: int, saves: bool, last: bool) -> None:
            """Trains on batches, ``per_epoch`` of them in each epoch; then comes the end of a training, if ``last``."""
            passes, at, step = self.program.accumulate, 0, from_step
            steps_per_epoch = -(-per_epoch // passes)
            while at < len(batches):
                place = step % steps_per_epoch * passes
                group = batches[at : at + min(passes, per_epoch - place)]
                at += len(group)
                for batch in group[:-1]:
                    with self.optimizer.no_sync():
                        (self.net(**batch)["loss"] / len(group)).backward()
                (self.net(**group[-1])["loss"] / len(group)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if saves and (step % steps_per_epoch == 0 or (last and at == len(batches))):
                    if self.program.equal_replicas:
                        self.finish()
                    self.save(step)
            if last:
                self.finish()

        def finish(self) -> None:
            if hasattr(self.optimizer, "finish"):
                self.optimizer.finish()

        def save(self, step: int) -> None:
            parameters = [p.detach().clone() for p in self.net.parameters()]
            parameters = hvd.broadcast_object(parameters)
            self.saved = {
                "parameters": parameters,
                "state": self.optimizer.state_dict(),
                "own": self.optimizer.rank_state_dict(),
                "steps": self.optimizer._driver.steps,
                "step": step,
            }

    def made(program: Program, training: Training, folder: str, epochs: int, events: Events, searches: bool) -> Any:
        args = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no" if searches else "epoch",
            save_total_limit=None,
            remove_unused_columns=False,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=program.accumulate,
            max_grad_norm=program.clip,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            num_train_epochs=epochs,
            max_steps=training.steps or -1,
            auto_find_batch_size=any(each.fails is not None for each in program.trainings),
            ddp_find_unused_parameters=False,
        )
        rows = torch.randn(2 * program.rows, WIDTH, generator=torch.Generator().manual_seed(5))
        data = [{"x": row, "y": (row.sum() > 0).long()} for row in rows]
        model = {"model_init": lambda trial=None: Net()} if searches else {"model": Net()}
        trainer = Trainer(args=args, train_dataset=data, callbacks=[events], **model)
        trainer.program, trainer.seen = program, []
        OcommCallback(trainer, program.optimizer, equal_replicas=program.equal_replicas, **dict(program.options))
        return trainer

    def run(program: Program, folder: str) -> Iterator[str]:
        events, hand = Events(), ByHand(program)
        searches = any(each.how == "trial" for each in program.trainings)
        trainer: Any = None
        for position, training in enumerate(program.trainings):
            events.stop, events.fails, events.attempts = training.stop, training.fails, []
            rate = 1e-2
            saved = sorted(Path(folder).glob("checkpoint-*"), key=lambda p: p.stat().st_mtime_ns)
            hvd.barrier()
            resumes = training.how == "checkpoint" and bool(saved) and bool(hand.saved)
            place, before = None, 0
            if trainer is None or resumes:
                epochs = training.epochs
                if resumes:
                    place, before = str(saved[-1]), hand.saved["step"]
                    if int(saved[-1].name.split("-")[1]) != before:
                        return  # an older one of the same number of steps
                    epochs += -(-before * program.accumulate * BATCH // program.rows)
                trainer = made(program, training, folder, epochs, events, searches)
            trainer.args.max_steps = training.steps or -1
            if not resumes:
                trainer.args.num_train_epochs = training.epochs
            trainer.seen = []
            if training.how == "trial":
                rate = 2e-2
                trainer.hyperparameter_search(
                    lambda trial: {"learning_rate": 2e-2}, lambda metrics: 0.0, n_trials=1, backend="optuna"
                )
                trainer.args.learning_rate = 1e-2
            else:
                trainer.train(resume_from_checkpoint=place)
            found = hvd.allgather_object(digest(trainer.model))
            if len(set(found)) > 1:
                yield f"training {position}: parameters differ between ranks: {found}"
                return
            per_epoch = program.rows // BATCH
            if training.fails is not None and len(events.attempts) > 1:
                # Batches are smaller from now on, so only the last attempt is known by its number of steps.
                report = trainer.optimizer.optimizer.compression_report()
                total = trainer.optimizer.optimizer._driver.options.get("total_steps")
                over = report["step"] - events.attempts[-1] + trainer.state.max_steps
                if total is not None and total != over:
                    yield f"training {position}: total_steps is {total}, not {over}"
                return
            hand.begin(rate, trainer.state.max_steps - before, searches, hand.saved if resumes else None)
            hand.train(trainer.seen, per_epoch, before, not searches, True)
            if digest(hand.net) != found[0]:
                yield f"training {position}: parameters are not those of the loop by hand"
                return

    return run
