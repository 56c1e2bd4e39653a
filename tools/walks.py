"""How many of ocomm's own functions a gradient, a step and an allreduce pass through, and how often that changes file.

    python -m tools.walks

A walk is what the calling thread does; counted are calls of functions of ocomm's files, without comprehensions. Each
is walked several times, and the shortest counts: who waits for another thread may look for it more than once.
``tests/architecture/test_walks.py`` holds the counts.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ocomm
from ocomm import session as sessions
from ocomm.session import Session
from ocomm.transport.local import Fabric
from ocomm.types import Settings
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam

_ROOT = Path(ocomm.__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / package}/" for package in ("ocomm", "ocomm_torch", "ocomm_tf"))
_WARM_UP, _WALKS = 4, 5


class Walk(NamedTuple):
    """Calls of ocomm's functions, and how often a call is of another file than the one before."""

    calls: int
    moves: int


def walk(function: Callable[[], Any], trace: list[str] | None = None) -> Walk:
    """What a call of ``function`` passes through; ``trace`` gets the names, if given."""
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_OURS) and not code.co_name.endswith(("comp>", "genexpr>")):
            files.append(code.co_filename)
            if trace is not None:
                trace.append(f"{code.co_filename[len(str(_ROOT)) + 1 :]} {code.co_name}")

    previous = sys.getprofile()
    gc.disable()  # it would call what others have left
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(previous)
        gc.enable()
    return Walk(len(files), sum(one != other for one, other in pairwise(files)))


def walks(traces: dict[str, list[str]] | None = None) -> dict[str, Walk]:
    """The shortest walks of this thread, which has a current session, by name. Collective over the ranks.

    ``gradients``: the hooks of a model with two tensors, until their bucket is posted; ``step``: ``step()`` of
    1-bit Adam after its warm-up; ``allreduce``: of a NumPy array.
    """
    found: dict[str, list[Walk]] = {"gradients": [], "step": [], "allreduce": []}

    def take(name: str, function: Callable[[], Any]) -> None:
        trace: list[str] = []
        found[name].append(walk(function, trace))
        if traces is not None and found[name][-1] == min(found[name]):
            traces[name] = trace

    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
    optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters), freeze_step=2)
    hooks = [next(iter(p._post_accumulate_grad_hooks.values())) for p in parameters]

    def backward() -> None:
        for hook, parameter in zip(reversed(hooks), reversed(parameters), strict=True):
            hook(parameter)

    for step in range(_WARM_UP + _WALKS):
        optimizer.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.ones(64)
        if step < _WARM_UP:
            backward()
            optimizer.step()
        else:
            take("gradients", backward)
            take("step", optimizer.step)
    values = np.ones(64, np.float32)
    for call in range(_WARM_UP + _WALKS):
        if call < _WARM_UP:
            ocomm.allreduce(values, name="x")
        else:
            take("allreduce", lambda: ocomm.allreduce(values, name="x"))
    return {name: min(each) for name, each in found.items()}


def of_ranks(size: int, traces: dict[str, list[str]] | None = None) -> dict[str, Walk]:
    """The walks of rank 0 in a world of ``size`` ranks, which are threads of this process."""
    fabric, results = Fabric(size), {}

    def rank_main(rank: int) -> None:
        session = Session()
        sessions.use(session)
        session.start(fabric.endpoint(rank), Settings())
        try:
            results[rank] = walks(traces if rank == 0 else None)
        finally:
            session.shutdown(failed=rank not in results)
            sessions.use(None)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0]


def main() -> None:
    """Prints the walks in a world of one rank and in one of two; with ``--trace``, every call."""
    print(f"{'walk':12} {'ranks':>5} {'calls':>6} {'moves':>6}")
    for size in (1, 2):
        traces: dict[str, list[str]] = {}
        for name, (calls, moves) in of_ranks(size, traces).items():
            print(f"{name:12} {size:5} {calls:6} {moves:6}")
            if "--trace" in sys.argv:
                print(*(f"    {line}" for line in traces[name]), sep="\n")


if __name__ == "__main__":
    main()
