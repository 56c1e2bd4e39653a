"""Birder and SoftSignSGD for Keras 3. They wrap any optimizer with a learning rate, and make steps in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.birder import Birder
from ocomm.optim.soft_sign import SoftSignSGD
from ocomm_tf.keras.compressed import Compressed, optimizer_face, wrap


class _Birder(Compressed):
    ocomm_core = Birder


class _SoftSignSGD(Compressed):
    ocomm_core = SoftSignSGD


@optimizer_face(Birder)
def DistributedBirder(
    optimizer: Any,
    variables: Any = None,
    *,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps an optimizer for data-parallel Birder: exactly 1 bit per element and direction from the first step on.

    Every element moves by the learning rate in every step, so tune it and ``beta``: on a small language model Adam's
    rate and a ``beta`` of 0.8 were best, and 0.9 ended higher at every rate. The default is the paper's. Steps are
    collective.
    """
    return wrap(_Birder, optimizer, variables, names, process_set, arguments)


@optimizer_face(SoftSignSGD)
def DistributedSoftSignSGD(
    optimizer: Any,
    variables: Any = None,
    *,
    names: Mapping[str, Any] | None = None,
    process_set: ProcessSet = global_process_set,
    **arguments: Any,
) -> Any:
    """Wraps an optimizer for data-parallel SoftSignSGD, the dense counterpart of Birder, which exchanges without
    compression.
    """
    return wrap(_SoftSignSGD, optimizer, variables, names, process_set, arguments)
