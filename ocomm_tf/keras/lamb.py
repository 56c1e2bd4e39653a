"""1-bit LAMB for Keras 3: wraps Lamb, Adam or AdamW for their hyperparameters, and makes steps in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.lamb import Lamb
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm_tf.keras.compressed import GOES_ON, CompressedAdam, check_own_step, inner_of, optimizer_face, wrap


class _OneBitLamb(CompressedAdam):
    ocomm_core = Lamb
    ocomm_driver = OneBitAdamDriver
    trains_on_devices = False


@optimizer_face(
    Lamb,
    goes_on=GOES_ON,
    optimizer=(
        "A ``keras.optimizers.Lamb``, ``Adam`` or ``AdamW`` that was not used yet, or a LossScaleOptimizer around "
        "one. Learning rate (or schedule), betas, epsilon and weight decay are read from it at every step, also in "
        "a graph; it does clipping, gradient accumulation and averages of variables. Its own step is never called."
    ),
)
def DistributedOneBitLamb(
    optimizer: Any,
    variables: Any = None,
    *,
    warm_start: bool = False,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps an optimizer for data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per variable
    element and direction.

    LAMB multiplies the learning rate of each tensor by its trust ratio, |p| / |update|. A weight decay is part of the
    update, and so of its norm in the trust ratio. Steps follow the formula of ``ocomm_torch.DistributedOneBitLamb``,
    and are collective.
    """
    inner = inner_of(optimizer)
    if not isinstance(inner, (keras.optimizers.Lamb, keras.optimizers.Adam)):
        raise InvalidRequestError(
            f"DistributedOneBitLamb wraps keras.optimizers.Lamb, Adam or AdamW, not {type(inner).__name__}; use "
            "DistributedOptimizer for other optimizers."
        )
    check_own_step(inner, "DistributedOneBitLamb", keras.optimizers.Lamb, keras.optimizers.Adam)
    return wrap(_OneBitLamb, optimizer, variables, names, process_set, arguments, warm_start)
