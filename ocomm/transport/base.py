"""The network seam: nonblocking messages between the ranks of one communicator.

Collectives are built from these messages rather than from MPI's own collectives, because only then does a wait know
for which rank it waits (docs/decisions/0001-point-to-point.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ocomm.types import Bytes

#: An opaque handle; only the transport that made it looks inside.
Request = Any


class Transport(Protocol):
    """One communicator. Messages between two ranks with equal tags arrive in the order they were sent, into buffers in
    the order these were posted.

    ``arrival`` is set whenever something may have arrived and whenever the runtime is woken, so that a loop may sleep
    on it; a network that cannot tell leaves it alone, and the loop's timeout is its polling interval.
    """

    rank: int
    size: int
    arrival: threading.Event

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """Starts to send; ``buffer`` must not change until the request tests true."""
        ...

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """Starts to receive exactly ``buffer.nbytes`` bytes; ``buffer`` is filled when the request tests true."""
        ...

    def test(self, request: Request) -> bool:
        """True once the message has left or arrived; not to be called again after that."""
        ...

    def probe(self, tag: int) -> tuple[int, int] | None:
        """(source, nbytes) of a message which has arrived with this tag and not been received, or None."""
        ...

    def duplicate(self) -> Request:
        """Starts a collective copy of the communicator; see ``duplicated``."""
        ...

    def duplicated(self, request: Request) -> Transport | None:
        """The copy that ``duplicate`` started, once it is there."""
        ...

    def subset(self, ranks: Sequence[int]) -> Transport:
        """A communicator of these ranks (of this one's numbering); called by exactly those, in one order everywhere."""
        ...

    def abort(self, code: int) -> None:
        """Ends the whole job at once."""
        ...

    def close(self) -> None:
        """Gives the communicator back. Not collective; nothing may be in flight."""
        ...
