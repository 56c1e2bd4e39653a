"""dist-EF-SGD for Keras 3: wraps ``keras.optimizers.SGD``, whose settings it reads at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras

from ocomm.api import Average
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.ef_sgd import EFSGD, EFSGDOptions
from ocomm.training.common import Common
from ocomm_tf.keras.compressed import Compressed, check_own_step, documented, inner_of, wrap


class _EFSGD(Compressed):
    ocomm_core = EFSGD

    @property
    def ocomm_moments(self: Any) -> tuple[tuple[float, float], float]:  # type: ignore[override]
        momentum = float(self.momentum)
        return (momentum, momentum if self.nesterov else 0.0), 0.0


@documented(EFSGDOptions)
def DistributedEFSGD(
    optimizer: Any,
    variables: Any = None,
    *,
    block_size: int | Literal["tensor"] = 4096,
    overlap: bool = True,
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
    """Wraps SGD for data-parallel SGD with error feedback (dist-EF-blockSGDM, arXiv 1905.10936): 1 bit per element and
    direction.

    Each rank sends the signs of its own momentum times the learning rate, and per block the mean of their magnitudes.
    What that loses is kept and added in the next step; so is what compressing the average loses at its server. Steps
    follow Torch's formula, in which the learning rate is no part of the momentum. Steps are collective.

    Args:
        optimizer: A ``keras.optimizers.SGD`` that was not used yet, or a LossScaleOptimizer around one. Learning rate
            (or schedule), momentum, nesterov and weight decay (subtracted from the variable) are read from it at every
            step, also in a graph; it does clipping, gradient accumulation and averages of variables. Momentum is 0 at
            first, and not saved with a model.
        {arguments}

    Returns:
        An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
    """
    inner = inner_of(optimizer)
    if not isinstance(inner, keras.optimizers.SGD):
        raise InvalidRequestError(
            f"DistributedEFSGD wraps keras.optimizers.SGD, not {type(inner).__name__}; use DistributedOptimizer for "
            "other optimizers."
        )
    check_own_step(inner, "DistributedEFSGD", keras.optimizers.SGD)
    chosen = EFSGDOptions.of(locals()), Common.of(locals())
    return wrap(_EFSGD, optimizer, variables, names, process_set, *chosen)
