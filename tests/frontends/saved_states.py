"""Checkpoints of every compressed optimizer, written once by an older ocomm and read by every later one.

    python -m tests.frontends.saved_states FOLDER

writes them with the ocomm that Python finds, and in ``expected.json`` how the training went on from there.
The files in ``tests/frontends/saved`` were written by commit 687c053. They are never written again: a state that cannot
be read any more is what ``test_saved_states.py`` is there to find.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ocomm.session import Session
from tests.frontends.every_kind import KINDS
from tests.frontends.onebit_jobs import backward, digest, gradients
from tests.worlds import run_ranks

RANKS = 2
SHAPES = ((24, 10), (9,))
NAMES = ("a", "b")
#: Steps before the checkpoint, by which every kind is in its stage, and after it.
BEFORE, AFTER = 7, 5


def rank_of(session: Session) -> int:
    return session.require_topology().rank


def folder_name(kind: str) -> str:
    return kind.replace("/", "").replace(",", "").replace(" ", "-")


class TorchRun:
    """Two tensors and their optimizer, of gradients that follow from step and rank alone."""

    def __init__(self, kind: str, rank: int, values: Any = None) -> None:
        self.rank = rank
        arrays = [np.ones(shape, np.float32) for shape in SHAPES] if values is None else values
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in arrays]
        named = list(zip(NAMES, self.parameters, strict=True))
        # The default when these were saved.
        options = {"stochastic": True} if kind == "Birder" else {}
        self.optimizer = KINDS[kind].wrap(self.parameters, named_parameters=named, **options)

    def train(self, first: int, steps: int) -> list[str]:
        """The digests of the parameters after each of ``steps`` steps."""
        digests = []
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            backward(self.parameters, gradients(step, self.rank, SHAPES), range(len(SHAPES)))
            self.optimizer.step()
            digests.append(digest([p.detach().numpy() for p in self.parameters]))
        return digests

    def values(self) -> list[list[float]]:
        return [p.detach().numpy().reshape(-1).tolist() for p in self.parameters]

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            model = [p.detach().clone() for p in self.parameters]
            torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, folder / "common.pt")
        torch.save(self.optimizer.rank_state_dict(), folder / f"rank{self.rank}.pt")

    @classmethod
    def read(cls, kind: str, rank: int, folder: Path) -> TorchRun:
        common = torch.load(folder / "common.pt", weights_only=True)
        run = cls(kind, rank, [value.numpy() for value in common["model"]])
        run.optimizer.load_state_dict(common["optimizer"])
        run.optimizer.load_rank_state_dict(torch.load(folder / f"rank{rank}.pt", weights_only=True))
        return run


def write(into: Path) -> None:
    """Saves every kind, and how each goes on."""
    expected = {}
    for kind in KINDS:
        folder = into / folder_name(kind)
        folder.mkdir(parents=True)

        def body(session: Session, kind: str = kind, folder: Path = folder) -> Any:
            run = TorchRun(kind, rank_of(session))
            run.train(1, BEFORE)
            run.save(folder)
            return run.train(BEFORE + 1, AFTER), run.values()

        # Between two syncs of 0/1 Adam the ranks differ.
        results = run_ranks(RANKS, body)
        expected[kind] = {"digests": [digests for digests, _ in results], "values": [values for _, values in results]}
    (into / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
