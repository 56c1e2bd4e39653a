"""0/1 Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW``, whose settings it reads at every step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from ocomm.api import Average
from ocomm.optim import zero_one_adam as optim
from ocomm.optim.zero_one_adam import ZeroOneAdamOptions
from ocomm.training.common import Common
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_torch.adam import AdamWrapper
from ocomm_torch.compiling import eager
from ocomm_torch.compressed import documented
from ocomm_torch.memory_options import MemoryOptions
from ocomm_torch.mesh import chosen_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@documented(ZeroOneAdamOptions)
class ZeroOneAdam(AdamWrapper):
    """Data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per parameter from the second step on, later not at every step.

    Between syncs each rank steps by itself, and parameters differ between ranks, so evaluate and save after a sync;
    ``compression_report()["synced"]`` is True then. ``finish()`` syncs at any time. ``total_steps`` chooses when syncs
    become rare, and makes the last step one. After a warm start v counts as refreshed in each of the checkpoint's
    steps, and the schedules continue from its step count. In the hierarchical form the ranks of a host step together.

    ``step`` changes parameters in place, identically on all ranks at a sync, or changes nothing on any. Making the
    optimizer and its steps are collective.

    Args:
        optimizer: A ``torch.optim.Adam`` or ``AdamW`` over parameters in the host's memory or on one GPU: float32, or
            bfloat16 or float16 with float32 masters. Its param groups stay in use (lr, betas, eps, weight_decay, LR
            schedulers on either object). Its own step is never called. If it has a state already, 0/1 Adam continues
            from that.
        {arguments}

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things.
        NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity.
        SettingsError: An option of the algorithm has an impossible value.
    """

    _core_class = optim.ZeroOneAdam
    _driver_class = ZeroOneAdamDriver
    _driver: ZeroOneAdamDriver
    most_state_nbytes = 48

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        var_update_scaler: int = 16,
        var_freeze_step: int | None = None,
        local_step_start: int | None = None,
        local_step_doubling: int | None = None,
        local_step_clip: int | None = None,
        total_steps: int | None = None,
        vote: Literal["step", "sync"] = "step",
        warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        block_size: int | Literal["tensor"] = 4096,
        scale: Literal["l1", "rms"] = "rms",
        variance_floor: float = 0.2,
        dense_bits: Literal[32, 16, 8, 4] = 32,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        clip: Literal["exact", "previous"] = "exact",
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        hierarchical: bool | Literal["auto"] = "auto",
        op: int = Average,
        compression: type[Any] | None = None,
        gradient_predivide_factor: float = 1.0,
        offload: bool | str | os.PathLike[str] = False,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
    ) -> None:
        chosen = ZeroOneAdamOptions.of(locals()), Common.of(locals())
        memory = MemoryOptions.of(locals())
        super().__init__(
            optimizer, named_parameters, chosen_ranks(process_set, mesh, data), *chosen, warm_start, memory
        )

    @eager
    @torch.no_grad()
    def finish(self) -> None:
        """Syncs what the steps since the last sync have added up; all ranks have the same parameters then. Collective.

        Call it on all ranks after the last step, before the model is saved or evaluated. It is no step, and reads no
        gradient; after a sync it does nothing. Training may go on after it: the next sync is due as after any other.

        Raises:
            InvalidRequestError: Called between backward and ``step()``.
            NonFiniteError: What the steps have added up overflows on some rank; nothing was changed.
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        self._find_parameters()
        self._placement.arrive()
        self._masters.follow()
        self._driver.finish()
        self._placement.leave()
        self._masters.write()


DistributedZeroOneAdam = ZeroOneAdam
