"""What carries dense values between the devices of a node, beside the network: NCCL.

Its calls come from the engine's thread, for all segments and channels, in the order of ``collectives.turns``. A bridge
that has failed once is gone: what was to go over it raises, and what is on its way is aborted, lest devices hang.
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

#: Seconds after which nobody waits any more for an abort, or for a call that it is to end.
_ABORT_S = 10.0
#: Seconds that what is on its way is given before the abort: other ranks may still read what this one would free.
_SETTLE_S = 1.0


class Bridge:
    """One rank's side of the bridge of a node; ``ranks`` are the node's ranks in the world, ``position`` is this one's.
    Transfers are put on ``stream``, of ``device``.

    A transfer that is not over, or not launched, after ``timeout_s`` ends the bridge; 0: it may take any time.
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
        #: Why it is gone, "" while it is not.
        self.ended = ""
        self._communicator = communicator
        self._stream = stream
        self._lock = threading.Lock()
        self._aborting = threading.Thread(target=self._abort, name="ocomm-abort", daemon=True)

    def launch(self, number: int, sends: Sequence[Piece], receives: Sequence[Piece]) -> Event | None:
        """Transfer ``number``, if it is its turn: the event of its end."""
        with self._lock:
            self._require()
            if not self.turns.is_due(number):
                return None
            self.turns.launch(number)
            self._communicator.exchange(sends, receives, self._stream.handle)
            return self._stream.record()

    def is_over(self, event: Event) -> bool:
        """Of a transfer that was launched. HorovodInternalError if the bridge has failed."""
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
        """Gives it up, with what is on its way, and waits so long for the abort. The first reason stays."""
        # A call of the engine's thread that hangs is ended by the abort.
        is_locked = self._lock.acquire(timeout=_ABORT_S)
        if not self.ended:
            self.ended = why
            self._aborting.start()
        if is_locked:
            self._lock.release()
        self._aborting.join(wait_s)

    def _abort(self) -> None:
        with contextlib.suppress(OcommError):  # it is gone either way
            self.device.enter()
            last, until = self._stream.record(), time.monotonic() + _SETTLE_S
            while not last.is_over() and time.monotonic() < until:
                time.sleep(1e-3)
            self._communicator.abort()


@dataclass(frozen=True, slots=True)
class IntraNode:
    """How dense values travel inside a node: over ``bridge`` between ``ranks``, those of the channel.

    None where this node has one rank; its plans have the stages of the others.
    """

    bridge: Bridge | None
    ranks: tuple[int, ...]


def take_turn(
    intra_node: IntraNode, what: str, first: Stage, second: Stage, sends: Sequence[Piece], receives: Sequence[Piece]
) -> Offload:
    """A transfer among the ranks of ``intra_node``, who all call it ``what``. Two stages end with its messages:
    ``first`` says that this rank is ready, ``second`` gives the number. The next stage is to begin with the task."""
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
    """See ``plan.Task``: the first rank, which has heard that all are ready, gives a transfer its number."""

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
    """See ``plan.Task``: goes over the bridge when it is its turn."""

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
