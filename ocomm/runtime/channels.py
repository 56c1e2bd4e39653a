"""The channels of a process set, which all its ranks open and close together.

Ranks open and close in the order of responses, so a channel's number is the same on all ranks, and MPI sees
communicators in one order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ocomm.collectives.engine import Channel, Engine
from ocomm.errors import in_words
from ocomm.negotiation.request import Kind
from ocomm.runtime.handle import Handle
from ocomm.transport.base import Request, Transport

_log = logging.getLogger("ocomm")


@dataclass(slots=True)
class _Opening:
    """A communicator that is being made, for a channel or for another process set."""

    handle: Handle
    pending: Request


@dataclass(slots=True)
class _Open:
    """A channel and its communicator. ``channel`` is None once this rank has released it."""

    channel: Channel | None
    transport: Transport


class Channels:
    """One rank's channels. For the background thread, but for ``release``.

    Args:
        control: The communicator from which others are duplicated.
        data: That of the channel of negotiated collectives.
        engine: Runs the plans of all channels.
        window: The number of segments of a channel that may be under way.
    """

    def __init__(self, control: Transport, data: Transport, engine: Engine, window: int) -> None:
        self._control = control
        self._engine = engine
        self._window = window
        #: The channel of negotiated collectives, number 0.
        self.negotiated = engine.open_channel(data, window)
        self._open = {0: _Open(self.negotiated, data)}
        self._opened = 1
        self._opening: list[_Opening] = []
        self._released: deque[Channel] = deque()  # channels that users have released; any thread appends
        #: True once all channels are released, because the set was removed.
        self.is_retiring = False
        #: Communicators of closed channels on which messages may be under way.
        self.kept: list[Transport] = []

    @property
    def numbers(self) -> list[int]:
        """The numbers of the channels that some rank may still use."""
        return list(self._open)

    @property
    def is_opening(self) -> bool:
        return bool(self._opening)

    @property
    def is_releasing(self) -> bool:
        """True if there is a channel that was released, but not yet closed."""
        return bool(self._released)

    @property
    def wants_polling(self) -> bool:
        """True if a channel is being opened, or if the set retires and has a channel that this rank still uses: the
        engine sees neither. The other ranks' part in retiring comes by messages.
        """
        return self.is_opening or (self.is_retiring and self.is_releasing)

    def begin(self, handle: Handle) -> None:
        """Begins to make the communicator, and the channel on it, that ``handle`` waits for."""
        self._opening.append(_Opening(handle, self._control.duplicate()))

    def open(self) -> None:
        """Opens what has its communicator by now, and completes its handle."""
        while self._opening:
            opening = self._opening[0]
            transport = self._control.duplicated(opening.pending)
            if transport is None:
                return
            result: Channel | Transport = transport
            if opening.handle.submission.requests[0].kind != Kind.DUPLICATE:
                result = channel = self._engine.open_channel(transport, self._window)
                self._open[self._opened] = _Open(channel, transport)
                self._opened += 1
            # It was in the list until nothing could fail, because ``give_up`` returns what is in the list.
            self._opening.pop(0)
            opening.handle.complete([0], result)

    def give_up(self) -> list[Handle]:
        """Returns the handles of what is being opened, and forgets them."""
        handles = [opening.handle for opening in self._opening]
        self._opening.clear()
        return handles

    def release(self, channel: Channel) -> None:
        """Notes that this rank will not use ``channel`` any more. From any thread and finalizer: takes no lock."""
        self._released.append(channel)

    def release_all(self) -> None:
        """Releases all channels of a set that retires; plans of this rank that are under way on them are given up."""
        self.is_retiring = True
        self._released += [each.channel for each in self._open.values() if each.channel is not None]

    def close(self) -> Iterator[tuple[int, int]]:
        """Closes released channels on which nothing of this rank is under way. Yields their numbers, and how many
        segments have run there, -1 if some failed.
        """
        for _ in range(len(self._released)):
            channel = self._released.popleft()
            found = [(number, each) for number, each in self._open.items() if each.channel is channel]
            if not found:  # of another job
                continue
            segments = channel.close()
            if segments is None:
                if self.is_retiring:
                    channel.abandon()
                self._released.append(channel)
                continue
            number, closed = found[0]
            closed.channel = None
            yield number, segments

    def forget(self, number: int, is_empty: bool) -> None:
        """Frees the communicator of a channel that all ranks have closed, unless messages may be under way there."""
        transport = self._open.pop(number).transport
        if is_empty:
            free(transport)
        else:
            self.kept.append(transport)

    def end(self) -> None:
        """Frees all communicators except those on which messages may be under way. Called when the job is over."""
        for transport in [*(each.transport for each in self._open.values()), self._control]:
            free(transport)


def free(transport: Transport) -> None:
    """Frees a communicator that is no longer used. If that fails there is a warning, because nothing depends on it."""
    try:
        transport.close()
    except Exception as error:
        _log.warning("rank %d of a communicator cannot free it: %s", transport.rank, in_words(error))
