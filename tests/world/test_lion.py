"""Lion where nodes are the workers: a node's ranks add up their gradients, and it votes for all of them.

Hosts are names that the ranks give themselves, one letter per rank: "aab" is two ranks on host a and one on b.
"""

from __future__ import annotations

import numpy as np
import pytest

from ocomm.collectives.pipeline import Cut
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.optim.core import Group
from ocomm.optim.lion import Lion, LionOptions
from ocomm.optim.stepper import Stepper
from ocomm.optim.verdict import StepOutcome
from ocomm.session import Session
from ocomm.types import Nodes
from tests.oracle import lion as oracle
from tests.worlds import PATIENCE_S, run_ranks

SHAPES = ((70, 13), (200,), (33,))
STEPS, LR = 20, 2.0**-7


def gradients(step: int, rank: int) -> list[np.ndarray | None]:
    """In half of the steps the last tensor is missing on some ranks, and now and then on all."""
    rng = np.random.default_rng([step, rank])
    result: list[np.ndarray | None] = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    if step % 5 == 0 or (step % 2 and rank % 2):
        result[2] = None
    return result


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc"])
def test_every_step_equals_the_simulation_bit_for_bit(hosts: str) -> None:
    nodes = Nodes.of_hosts(list(hosts))
    layout = Layout([TensorSpec(f"t{n}", shape) for n, shape in enumerate(SHAPES)], len(hosts), 64, nodes)

    def body(session: Session) -> list[list[bytes]]:
        rank = session.require_topology().rank
        assert session.kernels is not None
        core = Lion(layout, rank, session.kernels, LionOptions(seed=5))
        params = [np.ones(shape, np.float32) for shape in SHAPES]
        core.tensors["param"] = [p.ctypes.data for p in params]
        local: list[np.ndarray | None] = []
        stepper = Stepper(
            "lion", core, session.open_channel(0, "lion", layout.digest, ""), range(len(hosts)),
            session.watch(0, "lion"),
            lambda tensors, final: [0 if local[t] is None else local[t].ctypes.data for t in tensors],  # type: ignore[union-attr]
            cut=Cut(256, 256), overlap=False, verify="full", timeout_s=PATIENCE_S,
        )  # fmt: skip
        history = []
        for step in range(STEPS):
            local[:] = gradients(step, rank)
            core.set_hyper(Group(np.arange(len(SHAPES)), LR, decoupled_decay=0.1))
            assert stepper.exchange(1, 2, LR, 0, lambda: None) is StepOutcome.TAKE
            stepper.commit()
            history.append([p.tobytes() for p in params])
        assert sum(core.memory().values()) < 20 * core.layout.worker_numel(rank) + 4096
        return history

    results = run_ranks(len(hosts), body, hosts=list(hosts))
    law = oracle.Lion(
        [np.ones(shape, np.float32) for shape in SHAPES],
        len(hosts),
        lr=LR,
        weight_decay=0.1,
        seed=5,
        nodes=[len(node) for node in nodes.members],
    )
    for step in range(STEPS):
        law.step([gradients(step, rank) for rank in range(len(hosts))])
        expected = [p.tobytes() for p in law.params]
        for result in results:
            assert result[step] == expected, f"step {step}"
    assert (law.ties > 0) == (hosts != "aaab"), "three ranks of one node always outvote the fourth"
