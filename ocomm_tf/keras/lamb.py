"""1-bit LAMB for Keras 3: it wraps Lamb, Adam or AdamW for their hyperparameters, and steps in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras

from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.session import Session
from ocomm.training.driver import Common, Driver
from ocomm.training.lamb import LambDriver
from ocomm_tf.keras.compressed import OneBitAdam, check_own_step, inner_of, wrap
from ocomm_tf.keras.host import Host


class _OneBitLamb(OneBitAdam):
    _kind = "OneBitLamb"
    trains_on_devices = False


def DistributedOneBitLamb(
    optimizer: Any,
    variables: Any = None,
    *,
    freeze_step: int | Literal["auto"] = "auto",
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    block_size: int | Literal["tensor"] = 4096,
    scale: Literal["l1", "rms"] = "rms",
    variance_floor: float = 0.05,
    overlap: bool = True,
    mask_refresh: int = 100,
    max_grad_norm: float | None = None,
    clip: Literal["exact", "previous"] = "exact",
    verify: Literal["sampled", "full", "version"] = "sampled",
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Data-parallel 1-bit LAMB (arXiv 2104.06069): LAMB at first, then 1 bit per variable element and direction.

    ``optimizer``: ``keras.optimizers.Lamb``, ``Adam`` or ``AdamW``, not used yet, or a LossScaleOptimizer around one.
    Steps follow the formula of ``ocomm_torch.DistributedOneBitLamb``, whose options these are: a weight decay is part
    of the update, whose norm the trust ratio has. The rest is as in ``DistributedOneBitAdam``.
    """
    inner = inner_of(optimizer)
    if not isinstance(inner, (keras.optimizers.Lamb, keras.optimizers.Adam)):
        raise InvalidRequestError(
            f"DistributedOneBitLamb wraps keras.optimizers.Lamb, Adam or AdamW, not {type(inner).__name__}; use "
            "DistributedOptimizer for other optimizers."
        )
    check_own_step(inner, "DistributedOneBitLamb", keras.optimizers.Lamb, keras.optimizers.Adam)
    common = Common(block_size, overlap, max_grad_norm, clip, verify)

    def make(session: Session, number: int, host: Host) -> Driver:
        return LambDriver(
            session,
            number,
            host.specs,
            host,
            common,
            optimizer="LAMB",
            freeze_step=freeze_step,
            scale=scale,
            variance_floor=variance_floor,
            mask_refresh=mask_refresh,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            coeff_beta=coeff_beta,
            factor_max=factor_max,
            factor_min=factor_min,
            factor_threshold=factor_threshold,
        )

    return wrap(_OneBitLamb, optimizer, variables, names, process_set, make)
