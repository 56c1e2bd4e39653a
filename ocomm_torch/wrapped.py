"""The optimizer that a distributed one wraps: whether it can be wrapped, and what it refuses from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ocomm.errors import InvalidRequestError
from ocomm_torch.naming import NamesParameters
from ocomm_torch.rank_states import HasRankState

#: A remedy that Horovod's messages do not name: a generator's loss gives the discriminator gradients, too.
OF_ANOTHER = (
    "Where a backward pass is for another optimizer, freeze the parameters of this one meanwhile: "
    "requires_grad_(False)."
)
#: An attribute of a wrapped optimizer: the weak reference to what wraps it, until that has stepped.
_AWAITED = "_ocomm_awaited"
#: The attributes that a wrapped optimizer gets when what wraps it has stepped: for schedulers that were made with it,
#: and for ``guard_against_dropping``.
STEPPED = {"_opt_called": True, _AWAITED: None}


def frozen_error(name: str) -> InvalidRequestError:
    """Returns the error for a frozen parameter with a gradient, which is not exchanged."""
    return InvalidRequestError(
        f"parameter '{name}' is frozen (requires_grad_(False)) and has a gradient. This rank would step on it alone, "
        "so replicas would come apart. Freeze parameters between step() and the next backward(), on all ranks, and "
        "set their .grad to None; where you compute gradients yourself, call requires_grad_(True) before step()."
    )


def guard_against_dropping(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, kind: str) -> None:
    """Makes a step of ``inner`` raise if ``outer``, which wraps it, is gone without a step: nobody has kept it, and
    each rank would train alone. ``kind`` names it.
    """
    reference, itself = weakref.ref(outer), weakref.ref(inner)
    setattr(inner, _AWAITED, reference)

    def before_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
        # What wraps it may have the same hooks.
        if stepping is itself() and getattr(stepping, _AWAITED) is reference and reference() is None:
            raise InvalidRequestError(
                f"the {kind} that wraps this {type(stepping).__name__} was not kept, so each rank would train alone. "
                f"Keep it, and call its step(): optimizer = hvd.{kind}(optimizer, ...)."
            )

    inner.register_step_pre_hook(before_step)


def stand_for_inner(optimizer: HasRankState, inner: torch.optim.Optimizer) -> list[Any]:
    """Makes the wrapped optimizer ``inner`` save the state of ``optimizer``, and refuse steps and loads by others.
    Returns the handles of its hooks.
    """
    guard_against_dropping(inner, optimizer, f"Distributed{type(optimizer).__name__}")
    return [
        inner.register_step_pre_hook(_guard_step(optimizer)),
        inner.register_load_state_dict_pre_hook(_guard_loading(optimizer)),
        inner.register_state_dict_post_hook(_whole_state(optimizer)),
    ]


def _guard_step(optimizer: HasRankState) -> Callable[..., None]:
    """Returns a hook for the wrapped optimizer that raises if its step is called by others: replicas would differ for
    good.
    """
    reference = weakref.ref(optimizer)

    def before_step(inner: torch.optim.Optimizer, *_: Any) -> None:
        outer = reference()
        if outer is not None and not outer._inner_steps:
            kind = type(outer).__name__
            raise InvalidRequestError(
                f"step() of the {type(inner).__name__} that Distributed{kind} wraps was called, which would move this "
                f"rank's parameters only; call step() of the Distributed{kind}."
            )

    return before_step


def _guard_loading(optimizer: HasRankState) -> Callable[..., None]:
    """Returns a hook for the wrapped optimizer that raises if it loads a state, which this one would not get."""
    reference = weakref.ref(optimizer)

    def before_load(inner: torch.optim.Optimizer, _: Any) -> None:
        if (outer := reference()) is not None:
            kind = type(outer).__name__
            raise InvalidRequestError(
                f"load_state_dict() of the {type(inner).__name__} that Distributed{kind} wraps was called, which would "
                f"change nothing here; call load_state_dict() of the Distributed{kind}, or load before you wrap."
            )

    return before_load


def _whole_state(optimizer: HasRankState) -> Callable[..., Any]:
    """Returns a hook that makes the wrapped optimizer, which alone has a part of the state, save that of this one."""
    reference = weakref.ref(optimizer)

    def after_state_dict(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        outer = reference()
        return state if outer is None else outer.state_dict()

    return after_state_dict


def check_plain_optimizer(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    """Raises InvalidRequestError if ``optimizer`` communicates already; ``wrapper`` names the class that is to wrap
    it.
    """
    if isinstance(optimizer, NamesParameters):
        found = "DistributedOptimizer"
    elif isinstance(optimizer, HasRankState):
        found = f"Distributed{type(optimizer).__name__}"
    else:
        return
    raise InvalidRequestError(f"{wrapper} averages by itself; wrap the plain optimizer, not a {found}.")


def check_steps_without_closure(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    """Raises InvalidRequestError if a step of ``optimizer`` evaluates the model; ``wrapper`` names what is to wrap
    it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError(
            f"{wrapper} wraps optimizers whose step() needs no closure; that of LBFGS evaluates the model."
        )
