"""Exchanges and compares texts between the ranks of a process set."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ocomm.session import Session
from ocomm.types import ReduceOp

_log = logging.getLogger("ocomm")
#: Advice for making replicas equal, by framework.
MADE_ALIKE = {
    "torch": "call broadcast_parameters and broadcast_optimizer_state",
    "keras": (
        "build the model and its optimizer, and fit with BroadcastGlobalVariablesCallback(0), or call "
        "broadcast_variables"
    ),
}
#: Number of steps after which equal gradients on all ranks are no chance.
LOOKED_AT = 2
#: Advice for a job in which all ranks have the same gradients before an optimizer averages them, by framework.
AVERAGED_TWICE = {
    "torch": (
        "DistributedDataParallel averages by itself: call ddp.register_comm_hook(optimizer, "
        "ocomm_torch.optimizer_hook), or leave DDP out. Give each rank its part of the data: "
        "DistributedSampler(dataset, num_replicas=size(), rank=rank())."
    ),
    "keras": "Give each rank its part of the data: dataset.shard(size(), rank()).",
}


def say_alike(name: str, framework: str) -> None:
    """Warns that all ranks had the same gradients in the first ``LOOKED_AT`` steps. ``name`` is the optimizer's."""
    _log.warning(
        "%s: all ranks had the same gradients in the first %d steps, bit for bit, before they were averaged. "
        "Either something has averaged them already, or all ranks read the same data, and more ranks add "
        "nothing. %s",
        name,
        LOOKED_AT,
        AVERAGED_TWICE[framework],
    )


def first_difference(session: Session, number: int, name: str, lines: list[str], verb: str) -> str:
    """Returns which ranks differ in the first line that is not the same on all ranks. Collective.

    Args:
        session: The session of this rank.
        number: The number of the process set.
        name: The name of the exchange, the same on all ranks.
        lines: This rank's description; their number may differ between ranks.
        verb: The verb of the result.

    Returns:
        "rank(s) [0] ``verb`` ...; rank(s) [1] ``verb`` ..." with world ranks; "" if all lines are equal.
    """
    ranks = session.set_ranks[number]
    all_lines = [json.loads(text) for text in gather(session, number, name, json.dumps(lines))]
    for position in range(max(len(said) for said in all_lines)):
        values: dict[str, list[int]] = {}
        for rank, said in zip(ranks, all_lines, strict=True):
            values.setdefault(said[position] if position < len(said) else "nothing", []).append(rank)
        if len(values) > 1:
            return by_rank(values, verb)
    return ""


def told_of_steps(interrupted: tuple[int, str], steps: int, within: int) -> str:
    """Returns a line that tells of a step of this rank that an error has ended, ``within`` steps before ``steps``.

    Args:
        interrupted: The number of the step, and the class of the error; "" for none.
        steps: The number of steps up to now.
        within: Steps after which it is not told any more.
    """
    step, error = interrupted
    return (
        f"parameters of step {step}, which {error} ended"
        if error and steps - step <= within
        else "those of whole steps"
    )


def cause_of(difference: str, causes: Mapping[str, str]) -> str:
    """Returns the one of ``causes``, by tensor name, of the tensor that ``difference`` names; "" for none."""
    return next((cause for name, cause in causes.items() if f"'{name}'" in difference), "")


def by_rank(values: Mapping[str, list[int]], verb: str) -> str:
    """Returns which ranks have which value: "rank(s) [0, 2] have x; rank(s) [1] have y" for ``verb`` "have"."""
    return "; ".join(f"rank(s) {who} {verb} {value}" for value, who in values.items())


def gather(session: Session, number: int, name: str, text: str) -> list[str]:
    """Returns the texts of all ranks of the set, in rank order. Collective.

    Args:
        session: The session of this rank.
        number: The number of the process set.
        name: The name of the exchange, the same on all ranks.
        text: This rank's text; its length may differ between ranks.
    """
    ranks = session.set_ranks[number]
    mine = text.encode()
    nbytes = np.zeros(len(ranks), np.int64)
    me = ranks.index(session.require_topology().rank)
    nbytes[me] = len(mine)
    session.reduce(number, f"{name}.lengths", nbytes, ReduceOp.SUM)
    table = np.zeros(int(nbytes.sum()), np.uint8)
    first = int(nbytes[:me].sum())
    table[first : first + len(mine)] = np.frombuffer(mine, np.uint8)
    session.reduce(number, name, table, ReduceOp.BITWISE_OR)
    ends = np.cumsum(nbytes).tolist()
    return [table[end - n : end].tobytes().decode() for end, n in zip(ends, nbytes.tolist(), strict=True)]


def digest(values: Any) -> int:
    """Returns a 64-bit hash of a value's ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")
