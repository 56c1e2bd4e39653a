"""1-bit Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW`` and takes over where its warm-up ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.session import Session
from ocomm.training.driver import Common, Group
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_torch.adam import MOMENTS, adam_group, is_decoupled, wrappable
from ocomm_torch.compressed import CompressedOptimizer, to_numpy, to_torch


class OneBitAdam(CompressedOptimizer):
    """Data-parallel 1-bit Adam (arXiv 2102.02888): Adam at first, then 1 bit per parameter and direction.

    ``optimizer`` is a ``torch.optim.Adam`` or ``AdamW`` over float32 CPU parameters; its param groups stay live (lr,
    betas, weight_decay, LR schedulers on either object; eps up to the freeze) and its step makes the warm-up steps.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``freeze_step``: the number
    of dense steps T_w, or ``"auto"``: until the variance is stable (at least 2 / (1 - beta2) steps). ``block_size``:
    elements per scale, or ``"tensor"``. ``scale``: ``"l1"`` or ``"rms"``. ``variance_floor``: fraction of a block's
    mean sqrt(v) below which no element's falls. ``mask_refresh``: steps between looks for elements that had no gradient
    before the freeze and have one now. ``overlap``: exchange during backward. ``verify``: how a gradient that changed
    after backward is noticed (``"sampled"``, ``"full"``, ``"version"``). ``max_grad_norm``: clips by the agreed norm
    sqrt(mean over ranks of |g|^2), without overlap. ``backward_passes_per_step``: gradients are summed over that many
    backward passes.

    ``step`` changes parameters in place, identically on all ranks, or on none: a NaN raises NonFiniteError everywhere.
    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things.
    """

    _driver: OneBitAdamDriver

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        block_size: int | Literal["tensor"] = 4096,
        scale: Literal["l1", "rms"] = "l1",
        variance_floor: float = 0.05,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        process_set: Any = None,
    ) -> None:
        self._common = Common(block_size, overlap, max_grad_norm, verify, backward_passes_per_step)
        self._options: dict[str, Any] = {
            "freeze_step": freeze_step,
            "scale": scale,
            "variance_floor": variance_floor,
            "mask_refresh": mask_refresh,
        }
        super().__init__(
            wrappable(optimizer, "DistributedOneBitAdam"), named_parameters, process_set, backward_passes_per_step
        )

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> OneBitAdamDriver:
        kind = "AdamW" if is_decoupled(self._inner, self.param_groups[0]) else "Adam"
        return OneBitAdamDriver(session, process_set, specs, self, self._common, optimizer=kind, **self._options)

    # The driver's host

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return adam_group(self._inner, self._group_tensors[number], group)

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats]) -> None:
        """The wrapped optimizer's own step on the averaged gradients of tensors in warm-up."""
        chosen = set(tensors)
        local = [parameter.grad for parameter in self._parameters]
        try:
            for index, parameter in enumerate(self._parameters):
                averaged = torch.from_numpy(average(index)).view(parameter.shape) if index in chosen else None
                parameter.grad = averaged
            if self._common.max_grad_norm is not None:
                clipped = [self._parameters[t] for t in tensors]
                torch.nn.utils.clip_grad_norm_(clipped, self._common.max_grad_norm, foreach=False)
            with self._inner_may_step():
                self._inner.step()
        finally:
            for parameter, grad in zip(self._parameters, local, strict=True):
                parameter.grad = grad

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """The wrapped Adam's m, v and step of a tensor."""
        state = self.state.get(self._parameters[tensor])
        if not state or "exp_avg" not in state:
            return None
        momentum, variance = (state[name].reshape(-1).numpy() for name in MOMENTS)
        return momentum, variance, int(state["step"])

    def release(self, tensor: int) -> None:
        """Frees a tensor's m and v."""
        state = self.state[self._parameters[tensor]]
        for name in MOMENTS:
            del state[name]

    # State

    def state_dict(self) -> dict[str, Any]:
        """What plain Adam would load (exp_avg = mbar, exp_avg_sq from the frozen variance), plus an entry "ocomm".

        The same on all ranks. The entry holds per tensor what a continued run needs; errors are this rank's own and
        not in it.
        """
        full = dict(super().state_dict())
        state = full["state"] = {key: dict(value) for key, value in full["state"].items()}
        core, groups = self._driver.core, self.groups()
        numbers = {id(p): n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for group in groups:
            for tensor in group.tensors[core.stage[group.tensors] != 0].tolist():
                parameter = self._parameters[tensor]
                entry = state.setdefault(numbers[id(parameter)], {})
                entry["step"] = torch.tensor(float(core.steps[tensor]))
                entry["exp_avg"] = torch.from_numpy(core.momentum(tensor)).view(parameter.shape)
                variance = core.variance(tensor, beta2=group.betas[1])
                entry["exp_avg_sq"] = torch.from_numpy(variance).view(parameter.shape)
        full["ocomm"] = to_torch(self._driver.state())
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse, and also of plain Adam's ``state_dict`` (then the warm-up goes on). Errors start at zero.

        Raises InvalidRequestError, before anything is changed, if the state is of other tensors.
        """
        saved = state_dict.get("ocomm")
        if saved is not None:
            known = {name: index for index, name in enumerate(self._names)}
            for name, tensor_state in saved["tensors"].items():
                expected = self._parameters[known[name]].numel() if name in known else None
                if expected != tensor_state["denominator"].numel():
                    raise InvalidRequestError(
                        f"the state has tensor '{name}' with {tensor_state['denominator'].numel()} elements; "
                        "this model " + (f"has {expected}." if expected is not None else "has no tensor of that name.")
                    )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "ocomm"})
        self._inner.state = self.state
        self._inner.param_groups = self.param_groups
        if saved is not None:
            for tensor in self._driver.load_state(to_numpy(saved), self._momentum):
                self.release(tensor)

    def _momentum(self, tensor: int) -> Floats:
        return self.state[self._parameters[tensor]]["exp_avg"].reshape(-1).contiguous().numpy()


DistributedOneBitAdam = OneBitAdam
