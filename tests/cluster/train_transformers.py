"""Hugging Face's Trainer with a small GPT-2, on two ranks however they are started; each writes its sha256.

train_transformers.py FOLDER [--epochs N] [--resume CHECKPOINT] [--norm N] [--accumulate N] [--crash RANK]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

import ocomm_torch as hvd
from ocomm_torch.transformers import OcommCallback


class Crash(TrainerCallback):  # type: ignore[misc]
    """Raises on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and hvd.rank() == self.rank:
            raise RuntimeError("a sample that cannot be read")


class Saving:
    """Notes how many files of ranks a checkpoint has when the Trainer makes it whole, by writing its own state."""

    def __init__(self) -> None:
        self.files: list[int] = []
        write = TrainerState.save_to_json

        def noting(state: TrainerState, path: str) -> None:
            self.files.append(
                sum(len(list(Path(path).parent.glob(name))) for name in ("ocomm_rank?.pt", "rng_state_?.pth"))
            )
            write(state, path)

        TrainerState.save_to_json = noting


def main() -> None:
    """Trains, and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume")
    parser.add_argument("--norm", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--crash", type=int, default=-1)
    args = parser.parse_args()
    # Before TrainingArguments, which look for the other ranks. It calls init(); with gloo errors name no ranks.
    torch.distributed.init_process_group("ocomm", init_method="ocomm://")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randint(32, (352, 1), generator=generator) + torch.arange(16)) % 32
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(args.folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=args.accumulate,
        num_train_epochs=args.epochs,
        learning_rate=1e-2,
        max_grad_norm=args.norm,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_steps=5,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:64], callbacks=[Crash(args.crash)])
    OcommCallback(trainer, freeze_step=5)
    saving = Saving()
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    report = trainer.optimizer.optimizer.compression_report()
    said = {"size": hvd.size(), "sha256": digest, "loss": loss, "log": trainer.state.log_history, "report": report}
    said["files"] = saving.files
    (args.folder / f"rank{hvd.rank()}").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
