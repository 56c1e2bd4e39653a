"""1-bit Lion for Keras 3: wraps any optimizer with a learning rate, and makes steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.lion import Lion, LionOptions
from ocomm_tf.keras.compressed import Compressed, inner_of, optimizer_face, wrap


class _Lion(Compressed):
    ocomm_core = Lion


@optimizer_face(
    Lion,
    betas="The factor of the momentum in the sign, and of its moving average; both in [0, 1). None: those of a "
    "``keras.optimizers.Lion``, else (0.9, 0.99).",
)
def DistributedLion(
    optimizer: Any,
    variables: Any = None,
    *,
    betas: tuple[float, float] | None = None,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps an optimizer for data-parallel Lion with a majority vote: exactly 1 bit per element and direction from the
    first step on.

    Every element moves by the learning rate in every step: begin with a third to a tenth of Adam's, and three to ten
    times its weight decay.
    """
    inner = inner_of(optimizer)
    if betas is None:
        betas = (inner.beta_1, inner.beta_2) if isinstance(inner, keras.optimizers.Lion) else LionOptions.betas
    return wrap(_Lion, optimizer, variables, names, process_set, {**arguments, "betas": betas})
