"""Small messages between the ranks' background threads: announcements, responses, departures, signs of life."""

from __future__ import annotations

import enum
import struct
import time

import numpy as np

from ocomm.errors import PeerError
from ocomm.transport.base import Request, Transport

TAG = 0


class MessageType(enum.IntEnum):
    """The first byte of a control message."""

    ANNOUNCE = 1  # to the coordinator: what this rank wants
    RESPOND = 2  # from the coordinator: what all do now
    LEAVE = 3  # to rank 0: this rank shuts down, or has failed
    GONE = 4  # from rank 0: who left and why
    ALIVE = 5  # a sign of life, to and from rank 0
    HELLO = 6  # to rank 0: this rank's host and settings
    WELCOME = 7  # from rank 0: the hosts of all ranks, or why the job cannot start
    WHERE = 8  # from a coordinator: which line of the user's code are you in?
    HERE = 9  # to the coordinator: that line
    BLOCKED = 10  # to rank 0: this rank cannot go on, and why; or it can again
    CONFIRM = 11  # from rank 0: is that still so?
    STUCK = 12  # from rank 0: no rank can go on
    RELEASED = 13  # to the coordinator: this rank uses a channel no longer


class Link:
    """Sends and receives control messages on one communicator. Owns the messages that are under way."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._sending: list[tuple[Request, np.ndarray]] = []
        self.balance = 0  # number of announcements and responses sent, minus those received

    def send(self, dest: int, word: MessageType, payload: bytes = b"") -> None:
        """Queues a message; its memory is kept until it has left."""
        self.balance += word in (MessageType.ANNOUNCE, MessageType.RESPOND)
        buffer = np.frombuffer(struct.pack("<B", word) + payload, np.uint8)
        request = self.transport.isend(buffer, dest, TAG)
        self._sending.append((request, buffer))

    def send_all(self, word: MessageType, payload: bytes = b"") -> None:
        """Queues a message to every other rank."""
        for dest in range(self.transport.size):
            if dest != self.transport.rank:
                self.send(dest, word, payload)

    def flush(self) -> bool:
        """Forgets messages that have left. Returns True if none is under way."""
        self._sending = [(request, buffer) for request, buffer in self._sending if not self.transport.test(request)]
        return not self._sending

    def receive(self) -> tuple[int, MessageType, bytes] | None:
        """Returns (source, word, payload) of the next message that has arrived, or None."""
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
                raise PeerError(f"rank {source} began a control message of {nbytes} bytes and did not end it in 30 s")
            time.sleep(20e-6)
        data = buffer.tobytes()
        word = MessageType(data[0])
        self.balance -= word in (MessageType.ANNOUNCE, MessageType.RESPOND)
        return source, word, data[1:]
