"""0/1 Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW``, whose settings it reads at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.session import Session
from ocomm.training.driver import Common, Group
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_torch.adam import MOMENTS, adam_group, is_decoupled, wrappable
from ocomm_torch.compressed import CompressedOptimizer, to_numpy, to_torch

_KIND = "ZeroOneAdam"


class ZeroOneAdam(CompressedOptimizer):
    """Data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per parameter from the second step on, later not at every step.

    ``optimizer`` is a ``torch.optim.Adam`` or ``AdamW`` over float32 CPU parameters; its param groups stay live (lr,
    betas, eps, weight_decay, LR schedulers on either object). Its own step is never called. If it has a state already,
    0/1 Adam goes on from that.

    Syncs: at every step up to ``local_step_start``, then every min(``local_step_clip``, 2^floor((t -
    ``local_step_start``) / ``local_step_doubling``)) steps. Between syncs each rank steps by itself, and parameters
    differ between ranks: evaluate and save after a sync, ``compression_report()["synced"]`` tells. The variance is
    refreshed, with a dense average, at step 1 and then after 2^floor(j / ``var_update_scaler``) steps, j counting, as
    long as every step is a sync, or up to step ``var_freeze_step``. For a run of T steps, T/4, T/4 and a clip of 4 did
    well.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``block_size``: elements per
    scale, or ``"tensor"``. ``scale``: ``"l1"`` or ``"rms"``. ``variance_floor``: fraction of a block's mean sqrt(v)
    below which no element's falls. ``mask_refresh``: syncs between looks for elements that had no gradient at any
    refresh and have one now. ``overlap``: exchange during backward. ``verify``: how a gradient that changed after
    backward is noticed (``"sampled"``, ``"full"``, ``"version"``). ``max_grad_norm``: clips by the agreed norm
    sqrt(mean over ranks of |g|^2), without overlap. ``backward_passes_per_step``: gradients are summed over that many
    backward passes.

    ``step`` changes parameters in place, identically on all ranks at a sync, or changes nothing on any: a NaN raises
    NonFiniteError everywhere. Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap
    different things.
    """

    _driver: ZeroOneAdamDriver

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        var_update_scaler: int = 16,
        var_freeze_step: int | None = None,
        local_step_start: int = 0,
        local_step_doubling: int = 32768,
        local_step_clip: int = 16,
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
            "intervals": {
                "local_step_start": local_step_start,
                "local_step_doubling": local_step_doubling,
                "local_step_clip": local_step_clip,
            },
            "refreshes": {"var_update_scaler": var_update_scaler, "var_freeze_step": var_freeze_step},
            "scale": scale,
            "variance_floor": variance_floor,
            "mask_refresh": mask_refresh,
        }
        inner = wrappable(optimizer, "DistributedZeroOneAdam")
        super().__init__(inner, named_parameters, process_set, backward_passes_per_step)
        self._adopt()

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> ZeroOneAdamDriver:
        kind = "AdamW" if is_decoupled(self._inner, self.param_groups[0]) else "Adam"
        return ZeroOneAdamDriver(session, process_set, specs, self, self._common, optimizer=kind, **self._options)

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return adam_group(self._inner, self._group_tensors[number], group)

    # State

    def _adopt(self) -> None:
        """Takes over what a plain Adam has, which is freed."""
        for group in self.groups():
            self._driver.adopt(group, self._moments)
        self.state.clear()

    def _moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        state = self.state.get(self._parameters[tensor])
        if not state or "exp_avg" not in state:
            return None
        momentum, variance = (state[name].reshape(-1).contiguous().numpy() for name in MOMENTS)
        return momentum, variance, int(state["step"])

    def state_dict(self) -> dict[str, Any]:
        """What plain Adam would load (exp_avg = m of the last sync, exp_avg_sq from the variance), plus an entry
        "ocomm" with what a continued run needs. The same on all ranks; ``rank_state_dict`` has the rest."""
        full = dict(super().state_dict())
        state = full["state"] = {}
        core = self._driver.core
        numbers = {id(p): n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for group in self.groups():
            for tensor in group.tensors[core.steps[group.tensors] > 0].tolist():
                parameter = self._parameters[tensor]
                moments = core.average_momentum(tensor), core.variance(tensor, beta2=group.betas[1])
                state[numbers[id(parameter)]] = {
                    "step": torch.tensor(float(core.steps[tensor])),
                    **{n: torch.from_numpy(m).view(parameter.shape) for n, m in zip(MOMENTS, moments, strict=True)},
                }
        full["ocomm"] = {"optimizer": _KIND, **to_torch(self._driver.state())}
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse: the run is where it was after its last sync, parameters that had moved since are set back.

        Also of another Adam's ``state_dict``: 0/1 Adam goes on from its moments, with schedules that begin anew. Errors
        start at zero. Raises InvalidRequestError, before anything is changed, if the state is of other tensors.
        """
        saved = state_dict.get("ocomm") or {}
        if saved.get("optimizer") == _KIND:
            self._check(saved["tensors"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "ocomm"})
        self._inner.state = self.state
        self._inner.param_groups = self.param_groups
        if saved.get("optimizer") == _KIND:
            self._driver.load_state(to_numpy(saved), self._momentum)
            self.state.clear()
        else:
            self._adopt()

    def _momentum(self, tensor: int) -> Floats:
        found = self._moments(tensor)
        return found[0] if found else torch.zeros(self._parameters[tensor].numel()).numpy()

    def _check(self, tensors: dict[str, Any]) -> None:
        known = {name: parameter.numel() for name, parameter in zip(self._names, self._parameters, strict=True)}
        for name in [*tensors, *known]:
            saved = tensors[name]["numel"] if name in tensors else None
            if saved != known.get(name):
                raise InvalidRequestError(
                    f"tensor '{name}': the state {_has(saved)}, this model {_has(known.get(name))}."
                )


def _has(numel: int | None) -> str:
    return "has none of that name" if numel is None else f"has {numel} elements of it"


DistributedZeroOneAdam = ZeroOneAdam
