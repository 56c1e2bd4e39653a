"""An elastic training to which something is done (see chaos_elastic.py).

python train_elastic.py FOLDER STEPS numpy|torch. What a rank does and says is in files of FOLDER: ``pid-R``,
``doing-R`` (generation and step), ``record-G-R`` (a line for each step and commit of generation G, see
tests/invariants.py) and, at the end, ``end-R`` (number of ranks, generation, the commit that it began with, hash of its
parameters). The data depends on the step and the sample, or the rank, alone, and every step checks a sum. A file
``enough`` ends the training at the next commit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ocomm
from benchmarks.numpy_training import Training, TrainingState, hash_of
from ocomm import elastic
from ocomm import session as sessions
from tests.invariants import COMMITTING, RESTORED, Line, Record

WIDTH, BATCH, COMMIT_EVERY = 192, 48, 5
#: Without local steps, after which a commit of all ranks' parameters would be several files.
OPTIMIZERS = ("1-bit Adam", "Lion", "EF-SGD")
#: The elastic state, a function that makes a step, and one that returns what a ``Line`` has.
Trained = tuple[elastic.ObjectState, Callable[[int], None], Callable[[], tuple[str, str]]]


def of_numpy() -> Trained:
    trainings = {name: Training(sessions.current(), name) for name in OPTIMIZERS}

    def step(number: int) -> None:
        for training in trainings.values():
            training.step(number)

    def hashes() -> tuple[str, str]:
        parameters, states = zip(*[training.hashes() for training in trainings.values()], strict=True)
        return hash_of(parameters), hash_of(states)

    return TrainingState(trainings), step, hashes


def of_torch(steps: int) -> Trained:
    import torch

    import ocomm_torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = hvd.DistributedOneBitAdam(
        torch.optim.Adam(model.parameters(), lr=1e-4), model.named_parameters(), freeze_step=steps // 5
    )

    def step(number: int) -> None:
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(inputs[hvd.rank() :: hvd.size()]).square().mean().backward()
        optimizer.step()

    def hashes() -> tuple[str, str]:
        return hash_of([parameter.detach().numpy() for parameter in model.parameters()]), "-"

    return hvd.elastic.TorchState(model, optimizer, step=0), step, hashes


def main() -> None:
    folder, steps, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    generation = int(os.environ["OCOMM_ELASTIC_GENERATION"])
    # Hosts of a lab have one file system: here each has a disk of its own.
    os.environ["OCOMM_ELASTIC_FOLDER"] += "/" + os.uname().nodename
    me = int(os.environ["RANK"])
    (folder / f"pid-{me}").write_text(str(os.getpid()))
    ocomm.init()
    assert me == ocomm.rank()
    size = ocomm.size()
    state, step, hashes = of_numpy() if program == "numpy" else of_torch(steps)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        with Record(folder / f"record-{generation}-{me}") as record:

            def write(kind: str) -> None:
                record.write(Line(state.step, True, *hashes(), kind))

            if state.commits:
                write(f"{RESTORED} {state.commits}")
            while state.step < steps:
                beside = folder / f"doing-{me}.new"
                beside.write_text(f"{generation} {state.step}")
                beside.replace(folder / f"doing-{me}")
                step(state.step)
                total = ocomm.allreduce(np.full(1000, me + 1.0), name="sum", op=ocomm.Sum)
                assert (total == size * (size + 1) / 2).all(), total
                state.step += 1
                write("step")
                if state.step % COMMIT_EVERY == 0:
                    write(f"{COMMITTING} {state.commits + 1}")
                    state.commit()
                    is_enough = np.array([(folder / "enough").exists()], np.uint8)
                    if ocomm.allreduce(is_enough, name="enough", op=ocomm.Max)[0]:
                        break

    train(state)
    digests = ocomm.allgather_object(hashes()[0])
    assert len(set(digests)) == 1, digests
    commit = state.resumed["commit"] if state.resumed else 0
    (folder / f"end-{me}").write_text(f"{size} {generation} {commit} {digests[0]}")


if __name__ == "__main__":
    main()
