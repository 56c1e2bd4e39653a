"""The optimizer that a distributed one wraps: whether it can be wrapped, and what it refuses from then on."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ocomm.errors import InvalidRequestError
from ocomm_torch.memory.naming import NamesParameters
from ocomm_torch.optimizers.rank_states import HasRankState

#: A remedy that Horovod's messages do not name: a generator's loss gives the discriminator gradients, too.
OF_ANOTHER = (
    "Where a backward pass is for another optimizer, freeze the parameters of this one meanwhile: "
    "requires_grad_(False). For parameters that both have, make one optimizer with param groups of the two."
)
#: The attributes of an optimizer that hold the hooks around its steps.
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: An attribute of a wrapped optimizer: its last ``StepGuard``, until what wraps it has stepped.
_AWAITED = "_ocomm_awaited"
#: The attributes that a wrapped optimizer gets when what wraps it has stepped: for schedulers that were made with it,
#: and for the ``StepGuard``.
STEPPED = {"_opt_called": True, _AWAITED: None}


def frozen_error(name: str) -> InvalidRequestError:
    """Returns the error for a frozen parameter with a gradient, which is not exchanged."""
    return InvalidRequestError(
        f"parameter '{name}' is frozen (requires_grad_(False)) and has a gradient. This rank would step on it alone, "
        "so replicas would come apart. Freeze parameters between step() and the next backward(), on all ranks, and "
        "set their .grad to None; where you compute gradients yourself, call requires_grad_(True) before step()."
    )


class StepGuard:
    """A hook before steps that ``inner`` makes by itself, where ``outer``, which ``kind`` names, wraps it.

    Such a step raises if ``outer`` is gone without a step: nobody has kept it, and each rank would train alone. If the
    guard ``refuses`` steps, it also raises as long as ``outer`` is there: replicas would differ for good.
    """

    def __init__(self, inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, kind: str, refuses: bool) -> None:
        self._inner, self._outer, self._kind = weakref.ref(inner), weakref.ref(outer), kind
        self._refuses = refuses
        setattr(inner, _AWAITED, self)
        inner.register_step_pre_hook(self)

    def __call__(self, stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is not self._inner():  # what wraps it has the same hooks
            return
        name, kind = type(stepping).__name__, self._kind
        if self._outer() is not None:
            if self._refuses:
                raise InvalidRequestError(
                    f"step() of the {name} that {kind} wraps was called, which would move this rank's parameters only; "
                    f"call step() of the {kind}."
                )
        elif getattr(stepping, _AWAITED) is self:
            raise InvalidRequestError(
                f"the {kind} that wraps this {name} was not kept, so each rank would train alone. Keep it, and call "
                f"its step(): optimizer = hvd.{kind}(optimizer, ...)."
            )

    def remove(self) -> None:
        """Allows steps from now on, unless ``outer`` is gone without one."""
        self._refuses = False


def stand_for_inner(optimizer: HasRankState, inner: torch.optim.Optimizer) -> list[Any]:
    """Makes the wrapped optimizer ``inner`` save the state of ``optimizer``, and refuse steps and loads by others.
    Returns the handles of its hooks. The hooks around a step are those of both, and run in steps of ``optimizer``.
    """
    for name in _STEP_HOOKS:
        setattr(optimizer, name, getattr(inner, name))
    return [
        StepGuard(inner, optimizer, f"Distributed{type(optimizer).__name__}", refuses=True),
        inner.register_load_state_dict_pre_hook(_guard_loading(optimizer)),
        inner.register_state_dict_post_hook(_whole_state(optimizer)),
    ]


def step_without_hooks(inner: torch.optim.Optimizer) -> None:
    """Makes the step of a wrapped optimizer. Its hooks, and torch's of all optimizers, run in that of what wraps it."""
    hooks = {name: getattr(inner, name) for name in _STEP_HOOKS}
    inner.__dict__.update({name: OrderedDict() for name in _STEP_HOOKS})
    try:
        step, own = type(inner).step, vars(inner).get("step")
        # A scheduler puts a step of its own on the object, which only notes that there was one.
        noted = hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is step
        if getattr(step, "hooked", False) and (own is None or noted):
            step.__wrapped__(inner)
        else:
            inner.step()
    finally:
        inner.__dict__.update(hooks)


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
