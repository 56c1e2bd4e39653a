"""Accelerate: its ``save_state`` and ``load_state`` with what each rank has for itself of a 1-bit optimizer."""

from __future__ import annotations

import functools
from typing import Any

import ocomm_torch as hvd
from ocomm.errors import LaunchError
from ocomm_torch import trainers


def keep_rank_states(accelerator: Any) -> None:
    """Makes ``accelerator.save_state`` and ``load_state`` keep what only one rank has of 1-bit optimizers.

    The folder of a state then has a file for each rank, ``ocomm_rank0.pt`` and so on, written by ``save_state`` and
    found again by ``load_state``, which becomes collective. Both are called on all ranks, as Accelerate asks, and all
    ranks must see the folder. A folder without these files loads, too: errors then start at zero, which rank 0 says.

    Args:
        accelerator: The ``accelerate.Accelerator``, of which ``load_state`` is replaced. Call it once; optimizers may
            be prepared before or after it.

    Raises:
        LaunchError: The accelerator has other ranks than ocomm, so that each would train alone.
    """
    if accelerator.num_processes != hvd.size():
        raise LaunchError(
            f"this Accelerator trains on {accelerator.num_processes} process(es), and ocomm has {hvd.size()} ranks. On "
            "CPUs it looks for the others if it is made with Accelerator(cpu=True), or with ACCELERATE_USE_CPU=1."
        )
    loaded_from = ""

    def optimizers() -> list[Any]:
        return [each.optimizer for each in accelerator._optimizers]

    def save(models: Any, weights: Any, folder: str) -> None:
        trainers.save_rank_states(optimizers(), folder)

    def note(models: Any, folder: str) -> None:
        nonlocal loaded_from
        loaded_from = folder

    load = accelerator.load_state

    @functools.wraps(load)
    def load_state(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        for said in trainers.load_saved_rank_states(optimizers(), loaded_from, hvd.size()):
            if hvd.rank() == 0:
                print(said, flush=True)
        return result

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(note)  # hooks run before optimizers have loaded; only they are told where
    accelerator.load_state = load_state
