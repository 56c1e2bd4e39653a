"""Where other hosts reach this one."""

from __future__ import annotations

import contextlib
import socket


def own_address(other: str) -> str:
    """This host's IPv4 address on the way to the host ``other``; "" if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing, but finds the way
        return probe.getsockname()[0]
    return ""


def free_port() -> int:
    """A TCP port that nobody has at this moment on any address of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
