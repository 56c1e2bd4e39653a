"""Which TCP ports the processes of a job listen on, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def listeners(pid: int) -> list[str]:
    """The addresses that a process listens on: IPv4 and IPv6 as the kernel writes them, in hexadecimal, with port."""
    open_sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            open_sockets.add(name[8:-1])
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    return sorted(words[1] for words in lines if words[3] == "0A" and words[9] in open_sockets)


def on_network(addresses: list[str]) -> list[str]:
    """Those that are not on loopback."""
    v6 = "0" * 24 + "01000000:"
    return [address for address in addresses if not (address[:8].endswith("7F") or address.startswith(v6))]


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
