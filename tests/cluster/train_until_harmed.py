"""A rank that trains for ever with everything in turn, until something is done to it or to another (see chaos.py).

python train_until_harmed.py FOLDER. What this rank does and says is in files of FOLDER: ``pid-R``, ``doing-R`` (the
round and the part of it), ``error-R`` (what ended its training), ``end-R`` (digest of its parameters after an end in
order, which comes when there is a file ``enough``).
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import ocomm_torch as hvd

DENSE_STEPS, COMPRESSED_STEPS = 4, 6
WIDTH = 256


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


class Training:
    """Rounds of plain allreduces, a dense optimizer, and a new 1-bit Adam with both of its stages."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.dense = small_model()
        self.onebit = small_model()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.dense.parameters(), lr=1e-3), named_parameters=self.dense.named_parameters()
        )
        self.generator = torch.Generator().manual_seed(1 + hvd.rank())

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=self.generator)).square().mean().backward()
        optimizer.step()

    def round(self, number: int) -> None:
        self.note(f"{number} allreduce")
        for _ in range(5):
            handles = [hvd.allreduce_async(torch.ones(50_000), name=f"burst.{i}", op=hvd.Sum) for i in range(8)]
            for handle in handles:
                assert bool((hvd.synchronize(handle) == hvd.size()).all())
        self.note(f"{number} dense optimizer")
        for _ in range(DENSE_STEPS):
            self.step(self.dense, self.optimizer)
        self.note(f"{number} 1-bit Adam, dense")
        adam = hvd.DistributedOneBitAdam(
            torch.optim.Adam(self.onebit.parameters(), lr=1e-4),
            named_parameters=self.onebit.named_parameters(prefix=f"round {number}"),
            freeze_step=DENSE_STEPS,
        )
        for taken in range(DENSE_STEPS + COMPRESSED_STEPS):
            if taken == DENSE_STEPS:
                self.note(f"{number} 1-bit Adam, compressed")
            self.step(self.onebit, adam)

    def digest(self) -> str:
        held = hashlib.sha256()
        for model in (self.dense, self.onebit):
            for parameter in model.parameters():
                held.update(parameter.detach().numpy().tobytes())
        return held.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks-{rank}").open("w"))
    torch.set_num_threads(1)

    def note(text: str) -> None:
        beside = folder / f"doing-{rank}.new"
        beside.write_text(text)
        beside.replace(folder / f"doing-{rank}")

    hvd.init()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    number = 0
    try:
        training = Training(note)
        while True:
            training.round(number)
            number += 1
            enough = hvd.allreduce(torch.tensor(float((folder / "enough").exists())), name="enough", op=hvd.Max)
            if enough:
                break
    except Exception as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / f"end-{rank}").write_text(training.digest())


if __name__ == "__main__":
    main()
