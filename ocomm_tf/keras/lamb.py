"""1-bit LAMB for Keras 3: wraps Lamb, Adam or AdamW for their hyperparameters, and makes steps in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras

from ocomm.api import Average
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.lamb import Lamb, LambOptions
from ocomm.training.common import Common
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_tf.keras.compressed import CompressedAdam, check_own_step, documented, inner_of, wrap


class _OneBitLamb(CompressedAdam):
    ocomm_core = Lamb
    ocomm_driver = OneBitAdamDriver
    trains_on_devices = False


@documented(LambOptions)
def DistributedOneBitLamb(
    optimizer: Any,
    variables: Any = None,
    *,
    freeze_step: int | Literal["auto"] = "auto",
    total_steps: int | None = None,
    warm_start: bool = False,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    block_size: int | Literal["tensor"] = 4096,
    scale: Literal["l1", "rms"] = "rms",
    variance_floor: float = 0.05,
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
    """Wraps an optimizer for data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per variable
    element and direction.

    LAMB multiplies the learning rate of each tensor by its trust ratio, |p| / |update|. A weight decay is part of the
    update, and so of its norm in the trust ratio. Steps follow the formula of ``ocomm_torch.DistributedOneBitLamb``,
    and are collective.

    Args:
        optimizer: A ``keras.optimizers.Lamb``, ``Adam`` or ``AdamW`` that was not used yet, or a LossScaleOptimizer
            around one. Learning rate (or schedule), betas, epsilon and weight decay are read from it at every step,
            also in a graph; it does clipping, gradient accumulation and averages of variables. Its own step is never
            called.
        {arguments}

    Returns:
        An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm, and a plain
        Adam can continue from it. To continue with 1 bit, compile with a new one, ``build`` it on the model's
        variables, and call ``model.load_weights(file)``; errors start at zero.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
        SettingsError: An option of the algorithm has an impossible value.
    """
    inner = inner_of(optimizer)
    if not isinstance(inner, (keras.optimizers.Lamb, keras.optimizers.Adam)):
        raise InvalidRequestError(
            f"DistributedOneBitLamb wraps keras.optimizers.Lamb, Adam or AdamW, not {type(inner).__name__}; use "
            "DistributedOptimizer for other optimizers."
        )
    check_own_step(inner, "DistributedOneBitLamb", keras.optimizers.Lamb, keras.optimizers.Adam)
    chosen = LambOptions.of(locals()), Common.of(locals())
    return wrap(_OneBitLamb, optimizer, variables, names, process_set, *chosen, warm_start)
