"""The entry point that Torch calls when it is imported: registers the backend "ocomm" of torch.distributed.

``import torch`` must stay as fast as it is, and may happen in the middle of ``import ocomm_torch``. So
``ocomm_torch.distributed`` is imported when a group is made.
"""

from __future__ import annotations

from typing import Any

from ocomm import torch_registration


def register() -> None:
    """Registers the backend. A second call does nothing."""
    torch_registration.register(_create, _rendezvous)


def _create(*arguments: Any) -> Any:
    from ocomm_torch import distributed

    return distributed.create(*arguments)


def _rendezvous(*arguments: Any, **options: Any) -> Any:
    from ocomm_torch import distributed

    return distributed.rendezvous(*arguments, **options)
