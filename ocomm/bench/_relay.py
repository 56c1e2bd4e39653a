"""A long or bad cable: carries the Ethernet frames of a lab's host to the switch, each after a delay, and back without
one. Of both directions a fraction of the frames is lost, drawn at random.

    python _relay.py NAMESPACE PORT MILLISECONDS LOSS

``eth0`` of the host, in the network namespace of that file, and the port of the switch are tap devices that exist. For
kernels without netem. A frame costs some ten microseconds of processor time, so this serves rates up to 200 Mbit/s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_CLONE_NEWNET = 0x40000000
#: Of a frame; the lab's interfaces have an MTU of 1,500.
_FRAME_NBYTES = 65536


def open_tap(name: str) -> int:
    """Returns a file that reads what the device sends, and whose writes it receives."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


def enter(namespace: str) -> None:
    """Moves this process to the network namespace of a file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def frames(device: int) -> list[bytes]:
    """Returns the frames that can be read now."""
    found: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < 64:
            found.append(os.read(device, _FRAME_NBYTES))
    return found


def relay(host: int, switch: int, delay_s: float, loss: float) -> None:
    """Never returns: the lab's end is its end."""
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _send(switch, waiting.popleft()[1])
        ready, _, _ = select.select([host, switch], [], [], waiting[0][0] - now if waiting else None)
        if host in ready:
            due = time.monotonic() + delay_s
            waiting.extend((due, frame) for frame in frames(host) if random.random() >= loss)
        if switch in ready:
            for frame in frames(switch):
                if random.random() >= loss:
                    _send(host, frame)


def _send(device: int, frame: bytes) -> None:
    # EIO: the device is down, as a cable that is not connected. BlockingIOError: its queue is full. Both lose frames.
    with contextlib.suppress(OSError):
        os.write(device, frame)


if __name__ == "__main__":
    to_switch = open_tap(sys.argv[2])
    enter(sys.argv[1])
    relay(open_tap("eth0"), to_switch, float(sys.argv[3]) / 1e3, float(sys.argv[4]))
