"""1-bit Lion for Keras 3: wraps any optimizer with a learning rate, and makes steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras

from ocomm.api import Average
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.lion import Lion, LionOptions
from ocomm.training.common import Common
from ocomm_tf.keras.compressed import Compressed, documented, inner_of, wrap


class _Lion(Compressed):
    ocomm_core = Lion


@documented(LionOptions)
def DistributedLion(
    optimizer: Any,
    variables: Any = None,
    *,
    betas: tuple[float, float] | None = None,
    seed: int = 0,
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
    """Wraps an optimizer for data-parallel Lion with a majority vote: exactly 1 bit per element and direction from the
    first step on.

    Every element moves by the learning rate in every step: begin with a third to a tenth of Adam's, and three to ten
    times its weight decay. Steps are collective.

    Args:
        betas: The factor of the momentum in the sign, and of its moving average; both in [0, 1). None: those of a
            ``keras.optimizers.Lion``, else (0.9, 0.99).
        {arguments}

    Returns:
        An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
        SettingsError: An option of the algorithm has an impossible value.
    """
    inner = inner_of(optimizer)
    if betas is None:
        betas = (inner.beta_1, inner.beta_2) if isinstance(inner, keras.optimizers.Lion) else LionOptions.betas
    chosen = LionOptions.of(locals()), Common.of(locals())
    return wrap(_Lion, optimizer, variables, names, process_set, *chosen)
