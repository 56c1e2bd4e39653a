"""Makes the backend "ocomm" known to torch.distributed: the entry point that Torch calls when it is imported.

``import torch`` must stay as fast as it is, and may happen in the middle of ``import ocomm_torch``. So nothing is
imported here but what Torch has already; ``ocomm_torch.distributed`` is imported when a group is made.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "ocomm"


def register() -> None:
    """Registers the backend and the store of ``init_method="ocomm://"``. A second call does nothing."""
    from torch import distributed

    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    distributed.register_rendezvous_handler(NAME, _rendezvous)


def _create(*arguments: Any) -> Any:
    return importlib.import_module("ocomm_torch.distributed").create(*arguments)


def _rendezvous(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("ocomm_torch.distributed").rendezvous(*arguments, **options)
