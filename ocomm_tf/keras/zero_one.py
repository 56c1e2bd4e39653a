"""0/1 Adam for Keras 3: wraps ``keras.optimizers.Adam`` or ``AdamW``, and makes steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ocomm.api import Average
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions
from ocomm.training.common import Common
from ocomm.training.zero_one_adam import ZeroOneAdamDriver
from ocomm_tf.keras.compressed import ADAM, CompressedAdam, documented, inner_of, require_adam, wrap
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


@documented(ZeroOneAdamOptions, optimizer=ADAM)
def DistributedZeroOneAdam(
    optimizer: Any,
    variables: Any = None,
    *,
    var_update_scaler: int = 16,
    var_freeze_step: int | None = None,
    local_step_start: int | None = None,
    local_step_doubling: int | None = None,
    local_step_clip: int | None = None,
    total_steps: int | None = None,
    vote: Literal["step", "sync"] = "step",
    warm_start: bool = False,
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
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps Adam for data-parallel 0/1 Adam (arXiv 2202.06009): 1 bit per element from the second step on, later not at
    every step.

    Between syncs variables differ between ranks; ``compression_report()["synced"]`` is True if they do not.
    ``finish()`` syncs at any time, and ``callbacks.FinishCallback`` calls it at the end of ``fit``. Steps follow
    Torch's formula, which adds epsilon to sqrt(v_hat), and are collective.

    Args:
        {arguments}

    Returns:
        An optimizer of a subclass with the same name, with ``finish()``. A model that is saved with it loads without
        ocomm, and a plain Adam can continue from it. To continue with 1 bit, compile with a new one, ``build`` it on
        the model's variables, and call ``model.load_weights(file)``; errors start at zero.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
        SettingsError: An option of the algorithm has an impossible value.
    """
    require_adam(optimizer, "DistributedZeroOneAdam")
    chosen = ZeroOneAdamOptions.of(locals()), Common.of(locals())
    if chosen[0].local_step_clip != 1:
        refuse_averages(
            inner_of(optimizer),
            "DistributedZeroOneAdam",
            "Leave it out, or pass local_step_clip=1, with which every step is a sync.",
        )
    if vote == "sync":
        refuse_loss_scaling(
            optimizer,
            "With vote='sync' a step between syncs sends nothing, and a LossScaleOptimizer asks all ranks in each step "
            "whether their gradients are finite.",
        )
    return wrap(_ZeroOneAdam, optimizer, variables, names, process_set, *chosen, warm_start)
