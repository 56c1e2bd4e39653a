"""0/1 Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW``, whose settings it reads at every step."""

from __future__ import annotations

import torch

from ocomm.optim import zero_one_adam as optim
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_torch.compiling import eager
from ocomm_torch.optimizers.adam import AdamWrapper
from ocomm_torch.optimizers.compressed import optimizer_face


@optimizer_face(
    optim.ZeroOneAdam,
    memory={"offload"},
    step="changes parameters in place, identically on all ranks at a sync, or changes nothing on any",
    optimizer=(
        "A ``torch.optim.Adam`` or ``AdamW`` over parameters in the host's memory or on one GPU: float32, or "
        "bfloat16 or float16 with float32 masters. Its param groups stay in use (lr, betas, eps, weight_decay, LR "
        "schedulers on either object). Its own step is never called. If it has a state already, 0/1 Adam continues "
        "from that."
    ),
)
class ZeroOneAdam(AdamWrapper):
    """Data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per parameter from the second step on, later not at every step.

    Between syncs each rank steps by itself, and parameters differ between ranks, so evaluate and save after a sync;
    ``compression_report()["synced"]`` is True then. ``finish()`` syncs at any time. ``total_steps`` chooses when syncs
    become rare, and makes the last step one. After a warm start v counts as refreshed in each of the checkpoint's
    steps, and the schedules continue from its step count. In the hierarchical form the ranks of a host step together.
    """

    _core_class = optim.ZeroOneAdam
    _driver_class = ZeroOneAdamDriver
    _driver: ZeroOneAdamDriver
    most_state_nbytes = 48

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
        with self._borrowed():
            self._driver.finish()


DistributedZeroOneAdam = ZeroOneAdam
