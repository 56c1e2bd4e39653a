"""A rank that makes many steps of one optimizer: python train_soak.py FOLDER OPTIMIZER STEPS (see soak.py).

What it uses goes to ``usage-R`` of FOLDER, a hundred times in the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ocomm
from benchmarks.numpy_training import Training
from ocomm import session as sessions
from tests.cluster.train_until_harmed import burst
from tests.cluster.usage import Usage


def main() -> None:
    folder, name, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    ocomm.init()
    training = None if name == "allreduce" else Training(sessions.current(), name)
    with (folder / f"usage-{ocomm.rank()}").open("w") as file:
        for number in range(1, steps + 1):
            if training is None:
                burst(number)
            else:
                training.step(number)
            if number % max(steps // 100, 1) == 0:
                file.write(Usage.now(number).text() + "\n")


if __name__ == "__main__":
    main()
