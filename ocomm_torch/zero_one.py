"""0/1 Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW``, whose settings it reads at every step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from ocomm.compression.layout import TensorSpec
from ocomm.session import Session
from ocomm.training.driver import Common
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_torch.adam import AdamWrapper, is_decoupled


class ZeroOneAdam(AdamWrapper):
    """Data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per parameter from the second step on, later not at every step.

    ``optimizer`` is a ``torch.optim.Adam`` or ``AdamW`` over parameters in the host's memory or on one GPU:
    float32, or bfloat16 or float16, of which float32 masters are trained. Its param groups stay live (lr, betas,
    eps, weight_decay, LR schedulers on either object). Its own step is never called. If it has a state already, 0/1
    Adam goes on from that.

    Syncs: at every step up to ``local_step_start``, then every min(``local_step_clip``, 2^floor((t -
    ``local_step_start``) / ``local_step_doubling``)) steps. Between syncs each rank steps by itself, and parameters
    differ between ranks: evaluate and save after a sync, ``compression_report()["synced"]`` tells. The variance is
    refreshed, with a dense average, at step 1 and then after 2^floor(j / ``var_update_scaler``) steps, j counting, as
    long as every step is a sync, or up to step ``var_freeze_step``. For a run of T steps, T/4, T/4 and a clip of 4 did
    well.

    ``warm_start``: as for ``OneBitAdam``; v counts as refreshed in each of the checkpoint's steps, and the schedules go
    on from its step count.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``block_size``: elements per
    scale, or ``"tensor"``. ``scale``: ``"l1"`` or ``"rms"``. ``variance_floor``: fraction of a block's mean sqrt(v)
    below which no element's falls. ``mask_refresh``: syncs between looks for elements that had no gradient at any
    refresh and have one now. ``overlap``: exchange during backward. ``verify``: how much of each gradient is read again
    to notice a change that Torch does not show (docs/checks.md): another 64th in each step (``"sampled"``), all of it
    (``"full"``), nothing (``"version"``). ``max_grad_norm``: clips gradients by one norm for all ranks, N = sqrt(mean
    over ranks of |g|^2). ``clip``: ``"exact"`` takes this step's N, without overlap; ``"previous"`` the last step's,
    with it. ``backward_passes_per_step``: gradients are summed over that many backward passes. ``hierarchical``: the
    ranks of a host add up their gradients and step together, and each compresses a slice; ``"auto"``: if there are
    several hosts, all with several ranks.

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
        warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        block_size: int | Literal["tensor"] = 4096,
        scale: Literal["l1", "rms"] = "rms",
        variance_floor: float = 0.2,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        process_set: Any = None,
    ) -> None:
        self._common = Common(block_size, overlap, max_grad_norm, clip, verify, backward_passes_per_step, hierarchical)
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
        super().__init__(optimizer, named_parameters, process_set, backward_passes_per_step, warm_start)

    def _make_driver(self, session: Session, process_set: int, specs: list[TensorSpec]) -> ZeroOneAdamDriver:
        kind = "AdamW" if is_decoupled(self._inner, self.param_groups[0]) else "Adam"
        assert session.kernels is not None
        options = {**self._options, "warm_start": self._read_warm_start(session.kernels)}
        return ZeroOneAdamDriver(session, process_set, specs, self, self._common, optimizer=kind, **options)


DistributedZeroOneAdam = ZeroOneAdam
