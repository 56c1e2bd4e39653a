"""What trainers have in common: which optimizer wraps, clipping, rank states."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ocomm.api import rank
from ocomm.errors import CheckpointError, InvalidRequestError, OcommError
from ocomm.telemetry.units import amount
from ocomm.training.notices import steps_by_kind
from ocomm.training.resume import Source
from ocomm_torch.auto import Auto
from ocomm_torch.functions import broadcast_parameters
from ocomm_torch.memory.parameters import by_position
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.birder import DistributedBirder, DistributedSoftSignSGD
from ocomm_torch.optimizers.checkpoint import read, to_numpy, unreadable
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.ef_sgd import DistributedEFSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.rank_states import HasRankState
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam

#: What wraps an optimizer, by the name that users of a trainer give.
WRAPPERS: Mapping[str, Callable[..., Any]] = {
    "onebit_adam": DistributedOneBitAdam,
    "onebit_lamb": DistributedOneBitLamb,
    "zero_one_adam": DistributedZeroOneAdam,
    "birder": DistributedBirder,
    "softsign_sgd": DistributedSoftSignSGD,
    "lion": DistributedLion,
    "ef_sgd": DistributedEFSGD,
    "dense": DistributedOptimizer,
}
#: The names of those that send 1 bit, for documentation.
ONE_BIT_NAMES = ", ".join(f'"{name}"' for name in WRAPPERS if name != "dense")


def wrapper_of(optimizer: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns what wraps an optimizer. Raises InvalidRequestError if there is nothing of that name."""
    if callable(optimizer):
        return optimizer
    if optimizer not in WRAPPERS:
        raise InvalidRequestError(f"there is no optimizer {optimizer!r}; there are {', '.join(WRAPPERS)}.")
    return WRAPPERS[optimizer]


def wrap(
    wrapper: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    options: Mapping[str, Any],
    *,
    total_steps: Callable[[], int | None],
    max_grad_norm: float | None,
    setting: str,
) -> Any:
    """Wraps the optimizer that a trainer has made, with what the trainer knows beside the user's options. Collective.

    Args:
        wrapper: One of ``WRAPPERS``, or a function with the same arguments.
        optimizer: The plain optimizer.
        named_parameters: (name, parameter) of the model. What the optimizer has beside them, such as the parameters of
            a loss, gets rank 0's values and is named by position.
        options: The user's own, which count.
        total_steps: Returns the number of steps of the run; None if it is not known.
        max_grad_norm: The norm that the trainer would clip gradients to; None for none.
        setting: The trainer's setting with that norm, for messages.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidRequestError: Two norms to clip to, or something that cannot be wrapped.
    """
    placed = by_position(optimizer)
    own = {id(p) for _, p in placed}
    named = [pair for pair in named_parameters if id(pair[1]) in own]
    in_model = {id(p) for _, p in named}
    others = [pair for pair in placed if id(pair[1]) not in in_model]
    if others:  # a trainer makes the replicas of its model alike, and knows of nothing else
        broadcast_parameters(others, root_rank=0)
    known = inspect.signature(wrapper).parameters
    chosen = dict(options)
    if (
        max_grad_norm
        and "max_grad_norm" in known
        and chosen.setdefault("max_grad_norm", max_grad_norm) != max_grad_norm
    ):
        raise InvalidRequestError(
            f"gradients are to be clipped to max_grad_norm={chosen['max_grad_norm']!r} and to {max_grad_norm!r}, by "
            f"{setting}. Leave one of them out."
        )
    # Where the user says when compression begins, that counts.
    if "total_steps" in known and "total_steps" not in chosen and chosen.get("freeze_step", "auto") == "auto":
        chosen["total_steps"] = total_steps()
    return wrapper(optimizer, named + others, **chosen)


def finish(optimizers: Iterable[Any]) -> None:
    """Makes the parameters of all ranks equal, by ``finish()`` of the optimizers that step locally between syncs.
    Gradients of a backward pass whose step never came are left out. Collective.
    """
    for optimizer in optimizers:
        if not hasattr(optimizer, "finish"):
            continue
        if isinstance(optimizer, CompressedOptimizer) and optimizer.has_begun:
            optimizer.skip()
        optimizer.finish()


def steps_in(state: Mapping[str, Any] | None, wrapper: Callable[..., Any]) -> int:
    """Returns the number of steps that an optimizer of ``wrapper`` has counted once it has loaded ``state``, a
    ``state_dict()`` of its own or of a plain optimizer; 0 for None.
    """
    if state is None:
        return 0
    if "ocomm" in state:
        return int(state["ocomm"]["steps"])
    # 0/1 Adam begins its schedules anew after a plain Adam.
    counts = [int(entry["step"]) for entry in state["state"].values() if "step" in entry]
    return 0 if wrapper is DistributedZeroOneAdam else max(counts, default=0)


def has_clipped(optimizer: Any, max_norm: float, norm_type: float, setting: str) -> bool:
    """Returns True if the optimizer itself clips its gradients in this way, False if a trainer may clip them.

    Raises InvalidRequestError if the trainer would clip the gradients of a 1-bit optimizer, which are those of this
    rank alone, in another way than the optimizer does. ``setting`` is what asks for it, in messages.
    """
    clips = isinstance(optimizer, Auto) or (isinstance(optimizer, CompressedOptimizer) and not optimizer.has_averages)
    if not clips:
        return False  # gradients of a DistributedOptimizer are averages
    limit = optimizer.max_grad_norm
    if limit == max_norm and norm_type == 2.0:
        return True
    how = "its value" if norm_type == float("inf") else f"its own norm to {max_norm!r}"
    raise InvalidRequestError(
        f"{setting} would clip each rank's gradients by {how}, before {type(optimizer).__name__} averages them: "
        "another factor on each rank. The optimizer clips by the norm of all "
        f"ranks: it has max_grad_norm={limit!r}. Pass it max_grad_norm={max_norm!r} and clip nothing else."
    )


def compressed(optimizers: Iterable[Any]) -> list[HasRankState]:
    """Returns those of ``optimizers`` that have rank states."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, HasRankState)]


def rank_states(optimizers: Iterable[Any]) -> dict[str, Any]:
    """Returns what only this rank has of ``optimizers``: plain values and tensors, for one file per rank."""
    return {"optimizers": [optimizer.rank_state_dict() for optimizer in compressed(optimizers)]}


def load_rank_states(
    optimizers: Sequence[Any], read: Callable[[int], Any], name: Callable[[int], str], ranks: int
) -> Iterator[dict[str, Any]]:
    """Loads what ``rank_states`` returned into ``optimizers``, one after the other, after their states. Collective.

    Args:
        optimizers: Those that were saved, in the same order.
        read: Returns what a rank has saved, or None.
        name: Names it in messages.
        ranks: The number of ranks now; there may have been another number.

    Yields:
        What was done with each optimizer, as ``load_rank_state_dict`` returns it.

    Raises:
        CheckpointError: A state cannot be read, is damaged or of another run.
    """
    for position, optimizer in enumerate(compressed(optimizers)):
        if not optimizer.awaits_rank_state:
            continue  # what it has loaded is of a run without ocomm, whose Adam goes on

        def read_one(rank: int, position: int = position) -> Any:
            try:
                found = read(rank)
            except OcommError:
                raise
            except Exception as error:  # a trainer's own reader
                raise unreadable(name(rank), error) from error
            if found is None:
                return None
            states = found.get("optimizers") if isinstance(found, Mapping) else None
            if not isinstance(states, list) or len(states) <= position:
                raise CheckpointError(f"{name(rank)} has no rank state of optimizer {position}.")
            return to_numpy(states[position])

        yield optimizer.load_rank_state_dict(Source(read_one, range(ranks), name))


def _rank_file(folder: str | os.PathLike[str], rank: int) -> str:
    return os.path.join(folder, f"ocomm_rank{rank}.pt")


def save_rank_states(optimizers: Iterable[Any], folder: str | os.PathLike[str]) -> None:
    """Writes what only this rank has of ``optimizers`` into the folder of a checkpoint, which is there or is made.

    Raises OSError, which names the file, if it cannot be written; then there is no such file, or still the old one.
    """
    os.makedirs(folder, exist_ok=True)
    name = _rank_file(folder, rank())
    # A job that is killed while it saves leaves this one, which nobody reads, and not the first half of a state.
    beside = f"{name}.part"
    try:
        with open(beside, "wb") as file:
            torch.save(rank_states(optimizers), file)
        os.replace(beside, name)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        # Where a write fails torch.save raises a RuntimeError about positions in the file.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, name) from None
        raise


def load_saved_rank_states(optimizers: Sequence[Any], folder: str | os.PathLike[str], ranks: int) -> Iterator[str]:
    """Loads what ``save_rank_states`` has written on all ranks. Collective.

    Args:
        optimizers: Those that were saved, in the same order. Their states are loaded already.
        folder: That of the checkpoint. Files may be missing.
        ranks: The number of ranks now.

    Yields:
        A line about each optimizer, for rank 0 to say.

    Raises:
        CheckpointError: A state is damaged or of another run.
    """

    def name(rank: int) -> str:
        return _rank_file(folder, rank)

    def read_rank(rank: int) -> Any:
        return read(name(rank)) if os.path.exists(name(rank)) else None

    for done in load_rank_states(optimizers, read_rank, name, ranks):
        yield f"ocomm: rank states {done['rank_state']} {done['why']}".rstrip()


def summary(optimizer: Any) -> str:
    """Returns a sentence about what a wrapped optimizer has sent; "" if it does not count that, or was alone."""
    if isinstance(optimizer, Auto):
        optimizer = optimizer.optimizer  # which counts since it was chosen
    if not isinstance(optimizer, HasRankState):
        return ""
    driver = optimizer._driver
    traffic = driver.stepper.traffic
    if not traffic.bytes_sent:
        return ""
    return (
        f"{driver.name}: {steps_by_kind(traffic, driver.core.dense_bits)}; this rank has sent "
        f"{amount(traffic.bytes_sent)}; dense averages would have been {amount(traffic.bytes_dense)}, "
        f"{traffic.bytes_dense / traffic.bytes_sent:.1f} times that."
    )
