"""A rank that trains for ever with everything in turn, until something is done to it or to another (see chaos.py).

python train_until_harmed.py FOLDER numpy|torch. What this rank does and says is in files of FOLDER: ``pid-R``,
``doing-R`` (the round and the part of it), ``record-R`` (a line for each step, see tests/invariants.py), ``error-R``
(what ended its training), ``end-R`` (after an end in order, which comes when there is a file ``enough``).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import ocomm
from benchmarks.numpy_training import KINDS, Training, hash_of
from ocomm import session as sessions
from tests.invariants import Line, Record

WIDTH = 256
#: Steps of the dense optimizer and of 1-bit Adam's stages in a round of Torch's.
DENSE_STEPS, COMPRESSED_STEPS = 4, 6


def burst(number: int) -> list[np.ndarray]:
    """Sums eight arrays at once, and returns the sums. Collective."""
    handles = [
        ocomm.allreduce_async(np.full(5_000, number + each, np.float32), name=f"burst.{each}", op=ocomm.Sum)
        for each in range(8)
    ]
    return [ocomm.synchronize(handle) for handle in handles]


def numpy_steps(note: Callable[[str], None]) -> Iterator[tuple[str, bool, str, str]]:
    """Makes a step of each optimizer in turn, and then several allreduces. Yields what ``Line`` has, after each."""
    trainings = {name: Training(sessions.current(), name) for name in KINDS}
    number = 0
    while True:
        number += 1
        note(f"{number} allreduce")
        yield "allreduce", True, hash_of(burst(number)), ""
        for name, training in trainings.items():
            note(f"{number} {name}")
            training.step(number)
            yield name, training.is_synced, *training.hashes()


def torch_steps(note: Callable[[str], None]) -> Iterator[tuple[str, bool, str, str]]:
    """Makes rounds of plain allreduces, a dense optimizer, and a new 1-bit Adam with both of its stages."""
    import torch

    import ocomm_torch as hvd

    torch.set_num_threads(1)

    def small_model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))

    dense, onebit = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(dense.parameters(), lr=1e-3), named_parameters=dense.named_parameters()
    )
    generator = torch.Generator().manual_seed(1 + hvd.rank())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[bool, str, str]:
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        return True, hash_of([parameter.detach().numpy() for parameter in model.parameters()]), ""

    number = 0
    while True:
        note(f"{number} allreduce")
        for _ in range(5):
            handles = [hvd.allreduce_async(torch.ones(50_000), name=f"burst.{i}", op=hvd.Sum) for i in range(8)]
            sums = [hvd.synchronize(handle).numpy() for handle in handles]
            assert all(bool((each == hvd.size()).all()) for each in sums)
            yield "allreduce", True, hash_of(sums), ""
        note(f"{number} dense optimizer")
        for _ in range(DENSE_STEPS):
            yield "dense optimizer", *step(dense, optimizer)
        note(f"{number} 1-bit Adam, dense")
        adam = hvd.DistributedOneBitAdam(
            torch.optim.Adam(onebit.parameters(), lr=1e-4),
            named_parameters=onebit.named_parameters(prefix=f"round {number}"),
            freeze_step=DENSE_STEPS,
        )
        for taken in range(DENSE_STEPS + COMPRESSED_STEPS):
            if taken == DENSE_STEPS:
                note(f"{number} 1-bit Adam, compressed")
            yield "1-bit Adam", *step(onebit, adam)
        number += 1


def main() -> None:
    folder, program = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks-{rank}").open("w"))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def note(text: str) -> None:
        beside = folder / f"doing-{rank}.new"
        beside.write_text(text)
        beside.replace(folder / f"doing-{rank}")

    ocomm.init()
    steps = {"numpy": numpy_steps, "torch": torch_steps}[program](note)
    try:
        with Record(folder / f"record-{rank}") as record:
            for number, (kind, synced, parameters, state) in enumerate(steps, 1):
                record.write(Line(number, synced, parameters, state or "-", kind))
                # After the last allreduce of a round, or of its first part.
                if kind == "allreduce" and number > 1:
                    is_enough = np.array([(folder / "enough").exists()], np.uint8)
                    if ocomm.allreduce(is_enough, name="enough", op=ocomm.Max)[0]:
                        break
    except Exception as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / f"end-{rank}").touch()


if __name__ == "__main__":
    main()
