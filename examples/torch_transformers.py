"""Hugging Face's Trainer with 1-bit Adam: a small GPT-2 learns the characters of this folder's scripts.

    ocommrun -np 2 python examples/torch_transformers.py    # or mpirun, or torchrun with ocomm[mpich]

A script that trains with the Trainer needs the process group before TrainingArguments, and the callback.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ocomm_torch.transformers import OcommCallback

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="torch-transformers-output", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="Adam on dense averages instead, to compare the losses")
    args = parser.parse_args()
    torch.distributed.init_process_group("ocomm", init_method="ocomm://")
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))).encode("ascii", "replace")
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).reshape(-1, LENGTH)
    arguments = TrainingArguments(
        args.output,
        use_cpu=True,
        per_device_train_batch_size=8,
        max_steps=args.steps,
        learning_rate=1e-3,
        logging_steps=max(1, args.steps // 10),
        save_steps=max(1, args.steps // 2),
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    if not args.plain:
        OcommCallback(trainer)
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
