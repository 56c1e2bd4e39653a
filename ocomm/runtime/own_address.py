"""Finds the addresses at which other hosts reach this one, and a free port."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def interface_addresses() -> list[tuple[str, ipaddress.IPv4Address]]:
    """Returns the names of this host's interfaces that have an IPv4 address, and the addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, ipaddress.IPv4Address(answer[20:24])))
    return found


def own_address(other: str) -> str:
    """Returns this host's IPv4 address on the way to the host ``other``; "" if there is no route to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing, but makes the system choose a route
        return probe.getsockname()[0]
    return ""


def ways_to_this_host(others: Iterable[str]) -> list[str]:
    """Returns addresses at which other hosts may reach this one, without loopback ones, and last its name.

    Args:
        others: Names or addresses of those hosts. A name that this host cannot resolve is skipped.
    """
    of_interfaces = [str(address) for _, address in interface_addresses()]
    ways = [way for way in (*map(own_address, others), *of_interfaces) if way and not way.startswith("127.")]
    return [*dict.fromkeys([*ways, socket.gethostname()])]


def free_port() -> int:
    """Returns the number of a TCP port that is free on all addresses of this host at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
