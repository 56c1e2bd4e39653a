"""Makes the backend "ocomm" known to torch.distributed. Imports nothing but what Torch has already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "ocomm"


def register(create: Callable[..., Any], rendezvous: Callable[..., Any]) -> None:
    """Registers the backend and the store of ``init_method="ocomm://"``, which these functions make. A second call does
    nothing.
    """
    from torch import distributed

    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    distributed.register_rendezvous_handler(NAME, rendezvous)
