"""0/1 Adam for Keras 3: wraps ``keras.optimizers.Adam`` or ``AdamW``, and makes steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_tf.keras.compressed import ADAM, GOES_ON, CompressedAdam, inner_of, optimizer_face, require_adam, wrap
from ocomm_tf.keras.driven import refuse_averages, refuse_loss_scaling


class _ZeroOneAdam(CompressedAdam):
    ocomm_core = ZeroOneAdam
    ocomm_driver = ZeroOneAdamDriver

    def finish(self: Any) -> None:
        """Syncs what the steps since the last sync have added up; all ranks have the same variables then. Collective,
        not in a graph.

        Call it on all ranks after the last step, before the model is saved or evaluated. It is no step; after a sync,
        and before the first step, it does nothing. Training may go on after it.

        Raises:
            NonFiniteError: What the steps have added up overflows on some rank; nothing was changed.
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        frontend = self._frontend
        if frontend is None:
            return
        self._export_moments()
        frontend.read(self._trainable_variables)
        frontend.driver.finish()
        frontend.write(self._trainable_variables)
        self._write_moments(int(self.iterations.numpy()))


@optimizer_face(ZeroOneAdam, goes_on=GOES_ON, optimizer=ADAM)
def DistributedZeroOneAdam(
    optimizer: Any,
    variables: Any = None,
    *,
    warm_start: bool = False,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps Adam for data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per element from the second step on, later not at
    every step.

    Between syncs variables differ between ranks; ``compression_report()["synced"]`` is True if they do not.
    ``finish()`` syncs at any time, and ``callbacks.FinishCallback`` calls it at the end of ``fit``. Steps follow
    Torch's formula, which adds epsilon to sqrt(v_hat).
    """
    require_adam(optimizer, "DistributedZeroOneAdam")
    options = ZeroOneAdamOptions.of(arguments)
    if options.local_step_clip != 1:
        refuse_averages(
            inner_of(optimizer),
            "DistributedZeroOneAdam",
            "Leave it out, or pass local_step_clip=1, with which every step is a sync.",
        )
    if options.vote == "sync":
        refuse_loss_scaling(
            optimizer,
            "With vote='sync' a step between syncs sends nothing, and a LossScaleOptimizer asks all ranks in each step "
            "whether their gradients are finite.",
        )
    return wrap(_ZeroOneAdam, optimizer, variables, names, process_set, arguments, warm_start)
