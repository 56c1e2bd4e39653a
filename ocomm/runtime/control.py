"""Small messages between the ranks' background threads: announcements, responses, departures, signs of life."""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from ocomm.errors import HorovodInternalError, PeerError
from ocomm.negotiation.tree import Tree
from ocomm.transport.base import Request, Transport

TAG = 0


class MessageType(enum.IntEnum):
    """The first byte of a control message."""

    ANNOUNCE = 1  # towards the coordinator: what this rank wants
    RESPOND = 2  # from the coordinator: what all do now
    LEAVE = 3  # to rank 0: a rank shuts down, or has failed
    GONE = 4  # from rank 0: who left and why
    ALIVE = 5  # a sign of life, to and from the neighbours in the tree
    HELLO = 6  # to rank 0: this rank's host and settings
    WELCOME = 7  # from rank 0: the hosts of all ranks, or why the job cannot start
    WHERE = 8  # from a coordinator: which line of the user's code are you in?
    HERE = 9  # to the coordinator: that line
    BLOCKED = 10  # to rank 0: this rank cannot go on, and why; or it can again
    CONFIRM = 11  # from rank 0: is that still so?
    STUCK = 12  # from rank 0: no rank can go on
    RELEASED = 13  # to the coordinator: this rank uses a channel no longer
    AGGREGATE = 14  # towards the coordinator: what this rank and those below it want
    COUNTERS = 15  # to rank 0: this rank's counters
    RELAY = 16  # to rank 0: a message of another rank
    INTERRUPTED = 17  # to rank 0: this rank takes no part any more in exchanges of a name, and why
    ENDED = 18  # from rank 0: which rank takes no part any more in which exchanges


#: Messages to all ranks, which every rank passes on to its children.
_FOR_ALL = frozenset({MessageType.RESPOND, MessageType.GONE, MessageType.CONFIRM, MessageType.STUCK, MessageType.ENDED})
_RELAY = struct.Struct("<IB")  # origin, type
#: What a rank says of itself as long as it takes part.
_OF_MEMBERS = frozenset(
    {
        MessageType.ANNOUNCE,
        MessageType.ALIVE,
        MessageType.HERE,
        MessageType.BLOCKED,
        MessageType.RELEASED,
        MessageType.COUNTERS,
        MessageType.INTERRUPTED,
    }
)
#: Messages that a deadlock cannot have on the way (``deadlock``).
_COUNTED = frozenset({MessageType.ANNOUNCE, MessageType.RESPOND, MessageType.AGGREGATE})


_TYPES = frozenset(MessageType)


class Link:
    """Sends and receives control messages on one communicator. Owns the messages that are under way.

    Messages to rank 0 and to all ranks go along a tree, in which a message never overtakes an earlier one. By default
    all ranks are children of rank 0. ``ranks`` are the communicator's ranks as world ranks, for messages to people.

    MPI would keep a message that nobody receives, and deliver it in the next job on a communicator of the same number.
    So once this rank has left it says nothing more of itself to its parent, which may end as soon as it has heard of
    the last departure, and once all have left it says nothing at all. What others have said it still passes on.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], tree: Tree | None = None) -> None:
        self.transport = transport
        self.ranks = ranks
        tree = tree or Tree.of(transport.rank, transport.size, transport.size)
        self.parent = tree.parent
        self.children = [subtree.start for subtree in tree.children]
        self._sending: list[tuple[Request, np.ndarray]] = []
        self.balance = 0  # number of announcements, aggregates and responses sent, minus those received
        self.has_left = False  # this rank has left the job
        self.have_all_left = False
        #: Called before news of a departure of a rank further below is passed on.
        self.before_departure: Callable[[], None] = lambda: None

    def send(self, dest: int, word: MessageType, payload: bytes = b"") -> None:
        """Queues a message to one rank; its memory is kept until it has left."""
        if self.have_all_left or (self.has_left and dest == self.parent and word in _OF_MEMBERS):
            return
        self.balance += word in _COUNTED
        buffer = np.frombuffer(struct.pack("<B", word) + payload, np.uint8)
        request = self.transport.isend(buffer, dest, TAG)
        self._sending.append((request, buffer))

    def send_up(self, word: MessageType, payload: bytes = b"") -> None:
        """Queues a message to rank 0, which must not be this one."""
        if self.parent == 0:
            self.send(0, word, payload)
        elif not self.has_left or word not in _OF_MEMBERS:
            self.send(self.parent, MessageType.RELAY, _RELAY.pack(self.transport.rank, word) + payload)

    def send_down(self, word: MessageType, payload: bytes = b"") -> None:
        """Queues a message to all ranks below this one: from rank 0, to all others."""
        for child in self.children:
            self.send(child, word, payload)

    def flush(self) -> bool:
        """Forgets messages that have left. Returns True if none is under way."""
        self._sending = [(request, buffer) for request, buffer in self._sending if not self.transport.test(request)]
        return not self._sending

    def receive(self) -> tuple[int, MessageType, bytes] | None:
        """Returns (source, type, payload) of the next message for this rank that has arrived, or None. Passes on what
        is for others.

        Raises PeerError if it began and does not end, HorovodInternalError if it is none.
        """
        while (message := self._take()) is not None:
            source, word, payload = message
            if word in _FOR_ALL:
                self.send_down(word, payload)
            elif word == MessageType.RELAY and self.transport.rank:
                if payload[_RELAY.size - 1 : _RELAY.size] == bytes([MessageType.LEAVE]):
                    self.before_departure()
                self.send(self.parent, word, payload)
                continue
            elif word == MessageType.RELAY:
                return self._relayed(source, payload)
            return source, word, payload
        return None

    def _relayed(self, relay: int, payload: bytes) -> tuple[int, MessageType, bytes]:
        if len(payload) >= _RELAY.size:
            source, word = _RELAY.unpack_from(payload)
            if source < self.transport.size and word in _TYPES:
                return source, MessageType(word), payload[_RELAY.size :]
        raise HorovodInternalError(
            f"rank {self.ranks[relay]} sent a control message of another rank in {len(payload)} bytes, which no rank "
            "of this version of ocomm sends."
        )

    def _take(self) -> tuple[int, MessageType, bytes] | None:
        self.flush()
        found = self.transport.probe(TAG)
        if found is None:
            return None
        source, nbytes = found
        buffer = np.empty(nbytes, np.uint8)
        request = self.transport.irecv(buffer, source, TAG)
        # The message, or its beginning, has arrived: the rest is being sent by a live thread.
        end = time.monotonic() + 30.0
        while not self.transport.test(request):
            if time.monotonic() > end:
                raise PeerError(
                    f"rank {self.ranks[source]} began a control message of {nbytes} bytes and did not end it in 30 s"
                )
            time.sleep(20e-6)
        data = buffer.tobytes()
        if not data or data[0] not in _TYPES:
            raise HorovodInternalError(
                f"rank {self.ranks[source]} sent a control message of {nbytes} bytes and type "
                f"{data[0] if data else 'none'}, which no rank of this version of ocomm sends."
            )
        word = MessageType(data[0])
        self.balance -= word in _COUNTED
        return source, word, data[1:]
