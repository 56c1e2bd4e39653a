"""dist-EF-SGD for Keras 3: wraps ``keras.optimizers.SGD``, whose settings it reads at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.ef_sgd import EFSGD
from ocomm_tf.keras.compressed import Compressed, check_own_step, inner_of, optimizer_face, wrap


class _EFSGD(Compressed):
    ocomm_core = EFSGD

    @property
    def ocomm_moments(self: Any) -> tuple[tuple[float, float], float]:  # type: ignore[override]
        momentum = float(self.momentum)
        return (momentum, momentum if self.nesterov else 0.0), 0.0


@optimizer_face(
    EFSGD,
    optimizer=(
        "A ``keras.optimizers.SGD`` that was not used yet, or a LossScaleOptimizer around one. Learning rate (or "
        "schedule), momentum, nesterov and weight decay (subtracted from the variable) are read from it at every "
        "step, also in a graph; it does clipping, gradient accumulation and averages of variables. Momentum is 0 at "
        "first, and not saved with a model."
    ),
)
def DistributedEFSGD(
    optimizer: Any,
    variables: Any = None,
    *,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps SGD for data-parallel SGD with error feedback (dist-EF-blockSGDM, arXiv 1905.10936): 1 bit per element and
    direction.

    Each rank sends the signs of its own momentum times the learning rate, and per block the mean of their magnitudes.
    What that loses is kept and added in the next step; so is what compressing the average loses at its server. Steps
    follow Torch's formula, in which the learning rate is no part of the momentum.
    """
    inner = inner_of(optimizer)
    if not isinstance(inner, keras.optimizers.SGD):
        raise InvalidRequestError(
            f"DistributedEFSGD wraps keras.optimizers.SGD, not {type(inner).__name__}; use DistributedOptimizer for "
            "other optimizers."
        )
    check_own_step(inner, "DistributedEFSGD", keras.optimizers.SGD)
    return wrap(_EFSGD, optimizer, variables, names, process_set, arguments)
