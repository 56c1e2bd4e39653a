"""1-bit Lion for Keras 3: it wraps any optimizer that has a learning rate, and steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras

from ocomm.operations import ProcessSet, global_process_set
from ocomm.session import Session
from ocomm.training.driver import Common, Driver
from ocomm.training.lion import LionDriver
from ocomm_tf.keras.compressed import Compressed, inner_of, wrap
from ocomm_tf.keras.host import Host


class _Lion(Compressed):
    _kind = "Lion"


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
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Data-parallel Lion with a majority vote: exactly 1 bit per element and direction from the first step on.

    Learning rate and weight decay are ``optimizer``'s (``keras.optimizers.Lion(lr)`` or ``SGD(lr)``), its own step is
    never made. ``betas``: None: those of a ``keras.optimizers.Lion``, else (0.9, 0.99). The other options are those of
    ``ocomm_torch.DistributedLion``, the rest is as in ``DistributedOneBitAdam``.
    """
    inner = inner_of(optimizer)
    if betas is None:
        betas = (inner.beta_1, inner.beta_2) if isinstance(inner, keras.optimizers.Lion) else (0.9, 0.99)
    options = {"betas": [float(beta) for beta in betas], "seed": seed}
    common = Common(block_size, overlap, max_grad_norm, clip, verify)

    def make(session: Session, number: int, host: Host) -> Driver:
        return LionDriver(session, number, host.specs, host, common, options)

    return wrap(_Lion, optimizer, variables, names, process_set, make)
