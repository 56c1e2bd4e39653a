"""Finds the address at which other hosts reach this one, and a free port."""

from __future__ import annotations

import contextlib
import socket


def own_address(other: str) -> str:
    """Returns this host's IPv4 address on the way to the host ``other``; "" if there is no route to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing, but makes the system choose a route
        return probe.getsockname()[0]
    return ""


def free_port() -> int:
    """Returns the number of a TCP port that is free on all addresses of this host at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
