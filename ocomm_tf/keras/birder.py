"""Birder and SoftSignSGD for Keras 3. They wrap any optimizer with a learning rate, and make steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ocomm.api import Average
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.birder import Birder, BirderOptions
from ocomm.optim.soft_sign import SoftSignSGD, SoftSignSGDOptions
from ocomm.training.common import Common
from ocomm_tf.keras.compressed import Compressed, documented, wrap


class _Birder(Compressed):
    ocomm_core = Birder


class _SoftSignSGD(Compressed):
    ocomm_core = SoftSignSGD


@documented(BirderOptions)
def DistributedBirder(
    optimizer: Any,
    variables: Any = None,
    *,
    beta: float = 0.95,
    stochastic: bool = False,
    seed: int = 0,
    amsgrad_after: int | None = None,
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
    """Wraps an optimizer for data-parallel Birder: exactly 1 bit per element and direction from the first step on.

    Every element moves by the learning rate in every step, so tune it and ``beta``: on a small language model Adam's
    rate and a ``beta`` of 0.8 were best, and 0.9 ended higher at every rate. The default is the paper's. Steps are
    collective.

    Args:
        {arguments}

    Returns:
        An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
        SettingsError: An option of the algorithm has an impossible value.
    """
    chosen = BirderOptions.of(locals()), Common.of(locals())
    return wrap(_Birder, optimizer, variables, names, process_set, *chosen)


@documented(SoftSignSGDOptions)
def DistributedSoftSignSGD(
    optimizer: Any,
    variables: Any = None,
    *,
    beta: float = 0.95,
    amsgrad_after: int | None = None,
    block_size: int | Literal["tensor"] = 4096,
    overlap: bool = True,
    max_grad_norm: float | None = None,
    clip: Literal["exact", "previous"] = "exact",
    verify: Literal["sampled", "full", "version"] = "sampled",
    backward_passes_per_step: int = 1,
    op: int = Average,
    compression: type[Any] | None = None,
    gradient_predivide_factor: float = 1.0,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer for data-parallel SoftSignSGD, the dense counterpart of Birder, which exchanges without
    compression.

    Steps are collective.

    Args:
        {arguments}

    Returns:
        An optimizer of a subclass with the same name. A model that is saved with it loads without ocomm.

    Raises:
        InvalidRequestError: The optimizer or a variable cannot be wrapped, or an option has an impossible value.
        MismatchError: The ranks wrap different things; here, or at the first step if ``variables`` is None.
        NonFiniteError: In a step, on all ranks: a rank's gradient has a NaN or infinity. No variable is changed.
        SettingsError: An option of the algorithm has an impossible value.
    """
    common = replace(Common.of(locals()), hierarchical=False)
    return wrap(_SoftSignSGD, optimizer, variables, names, process_set, SoftSignSGDOptions.of(locals()), common)
