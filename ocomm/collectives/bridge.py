"""The NCCL communicator of a node, which carries dense values between its devices.

Calls of NCCL come from the engine's thread, for all segments and channels, in the order of ``collectives.turns``. A
bridge that has failed once is not used again: later transfers raise, and those under way are aborted, so that no device
hangs.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ocomm.collectives.plan import Message, Offload, Stage
from ocomm.collectives.turns import Turns
from ocomm.errors import HorovodInternalError, OcommError
from ocomm.kernels.device import Device, Event, Stream
from ocomm.transport.nccl import Communicator, Piece
from ocomm.types import Bytes

#: Limit for the wait for an abort, or for a call that the abort should end, in seconds.
_ABORT_S = 10.0
#: Seconds between the end of a bridge and the abort, in which other ranks may still read what it would free.
_SETTLE_S = 1.0


class Bridge:
    """One rank's side of the bridge of a node.

    ``ranks`` are the world ranks of the node, ``position`` is the position of this rank among them. Transfers are
    queued on ``stream`` of ``device``. A transfer that is not over, or not launched, after ``timeout_s`` ends the
    bridge; 0: no limit.
    """

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        device: Device,
        stream: Stream,
        ranks: Sequence[int],
        position: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.device = device
        self.ranks = tuple(ranks)
        self.position = position
        self.timeout_s = timeout_s or float("inf")
        self.turns = Turns()
        #: Why the bridge has ended, "" while it has not.
        self.ended = ""
        self._communicator = communicator
        self._stream = stream
        self._lock = threading.Lock()
        self._aborting = threading.Thread(target=self._abort, name="ocomm-abort", daemon=True)

    def launch(self, number: int, sends: Sequence[Piece], receives: Sequence[Piece]) -> Event | None:
        """Launches transfer ``number`` if it is its turn, and returns the event of its end; else returns None."""
        with self._lock:
            self._require()
            if not self.turns.is_due(number):
                return None
            self.turns.launch(number)
            self._communicator.exchange(sends, receives, self._stream.handle)
            return self._stream.record()

    def is_over(self, event: Event) -> bool:
        """Returns True if a launched transfer is over. Raises HorovodInternalError if the bridge has failed."""
        with self._lock:
            self._require()
            words = self._communicator.failure()
        if words:
            raise HorovodInternalError(f"{self.name}: {words}")
        return event.is_over()

    def _require(self) -> None:
        if self.ended:
            raise HorovodInternalError(
                f"{self.name} of ranks {list(self.ranks)} was given up: {self.ended}. A new optimizer opens "
                "another; other sums go through the host's memory from now on."
            )

    def end(self, why: str, wait_s: float = _ABORT_S) -> None:
        """Ends the bridge and the transfers under way, and waits ``wait_s`` for the abort. The first reason is kept."""
        # If a call of the engine's thread hangs, the abort ends it.
        is_locked = self._lock.acquire(timeout=_ABORT_S)
        if not self.ended:
            self.ended = why
            self._aborting.start()
        if is_locked:
            self._lock.release()
        self._aborting.join(wait_s)

    def _abort(self) -> None:
        with contextlib.suppress(OcommError):  # the bridge is not used again either way
            self.device.enter()
            last, until = self._stream.record(), time.monotonic() + _SETTLE_S
            while not last.is_over() and time.monotonic() < until:
                time.sleep(1e-3)
            self._communicator.abort()


@dataclass(frozen=True, slots=True)
class IntraNode:
    """How dense values travel inside a node: over ``bridge`` between ``ranks``, which are ranks of the channel.

    ``bridge`` is None if this node has one rank; its plans have the same stages as those of the other nodes.
    """

    bridge: Bridge | None
    ranks: tuple[int, ...]


def take_turn(
    intra_node: IntraNode, what: str, first: Stage, second: Stage, sends: Sequence[Piece], receives: Sequence[Piece]
) -> Offload:
    """Adds a transfer among the ranks of ``intra_node``, which all call it ``what``, and returns the task that makes
    it.

    Messages are added to two stages: those of ``first`` say that this rank is ready, those of ``second`` give the
    transfer its number. The stage after these is to begin with the task.
    """
    assert intra_node.bridge is not None
    bridge, ranks = intra_node.bridge, intra_node.ranks
    ready = np.full(len(ranks), zlib.crc32(what.encode()), np.int64)
    said, number = [ready[k : k + 1].view(np.uint8) for k in range(len(ranks))], np.zeros(8, np.uint8)
    if bridge.position == 0:
        first.receives += [Message(peer, said[k]) for k, peer in enumerate(ranks) if k]
        second.compute.append(Offload("Order", Order(bridge, ready, number)))
        second.sends = [Message(peer, number) for peer in ranks[1:]]
    else:
        first.sends.append(Message(ranks[0], said[bridge.position]))
        second.receives.append(Message(ranks[0], number))
    sent, received = (sum(piece.nbytes for piece in pieces) for pieces in (sends, receives))
    return Offload("Transfer", Transfer(bridge, number, sends, receives), sent, received)


class Order:
    """A ``plan.Task`` that gives a transfer its number, on the first rank of the node once all ranks are ready."""

    def __init__(self, bridge: Bridge, ready: np.ndarray, number: Bytes) -> None:
        self.failure: BaseException | None = None
        self._bridge = bridge
        self._ready = ready
        self._number = number

    def start(self) -> None:
        if (self._ready != self._ready[0]).any():
            ranks = [self._bridge.ranks[k] for k in np.flatnonzero(self._ready != self._ready[0])]
            raise HorovodInternalError(
                f"{self._bridge.name}: rank(s) {ranks} are at another exchange than rank {self._bridge.ranks[0]}"
            )
        self._number.view(np.int64)[0] = self._bridge.turns.give()

    def is_over(self) -> bool:
        return True


class Transfer:
    """A ``plan.Task`` that makes a transfer over the bridge when it is its turn."""

    def __init__(self, bridge: Bridge, number: Bytes, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self.failure: BaseException | None = None
        self._bridge = bridge
        self._number = number
        self._sends = sends
        self._receives = receives
        self._event: Event | None = None
        self._since = 0.0

    def start(self) -> None:
        self._event, self._since = None, time.monotonic()

    def is_over(self) -> bool:
        bridge = self._bridge
        try:
            if self._event is None:
                self._event = bridge.launch(int(self._number.view(np.int64)[0]), self._sends, self._receives)
            if self._event is not None and bridge.is_over(self._event):
                return True
            if time.monotonic() - self._since > bridge.timeout_s:
                what = "was launched, and is not over" if self._event else "waits for one before it that never came"
                peers = [bridge.ranks[p] for p in sorted({piece.peer for piece in (*self._sends, *self._receives)})]
                raise HorovodInternalError(
                    f"{bridge.name}: a transfer with rank(s) {peers} {what} after {bridge.timeout_s:.0f} s"
                )
        except HorovodInternalError as error:
            bridge.end(str(error), wait_s=0.0)
            raise
        return False
