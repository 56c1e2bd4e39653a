"""The interface of a network: nonblocking messages between the ranks of one communicator.

Collectives are built from these messages instead of MPI's own collectives, because only then a wait knows which rank it
waits for (docs/decisions/0001-point-to-point.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ocomm.types import Bytes

#: An opaque handle, which only the transport that made it can read.
Request = Any


class Transport(Protocol):
    """One communicator. Messages between two ranks with equal tags arrive in the order they were sent, into buffers in
    the order these were posted.

    ``arrival`` is set whenever something may have arrived and whenever the runtime is woken, so that a loop may sleep
    on it. A network that cannot detect arrivals does not set it, and the loop's timeout is its polling interval.
    """

    rank: int
    size: int
    arrival: threading.Event

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """Starts to send. ``buffer`` must not change until ``test`` of the request returns True."""
        ...

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """Starts to receive exactly ``buffer.nbytes`` bytes. ``buffer`` is filled once ``test`` of the request returns
        True.
        """
        ...

    def test(self, request: Request) -> bool:
        """Returns True once the message has left or arrived; must not be called again after that."""
        ...

    def probe(self, tag: int) -> tuple[int, int] | None:
        """Returns (source, nbytes) of a message that has arrived with this tag and has not been received, or None."""
        ...

    def duplicate(self) -> Request:
        """Starts to copy the communicator; ``duplicated`` returns the copy. Collective."""
        ...

    def duplicated(self, request: Request) -> Transport | None:
        """Returns the copy that ``duplicate`` started, or None until it is made."""
        ...

    def subset(self, ranks: Sequence[int]) -> Transport:
        """Returns a communicator of these ranks (numbers in this one). Exactly these ranks call it, in one order on all
        of them.
        """
        ...

    def abort(self, code: int) -> None:
        """Ends the whole job at once."""
        ...

    def close(self) -> None:
        """Frees the communicator. Not collective; nothing may be in flight."""
        ...
